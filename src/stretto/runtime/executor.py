"""One executor per device: a ready queue, a dispatch policy, and programs. It runs whatever the plan put on its device.

The executor never waits for another device. A chunk arrives with its values, passes through the segments placed here,
and departs with the values that live on: to the next device, or to the host when the route is done.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.core.errors import RefusedError, StreamClosedError, WorkerDiedError
from stretto.core.model import Model, Row
from stretto.core.plan import Placement, Plan
from stretto.runtime.arena import Arenas
from stretto.runtime.program import Graphs, Member, Program, batch_buckets
from stretto.runtime.timing import Stamp
from stretto.sched.dispatch import DispatchPolicy, Limits, Waiting, policy

log = logging.getLogger(__name__)

_AHEAD = 2  # launches queued on the device before the host waits for the oldest


@dataclass(eq=False, slots=True)
class Flow:
    """One chunk on its way, as the device that has it sees it."""

    stream: int
    chunk: int
    placements: tuple[Placement, ...]
    seed: int = 0
    submitted_s: float = 0.0
    deadline_s: float = math.inf
    lengths: Mapping[str, int] = field(default_factory=dict)
    packed: Tensor | None = None
    """Route inputs of a chunk that starts here."""
    values: Mapping[str, Tensor] | None = None
    """Values that came with a chunk from another device."""
    at: int = 0
    slot: int = 0
    ready_s: float = 0.0
    started_s: float = math.inf
    spans: list[tuple[str, Stamp, Stamp, int]] = field(default_factory=list)

    @property
    def placement(self) -> Placement:
        return self.placements[self.at]


Depart = Callable[[Sequence[Flow], Mapping[str, Tensor]], None]
"""Takes chunks that leave the device together, and their values as [B, ...] on the device; called on its thread."""
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
        state_slots: int = 0,
        depart: Depart,
        fail: Fail,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = device_name
        self.device = torch.device(device_name if device_name.startswith("cuda") else "cpu")
        self._model, self._plan = model, plan
        self._depart, self._fail, self._clock = depart, fail, clock
        self._policy: DispatchPolicy = policy(plan.dispatch)
        cap = plan.batch_cap(device_name)
        self._limits = Limits(batch_cap=cap)
        self.arenas = Arenas(model.route, model.values, model.state, device=self.device, slots=slots, state_slots=state_slots)
        self.graphs = Graphs() if plan.mode == "graph" else None
        self._programs: dict[tuple[str, ...], Program] = {}
        for placements in plan.classes.values():
            for p in placements:
                signature = model.route.signature(p.segment)
                if p.device == device_name and signature not in self._programs:
                    self._programs[signature] = Program(
                        model, p.segment, self.arenas, mode=plan.mode, batch_buckets=batch_buckets(cap), graphs=self.graphs
                    )
        self._kinds = {signature: i for i, signature in enumerate(self._programs)}
        self._wake = threading.Condition()
        self._arrivals: deque[Flow] = deque()
        self._cancelled: set[int] = set()
        self._waiting: list[Flow] = []
        self._running: Sequence[Flow] = ()
        self._arrived = 0
        self._keys: dict[Flow, int] = {}
        self._outstanding: deque[Stamp] = deque()
        self._stopping = False
        self.dead: str | None = None
        self._thread = threading.Thread(target=self._loop, name=f"executor {device_name}", daemon=True)

    def warm(self) -> None:
        """Capture every graph the plan can need. Synchronises the device; call before `start`."""
        with torch.inference_mode(), self._on_device():
            for program in self._programs.values():
                program.capture()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the batch in hand; chunks still here fail with StreamClosedError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for flow in [*self._arrivals, *self._waiting]:
            self._fail(flow, StreamClosedError("the engine was closed"))

    def offer(self, flow: Flow) -> None:
        """Hand a chunk to this device; any thread."""
        with self._wake:
            alive = self.dead is None
            if alive:
                self._arrivals.append(flow)
                self._wake.notify()
        if not alive:
            self._fail(flow, self._death())

    def cancel(self, stream: int) -> None:
        """Drop the stream's chunks that are here; a batch that is already launched runs to its end."""
        with self._wake:
            self._cancelled.add(stream)
            self._wake.notify()

    @property
    def queue_depth(self) -> int:
        return len(self._arrivals) + len(self._waiting)

    def _on_device(self) -> torch.cuda.device:
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def _loop(self) -> None:
        try:
            with torch.inference_mode(), self._on_device():
                while self._accept():
                    self._step()
        except Exception as error:  # the device's edge: whatever it was, the device is lost and its chunks must know
            log.exception("device %s is down", self.name)
            with self._wake:
                self.dead = f"{type(error).__name__}: {error}"
                lost = [*self._arrivals, *self._waiting, *self._running]
                self._arrivals.clear()
                self._waiting.clear()
            for flow in lost:
                self._fail(flow, self._death())

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f"device {self.name} is down: {self.dead}")

    def _accept(self) -> bool:
        """Take in arrivals and cancellations; sleep while there is nothing to run. Returns False to stop."""
        with self._wake:
            while not (self._arrivals or self._waiting or self._stopping or self._cancelled):
                self._wake.wait()
            if self._stopping:
                return False
            arrived = list(self._arrivals)
            self._arrivals.clear()
            cancelled, self._cancelled = self._cancelled, set()
        for flow in arrived:
            self._enqueue(flow)
        if cancelled:
            self._drop(cancelled)
        return True

    def _enqueue(self, flow: Flow) -> None:
        flow.ready_s = self._clock()
        self._keys[flow] = self._arrived
        self._arrived += 1
        self._waiting.append(flow)

    def _drop(self, streams: set[int]) -> None:
        dropped = [f for f in self._waiting if f.stream in streams]
        self._waiting = [f for f in self._waiting if f.stream not in streams]
        for flow in dropped:
            self._release(flow)
            self._fail(flow, StreamClosedError("the stream was closed"))

    def _release(self, flow: Flow) -> None:
        self._keys.pop(flow, None)
        if flow.slot:
            self.arenas.slots.give(flow.slot)
            flow.slot = 0

    def _ready(self) -> list[Flow]:
        """Chunks that can run now: those that hold a slot, and as many new ones as slots are free."""
        free = self.arenas.slots.free
        ready = []
        for flow in self._waiting:
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
        decision = self._policy(self._clock(), [self._seen(f) for f in ready], self._limits)
        for refusal in decision.refuse:
            self._refuse(by_key[refusal.key], refusal.reason)
        batch = [by_key[key] for key in decision.run]
        if batch:
            self._running = batch
            self._launch(batch)
            self._running = ()

    def _refuse(self, flow: Flow, reason: str) -> None:
        self._waiting.remove(flow)
        self._release(flow)
        self._fail(flow, RefusedError(reason, "the dispatch policy dropped the task"))

    def _seen(self, flow: Flow) -> Waiting:
        kind = self._kinds[self._model.route.signature(flow.placement.segment)]
        return Waiting(self._keys[flow], kind, flow.ready_s, flow.submitted_s, flow.deadline_s, flow.stream, flow.chunk)

    def _launch(self, batch: Sequence[Flow]) -> None:
        if len(self._outstanding) >= _AHEAD:
            self._outstanding.popleft().wait()
        signature = self._model.route.signature(batch[0].placement.segment)
        for flow in batch:
            self._waiting.remove(flow)
            if not flow.slot:
                self._settle(flow)
        lengths = {axis: max(f.lengths[axis] for f in batch) for axis in batch[0].lengths}
        begin = Stamp(self.device)
        self._programs[signature].launch([self._member(f) for f in batch], lengths)
        end = Stamp(self.device)
        self._outstanding.append(end)
        for flow in batch:
            flow.spans.append(("+".join(dict.fromkeys(signature)), begin, end, len(batch)))
        self._move_on(batch)

    def _settle(self, flow: Flow) -> None:
        """Give a new chunk a slot and put its values there."""
        flow.slot = self.arenas.slots.take()
        flow.started_s = min(flow.started_s, self._clock())
        if flow.packed is not None:
            self.arenas.load(flow.slot, flow.packed)
            flow.packed = None
        for name, value in (flow.values or {}).items():
            self.arenas[name][flow.slot].copy_(value, non_blocking=True)
        flow.values = None

    def _member(self, flow: Flow) -> Member:
        return Member(Row(flow.stream, flow.chunk, 0, flow.slot, seed=flow.seed), flow.placement.segment.start)

    def _move_on(self, batch: Sequence[Flow]) -> None:
        leaving = []
        for flow in batch:
            flow.at += 1
            if flow.at < len(flow.placements) and flow.placement.device == self.name:
                flow.ready_s = self._clock()
                self._waiting.append(flow)
            else:
                leaving.append(flow)
        if not leaving:
            return
        cut = leaving[0].placements[leaving[0].at - 1].segment.stop
        slots = torch.tensor([f.slot for f in leaving], dtype=torch.int64).to(self.device, non_blocking=True)
        rows = {name: self.arenas[name].index_select(0, slots) for name in self._model.route.crossing(cut)}
        for flow in leaving:
            self._release(flow)
        self._depart(leaving, rows)
