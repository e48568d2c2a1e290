"""Dispatch: which waiting tasks run next on one device. The executor and the simulator call the same functions.

A policy sees the tasks that are ready on one device and answers with one batch of one kind. It keeps nothing between
calls, so replaying a trace gives the same answer. It is work-conserving: if anything waits and is not refused, something
runs. A task runs to the end of its segment, so segments are the quantum after which a more urgent task gets its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stretto.core.errors import ConfigError


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


Order = Callable[[Waiting], tuple[float, ...]]


def _urgency(task: Waiting) -> tuple[float, ...]:
    return (task.deadline_s, task.submitted_s, task.key)


def _age(task: Waiting) -> tuple[float, ...]:
    return (task.submitted_s, task.key)


def _arrival(task: Waiting) -> tuple[float, ...]:
    return (task.ready_s, task.key)


def virtual_deadline_s(task: Waiting) -> float:
    """Return when this task should be done for its chunk to be on time: its share of the chunk's allowance.

    A chunk without a deadline has an allowance without end; the oldest then comes first.
    """
    if task.deadline_s == math.inf:
        return math.inf
    return task.submitted_s + (task.deadline_s - task.submitted_s) * task.progress


def _share(task: Waiting) -> tuple[float, ...]:
    return (virtual_deadline_s(task), task.submitted_s, task.key)


def _batch_of(kind: int, waiting: Sequence[Waiting], cap: int, order: Order) -> Decision:
    same = [t for t in waiting if t.kind == kind]
    if len(same) > 1:
        same.sort(key=order)
    return Decision(tuple([t.key for t in same[:cap]]))


def _in(order: Order, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    if len(waiting) < 2:
        return Decision(tuple([t.key for t in waiting]))
    kind = min(waiting, key=order).kind
    return _batch_of(kind, waiting, limits.cap(kind), order)


def earliest_deadline_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run the most urgent task, with the next most urgent ones of its kind up to the cap.

    Without deadlines the oldest chunk is the most urgent.
    """
    return _in(_urgency, waiting, limits)


def earliest_virtual_deadline_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run the task that is furthest behind its share of the chunk's allowance, with others of its kind up to the cap."""
    return _in(_share, waiting, limits)


def oldest_chunk_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run the task whose chunk was submitted first, whatever the deadlines."""
    return _in(_age, waiting, limits)


def first_come_first_served(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run tasks in the order in which they became ready, batching what matches the first."""
    return _in(_arrival, waiting, limits)


def largest_batch_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Run the kind of which the most tasks wait. On a ring of devices this forms convoys unless the cap is low."""
    if len(waiting) < 2:
        return Decision(tuple([t.key for t in waiting]))
    counts: dict[int, int] = {}
    for task in waiting:
        counts[task.kind] = counts.get(task.kind, 0) + 1
    kind = max(counts, key=lambda k: (min(counts[k], limits.cap(k)), -k))
    return _batch_of(kind, waiting, limits.cap(kind), _arrival)


def sweep(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Go through the kinds in a circle, like a lift: the next kind after the one whose tasks became ready last.

    Steady inside a ring of equal ranges; streams with other cuts can starve, so it is for pure rings only.
    """
    if len(waiting) < 2:
        return Decision(tuple([t.key for t in waiting]))
    here = max(waiting, key=lambda t: (t.ready_s, -t.key)).kind
    kind = min((t.kind for t in waiting), key=lambda k: (k < here, k))
    return _batch_of(kind, waiting, limits.cap(kind), _age)


