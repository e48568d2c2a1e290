"""One executor per device: a ready queue, a dispatch policy, and programs. It runs whatever the plan put on its device.

The executor never waits for another device. A chunk arrives with its values, passes through the segments placed here,
and departs with the values that live on: to the next device, or to the host when the route is done.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import DeadlineError, RefusedError, StreamClosedError, SupersededError, WorkerDiedError
from stretto.core.model import Model, Row
from stretto.core.plan import Plan
from stretto.parallel.order import hold_for_current_stream
from stretto.runtime.costs import Backlog, Served
from stretto.runtime.flow import Flow
from stretto.runtime.layout import arenas_for
from stretto.runtime.program import Member
from stretto.runtime.repertoire import Repertoire
from stretto.runtime.residents import Residents
from stretto.runtime.timing import Stamp
from stretto.runtime.ways import Ways, ways_of
from stretto.sched.dispatch import DispatchPolicy, Limits, Waiting, policy

log = logging.getLogger(__name__)

LOOKS_AHEAD = ("deadline_limited",)
"""Dispatch policies that hold costs against deadlines."""
_REFUSALS: Mapping[str, type[RefusedError]] = {"deadline": DeadlineError, "superseded": SupersededError}
_AHEAD = 2  # launches queued on the device before the host waits for the oldest
_WAITED_S = 50e-6  # waiting for longer than this, the host met the end of a batch


Depart = Callable[[Sequence[Flow], Mapping[str, Tensor]], None]
"""Takes chunks that leave from one place of one route, and their values as [B, ...] on the device; on its thread."""
Fail = Callable[[Flow, Exception], None]


class Executor:
    """Runs the tasks of one device on its own thread."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device_name: str,
        *,
        slots: int,
        streams: int = 1,
        depart: Depart,
        fail: Fail,
        died: Callable[[str, str], None] | None = None,
        ways: Ways | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = device_name
        self.device = torch.device(device_name if device_name.startswith("cuda") else "cpu")
        self._plan = plan
        self._depart, self._fail, self._died, self._clock = depart, fail, died, clock
        self._stateless = not model.state and not model.conditions
        self._ways = ways = ways or ways_of(model, plan)
        self._policy: DispatchPolicy = policy(plan.dispatch)
        cap = plan.batch_cap(device_name)
        self._limits = Limits(batch_cap=cap)
        self.arenas = arenas_for(model, plan, device_name, self.device, slots=slots, streams=streams, ways=ways)
        self._can = Repertoire(model, plan, ways, device_name, self.arenas)
        self._residents = Residents(model, device_name, self.arenas.state_slots, ways)
        self._served = Served()
        self._backlog = Backlog()
        self._wake = threading.Condition()
        self._mail: deque[Callable[[], None]] = deque()
        self._waiting: list[Flow] = []
        self._running: Sequence[Flow] = ()
        self._arrived = self._launches = 0
        self._keys: dict[Flow, int] = {}
        self._outstanding: deque[Stamp] = deque()
        self._holds = 0
        self._stopping = False
        self.dead: str | None = None
        self._thread = threading.Thread(target=self._loop, name=f"executor {device_name}", daemon=True)

    def warm(self) -> None:
        """Capture every graph the plan can need. Synchronises the device; call before `start`."""
        with torch.inference_mode(), self._on_device():
            self._can.capture()
            # Only what keeps nothing between chunks can run for the sake of measuring.
            if self._plan.dispatch in LOOKS_AHEAD and self._stateless:
                self._limits = replace(self._limits, costs=self._can.measured(self._limits.batch_cap))

    @property
    def costs(self) -> Mapping[tuple[str, ...], Sequence[float]]:
        """Stages that run as one task -> measured seconds of a batch of 1, 2, ... of them; empty before `warm`."""
        return self._can.by_stages(self._limits.costs)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the batch in hand; chunks still here fail with StreamClosedError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._drain()
        for flow in self._waiting:
            self._fail(flow, StreamClosedError("the engine was closed"))
        self._waiting.clear()

    def open_stream(self, stream: int, stream_class: str) -> None:
        """Make room for a stream's state here. The caller has checked that there is some."""
        self._post(lambda: self._residents.open(stream, stream_class))

    def close_stream(self, stream: int, closed: Callable[[], None]) -> None:
        """Drop the stream's chunks that are here and free its state, then call `closed`.

        A batch that is already launched runs to its end; the device's order of work makes the freed slots safe to reuse.
        """

        def close() -> None:
            self._drop(stream)
            self._served.forget(stream)
            self._residents.close(stream)
            closed()

        if not self._post(close):
            closed()

    def set_condition(self, stream: int, name: str, version: int, value: Tensor) -> None:
        """Give a stream a new version of a condition; chunks that ask for it wait until it is here."""
        self._post(lambda: self._residents.set_condition(stream, name, version, value.to(self.device)))

    def offer(self, flow: Flow) -> None:
        """Hand a chunk to this device; any thread."""
        self.offer_all((flow,))

    def offer_all(self, flows: Sequence[Flow]) -> None:
        """Hand chunks to this device that may share a batch from the start; any thread."""
        now_s = self._clock()
        for flow in flows:
            flow.ready_s = now_s  # the device may be busy for a while before it looks at its mail

        def enqueue() -> None:
            for flow in flows:
                self._enqueue(flow)

        if not self._post(enqueue):
            for flow in flows:
                self._fail(flow, self._death())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start nothing while inside, so that what is offered meanwhile can share a batch."""
        with self._wake:
            self._holds += 1
        try:
            yield
        finally:
            with self._wake:
                self._holds -= 1
                self._wake.notify()

    def _post(self, action: Callable[[], None]) -> bool:
        with self._wake:
            if self.dead is not None:
                return False
            self._mail.append(action)
            self._wake.notify()
            return True

    def pack(self, inputs: Mapping[str, np.ndarray]) -> Tensor:
        """Pack the inputs of a chunk that starts here.

        Raises:
            FieldError: if an input is missing, unknown, or of another shape or dtype.
        """
        return self.arenas.layout.pack(inputs, pin=self.device.type == "cuda")

    @property
    def queue_depth(self) -> int:
        return len(self._mail) + len(self._waiting)

    @property
    def captures(self) -> int:
        return self._can.graphs.captures if self._can.graphs else 0

    @property
    def launches(self) -> int:
        """Batches that have been handed to the device so far."""
        return self._launches

    @property
    def busy(self) -> bool:
        """Whether a batch is being handed to the device now."""
        return bool(self._running)

    def _on_device(self) -> torch.cuda.device:
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def _loop(self) -> None:
        try:
            with torch.inference_mode(), self._on_device():
                while self._accept():
                    self._step()
                    if self._plan.dispatch in LOOKS_AHEAD:
                        # Before choosing, so that the choice is made by what is there when it can run.
                        self._make_room()
        except Exception as error:  # the device's edge: whatever it was, the device is lost and its chunks must know
            log.exception("device %s is down", self.name)
            self._drain()
            with self._wake:
                self.dead = f"{type(error).__name__}: {error}"
            self._drain()
            for flow in [*self._waiting, *self._running]:
                self._fail(flow, self._death())
            self._waiting.clear()
            if self._died is not None:
                self._died(self.name, self.dead)

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f"device {self.name} is down: {self.dead}")

    def _accept(self) -> bool:
        """Do what others asked for; sleep while there is nothing to run. Returns False to stop."""
        with self._wake:
            while not self._stopping and (self._holds or not (self._mail or self._ready())):
                self._wake.wait()
            if self._stopping:
                return False
        self._drain()
        return True

    def _drain(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _enqueue(self, flow: Flow) -> None:
        if flow.stream not in self._residents:
            self._fail(flow, StreamClosedError("the stream was closed"))
            return
        self._keys[flow] = self._arrived
        self._arrived += 1
        self._waiting.append(flow)

    def _drop(self, stream: int) -> None:
        dropped = [f for f in self._waiting if f.stream == stream]
        self._waiting = [f for f in self._waiting if f.stream != stream]
        for flow in dropped:
            self._release(flow)
            self._fail(flow, StreamClosedError("the stream was closed"))

    def _release(self, flow: Flow) -> None:
        self._keys.pop(flow, None)
        if flow.slot:
            self.arenas.slots.give(flow.slot)
            flow.slot = 0

    def _ready(self) -> list[Flow]:
        """Chunks that can run now: their turn has come, and they hold a slot or one is free for them."""
        free = self.arenas.slots.free
        ready = []
        for flow in self._waiting:
            if not self._residents.may_run(flow):
                continue
            if flow.slot:
                ready.append(flow)
            elif free:
                free -= 1
                ready.append(flow)
        return ready

    def _step(self) -> None:
        ready = self._ready()
        if not ready:
            return
        by_key = {self._keys[f]: f for f in ready}
        free_s = self._backlog.free_s(self._clock())
        decision = self._policy(free_s, [self._seen(f) for f in ready], self._limits)
        for refusal in decision.refuse:
            self._refuse(by_key[refusal.key], refusal.reason, refusal.text)
        batch = [by_key[key] for key in decision.run]
        if batch:
            self._running = batch
            self._launch(batch)
            self._running = ()

    def _refuse(self, flow: Flow, reason: str, text: str) -> None:
        self._waiting.remove(flow)
        self._release(flow)
        kind = _REFUSALS.get(reason, RefusedError)
        self._fail(flow, kind(reason, text or "the dispatch policy dropped the task"))

    def _seen(self, flow: Flow) -> Waiting:
        share, left_s, ahead = self._can.progress(flow, self._limits)
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

    def _make_room(self) -> None:
        """Wait until one more batch may be queued on the device."""
        if len(self._outstanding) >= _AHEAD:
            begin_s = self._clock()
            self._outstanding.popleft().wait()
            now_s = self._clock()
            if self.device.type == "cuda":
                self._backlog.reach(now_s - begin_s > _WAITED_S, now_s)

    def _launch(self, batch: Sequence[Flow]) -> None:
        self._make_room()
        number, program, stages = self._can.entry(batch[0])
        for flow in batch:
            self._waiting.remove(flow)
            if not flow.slot:
                self._settle(flow)
        lengths = {axis: max(f.lengths[axis] for f in batch) for axis in batch[0].lengths}
        begin = Stamp(self.device)
        ran = program.launch([self._member(f) for f in batch], lengths)
        for flow in batch:
            last = all(p.device != self.name for p in flow.placements[flow.at + 1 :])
            self._residents.pass_by(flow, last=last)
        end = Stamp(self.device)
        self._outstanding.append(end)
        self._launches += 1
        seconds = self._limits.seconds(number, len(batch))
        if self.device.type == "cuda":
            self._backlog.give(seconds / (1.0 + self._limits.margin), self._clock())
        share_s = seconds / len(batch)
        for flow in batch:
            self._served.add(flow.stream, share_s, self._clock())
            flow.spans.append(("+".join(dict.fromkeys(stages)), begin, end, len(batch)))
            flow.ran_eagerly |= ran.mode == "eager"
        self._move_on(batch)

    def _settle(self, flow: Flow) -> None:
        """Give a new chunk a slot and put its values there."""
        flow.slot = self.arenas.slots.take()
        flow.started_s = min(flow.started_s, self._clock())
        if flow.packed is not None:
            self.arenas.load(flow.slot, flow.packed)
            flow.packed = None
        if flow.there is not None:
            flow.there.wait()
        for name, value in (flow.values or {}).items():
            self.arenas[name][flow.slot].copy_(value, non_blocking=True)
        if flow.there is not None:
            hold_for_current_stream((flow.values or {}).values())
        flow.values = flow.there = None

    def _member(self, flow: Flow) -> Member:
        segment = flow.placement.segment
        row = Row(flow.stream, flow.chunk, 0, flow.slot, seed=flow.seed)
        state_slots = self._residents.slots(flow.stream, segment, self._can.model(flow.route))
        return Member(row, segment.start, state_slots, self._residents.conditions(flow.stream, flow.versions))

    def _move_on(self, batch: Sequence[Flow]) -> None:
        leaving = []
        for flow in batch:
            flow.at += 1
            if flow.at < len(flow.placements) and flow.placement.device == self.name:
                flow.ready_s = self._clock()
                self._waiting.append(flow)
            else:
                leaving.append(flow)
        leaving.sort(key=_place)
        behind: Counter[str] = Counter()
        for flow in reversed(leaving):
            if flow.at < len(flow.placements):
                flow.behind = behind[flow.placement.device]
                behind[flow.placement.device] += 1
        for _, group in groupby(leaving, key=_place):
            self._leave(list(group))

    def _leave(self, flows: Sequence[Flow]) -> None:
        """Let chunks go that leave from one place of one route."""
        cut = flows[0].placements[flows[0].at - 1].segment.stop
        slots = torch.tensor([f.slot for f in flows], dtype=torch.int64).to(self.device, non_blocking=True)
        route = self._can.route(flows[0].route)
        rows = {name: self.arenas[name].index_select(0, slots) for name in route.crossing(cut)}
        for flow in flows:
            self._release(flow)
        self._depart(flows, rows)


def _place(flow: Flow) -> tuple[str, str, int]:
    return flow.route, flow.stream_class, flow.at
