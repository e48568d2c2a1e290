"""Demands as they are written on the command line of `load.py`."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from fleet import Demand

DEMANDS = ("10:5:100", "2:25:50+3*2:25:500", "10:5:200:open")
Kind = tuple[float, int, float, str, str]
"""Chunks/s, steps executed, deadline in ms, loop or "", phases."""


@dataclass(frozen=True)
class Wanted:
    """One row to run."""

    kinds: tuple[Kind, ...]
    precision: str = ""
    guesses: tuple[int, ...] = ()


def read_demand(text: str) -> Wanted:
    """Read `[n*]chunks_hz:executed_steps:deadline_ms[:loop][:phases][+...][@precision][=robots/...]`."""
    rest, _, guesses = text.partition("=")
    rest, _, precision = rest.partition("@")
    kinds: list[Kind] = []
    try:
        for part in rest.split("+"):
            times, star, kind = part.partition("*")
            kinds += [_read_kind(kind if star else part)] * (int(times) if star else 1)
        wanted = Wanted(tuple(kinds), precision, tuple(int(n) for n in guesses.split("/")) if guesses else ())
    except (ValueError, IndexError):
        wanted = Wanted(())
    if not wanted.kinds or any(n < 1 for n in wanted.guesses):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected for instance 10:5:100, 10:5:100:open@fp8=16/7 or 2:5:60+3*2:25:500"
        )
    return wanted


def _read_kind(text: str) -> Kind:
    parts = text.split(":")
    hz, steps, deadline_ms = float(parts[0]), int(parts[1]), float(parts[2])
    words = parts[3:]
    phases = words.pop() if words and words[-1] in ("any", "together") else "any"
    loop = words.pop() if words and words[-1] in ("closed", "open") else ""
    if words:
        raise ValueError(text)
    if not (0 < hz < math.inf and steps > 0 and 0 < deadline_ms < math.inf):
        raise ValueError(text)
    return hz, steps, deadline_ms, loop, phases


def wanted(options: argparse.Namespace) -> list[tuple[Demand, str, tuple[int, ...]]]:
    """Return every demand with every precision that it is wanted in, in the order of the demands, and where to begin."""
    said = {name: getattr(options, name) for name in ("jitter", "network_ms", "network_jitter_ms")}
    rows = []
    for row in options.demand or [read_demand(text) for text in DEMANDS]:
        first, *also = (
            Demand(chunks_hz=hz, executed_steps=steps, deadline_ms=ms, loop=loop or options.loop, phases=phases, **said)
            for hz, steps, ms, loop, phases in row.kinds
        )
        for precision in [row.precision] if row.precision else options.precision.split(","):
            rows.append((replace(first, also=tuple(also)), precision, row.guesses))
    return rows
