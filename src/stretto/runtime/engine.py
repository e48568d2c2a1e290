"""The engine: streams in, chunks out. It hands chunks to the devices of its plan and gives finished ones back.

The devices are executors in this process, or processes of their own (`workers`); the engine is the same.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.errors import CapacityError, FieldError, StreamClosedError, StrettoError, WorkerDiedError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.core.route import Route
from stretto.runtime.arena import PackedRow
from stretto.runtime.devices import Devices
from stretto.runtime.entrance import Entrance
from stretto.runtime.fleet import Workers
from stretto.runtime.flow import Flow
from stretto.runtime.layout import Streams
from stretto.runtime.passage import Finisher, Passage
from stretto.runtime.pending import Answer, Pending
from stretto.runtime.room import Room
from stretto.runtime.seat import Seat
from stretto.runtime.slots import Slots
from stretto.runtime.stream import Stream as Stream
from stretto.runtime.ways import MAIN, ways_of


class Engine:
    """Runs one model under one plan. Build it, warm it, open streams.

    The model is bound to its device and its weights are loaded before it comes here.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        slots: int | None = None,
        streams: Streams = 64,
        routes: Mapping[str, Route] | None = None,
        workers: Workers | None = None,
        callers_launch: bool | None = None,
    ) -> None:
        """Make an engine.

        Args:
            slots: chunks that a device holds at a time. `streams`: streams that it holds state for,
                so many of any class of the plan or so many of each.
            routes: other routes of the model by name, beside its main one.
            workers: run each device in a process of its own. `model` then needs no weights: it describes.
            callers_launch: whether `submit` may launch on an idle device of this process itself. None: where a launch is a
                mere hand-over, which it is for graphs on a GPU.

        Raises:
            PlanError: if the plan does not fit the model.
        """
        self.model, self.plan = model, plan
        self.ways = ways_of(model, plan, routes)
        self._pending: dict[tuple[int, int], Pending] = {}
        self._open: dict[int, Stream] = {}
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._closed = False
        # What follows chunks of one batch, once these are through, can share a batch again, whoever is the first to ask.
        self._finisher = Finisher(self._passed, together=self.together if model.state else nullcontext)
        most = max(plan.batch_cap(d.name) * plan.lanes(d.name) for d in plan.devices)
        self._devices = Devices(
            model, plan, self.ways, self._finisher, slots=slots or 2 * most,
            streams=streams, workers=workers, callers_launch=callers_launch,
            passed=self._heard, failed=self._failed, died=self._died,
        )  # fmt: skip
        self.executors: Mapping[str, Seat] = self._devices.seats
        self.room = Room(model, plan, streams, self.executors)
        self._entrance = Entrance(self._lock, self._most_of, self._offer, time.monotonic)

    def warm(self) -> None:
        """Capture all graphs, or wait for all workers, then start. Blocks until ready.

        Raises:
            WorkerDiedError: if a worker cannot start.
            LinkError: if two workers cannot be linked.
        """
        self._devices.warm()
        self._finisher.start()

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @property
    def dead(self) -> str | None:
        """Why the engine cannot run all of its plan any more, or None."""
        return next((e.dead for e in self.executors.values() if e.dead), None)

    @property
    def ended(self) -> str | None:
        """Why the engine can take no stream of any class any more, or None."""
        reasons = [self._devices.down(name) for name in self.plan.classes]
        return reasons[0] if all(reasons) else None

    @property
    def queue_depth(self) -> int:
        return sum(e.queue_depth for e in self.executors.values())

    @property
    def captures(self) -> int:
        return sum(e.captures for e in self.executors.values())

    @property
    def costs(self) -> dict[tuple[str, ...], tuple[float, ...]]:
        """Stages that run as one task -> measured seconds of a batch of 1, 2, ...; known for models without state."""
        return {stages: tuple(seconds) for e in self.executors.values() for stages, seconds in e.costs.items()}

    @property
    def slowed(self) -> dict[tuple[str, ...], float]:
        """Stages that run as one task -> how many times longer it takes beside another lane; known where costs are."""
        return self._devices.slowed

    @property
    def in_flight(self) -> int:
        """Chunks that have been submitted and are not finished."""
        return len(self._pending)

    @property
    def carriage(self) -> str:
        """How chunks cross between devices: within this process, or by what its workers can share."""
        return self._devices.carriage

    @property
    def workers(self) -> Mapping[str, int]:
        """Device -> process id of its worker; empty where there are none."""
        return self._devices.workers

    def resident_bytes(self) -> Mapping[str, int]:
        """Return device -> bytes of host memory that its worker holds, as it last said; empty where there are none."""
        return self._devices.resident_bytes

    def open(self, *, stream_class: str | None = None, seed: int = 0) -> Stream:
        """Open a stream of a class of the plan; by default of the one with the fewest streams that has room.

        Raises:
            PlanError: if the plan has no such class.
            CapacityError: if a device has no room for its state.
            WorkerDiedError: if a device of the class is gone.
        """
        if stream_class is not None:
            return self._open_in(stream_class, seed)
        with self._lock:
            taken = Counter(s.stream_class for s in self._open.values())
        refusals: list[StrettoError] = []
        for name in sorted(self.plan.classes, key=lambda name: taken[name]):
            try:
                return self._open_in(name, seed)
            except (CapacityError, WorkerDiedError) as refusal:
                refusals.append(refusal)
        raise next((r for r in refusals if isinstance(r, CapacityError)), refusals[0])

    def _open_in(self, name: str, seed: int) -> Stream:
        placements = self.plan.placements(name)
        if down := self._devices.down(name):
            raise WorkerDiedError(down)
        with self._lock:
            self.room.take(name)
            slots = Slots(self.plan.admission, len(placements)) if self.plan.admission and self.model.state else None
            stream = Stream(self, next(self._ids), name, seed, slots=slots)
            self._open[stream.id] = stream
            for executor in self.executors.values():
                executor.open_stream(stream.id, name)
        return stream

    def retune(self, plan: Plan) -> None:
        """Go on by another plan that puts everything where this one does: its order, caps, credits and launches ahead.

        Streams go on meanwhile. Devices of this process only.

        Raises:
            PlanError: if the plan differs in anything else, or has larger batches than the engine was made for.
            ConfigError: if it names an unknown order.
        """
        self._devices.retune(plan)
        self.plan = plan

    def together(self) -> AbstractContextManager[None]:
        """Start nothing while inside, so that what is submitted meanwhile can share batches. Devices of this process only."""
        return self._devices.together()

    def help(self, done: Callable[[], bool]) -> None:
        """Do what the engine's threads would else be woken for, until `done` or there is nothing, for a caller about to wait.

        Waits for devices, and runs the callbacks of chunks that are finished meanwhile; hold no lock that these may need.
        """
        self._finisher.help(done)

    def close(self) -> None:
        """Stop all devices. Chunks that are not finished fail with StreamClosedError."""
        self._closed = True
        self._devices.close()
        self._finisher.close()
        for pending in list(self._pending.values()):
            self._fail(pending.flow, StreamClosedError("the engine was closed"))

    def _submit(
        self, stream: Stream, flow: Flow, inputs: Mapping[str, np.ndarray], row: PackedRow | None = None
    ) -> Future[Chunk]:
        executor = self.executors[flow.placements[0].device]
        flow.packed = executor.pack(inputs, row)
        pace_s = self.plan.pace_s.get(stream.stream_class)
        if pace_s is not None and flow.deadline_s == math.inf:
            flow.deadline_s = flow.submitted_s + pace_s
        future = Answer(self._finisher)
        with self._lock:
            self._pending[flow.key] = Pending(stream, flow, future, every_device=self._devices.far)
            following = self._entrance.come(stream, flow)
        for entered in following:
            self._offer(entered)
        return future

    def _most_of(self, stream: Stream) -> float:
        return self.plan.credit(stream.stream_class) if self.model.state else math.inf

    def _offer(self, flow: Flow) -> None:
        self.executors[flow.placement.device].offer(flow)

    def _set_condition(self, stream: Stream, name: str, version: int, value: Tensor) -> None:
        spec = self.model.conditions.get(name)
        if spec is None or tuple(value.shape) != spec.shape:
            expected = f"one of { {n: list(s.shape) for n, s in self.model.conditions.items()} }"
            raise FieldError("condition", got=f"{name} {list(value.shape)}", expected=expected)
        for executor in self.executors.values():
            executor.set_condition(stream.id, name, version, value)

    def _close_stream(self, stream: Stream) -> None:
        with self._lock:
            if self._open.pop(stream.id, None) is None:
                return
            held = list(stream.held)
            stream.held.clear()
        for flow in held:
            self._fail(flow, StreamClosedError("the stream was closed"))
        for name, executor in self.executors.items():
            executor.close_stream(stream.id, partial(self._freed, name, self.room.needs(name, stream.stream_class)))

    def _freed(self, device: str, slots: Mapping[str, int]) -> None:
        with self._lock:
            self.room.give(device, slots)

    def _passed(self, flow: Flow, passage: Passage) -> None:
        self._heard(flow.key, passage)

    def _heard(self, key: tuple[int, int], passage: Passage) -> None:
        with self._lock:
            pending = self._pending.get(key)
            if pending is None or not pending.add(passage):
                return
        self._settle(pending.flow)
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_result(pending.chunk())

    def _failed(self, key: tuple[int, int], error: Exception) -> None:
        pending = self._pending.get(key)
        if pending is not None:
            self._fail(pending.flow, error)

    def _fail(self, flow: Flow, error: Exception) -> None:
        pending = self._settle(flow)
        if pending is None:
            return
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_exception(error)
        stream = pending.stream
        if self.model.state and not (stream.closed or stream.lost or self._closed):
            # What follows would read state that this chunk never wrote.
            self._lose(stream, f"chunk {flow.chunk} of the stream failed: {error}", type(error))

    def _settle(self, flow: Flow) -> Pending | None:
        """Take a chunk off the books and let the next held one of its stream in."""
        with self._lock:
            pending = self._pending.pop(flow.key, None)
            if pending is None:
                return None
            following = self._entrance.left(pending.stream, flow)
        for entered in following:
            self._offer(entered)
        return pending

    def _died(self, device: str, reason: str) -> None:
        """Fail the streams that had state or chunks on a device; the others go on."""
        with self._lock:
            hit = [s for s in self._open.values() if any(p.device == device for p in self.plan.placements(s.stream_class))]
        for stream in hit if self.model.state or self._devices.far else ():
            self._lose(stream, f"device {device} is down: {reason}")

    def _lose(self, stream: Stream, reason: str, kind: type[Exception] = WorkerDiedError) -> None:
        stream.lost = reason
        with self._lock:
            left = [p.flow for p in self._pending.values() if p.stream is stream]
        for flow in left:
            self._fail(flow, WorkerDiedError(reason) if kind is WorkerDiedError else StreamClosedError(reason))
        self._close_stream(stream)


__all__ = ["MAIN", "Engine", "Stream"]
