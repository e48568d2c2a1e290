"""Dispatch for requests with deadlines: what has been started ends on time, and what cannot be on time is never started.

Time that a late chunk has had is lost to all others, so under overload a policy that starts everybody finishes nobody. Here
a new request starts only if it, and everybody who has started, is on time by the measured cost of all that is left to run;
one that would have to wait too long for its turn is refused before any of its stages has run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.sched.dispatch_forecast import Forecast, Left, Work, batch_size, most_urgent, room_s, urgency
from stretto.sched.dispatch_types import Decision, Limits, Refusal, Waiting


def deadline_limited(now_s: float, waiting: Sequence[Waiting], limits: Limits) -> Decision:
    """Serve robots: start as many as stay on time together with those who have started, and refuse who cannot be.

    Who is on time only if the started ones wait goes ahead of them, if they can wait. A newer observation of the same robot
    replaces one that has not started. When more wait than can be on time, those who
    have had the least device time come first. `now_s` is when the device is free. What has no deadline takes the room that
    is left in batches, and the device when nobody with a deadline is there. Needs `limits.costs` and `Waiting.ahead` to look
    ahead; without them only what is late already is refused.
    """
    return _Table(now_s, limits).decide(waiting)


def superseded(waiting: Sequence[Waiting]) -> list[Refusal]:
    """Return refusals of tasks that have not started and of whose robot a newer observation is here."""
    newest: dict[int, int] = {}
    for task in waiting:
        newest[task.stream] = max(newest.get(task.stream, -1), task.chunk)
    return [
        Refusal(t.key, "superseded", f"observation {newest[t.stream]} of the same robot took its place")
        for t in waiting
        if not t.started and t.chunk < newest[t.stream]
    ]


@dataclass
class _Table:
    """One decision."""

    now_s: float
    limits: Limits
    begun: list[Waiting] = field(default_factory=list)
    fresh: list[Waiting] = field(default_factory=list)
    idle: list[Waiting] = field(default_factory=list)
    """Without a deadline."""
    refuse: list[Refusal] = field(default_factory=list)

    def decide(self, waiting: Sequence[Waiting]) -> Decision:
        self.work = Work(self.limits)
        self._sort(waiting)
        self.forecast = self._together(self.begun)
        ends = self.forecast.ends()
        if hurried := self._hurried(ends):
            return self._ahead(hurried)
        safe = [t for t in self.begun if self._spare_s(t, ends) >= 0.0]
        chosen = self._start(safe) if self.fresh else []
        if saved := self._saved(safe):
            return self._ahead(saved)
        ready = [*self.begun, *chosen]
        if not ready:
            return self._unhurried()
        calm = len(safe) == len(self.begun)
        kind = min(t.kind for t in ready) if calm else most_urgent(self.begun, self.work).kind
        batch = sorted((t for t in ready if t.kind == kind), key=urgency)
        batch = batch[: batch_size(kind, len(batch), self.limits)]
        if calm:
            if chosen:
                ends = self.forecast.ends(self.work.of(chosen[0]).visits, len(chosen))
            batch += self._fillers(kind, len(batch), min(self._spare_s(t, ends) for t in ready))
        return Decision(tuple(t.key for t in batch), tuple(self.refuse))

    def _together(self, tasks: Sequence[Waiting]) -> Forecast:
        forecast = Forecast(self.limits)
        for task in tasks:
            forecast.add(self.work.of(task).visits)
        return forecast

    def _hurried(self, ends: dict[int, list[float]]) -> list[Waiting]:
        """Return those who are on time only if others wait for them, if the others then are on time, too.

        Among robots of equal deadlines there are none: who started first also ends first.
        """
        if not self.begun or not _differ([*self.begun, *self.fresh]):
            return []
        behind = [t for t in self.begun if self._spare_s(t, ends) >= 0.0]
        late = [t for t in self.begun if self._spare_s(t, ends) < 0.0]
        with_one: dict[tuple[int, tuple[int, ...]], dict[int, list[float]]] = {}
        for task in self.fresh:
            key = task.kind, task.ahead
            if key not in with_one:
                with_one[key] = self.forecast.ends(self.work.of(task).visits, 1)
            # One who makes others late where all go together is late for them.
            if any(self._spare_s(t, with_one[key]) < 0.0 for t in (task, *behind)):
                late.append(task)
        late.sort(key=urgency)
        for n in range(min(len(late), self.limits.batch_cap) if behind else 0, 0, -1):
            if first := self._with_those_who_cannot_wait(late[:n], [*behind, *(t for t in late[n:] if t.started)]):
                return first
        return []

    def _with_those_who_cannot_wait(self, first: list[Waiting], rest: list[Waiting]) -> list[Waiting]:
        """Return the first with all of the rest who cannot wait for them, or nothing if not all would be on time so."""
        while rest:
            ends = self._together(first).ends()
            if any(self._spare_s(t, ends) < 0.0 for t in first):
                return []
            held_up_s = max(max(times) for times in ends.values())
            ends = self._together(rest).ends()
            hasty = [t for t in rest if self._spare_s(t, ends) < held_up_s]
            if not hasty:
                return first
            # One by one: the less stands before the rest, the more of them can wait.
            soonest = min(hasty, key=urgency)
            first, rest = [*first, soonest], [t for t in rest if t is not soonest]
        return []

    def _saved(self, safe: Sequence[Waiting]) -> list[Waiting]:
        """Return newcomers who are lost where all go together, with whoever is as urgent, if ahead of all they are on time."""
        lost = {r.key for r in self.refuse if r.reason == "deadline"}
        losing = [t for t in self.fresh if t.key in lost]
        if not losing or not safe or not _differ([*self.begun, *self.fresh]):
            return []
        last = max(urgency(t) for t in losing)
        wanted = sorted((t for t in self.fresh if urgency(t) <= last), key=urgency)
        for n in range(min(len(wanted), self.limits.batch_cap), 0, -1):
            kept = {t.key for t in wanted[:n]}
            if not lost & kept:
                return []
            if first := self._with_those_who_cannot_wait(wanted[:n], list(self.begun)):
                self.refuse = [r for r in self.refuse if r.key not in kept]
                return first
        return []

    def _ahead(self, hurried: Sequence[Waiting]) -> Decision:
        """Run these before all others, who come along where a batch gains by it, as far as nobody is late for it."""
        kind = min(t.kind for t in hurried)
        alike = [t for t in hurried if t.kind == kind]
        first = alike[: batch_size(kind, len(alike), self.limits)]
        ends = self._together(hurried).ends()
        spare_s = min(self._spare_s(t, ends) for t in hurried)
        seconds = self.limits.seconds
        gains = seconds(kind, len(first) + 1) - seconds(kind, len(first)) < 0.5 * seconds(kind, 1)
        also = [t for t in self.begun if t.kind == kind and t not in alike] if gains else []
        batch = [*first, *self._joining(also, kind, len(first), spare_s)]
        return Decision(tuple(t.key for t in batch), tuple(self.refuse))

    def _sort(self, waiting: Sequence[Waiting]) -> None:
        self.refuse += superseded(waiting)
        gone = {r.key for r in self.refuse}
        for task in waiting:
            if task.key in gone:
                continue
            if task.deadline_s == math.inf:
                self.idle.append(task)
                continue
            need_s, left_s = self.work.of(task).alone_s, self._left_s(task)
            # What has started may use up its margin; it is given up only when all hope is gone.
            if (need_s / (1.0 + self.limits.margin) if task.started else need_s) > left_s:
                self.refuse.append(_too_late(task, need_s, 0.0, left_s))
            else:
                (self.begun if task.started else self.fresh).append(task)

    def _left_s(self, task: Waiting) -> float:
        return task.deadline_s + self.limits.allowed_late_s - self.limits.answer_s - self.now_s

    def _spare_s(self, task: Waiting, ends: dict[int, list[float]]) -> float:
        left = self.work.of(task)
        kind, visits = left.end
        return room_s(task, left, self.now_s, self.limits) - ends[kind][visits]

    def _start(self, safe: Sequence[Waiting]) -> Sequence[Waiting]:
        """Choose who starts now, and refuse who will not have a turn in time."""
        first = min(self.fresh, key=urgency)
        left = self.work.of(first)
        alike = sorted((t for t in self.fresh if (t.kind, t.ahead) == (first.kind, first.ahead)), key=urgency)
        n, able = self._most(alike, left, safe)
        chosen = able[:n]
        if not self.begun and not chosen:
            chosen = [first]
        lost = self._lost(alike, chosen, left, safe)
        if lost and (fewer := self._rather(alike, n, left, safe, len(lost))):
            self.refuse += self._lost(alike, fewer, left, safe)
            return fewer
        if lost and 0 < n < len(able):
            chosen = sorted(able, key=lambda t: (t.served_s, *urgency(t)))[:n]
            lost = self._lost(alike, chosen, left, safe)
        self.refuse += lost
        return chosen

    def _most(self, alike: Sequence[Waiting], left: Left, safe: Sequence[Waiting]) -> tuple[int, list[Waiting]]:
        """Return the largest number of newcomers with whom everybody is on time, and those who can be among them."""
        rooms = [room_s(t, left, self.now_s, self.limits) for t in alike]
        tightest: dict[tuple[int, int], float] = {}
        for task in safe:
            its = self.work.of(task)
            tightest[its.end] = min(tightest.get(its.end, math.inf), room_s(task, its, self.now_s, self.limits))
        kind, visits = left.end
        low, high, able_from = 0, min(len(alike), self.limits.cap(alike[0].kind)), 0
        while low < high:
            n = (low + high + 1) // 2
            ends = self.forecast.ends(left.visits, n)
            able = bisect_left(rooms, ends[kind][visits])
            if len(rooms) - able >= n and all(ends[k][m] <= room for (k, m), room in tightest.items()):
                low, able_from = n, able
            else:
                high = n - 1
        return low, list(alike[able_from:])

    def _rather(self, alike: Sequence[Waiting], most: int, left: Left, safe: Sequence[Waiting], lost: int) -> Sequence[Waiting]:
        """Return the most urgent newcomers, if fewer than `lost` are lost by that.

        Among robots of equal deadlines this would only favour those who came first, so there the largest batch is kept.
        """
        room = room_s(alike[0], left, self.now_s, self.limits)
        kind, visits = left.end
        fits = (n for n in range(most, 0, -1) if self.forecast.ends(left.visits, n)[kind][visits] <= room)
        first, rest = alike[: (n := next(fits, 0))], alike[n:]
        if not rest or not _differ(alike):
            return ()
        return first if len(self._lost(alike, first, left, safe)) < lost else ()

    def _lost(self, alike: Sequence[Waiting], chosen: Sequence[Waiting], left: Left, safe: Sequence[Waiting]) -> list[Refusal]:
        """Return refusals of those not chosen who cannot be on time behind all that has been started by now.

        One more robot must wait for the batch that starts now. It then holds up the others by its own stages up to the
        shared last one, so it must also wait for all who have less to spare than that.
        """
        kind, visits = left.end
        ends = self.forecast.ends(left.visits, len(chosen))
        held_up_s = left.alone_s - left.tail_s - visits * self.limits.seconds(kind, 1)
        ahead = ((ends[k][m], self._spare_s(t, ends)) for t in (*safe, *chosen) for k, m in (self.work.of(t).end,))
        entry = alike[0].kind
        launch_s = self.limits.seconds(entry, batch_size(entry, len(chosen), self.limits)) if chosen else 0.0
        wait_s = max([launch_s, *(end_s for end_s, spare_s in ahead if spare_s < held_up_s)])
        picked = {t.key for t in chosen}
        need_s = wait_s + left.alone_s
        # Without the margin: who is put off may still be lucky, who is refused may not.
        return [
            _too_late(t, need_s, wait_s, self._left_s(t))
            for t in alike
            if t.key not in picked and need_s / (1.0 + self.limits.margin) > self._left_s(t)
        ]

    def _unhurried(self) -> Decision:
        """Run what has no deadline, the oldest first."""
        if not self.idle:
            return Decision((), tuple(self.refuse))
        kind = min(self.idle, key=urgency).kind
        batch = sorted((t for t in self.idle if t.kind == kind), key=urgency)[: self.limits.cap(kind)]
        return Decision(tuple(t.key for t in batch), tuple(self.refuse))

    def _fillers(self, kind: int, rows: int, spare_s: float) -> list[Waiting]:
        """Return tasks without a deadline that join the batch, as far as nobody is late for it."""
        return self._joining([t for t in self.idle if t.kind == kind], kind, rows, spare_s)

    def _joining(self, tasks: Sequence[Waiting], kind: int, rows: int, spare_s: float) -> list[Waiting]:
        alike = sorted(tasks, key=urgency)
        most = min(len(alike), self.limits.cap(kind) - rows)
        now_s = self.limits.seconds(kind, rows)
        while most > 0 and self.limits.seconds(kind, rows + most) - now_s > spare_s:
            most -= 1
        return alike[: max(0, most)]


def _differ(tasks: Sequence[Waiting]) -> bool:
    """Tell whether some robots were given clearly more time than others."""
    given = [t.deadline_s - t.submitted_s for t in tasks]
    return min(given) < 0.9 * max(given)


def _too_late(task: Waiting, need_s: float, wait_s: float, left_s: float) -> Refusal:
    turn = f", {wait_s * 1e3:.1f} ms of them until its turn" if wait_s else ""
    text = f"needs {need_s * 1e3:.1f} ms more{turn}, and its deadline is in {left_s * 1e3:.1f} ms"
    return Refusal(task.key, "deadline", text)
