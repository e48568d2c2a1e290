"""The chunks that are on a device: who waits for which lane, whose turn it is, and which batch is next.

Nothing here launches work or waits, and nothing is thread-safe: the executor calls it under its lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from stretto.core.errors import DeadlineError, RefusedError, StreamClosedError, SupersededError
from stretto.core.model import Model, Row
from stretto.core.plan import Plan
from stretto.runtime.arena import Arenas
from stretto.runtime.costs import Served
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane, Touched
from stretto.runtime.program import Member
from stretto.runtime.repertoire import Entry, Repertoire
from stretto.runtime.residents import Residents
from stretto.runtime.timing import Stamp
from stretto.runtime.ways import Ways
from stretto.sched.dispatch import ANSWER_S, DispatchPolicy, Limits, Waiting, policy
from stretto.sched.patience import Patience

_REFUSALS: Mapping[str, type[RefusedError]] = {"deadline": DeadlineError, "superseded": SupersededError}

Fail = Callable[[Flow, Exception], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that a lane runs together now, and what it needs to know of them."""

    flows: Sequence[Flow]
    members: Sequence[Member]
    entry: Entry
    seconds: float
    """What the batch is expected to take; 0 where no cost is known."""


class Desk:
    """Keeps the chunks of one device in order."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        name: str,
        arenas: Arenas,
        can: Repertoire,
        lanes: Sequence[Lane],
        *,
        ways: Ways,
        fail: Fail,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._arenas, self._can, self._lanes = name, arenas, can, lanes
        self._fail, self._clock = fail, clock
        self.policy: DispatchPolicy = policy(plan.dispatch)
        self.limits = Limits(batch_cap=plan.batch_cap(name), answer_s=ANSWER_S)
        self.residents = Residents(model, name, arenas.state_slots, ways)
        self.touched = Touched(len(lanes))
        self._served, self._patience = Served(), Patience()
        self._keys: dict[Flow, int] = {}
        self._arrived = 0

    def retune(self, plan: Plan) -> None:
        """Choose batches in the order and up to the caps of another plan."""
        self.policy = policy(plan.dispatch)
        self.limits = replace(self.limits, batch_cap=plan.batch_cap(self._name))

    @property
    def depth(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes)

    def enqueue(self, flow: Flow) -> None:
        """Take a chunk that has come to this device."""
        if flow.stream not in self.residents:
            self._fail(flow, StreamClosedError("the stream was closed"))
            return
        self._keys[flow] = self._arrived
        self._arrived += 1
        if flow.at == 0 and self.limits.costs:
            self._hear_deadline(flow)
        self._lanes[flow.placement.lane].waiting.append(flow)

    def _hear_deadline(self, flow: Flow) -> None:
        _, left_s, _ = self._can.progress(flow, self.limits)
        alone_s = self.limits.seconds(self._can.entry(flow).number, 1) + left_s
        now_s = self._clock()
        patience_s = self._patience.note(flow.stream, flow.deadline_s - now_s - alone_s, now_s)
        if patience_s != self.limits.patience_s:
            self.limits = replace(self.limits, patience_s=patience_s)

    def close_stream(self, stream: int) -> None:
        """Drop a stream's chunks that wait here, and its state."""
        for lane in self._lanes:
            dropped = [f for f in lane.waiting if f.stream == stream]
            lane.waiting = [f for f in lane.waiting if f.stream != stream]
            for flow in dropped:
                self._end(flow, StreamClosedError("the stream was closed"))
        self._served.forget(stream)
        self._patience.forget(stream)
        self.residents.close(stream)

    def clear(self, error: Exception) -> None:
        """Fail every chunk that waits or is being launched."""
        for lane in self._lanes:
            left, lane.waiting = [*lane.waiting, *lane.running], []
            for flow in left:
                self._fail(flow, error)

    def choose(self, lane: Lane) -> Batch | None:
        """Take the batch that a lane runs next, refusing what the policy refuses; None if nothing can run now."""
        while ready := self._ready(lane):
            if len(ready) == 1 and ready[0].deadline_s == math.inf:
                # No policy refuses a lone task without a deadline, and none lets the device idle.
                lane.running = ready
                return self._batch(lane, ready)
            by_key = {self._keys[f]: f for f in ready}
            decision = self.policy(lane.free_s(), [self._seen(f) for f in ready], self.limits)
            for refusal in decision.refuse:
                flow = by_key[refusal.key]
                lane.waiting.remove(flow)
                kind = _REFUSALS.get(refusal.reason, RefusedError)
                self._end(flow, kind(refusal.reason, refusal.text or "the dispatch policy dropped the task"))
            if decision.run:
                lane.running = [by_key[key] for key in decision.run]
                return self._batch(lane, lane.running)
            if not decision.refuse:
                return None
        return None

    def _ready(self, lane: Lane) -> list[Flow]:
        """Chunks that can run now: their turn has come, and they hold a slot or one is free for them.

        Those whose values another lane is still making come only when there is nobody else, so that no launch that could
        begin stands behind one that has to wait.
        """
        free = self._arenas.slots.free
        ready: list[Flow] = []
        early: list[Flow] = []
        for flow in lane.waiting:
            if not self.residents.may_run(flow):
                continue
            if flow.slot:
                (ready if self.touched.settled(lane, flow.slot) else early).append(flow)
            elif free:
                free -= 1
                ready.append(flow)
        return ready or early

    def _seen(self, flow: Flow) -> Waiting:
        share, left_s, ahead = self._can.progress(flow, self.limits)
        return Waiting(
            key=self._keys[flow],
            kind=self._can.entry(flow).number,
            ready_s=flow.ready_s,
            submitted_s=flow.submitted_s,
            deadline_s=flow.deadline_s,
            stream=flow.stream,
            chunk=flow.chunk,
            progress=share,
            remaining_s=left_s,
            started=flow.started_s < math.inf,
            served_s=self._served.of(flow.stream, self._clock()),
            ahead=ahead,
        )

    def _batch(self, lane: Lane, flows: Sequence[Flow]) -> Batch:
        entry = self._can.entry(flows[0])
        for flow in flows:
            lane.waiting.remove(flow)
            if not flow.slot:
                flow.slot = self._arenas.slots.take()
                flow.started_s = min(flow.started_s, self._clock())
        return Batch(flows, [self._member(f) for f in flows], entry, self._seconds(entry.number, len(flows)))

    def _seconds(self, kind: int, rows: int) -> float:
        return self.limits.seconds(kind, rows) / (1.0 + self.limits.margin)

    def _member(self, flow: Flow) -> Member:
        segment = flow.placement.segment
        row = Row(flow.stream, flow.chunk, 0, flow.slot, seed=flow.seed)
        state_slots = self.residents.slots(flow.stream, segment, self._can.model(flow.route))
        return Member(row, segment.start, state_slots, self.residents.conditions(flow.stream, flow.versions))

    def launched(self, lane: Lane, batch: Batch, end: Stamp) -> Iterator[list[Flow]]:
        """Move chunks on that have been launched; yields those that leave the device, together where they stand together."""
        now_s = self._clock()
        leaving: list[Flow] = []
        self.touched.note(lane, [f.slot for f in batch.flows], end)
        for flow in batch.flows:
            here = flow.stream in self.residents
            if here:
                last = all(p.device != self._name for p in flow.placements[flow.at + 1 :])
                self.residents.pass_by(flow, last=last)
                self._served.add(flow.stream, batch.seconds / len(batch.flows), now_s)
            flow.at += 1
            if flow.at == len(flow.placements) or flow.placement.device != self._name:
                leaving.append(flow)
            elif here:
                flow.ready_s = now_s
                self._lanes[flow.placement.lane].waiting.append(flow)
            else:  # closed by another lane's thread while this one launched
                self._end(flow, StreamClosedError("the stream was closed"))
        leaving.sort(key=_place)
        behind: Counter[str] = Counter()
        for flow in reversed(leaving):
            if flow.at < len(flow.placements):
                flow.behind = behind[flow.placement.device]
                behind[flow.placement.device] += 1
        return (list(group) for _, group in groupby(leaving, key=_place))

    def left(self, flows: Sequence[Flow]) -> None:
        """Free the slots of chunks whose values have been taken from them."""
        for flow in flows:
            self._release(flow)

    def _end(self, flow: Flow, error: Exception) -> None:
        self._release(flow)
        self._fail(flow, error)

    def _release(self, flow: Flow) -> None:
        self._keys.pop(flow, None)
        if flow.slot:
            self._arenas.slots.give(flow.slot)
            flow.slot = 0


def _place(flow: Flow) -> tuple[str, str, int]:
    return flow.route, flow.stream_class, flow.at
