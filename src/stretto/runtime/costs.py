"""What a task costs on the device at hand, and what a stream has had: the numbers that look-ahead dispatch needs."""

from __future__ import annotations

from collections import deque

import torch

from stretto.core.model import Row
from stretto.core.plan import Placement
from stretto.core.route import Route
from stretto.runtime.program import Member, Program
from stretto.runtime.timing import Stamp

WARMUP, RUNS = 2, 5
MOST_S = 0.5  # a batch that takes long needs no more runs to be known well
HALF_LIFE_S = 2.0


def measure(program: Program, start: int, device: torch.device, cap: int) -> tuple[float, ...]:
    """Time a program on rows of slot 0, at the longest length of each bucketed axis; synchronises the device.

    Returns the seconds of a batch of 1, 2, ... `cap` rows; sizes between two buckets cost what the larger one does.
    """
    lengths = {b.axis: b.lengths[-1] for b in program.buckets}
    by_bucket = {}
    for batch in (b for b in program.batch_buckets if b <= max(cap, program.batch_buckets[0])):
        members = [Member(Row(0, 0, 0, 0), start)] * batch
        times: list[float] = []
        while len(times) < WARMUP + RUNS and sum(times) < MOST_S:
            begin = Stamp(device)
            program.launch(members, lengths)
            end = Stamp(device)
            end.wait()
            times.append(end.ms_since(begin) / 1e3)
        # The least, not the mean: other work on the machine can only add.
        by_bucket[batch] = min(times)
    sizes = sorted(by_bucket)
    return tuple(by_bucket[next((b for b in sizes if b >= n), sizes[-1])] for n in range(1, cap + 1))


def progress(route: Route, placements: tuple[Placement, ...], seconds: list[float]) -> list[tuple[float, float]]:
    """Return, for each placement, the share of the chunk that is done after it, and the seconds left then.

    Without known costs the share is that of the visits, and nothing is known to be left.
    """
    total = sum(seconds)
    if total <= 0.0:
        return [(p.segment.stop / len(route), 0.0) for p in placements]
    done = [sum(seconds[: i + 1]) for i in range(len(placements))]
    return [(d / total, total - d) for d in done]


class Backlog:
    """When the device will be through with what it has been given, as far as costs are known.

    The host hands over work before the device needs it; held against the host's clock alone, deadlines would look further
    away than they are.
    """

    def __init__(self) -> None:
        self._given: deque[float] = deque()
        self._free_s = 0.0

    def give(self, seconds: float, now_s: float) -> None:
        """Note a batch that has been handed over."""
        self._free_s = max(self._free_s, now_s) + seconds
        self._given.append(seconds)

    def reach(self, waited: bool, now_s: float) -> None:
        """Note that the oldest batch is done: just now if the host had to wait for it, some time ago else."""
        self._given.popleft()
        free_s = now_s + sum(self._given)
        self._free_s = free_s if waited else min(self._free_s, free_s)

    def free_s(self, now_s: float) -> float:
        return max(now_s, self._free_s)


class Served:
    """Device time that each stream has had of late; half of it is forgotten every `HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._had: dict[int, tuple[float, float]] = {}

    def add(self, stream: int, seconds: float, now_s: float) -> None:
        self._had[stream] = (self.of(stream, now_s) + seconds, now_s)

    def of(self, stream: int, now_s: float) -> float:
        seconds, at_s = self._had.get(stream, (0.0, now_s))
        return float(seconds * 0.5 ** ((now_s - at_s) / HALF_LIFE_S))

    def forget(self, stream: int) -> None:
        self._had.pop(stream, None)
