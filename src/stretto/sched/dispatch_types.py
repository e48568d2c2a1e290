"""What dispatch policies see and answer. The executor and the simulator both speak in these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Waiting(NamedTuple):
    """One ready task as a policy sees it."""

    key: int
    """Order of arrival at the device; ties between equally urgent tasks go to the lower key."""
    kind: int
    """Tasks of equal kind run the same stages and can share a batch. Kinds are numbered along the route."""
    ready_s: float
    submitted_s: float
    deadline_s: float = math.inf
    """Of the whole chunk."""
    stream: int = 0
    chunk: int = 0
    progress: float = 1.0
    """Share of the route that is done when this task is."""
    remaining_s: float = 0.0
    """Least time from the end of this task to the end of its chunk."""
    started: bool = True
    """Whether the chunk has run anywhere yet; only a chunk that has not is superseded."""
    served_s: float = 0.0
    """Device time that the stream (or its tenant) has had of late."""
    ahead: tuple[int, ...] = ()
    """Kinds that the chunk visits on this device after this task, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows on this device."""

    batch_cap: int = 1
    """Most tasks in one batch."""
    fill_cap: int = 0
    """`fill_first` starts new chunks while fewer than this many are further along; 0 means `batch_cap`."""
    kind_caps: Mapping[int, int] = field(default_factory=dict)
    """Kind -> a cap of its own, where kinds of several models or rings share the device."""
    costs: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Kind -> seconds of a batch of 1, 2, ... tasks, as measured."""
    margin: float = 0.05
    """Share added to a cost before it is held against a deadline."""
    allowed_late_s: float = 0.0
    """Lateness up to which a chunk is still worth running."""
    answer_s: float = 0.0
    """From the end of a chunk's last batch to its answer; a deadline must leave so much."""
    patience_s: float = math.inf
    """Longest batch that somebody who comes right after its launch can wait for and still be on time."""

    def cap(self, kind: int) -> int:
        return min(self.batch_cap, self.kind_caps[kind]) if kind in self.kind_caps else self.batch_cap

    def seconds(self, kind: int, rows: int) -> float:
        """Return the time of a batch with its margin; 0 where no cost is known."""
        costs = self.costs.get(kind)
        return costs[min(rows, len(costs)) - 1] * (1.0 + self.margin) if costs else 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    key: int
    reason: str
    """A short, stable word."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Keys to run as one batch now, and tasks that are not run at all."""

    run: tuple[int, ...]
    refuse: tuple[Refusal, ...] = ()


class DispatchPolicy(Protocol):
    def __call__(self, now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision: ...
