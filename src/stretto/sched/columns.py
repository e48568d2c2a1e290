"""A route seen from the side: columns of stages that a virtual rank takes a contiguous range of, for all steps.

A column is one stage with state, or a heavy one without, together with the light stages beside it (embed, head). All
its visits run on one device, so its weights are there once and its state never moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stretto.core.errors import PlanError
from stretto.core.plan import Placement
from stretto.core.route import Segment
from stretto.sched.profile import Profile

_LIGHT = 0.1  # of the heaviest stage; lighter ones without state ride with a neighbour


@dataclass(frozen=True)
class Columns:
    """The columns of a profile's route, with sums over ranges of them."""

    profile: Profile
    stages: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(profile: Profile) -> Columns:
        per_chunk: dict[str, float] = {}
        for visit in profile.visits:
            per_chunk[visit.stage] = per_chunk.get(visit.stage, 0.0) + profile.stage(visit.stage).cost(1)
        heaviest = max(per_chunk.values())
        groups: list[list[str]] = []
        waiting: list[str] = []
        for stage in profile.order:
            if not profile.stage(stage).state_bytes and per_chunk[stage] < _LIGHT * heaviest:
                (groups[-1] if groups else waiting).append(stage)
            else:
                groups.append([*waiting, stage])
                waiting = []
        return Columns(profile, tuple(tuple(g) for g in groups) or (tuple(waiting),))

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def column_of(self) -> Mapping[str, int]:
        return {stage: i for i, stages in enumerate(self.stages) for stage in stages}

    @cached_property
    def visits(self) -> tuple[int, ...]:
        """Column of every visit of the route."""
        return tuple(self.column_of[v.stage] for v in self.profile.visits)

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """How often one chunk comes by each column."""
        turns = [0] * len(self)
        for column, _ in itertools.groupby(self.visits):
            turns[column] += 1
        return tuple(turns)

    @cached_property
    def work(self) -> tuple[float, ...]:
        return self.work_at(1)

    def work_at(self, batch: int) -> tuple[float, ...]:
        """Return the device time of one chunk in every column, when its visits run in batches of this size."""
        totals = [0.0] * len(self)
        for visit, column in zip(self.profile.visits, self.visits, strict=True):
            totals[column] += self.profile.stage(visit.stage).cost(batch) / batch
        return tuple(totals)

    @cached_property
    def _work_sum(self) -> tuple[float, ...]:
        return (0.0, *itertools.accumulate(self.work))

    def work_s_of(self, start: int, stop: int) -> float:
        """Return the device time of one chunk in a range of columns, one row at a time."""
        return self._work_sum[stop] - self._work_sum[start]

    @cached_property
    def weights(self) -> tuple[int, ...]:
        return tuple(sum(self.profile.stage(s).weight_bytes for s in group) for group in self.stages)

    @cached_property
    def state(self) -> tuple[int, ...]:
        """State of one stream in each column, for all its visits."""
        p = self.profile
        return tuple(sum(p.stage(s).state_bytes * p.state_slots(s) for s in group) for group in self.stages)

    @cached_property
    def hop_bytes(self) -> int:
        """Bytes that cross between columns, at most."""
        return max(s.crossing_bytes for s in self.profile.stages.values())

    def pieces(self, start: int, stop: int, quantum: int) -> tuple[int, ...]:
        """Return the columns at which a range is cut: multiples of the quantum, so that ranges of other streams match."""
        return tuple(c for c in range(start + 1, stop) if c % quantum == 0)

    def balanced(self, parts: int, work: Sequence[float] | None = None) -> tuple[int, ...]:
        """Return the ends of `parts` contiguous ranges whose heaviest is as light as can be.

        Raises:
            PlanError: if there are more parts than columns.
        """
        if not 1 <= parts <= len(self):
            raise PlanError("parts", got=parts, expected=f"1 to {len(self)}, the columns of {self.profile.model}")
        return split(work or self.work, parts)


def split(loads: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the ends of `parts` contiguous, non-empty ranges whose heaviest is as light as can be."""
    low, high = max(loads), sum(loads)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _parts(loads, middle) <= parts else (middle, high)
    return _filled(loads, high * (1 + 1e-9), parts)


def _parts(loads: Sequence[float], most: float) -> int:
    count, load = 1, 0.0
    for value in loads:
        if load + value > most:
            count, load = count + 1, 0.0
        load += value
    return count


def _filled(loads: Sequence[float], most: float, parts: int) -> tuple[int, ...]:
    """Cut greedily under `most`, but never so late that a part would be left without a column."""
    ends: list[int] = []
    load = 0.0
    for i, value in enumerate(loads):
        left_parts = parts - len(ends)
        if i and (load + value > most or len(loads) - i < left_parts) and left_parts > 1 and i > (ends[-1] if ends else 0):
            ends.append(i)
            load = 0.0
        load += value
    return (*ends, len(loads))


@dataclass(frozen=True, slots=True)
class Rank:
    """A virtual rank: columns [start, stop) of one stream on one device, for all steps."""

    start: int
    stop: int
    device: str


def placements(columns: Columns, ranks: Sequence[Rank], *, quantum: int) -> tuple[Placement, ...]:
    """Turn ranks into segments on devices: cut where the device or the step changes, and at the quantum.

    Raises:
        PlanError: if the ranks do not cover the columns in order.
    """
    at = 0
    for i, rank in enumerate(ranks):
        if rank.start != at or rank.stop <= rank.start:
            raise PlanError(f"ranks[{i}]", got=f"[{rank.start}, {rank.stop})", expected=f"a range that starts at {at}")
        at = rank.stop
    if at != len(columns):
        raise PlanError("ranks", got=f"{at} columns", expected=f"all {len(columns)}")
    device = {c: r.device for r in ranks for c in range(r.start, r.stop)}
    cuts = {c for r in ranks for c in (*columns.pieces(r.start, r.stop, quantum), r.start)}
    out: list[Placement] = []
    begin = 0
    seen = columns.visits
    for i in range(1, len(seen) + 1):
        if i < len(seen):
            here, before = seen[i], seen[i - 1]
            stays = device[here] == device[before]
            if stays and (here == before or (here == before + 1 and here not in cuts)):
                continue
        out.append(Placement(Segment(begin, i), device[seen[begin]]))
        begin = i
    return tuple(out)
