"""Cells: a few devices over which several streams of one model are cut in the same way, so that their blocks meet.

The best cell of a model is the one that carries the most streams a device under its promises and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.plan import Device
from stretto.sched.cluster import EXCLUSIVE_CAP, SHARED_CAP, ModelView, StreamSpec, stretch
from stretto.sched.columns import Rank
from stretto.sched.equal import equal_ranks

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12)


@dataclass(frozen=True, slots=True)
class Cell:
    """`devices` devices that carry `streams` streams of one model."""

    devices: int
    streams: int

    @property
    def density(self) -> float:
        return self.streams / self.devices


def capacity(view: ModelView, spec: StreamSpec, ranks: Sequence[Rank], memory_bytes: int) -> int:
    """Return how many streams with these ranks fit on the devices of the ranks, by time, memory and response."""
    heaviest = max(view.work_sum[r.stop] - view.work_sum[r.start] for r in ranks) / spec.interval_s
    k = int(SHARED_CAP / heaviest) if heaviest <= SHARED_CAP / 2 else int(heaviest <= EXCLUSIVE_CAP)
    if memory_bytes:
        for r in ranks:
            free = memory_bytes - view.profile.reserved_bytes - (view.weight_sum[r.stop] - view.weight_sum[r.start])
            state = view.state_sum[r.stop] - view.state_sum[r.start]
            k = min(k, int(free // state) if state else k) if free >= 0 else 0
    while k > 1 and view.profile.work_s * stretch((k - 1) * heaviest) > spec.response_s:
        k -= 1
    return k


def best_cell(view: ModelView, spec: StreamSpec, devices: Sequence[Device]) -> Cell | None:
    """Return the densest cell of up to as many devices as there are; the smallest of equals. None if none carries a stream."""
    best: Cell | None = None
    memory = min(d.memory_bytes for d in devices)
    for g in SIZES:
        if g > min(len(devices), len(view)):
            break
        k = capacity(view, spec, equal_ranks(view, devices[:g]), memory)
        if k and (best is None or k / g > best.density + 1e-9):
            best = Cell(g, k)
    return best
