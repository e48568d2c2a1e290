"""Dispatch: which waiting tasks run next on one device. The executor and the simulator call the same functions.

A policy sees the tasks that are ready on one device and answers with one batch of one kind. It keeps nothing between
calls, so replaying a trace gives the same answer. It is work-conserving: if anything waits and is not refused, something
runs. A task runs to the end of its segment, so segments are the quantum after which a more urgent task gets its turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from stretto.core.errors import ConfigError
from stretto.sched.dispatch_deadline import deadline_limited
from stretto.sched.dispatch_types import Decision, DispatchPolicy, Limits, Refusal, Waiting

__all__ = [
    "ANSWER_S",
    "LOOKS_AHEAD",
    "POLICIES",
    "Decision",
    "DispatchPolicy",
    "Limits",
    "Refusal",
    "Waiting",
    "deadline_limited",
    "earliest_deadline_first",
    "earliest_virtual_deadline_first",
    "fill_first",
    "first_come_first_served",
    "largest_batch_first",
    "oldest_chunk_first",
    "policy",
    "ring_cap",
    "sweep",
    "virtual_deadline_s",
]


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


LOOKS_AHEAD = ("deadline_limited",)
"""Policies that hold costs against deadlines."""
ANSWER_S = 0.001
"""What they leave from the end of a batch on the device to the answer on its way."""


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
