"""When a set of tasks is done if a device runs them together: the prediction that look-ahead dispatch decides by.

It assumes what the policy then does: kinds in the order of the route, so that newcomers catch up with those who are further
along and all share the batches of the later stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stretto.sched.dispatch_types import Limits, Waiting

Visits = tuple[tuple[int, int], ...]
"""(kind, how many visits of it are left), in the order of the route."""


SPLITTING = 1.2
"""How many times longer a row may take in a smaller batch for the sake of who may come meanwhile."""


class Splits(NamedTuple):
    """How to run 0, 1, 2, ... rows of one kind: in one batch or, where padding makes that cheaper, in several."""

    seconds: tuple[float, ...]
    first: tuple[int, ...]
    """Rows of the first batch."""


@lru_cache(maxsize=256)
def splits(costs: tuple[float, ...], cap: int) -> Splits:
    """Return the cheapest ways to run up to two full batches; more rows never cost less."""
    seconds, first = [0.0], [0]
    for rows in range(1, 2 * cap + 1):
        # The largest first: of two equal ways it serves more at once.
        sizes = range(min(rows, cap), 0, -1)
        size = min(sizes, key=lambda n: costs[min(n, len(costs)) - 1] + seconds[rows - n])
        best = costs[min(size, len(costs)) - 1] + seconds[rows - size]
        seconds.append(max(best, seconds[-1]))
        first.append(size)
    return Splits(tuple(seconds), tuple(first))


def batch_size(kind: int, rows: int, limits: Limits) -> int:
    """Return how many of these rows to run first: the cheapest, as far as who may come meanwhile can wait for it."""
    costs, cap = limits.costs.get(kind), limits.cap(kind)
    if not costs:
        return min(rows, cap)
    size = splits(tuple(costs), cap).first[min(rows, 2 * cap)]
    if limits.seconds(kind, size) <= limits.patience_s:
        return size
    dear_s = SPLITTING * limits.seconds(kind, size) / size
    cheap = [n for n in range(size, 0, -1) if limits.seconds(kind, n) <= dear_s * n]
    return next((n for n in cheap if limits.seconds(kind, n) <= limits.patience_s), cheap[-1])


class Left(NamedTuple):
    """What one task still has to run."""

    visits: Visits
    alone_s: float
    """Time to the end of its chunk if it has the device for itself."""
    tail_s: float
    """Part of that which is spent elsewhere, after this device."""

    @property
    def end(self) -> tuple[int, int]:
        return self.visits[-1]


class Work:
    """The work left of each task; tasks at one place of one route have the same."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[tuple[int, tuple[int, ...]], Left] = {}

    def of(self, task: Waiting) -> Left:
        key = task.kind, task.ahead
        left = self._known.get(key)
        if left is None:
            left = self._known[key] = self._of(task)
        return left

    def _of(self, task: Waiting) -> Left:
        counts: dict[int, int] = {}
        for kind in (task.kind, *task.ahead):
            counts[kind] = counts.get(kind, 0) + 1
        ahead_s = sum(self._limits.seconds(kind, 1) for kind in task.ahead)
        alone_s = self._limits.seconds(task.kind, 1) + max(ahead_s, task.remaining_s)
        return Left(tuple(sorted(counts.items())), alone_s, max(0.0, task.remaining_s - ahead_s))


class Forecast:
    """The work of a set of tasks, and when each part of it is done."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows: dict[int, list[int]] = {}

    def add(self, visits: Visits) -> None:
        for kind, times in visits:
            rows = self._rows.setdefault(kind, [])
            rows.extend([0] * (times - len(rows)))
            for i in range(times):
                rows[i] += 1

    def ends(self, more: Visits = (), tasks: int = 0) -> dict[int, list[float]]:
        """Return, for each kind, the seconds after which 0, 1, 2, ... of its visits are done, with more tasks of one sort.

        A task with fewer visits left leaves the shared batches first, so entry m is when a task with m of them is through.
        """
        extra = dict(more)
        at_s = 0.0
        found: dict[int, list[float]] = {}
        for kind in sorted({*self._rows, *extra}):
            rows, times = self._rows.get(kind, []), extra.get(kind, 0)
            found[kind] = ends = [at_s]
            for i in range(max(len(rows), times)):
                at_s += self._seconds(kind, (rows[i] if i < len(rows) else 0) + (tasks if i < times else 0))
                ends.append(at_s)
        return found

    def _seconds(self, kind: int, rows: int) -> float:
        costs, cap = self._limits.costs.get(kind), self._limits.cap(kind)
        if not costs:
            return 0.0
        table = splits(tuple(costs), cap).seconds
        full, rest = divmod(rows, 2 * cap)
        return (full * table[-1] + table[rest]) * (1.0 + self._limits.margin)


def room_s(task: Waiting, left: Left, now_s: float, limits: Limits) -> float:
    """Return the time in which a task must be through on this device for its chunk to be on time."""
    if task.deadline_s == math.inf:
        return math.inf
    return task.deadline_s + limits.allowed_late_s - limits.answer_s - now_s - left.tail_s


def urgency(task: Waiting) -> tuple[float, ...]:
    return (task.deadline_s, task.submitted_s, task.key)


def most_urgent(tasks: Sequence[Waiting], work: Work) -> Waiting:
    """Return the task that can be put off for the shortest time."""
    return min(tasks, key=lambda t: (t.deadline_s - work.of(t).alone_s, t.key))
