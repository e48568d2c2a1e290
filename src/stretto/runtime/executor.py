"""One executor per device: threads that give it work. It runs whatever the plan put on its device.

The executor never waits for another device. A chunk arrives with its values, passes through the segments placed here,
and departs with the values that live on: to the next device, or to the host when the route is done. Each lane of the
device has a thread; what they share (`Desk`) changes under one lock, which none of them holds while it launches.

A thread is woken for what its lane is given, and that takes longer than a launch. So where a launch is a mere hand-over,
whoever offers a chunk to an idle lane does the lane's work itself. Only one thread at a time does (`Lane.driver`), and what
can run code of users, such as telling that a chunk failed, is left to the lane's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import StreamClosedError, WorkerDiedError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.runtime.arena import PackedRow
from stretto.runtime.desk import Batch, Desk, Fail
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane
from stretto.runtime.launcher import Depart, Launcher
from stretto.runtime.layout import Streams, arenas_for
from stretto.runtime.mailbox import Mailbox
from stretto.runtime.partition import LaneStreams
from stretto.runtime.repertoire import Repertoire
from stretto.runtime.staging import Staging
from stretto.runtime.ways import Ways, ways_of
from stretto.sched.dispatch import LOOKS_AHEAD

log = logging.getLogger(__name__)


class Executor:
    """Runs the tasks of one device on its own threads."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        device_name: str,
        *,
        slots: int,
        streams: Streams = 1,
        depart: Depart,
        fail: Fail,
        died: Callable[[str, str], None] | None = None,
        ways: Ways | None = None,
        callers_launch: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one. `callers_launch`: whether whoever offers a chunk may launch it; None: where launching computes nothing."""
        self.name = device_name
        self.device = torch.device(device_name if device_name.startswith("cuda") else "cpu")
        self._plan = plan
        self._fail, self._died, self._clock, self._streams = fail, died, clock, streams
        self._stateless = not model.state and not model.conditions
        prompt = self.device.type == "cuda" and plan.mode == "graph" and self._stateless
        self._callers_launch = prompt if callers_launch is None else callers_launch
        ways = ways or ways_of(model, plan)
        self.arenas = arenas_for(model, plan, device_name, self.device, slots=slots, streams=streams, ways=ways)
        self._staging = Staging(self.arenas.layout, pin=self.device.type == "cuda", keep=slots)
        count = plan.lanes(device_name)
        sms = plan.lane_sms.get(device_name, (0,) * count)
        several = self.device.type == "cuda" and (count > 1 or any(sms))
        own = LaneStreams(self.device, sms) if several else None
        self._can = Repertoire(model, plan, ways, device_name, self.arenas, own)
        self._lanes = [
            Lane(i, self.device, clock=clock, ahead=plan.ahead, **({"stream": own.new(i), "part": own.part(i)} if own else {}))
            for i in range(count)
        ]
        self._desk = Desk(
            model, plan, device_name, self.arenas, self._can, self._lanes, ways=ways, fail=self._lose, clock=clock
        )
        self._turn = threading.RLock()  # guards the desk; a callback of a chunk that fails may come back here
        self._mail = Mailbox()
        self._lost: deque[tuple[Flow, Exception]] = deque()
        self._fault: Exception | None = None
        self._launcher = Launcher(self.arenas, self._staging, self._can, self._desk, self._lanes, self._turn, depart, clock)
        self._started = False
        self.dead: str | None = None
        self._threads = [
            threading.Thread(target=self._loop, args=(lane,), name=f"executor {device_name} {lane.number}", daemon=True)
            for lane in self._lanes
        ]

    def warm(self) -> None:
        """Capture every graph the plan can need. Synchronises the device; call before `start`."""
        for lane in self._lanes:
            with lane.current():
                self._can.capture(lane, self._desk.residents, self._streams)
                self._staging.warm(self.device)
        # Only what keeps nothing between chunks can run for the sake of measuring.
        if self._plan.dispatch in LOOKS_AHEAD and self._stateless:
            self._desk.limits = replace(self._desk.limits, costs=self._can.measured(self._desk.limits.batch_cap, self._lanes))

    @property
    def costs(self) -> Mapping[tuple[str, ...], Sequence[float]]:
        """Stages that run as one task -> measured seconds of a batch of 1, 2, ... of them; empty before `warm`."""
        return self._can.by_stages(self._desk.limits.costs)

    @property
    def slowed(self) -> Mapping[tuple[str, ...], float]:
        """Stages that run as one task -> how many times longer it takes beside another lane; empty before `warm`."""
        return self._can.slowed

    def retune(self, plan: Plan) -> None:
        """Choose batches by another plan from now on; see `Engine.retune`."""
        with self._turn:
            self._plan = plan
            self._desk.retune(plan)
            for lane in self._lanes:
                lane.launch_ahead(plan.ahead)

    def start(self) -> None:
        self._started = True
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the batches in hand; chunks still here fail with StreamClosedError."""
        self._mail.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for lane in self._lanes:
            with lane.driver:  # a caller may be launching
                pass
        with self._turn:
            self._mail.drain()
            self._desk.clear(StreamClosedError("the engine was closed"))
        self._tell_lost()

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
        """Hand a chunk to this device; any thread, which may also launch it."""
        flow.ready_s = self._clock()  # the device may be busy for a while before it looks at its mail
        if self._callers_launch and self._drive(self._lanes[flow.placement.lane], flow):
            return
        if not self._post(partial(self._desk.enqueue, flow)):
            self._fail(flow, self._death())

    def offer_all(self, flows: Sequence[Flow]) -> None:
        """Hand chunks to this device that may share a batch from the start; any thread."""
        now_s = self._clock()
        for flow in flows:
            flow.ready_s = now_s

        def enqueue() -> None:
            for flow in flows:
                self._desk.enqueue(flow)

        if not self._post(enqueue):
            for flow in flows:
                self._fail(flow, self._death())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start nothing while inside, so that what is offered meanwhile can share a batch."""
        self._mail.hold(1)
        try:
            yield
        finally:
            self._mail.hold(-1)
            for lane in self._lanes:
                if not (self._callers_launch and self._drive(lane)):
                    self._mail.ring()

    def _post(self, action: Callable[[], None]) -> bool:
        """Ask for something; False if the device is gone."""
        if not self._mail.put(action):
            return False
        self._mail.ring()
        return True

    def _drive(self, lane: Lane, flow: Flow | None = None) -> bool:
        """Do a lane's work on the calling thread as far as it does not have to wait, with a chunk that has just come.

        Returns False, and nothing is done, if another thread is at it or the device has stopped.
        """
        if not self._started or not lane.driver.acquire(blocking=False):
            return False
        try:
            with lane.driving:
                if not self._take(flow):
                    return False
                while self._fault is None and not lane.full:
                    batch = self._choose(lane)
                    if batch is None:
                        if self._lost or len(self._lanes) > 1:
                            break
                        return True
                    self._launch(lane, batch)
        except Exception as error:  # the same edge as in `_loop`, whose thread is to tell
            self._fault = error
        finally:
            lane.driver.release()
        self._mail.ring()  # the lane's thread is needed
        return True

    def _take(self, flow: Flow | None) -> bool:
        with self._turn:
            self._mail.drain()
            if self._mail.stopping:
                return False
            if flow is not None:
                self._desk.enqueue(flow)
            return True

    def row(self) -> PackedRow:
        """Return a row for the inputs of a chunk that will start here."""
        return self._staging.take()

    def pack(self, inputs: Mapping[str, np.ndarray], row: PackedRow | None = None) -> PackedRow:
        """Pack the inputs of a chunk that starts here, into a row that was got for it or another.

        Raises:
            FieldError: if an input is missing, unknown, or of another shape or dtype.
        """
        return self._staging.pack(inputs, row)

    @property
    def queue_depth(self) -> int:
        return len(self._mail) + self._desk.depth

    @property
    def captures(self) -> int:
        return self._can.captures

    @property
    def launches(self) -> int:
        """Batches that have been handed to the device so far."""
        return self._launcher.launches

    @property
    def busy(self) -> bool:
        """Whether a batch is being handed to the device now."""
        return any(lane.running for lane in self._lanes)

    def _loop(self, lane: Lane) -> None:
        try:
            with lane.current():
                while not self._mail.stopping:
                    seen = self._mail.news
                    with lane.driver:
                        batch = self._next(lane)
                        if batch is not None:
                            self._launch(lane, batch)
                    self._tell_lost()
                    if batch is None:
                        self._mail.sleep(seen)
        except Exception as error:  # the device's edge: whatever it was, the device is lost and its chunks must know
            log.exception("device %s is down", self.name)
            self._die(f"{type(error).__name__}: {error}")

    def _next(self, lane: Lane) -> Batch | None:
        if self._fault is not None:
            raise self._fault
        with self._turn:
            self._mail.drain()
        if lane.waiting:
            # Before choosing, so that the choice is made by what is there when it can run.
            lane.make_room()
        return None if lane.full else self._choose(lane)

    def _choose(self, lane: Lane) -> Batch | None:
        """Do what others asked for, and take the batch that a lane runs next, if there is one."""
        with self._turn:
            self._mail.drain()
            return None if self._mail.holds or self._mail.stopping else self._desk.choose(lane)

    def _lose(self, flow: Flow, error: Exception) -> None:
        self._lost.append((flow, error))

    def _tell_lost(self) -> None:
        """Tell whose chunks failed. Runs code of users."""
        while True:
            try:
                flow, error = self._lost.popleft()
            except IndexError:  # another lane's thread may take the last one
                return
            self._fail(flow, error)

    def _die(self, reason: str) -> None:
        with self._turn:
            first, self.dead = self.dead is None, self.dead or reason
            self._mail.stop(shut=True)
            self._mail.drain()
            self._desk.clear(self._death())
        self._tell_lost()
        if first and self._died is not None:
            self._died(self.name, reason)

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f"device {self.name} is down: {self.dead}")

    def _launch(self, lane: Lane, batch: Batch) -> None:
        self._launcher.launch(lane, batch)
        if len(self._lanes) > 1:
            self._mail.ring()
