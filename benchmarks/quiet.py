"""Timing on a machine that others use too: wait until it is quiet, and repeat what was disturbed.

What others take is the machine's busy time less that of this process and its children, as the kernel counts it. Whether a run
is repeated depends on that alone, never on what came out. Linux only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
LOOK_S = 1.0


@dataclass(frozen=True)
class Spent:
    """Seconds so far."""

    clock_s: float
    machine_s: float
    """Busy, all cores together."""
    own_s: float

    @staticmethod
    def now() -> Spent:
        user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
        return Spent(time.monotonic(), (user + nice + system + irq + soft) * TICK_S, time.process_time() + _children_s())

    def others_since(self, before: Spent) -> float:
        """Return the share of the machine that others took."""
        taken_s = (self.machine_s - before.machine_s) - (self.own_s - before.own_s)
        return max(0.0, taken_s / max(1e-9, self.clock_s - before.clock_s) / (os.cpu_count() or 1))


def _children_s() -> float:
    ended, me = os.times(), str(os.getpid())
    total = ended.children_user + ended.children_system
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if fields[1] == me:
            total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def undisturbed(play: Callable[[], T], most: float, patience_s: float) -> tuple[T, float]:
    """Call `play` while others take at most this share of the machine; returns its result and what they took.

    Raises:
        TimeoutError: if the machine does not become quiet, or does not stay so.
    """
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s:
        before = Spent.now()
        time.sleep(LOOK_S)
        if Spent.now().others_since(before) > most:
            continue
        before = Spent.now()
        result = play()
        share = Spent.now().others_since(before)
        if share <= most:
            return result, share
        print(f"  disturbed: others took {100 * share:.0f} % of the machine; once more", flush=True)
    raise TimeoutError(f"others took more than {100 * most:.0f} % of the machine for {patience_s:.0f} s")
