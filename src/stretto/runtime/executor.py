"""One executor per device: threads that give it work. It runs whatever the plan put on its device.

The executor never waits for another device. A chunk arrives with its values, passes through the segments placed here,
and departs with the values that live on: to the next device, or to the host when the route is done. Each lane of the
device has a thread; what they share (`Desk`) changes under one lock, which none of them holds while it launches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import StreamClosedError, WorkerDiedError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.parallel.order import hold_for_current_stream
from stretto.runtime.desk import Batch, Desk, Fail
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane
from stretto.runtime.layout import arenas_for
from stretto.runtime.repertoire import Repertoire
from stretto.runtime.staging import Staging
from stretto.runtime.timing import Stamp
from stretto.runtime.ways import Ways, ways_of

log = logging.getLogger(__name__)

LOOKS_AHEAD = ("deadline_limited",)
"""Dispatch policies that hold costs against deadlines."""

Depart = Callable[[Sequence[Flow], Mapping[str, Tensor]], None]
"""Takes chunks that leave from one place of one route, and their values as [B, ...] on the device; on a thread of it."""


class Executor:
    """Runs the tasks of one device on its own threads."""

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
        ways = ways or ways_of(model, plan)
        self.arenas = arenas_for(model, plan, device_name, self.device, slots=slots, streams=streams, ways=ways)
        self._staging = Staging(self.arenas.layout, pin=self.device.type == "cuda", keep=slots)
        self._can = Repertoire(model, plan, ways, device_name, self.arenas)
        count = plan.lanes(device_name)
        self._lanes = [Lane(i, self.device, alone=count == 1, clock=clock) for i in range(count)]
        self._desk = Desk(model, plan, device_name, self.arenas, self._can, self._lanes, ways=ways, fail=fail, clock=clock)
        self._turn = threading.RLock()  # guards the desk; a callback of a chunk that fails may come back here
        self._wake = threading.Condition(threading.Lock())
        self._news = 0  # grows with everything after which a lane that found nothing to run should look again
        self._mail: deque[Callable[[], None]] = deque()
        self._launches = 0
        self._holds = 0
        self._stopping = False
        self.dead: str | None = None
        self._threads = [
            threading.Thread(target=self._loop, args=(lane,), name=f"executor {device_name} {lane.number}", daemon=True)
            for lane in self._lanes
        ]

    def warm(self) -> None:
        """Capture every graph the plan can need. Synchronises the device; call before `start`."""
        for lane in self._lanes:
            with lane.current():
                self._can.capture(lane)
        # Only what keeps nothing between chunks can run for the sake of measuring.
        if self._plan.dispatch in LOOKS_AHEAD and self._stateless:
            self._desk.limits = replace(self._desk.limits, costs=self._can.measured(self._desk.limits.batch_cap, self._lanes))

    @property
    def costs(self) -> Mapping[tuple[str, ...], Sequence[float]]:
        """Stages that run as one task -> measured seconds of a batch of 1, 2, ... of them; empty before `warm`."""
        return self._can.by_stages(self._desk.limits.costs)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the batches in hand; chunks still here fail with StreamClosedError."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        with self._turn:
            self._drain()
            self._desk.clear(StreamClosedError("the engine was closed"))

    def open_stream(self, stream: int, stream_class: str) -> None:
        """Make room for a stream's state here. The caller has checked that there is some."""
        self._post(lambda: self._desk.residents.open(stream, stream_class))

    def close_stream(self, stream: int, closed: Callable[[], None]) -> None:
        """Drop the stream's chunks that are here and free its state, then call `closed`.

        A batch that is already launched runs to its end; the device's order of work makes the freed slots safe to reuse.
        """

        def close() -> None:
            self._desk.close_stream(stream)
            closed()

        if not self._post(close):
            closed()

    def set_condition(self, stream: int, name: str, version: int, value: Tensor) -> None:
        """Give a stream a new version of a condition; chunks that ask for it wait until it is here."""
        self._post(lambda: self._desk.residents.set_condition(stream, name, version, value.to(self.device)))

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
                self._desk.enqueue(flow)

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
                self._tell()

    def _post(self, action: Callable[[], None]) -> bool:
        with self._wake:
            if self.dead is not None:
                return False
            self._mail.append(action)
            self._tell()
            return True

    def _tell(self) -> None:
        """Let every lane look again for what it can run; the caller holds `_wake`."""
        self._news += 1
        self._wake.notify_all()

    def pack(self, inputs: Mapping[str, np.ndarray]) -> Tensor:
        """Pack the inputs of a chunk that starts here.

        Raises:
            FieldError: if an input is missing, unknown, or of another shape or dtype.
        """
        return self._staging.pack(inputs)

    @property
    def queue_depth(self) -> int:
        return len(self._mail) + self._desk.depth

    @property
    def captures(self) -> int:
        return self._can.captures

    @property
    def launches(self) -> int:
        """Batches that have been handed to the device so far."""
        return self._launches

    @property
    def busy(self) -> bool:
        """Whether a batch is being handed to the device now."""
        return any(lane.running for lane in self._lanes)

    def _loop(self, lane: Lane) -> None:
        try:
            with lane.current():
                while (batch := self._next(lane)) is not None:
                    self._launch(lane, batch)
                    lane.running = ()
        except Exception as error:  # the device's edge: whatever it was, the device is lost and its chunks must know
            log.exception("device %s is down", self.name)
            self._die(f"{type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        with self._turn:
            self._drain()
            with self._wake:
                first, self.dead = self.dead is None, self.dead or reason
                self._stopping = True
                self._wake.notify_all()
            self._drain()
            self._desk.clear(self._death())
        if first and self._died is not None:
            self._died(self.name, reason)

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f"device {self.name} is down: {self.dead}")

    def _next(self, lane: Lane) -> Batch | None:
        """Return what a lane runs next; does what others asked for, and sleeps while there is nothing. None to stop."""
        while True:
            # Before choosing, so that the choice is made by what is there when it can run.
            lane.make_room()
            seen = self._news
            if self._stopping:
                return None
            with self._turn:
                self._drain()
                batch = None if self._holds or self._stopping else self._desk.choose(lane)
            if batch is not None:
                return batch
            with self._wake:
                while not self._stopping and self._news == seen:
                    self._wake.wait()

    def _drain(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _launch(self, lane: Lane, batch: Batch) -> None:
        flows = batch.flows
        self._bring(lane, flows)
        lengths = {axis: max(f.lengths[axis] for f in flows) for axis in flows[0].lengths}
        begin = Stamp(self.device)
        ran = batch.entry.program.launch(batch.members, lengths)
        end = Stamp(self.device)
        lane.gave(end, batch.seconds / (1.0 + self._desk.limits.margin))
        name = "+".join(dict.fromkeys(batch.entry.stages))
        for flow in flows:
            flow.spans.append((name, begin, end, len(flows)))
            flow.ran_eagerly |= ran.mode == "eager"
            if flow.packed is not None:
                self._staging.give(flow.packed, begin)
                flow.packed = None
        with self._turn:
            self._launches += 1
            leaving = self._desk.launched(lane, batch, end)
        for group in leaving:
            self._leave(lane, group)
        if len(self._lanes) > 1:
            with self._wake:
                self._tell()

    def _bring(self, lane: Lane, flows: Sequence[Flow]) -> None:
        """Put the values of chunks that are new here into their slots, after whatever else used these last."""
        self._desk.touched.hold(lane, [f.slot for f in flows])
        for flow in flows:
            if flow.packed is not None:
                self.arenas.load(flow.slot, flow.packed)
            if flow.values is None:
                continue
            if flow.there is not None:
                flow.there.wait()
            for name, value in flow.values.items():
                self.arenas[name][flow.slot].copy_(value, non_blocking=True)
            if flow.there is not None:
                hold_for_current_stream(flow.values.values())
            flow.values = flow.there = None

    def _leave(self, lane: Lane, flows: Sequence[Flow]) -> None:
        """Let chunks go that leave from one place of one route."""
        cut = flows[0].placements[flows[0].at - 1].segment.stop
        slots = [f.slot for f in flows]
        rows = self.arenas.rows(self._can.route(flows[0].route).crossing(cut), slots)
        with self._turn:
            if len(self._lanes) > 1:
                self._desk.touched.note(lane, slots, Stamp(self.device))
            self._desk.left(flows)
        self._depart(flows, rows)
