"""Dispatch: which waiting tasks run next on one device. The executor and the simulator call the same functions.

A policy sees the tasks that are ready on one device and answers with one batch of one kind. It keeps nothing between
calls, so replaying a trace gives the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Waiting:
    """One ready task as a policy sees it."""

    key: int
    """Order of arrival at the device; ties between equally urgent tasks go to the lower key."""
    kind: int
    """Tasks of equal kind run the same stages and can share a batch. Kinds are numbered along the route."""
    ready_s: float
    submitted_s: float
    deadline_s: float = math.inf
    stream: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows on this device."""

    batch_cap: int = 1
    """Most tasks in one batch."""
    fill_cap: int = 0
    """`fill_first` starts new chunks while fewer than this many are further along; 0 means `batch_cap`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Keys to run as one batch now, and tasks that are not run at all."""

    run: tuple[int, ...]
    refuse: tuple[Refusal, ...] = ()


class DispatchPolicy(Protocol):
    def __call__(self, now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision: ...


def _urgency(task: Waiting) -> tuple[float, float, int]:
    return (task.deadline_s, task.submitted_s, task.key)


def _batch_of(kind: int, waiting: Sequence[Waiting], cap: int, order: Callable[[Waiting], object]) -> Decision:
    same = sorted((t for t in waiting if t.kind == kind), key=order)  # type: ignore[arg-type]
    return Decision(tuple(t.key for t in same[:cap]))


def earliest_deadline_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run the most urgent task, with the next most urgent ones of its kind up to the cap.

    Without deadlines the oldest chunk is the most urgent.
    """
    if not waiting:
        return Decision(())
    return _batch_of(min(waiting, key=_urgency).kind, waiting, limits.batch_cap, _urgency)


def first_come_first_served(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run tasks in the order in which they became ready, batching what matches the first."""
    if not waiting:
        return Decision(())
    order = lambda t: (t.ready_s, t.key)  # noqa: E731
    return _batch_of(min(waiting, key=order).kind, waiting, limits.batch_cap, order)


def fill_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Start waiting chunks before advancing older ones, so that later stages run in fuller batches.

    New chunks start only while fewer than `fill_cap` are further along the route; a chunk that has a deadline and is
    the most urgent of all goes first regardless.
    """
    if not waiting:
        return Decision(())
    urgent = min(waiting, key=_urgency)
    if math.isfinite(urgent.deadline_s):
        return _batch_of(urgent.kind, waiting, limits.batch_cap, _urgency)
    first = min(t.kind for t in waiting)
    further = sum(t.kind > first for t in waiting)
    cap = limits.fill_cap or limits.batch_cap
    if further < cap:
        return _batch_of(first, waiting, min(limits.batch_cap, cap - further), _urgency)
    return _batch_of(min((t for t in waiting if t.kind > first), key=_urgency).kind, waiting, limits.batch_cap, _urgency)


POLICIES: Mapping[str, DispatchPolicy] = {
    "earliest_deadline_first": earliest_deadline_first,
    "first_come_first_served": first_come_first_served,
    "fill_first": fill_first,
}


def policy(name: str) -> DispatchPolicy:
    """Return a dispatch policy by its name in a plan.

    Raises:
        ConfigError: if no policy has that name.
    """
    if name not in POLICIES:
        raise ConfigError("dispatch", got=repr(name), expected=f"one of {sorted(POLICIES)}")
    return POLICIES[name]
