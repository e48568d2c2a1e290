"""A model as a route of stages: what one chunk visits, in which order, and what passes between the visits.

Two kinds of tensor are declared by name. A *value* belongs to one chunk: a stage reads and writes it, and it crosses to
another device when a later visit there reads it. *State* belongs to one (stream, visit): it is left by the previous
chunk at the same visit, and it never moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stretto.core.errors import RouteError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (of one row, without the batch axis) and dtype name of a declared tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The contract of one stage: the values it reads and writes, and the state it keeps from chunk to chunk."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Visit:
    """One stop on a route: a stage, and the denoise step it is visited for."""

    stage: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive visits [start, stop) of a route that run on one device without a break."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Route:
    """The ordered visits of one chunk.

    Raises:
        RouteError: on construction, if a stage is unknown or reads a value that nothing before it provides.
    """

    stages: Mapping[str, StageSpec]
    visits: tuple[Visit, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        if not self.visits:
            raise RouteError("visits", got="none", expected="at least one visit")
        for i, visit in enumerate(self.visits):
            spec = self.stages.get(visit.stage)
            if spec is None:
                raise RouteError(f"visits[{i}]", got=repr(visit.stage), expected=f"one of {sorted(self.stages)}")
            missing = [name for name in spec.reads if name not in known]
            if missing:
                raise RouteError(
                    f"visits[{i}] ({visit.stage})", got=f"reads {missing}", expected=f"values known by then: {sorted(known)}"
                )
            known.update(spec.writes)
        lost = [name for name in self.outputs if name not in known]
        if lost:
            raise RouteError("outputs", got=lost, expected=f"values written on the route: {sorted(known)}")

    def __len__(self) -> int:
        return len(self.visits)

    @property
    def whole(self) -> Segment:
        return Segment(0, len(self.visits))

    def on(self, segment: Segment) -> tuple[Visit, ...]:
        return self.visits[segment.start : segment.stop]

    def signature(self, segment: Segment) -> tuple[str, ...]:
        """Return the stages the segment runs; segments of equal signature on one device can share a batch."""
        return tuple(v.stage for v in self.on(segment))

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Return the values alive at the cut before visit `cut`: known by then, and read there or later (or an output)."""
        return self._crossings[cut]

    @cached_property
    def _crossings(self) -> tuple[tuple[str, ...], ...]:
        known: list[set[str]] = [set(self.inputs)]
        for visit in self.visits:
            known.append(known[-1] | set(self.stages[visit.stage].writes))
        needed = set(self.outputs)
        alive: list[tuple[str, ...]] = [tuple(sorted(needed & known[-1]))]
        for i in range(len(self.visits) - 1, -1, -1):
            spec = self.stages[self.visits[i].stage]
            needed = (needed - (set(spec.writes) - set(spec.reads))) | set(spec.reads)
            alive.append(tuple(sorted(needed & known[i])))
        return tuple(reversed(alive))

    def cut(self, at: Iterable[int]) -> tuple[Segment, ...]:
        """Split the route before each given visit index.

        Raises:
            RouteError: if an index is not strictly inside the route.
        """
        points = sorted(set(at))
        bad = [p for p in points if not 0 < p < len(self.visits)]
        if bad:
            raise RouteError("cut", got=bad, expected=f"visit indices between 1 and {len(self.visits) - 1}")
        edges = [0, *points, len(self.visits)]
        return tuple(Segment(a, b) for a, b in itertools.pairwise(edges))