def fill_first(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Start waiting chunks before advancing older ones, so that later stages run in fuller batches.

    New chunks start only while fewer than `fill_cap` are further along the route; a chunk that has a deadline and is
    the most urgent of all goes first regardless.
    """
    if not waiting:
        return Decision(())
    urgent = min(waiting, key=_urgency)
    if math.isfinite(urgent.deadline_s):
        return _batch_of(urgent.kind, waiting, limits.cap(urgent.kind), _urgency)
    first = min(t.kind for t in waiting)
    further = sum(t.kind > first for t in waiting)
    cap = limits.fill_cap or limits.batch_cap
    if further < cap:
        return _batch_of(first, waiting, min(limits.cap(first), cap - further), _urgency)
    kind = min((t for t in waiting if t.kind > first), key=_urgency).kind
    return _batch_of(kind, waiting, limits.cap(kind), _urgency)


def deadline_limited(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Serve robots: the most urgent first, in the largest batch with which it is still on time.

    A newer observation of the same robot replaces one that has not started. What cannot be on time is refused now, so
    that the robot knows and the others are not held up. When more waits than can be on time, those who have had the
    least device time come first. Needs `limits.costs` to look ahead; without them only what is late already is refused.
    """
    refuse = _superseded(waiting)
    gone = {r.key for r in refuse}
    alive = []
    for task in waiting:
        if task.key in gone:
            continue
        need = limits.seconds(task.kind, 1) + task.remaining_s
        left = task.deadline_s + limits.allowed_late_s - now_s
        if need > left:
            text = f"needs {need * 1e3:.1f} ms more, and its deadline is in {left * 1e3:.1f} ms"
            refuse.append(Refusal(task.key, "deadline", text))
        else:
            alive.append(task)
    if not alive:
        return Decision((), tuple(refuse))
    order: Order = _fair if _overloaded(now_s, alive, limits) else _share
    first = min(alive, key=order)
    same = sorted((t for t in alive if t.kind == first.kind), key=lambda t: (t is not first, order(t)))
    n = _on_time(now_s, same[: limits.cap(first.kind)], limits)
    return Decision(tuple(t.key for t in same[:n]), tuple(refuse))


def _fair(task: Waiting) -> tuple[float, ...]:
    return (task.served_s, *_share(task))


def _superseded(waiting: Sequence[Waiting]) -> list[Refusal]:
    newest: dict[int, int] = {}
    for task in waiting:
        newest[task.stream] = max(newest.get(task.stream, -1), task.chunk)
    return [
        Refusal(t.key, "superseded", f"observation {newest[t.stream]} of the same robot took its place")
        for t in waiting
        if not t.started and t.chunk < newest[t.stream]
    ]


def _overloaded(now_s: float, alive: Sequence[Waiting], limits: Limits) -> bool:
    """Tell whether serving everyone in order of deadline, in full batches, would make someone late."""
    at = now_s
    by_kind: dict[int, list[Waiting]] = {}
    for task in sorted(alive, key=_share):
        by_kind.setdefault(task.kind, []).append(task)
    for kind, tasks in by_kind.items():
        cap = limits.cap(kind)
        for i in range(0, len(tasks), cap):
            batch = tasks[i : i + cap]
            at += limits.seconds(kind, len(batch))
            if any(at + t.remaining_s > t.deadline_s + limits.allowed_late_s for t in batch):
                return True
    return False


def _on_time(now_s: float, batch: Sequence[Waiting], limits: Limits) -> int:
    """Return the largest n for which the first n tasks, run together, all meet their deadlines; at least 1."""
    slack = math.inf
    best = 1
    for n, task in enumerate(batch, 1):
        slack = min(slack, task.deadline_s + limits.allowed_late_s - task.remaining_s - now_s)
        if limits.seconds(task.kind, n) <= slack:
            best = n
    return best


POLICIES: Mapping[str, DispatchPolicy] = {
    "earliest_deadline_first": earliest_deadline_first,
    "earliest_virtual_deadline_first": earliest_virtual_deadline_first,
    "oldest_chunk_first": oldest_chunk_first,
    "first_come_first_served": first_come_first_served,
    "largest_batch_first": largest_batch_first,
    "sweep": sweep,
    "fill_first": fill_first,
    "deadline_limited": deadline_limited,
}


def policy(name: str) -> DispatchPolicy:
    """Return a dispatch policy by its name in a plan.

    Raises:
        ConfigError: if no policy has that name.
    """
    if name not in POLICIES:
        raise ConfigError("dispatch", got=repr(name), expected=f"one of {sorted(POLICIES)}")
    return POLICIES[name]


def ring_cap(in_flight: float, ring: int, most: int) -> int:
    """Return the batch cap of a ring of devices: tasks in flight over its size, so that every device has one to run.

    A ring of one device has nobody to starve and takes whatever waits, up to `most`.
    """
    return most if ring <= 1 else max(1, min(most, int(in_flight / ring + 1e-9)))
