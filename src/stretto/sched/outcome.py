"""What a simulated run gave: intervals and latencies of streams, use of devices, broken promises, a trace to draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Launch(NamedTuple):
    """One batch on one device."""

    device: str
    begin_s: float
    end_s: float
    kind: int
    placement: int
    chunks: tuple[tuple[str, int], ...]


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile, the next higher value where it falls between two; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1 if q > 0 else 0)]


@dataclass
class StreamOutcome:
    """One stream's chunks."""

    name: str
    model: str
    promised_interval_s: float
    promised_response_s: float
    submitted: list[float] = field(default_factory=list)
    done: list[tuple[int, float, float]] = field(default_factory=list)
    """(chunk, due in, out)"""
    refused: list[tuple[int, float, str]] = field(default_factory=list)
    ended: str = ""
    """Why it ended early, or empty."""

    def after(self, start_s: float) -> list[tuple[int, float, float]]:
        return [d for d in self.done if d[2] >= start_s]

    def interval_s(self, start_s: float = 0.0) -> float:
        """Return the steady output interval: the mean time between finished chunks from `start_s` on."""
        out = [d[2] for d in self.after(start_s)]
        return (out[-1] - out[0]) / (len(out) - 1) if len(out) > 1 else math.nan

    def intervals_s(self, start_s: float = 0.0) -> list[float]:
        out = [d[2] for d in self.after(start_s)]
        return [b - a for a, b in itertools.pairwise(out)]

    def responses_s(self, start_s: float = 0.0) -> list[float]:
        return [d[2] - d[1] for d in self.after(start_s)]

    def broken(self, start_s: float, until_s: float, *, q: float = 0.99, slack: float = 0.005) -> str:
        """Return which promise was broken, or an empty string.

        The interval is kept if a player that shows one chunk each promised interval, from the first chunk of the
        window on and with one chunk in hand, never runs dry. The response is kept at quantile `q`.
        """
        if self.ended:
            return ""
        steady = self.after(start_s)
        if not steady:
            return "no output"
        t = self.promised_interval_s
        if t:
            first = steady[0]
            late = max(out - first[2] - (chunk - first[0]) * t for chunk, _, out in steady)
            if late > t * (1 + slack) or until_s - steady[-1][2] > 2 * t * (1 + slack):
                return "interval"
        if quantile(self.responses_s(start_s), q) > self.promised_response_s * (1 + slack):
            return "response"
        return ""


@dataclass
class Outcome:
    """A whole run."""

    streams: list[StreamOutcome]
    busy_s: dict[str, float]
    until_s: float
    tasks: int
    trace: list[Launch] | None = None

    def stream(self, name: str) -> StreamOutcome:
        return next(s for s in self.streams if s.name == name)

    def utilisation(self) -> dict[str, float]:
        return {d: min(1.0, s / self.until_s) if self.until_s else 0.0 for d, s in self.busy_s.items()}

    def broken(self, start_s: float) -> dict[str, str]:
        """Return the streams whose promise was broken after `start_s`, and which promise."""
        found = {s.name: s.broken(start_s, self.until_s) for s in self.streams}
        return {name: what for name, what in found.items() if what}
