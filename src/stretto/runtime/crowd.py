"""How much slower a task is while another lane of its device is at work: measured before the start, like all costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stretto.core.model import Row
from stretto.runtime.lane import Lane
from stretto.runtime.program import Member, Program
from stretto.runtime.timing import Stamp

_RUNS = 5


@dataclass(frozen=True)
class Crowd:
    """A program that runs in another lane while something is timed."""

    program: Program
    start: int
    seconds: float
    """Of one launch, alone."""
    lane: Lane

    def slows(self, program: Program, start: int, alone_s: float, lane: Lane) -> float:
        """Return how many times longer one row of a program takes beside this one, at least 1. Synchronises the device."""
        times = []
        for _ in range(_RUNS):
            torch.cuda.synchronize(lane.device)
            with self.lane.current():
                self.lane.turn(beside=True)
                # More than enough to last, even if the two shared the device evenly.
                for _ in range(1 + math.ceil(4 * alone_s / self.seconds)):
                    self._launch(self.program, self.start)
            with lane.current():
                lane.turn(beside=True)
                begin = Stamp(lane.device)
                self._launch(program, start)
                end = Stamp(lane.device)
                end.wait()
                times.append(end.ms_since(begin) / 1e3)
        torch.cuda.synchronize(lane.device)
        return max(1.0, sorted(times)[len(times) // 2] / alone_s)

    @staticmethod
    def _launch(program: Program, start: int) -> None:
        lengths = {b.axis: b.lengths[-1] for b in program.buckets}
        program.launch([Member(Row(0, 0, 0, 0), start)], lengths, beside=True)
