"""The engine: streams in, chunks out. It hands chunks to the executors of its plan and gives finished ones back."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.errors import CapacityError, FieldError, StreamClosedError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.runtime.executor import Executor
from stretto.runtime.flow import Flow
from stretto.runtime.layout import slots_per_stream, state_slots
from stretto.runtime.timing import Stamp


@dataclass(eq=False)
class Stream:
    """One robot or one world session: a sequence of chunks, in order."""

    engine: Engine
    id: int
    stream_class: str
    seed: int
    submitted: int = 0
    """Chunks so far; the index of the next one."""
    _turn: threading.Lock = field(default_factory=threading.Lock)
    versions: dict[str, int] = field(default_factory=dict)
    closed: bool = False

    def set_condition(self, name: str, value: Tensor) -> int:
        """Change a condition, such as the prompt, for the chunks submitted from now on. Returns its version."""
        self.versions[name] = self.versions.get(name, -1) + 1
        self.engine._set_condition(self, name, self.versions[name], value)
        return self.versions[name]

    def submit(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        lengths: Mapping[str, int] | None = None,
        seed: int | None = None,
        deadline_s: float = math.inf,
    ) -> Future[Chunk]:
        """Queue one chunk; any thread, never blocks on the device.

        `inputs` holds every route input as one row. `lengths` are the real lengths on the model's bucketed axes.
        `deadline_s` is on the engine's clock (`engine.now_s`).

        Raises:
            FieldError: if an input is missing, unknown, or of another shape or dtype.
            StreamClosedError: if the stream was closed.
        """
        if self.closed:
            raise StreamClosedError("the stream was closed")
        seed = self.seed if seed is None else seed
        with self._turn:
            future = self.engine._submit(self, inputs, lengths or {}, seed, deadline_s)
            self.submitted += 1
        return future

    def close(self) -> None:
        """Drop queued chunks; their futures raise StreamClosedError. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self.engine._close_stream(self)


class Engine:
    """Runs one model under one plan. Build it, warm it, open streams.

    The model is bound to its device and its weights are loaded before it comes here.
    """

    def __init__(self, model: Model, plan: Plan, *, slots: int | None = None, streams: int = 64) -> None:
        plan.validate(model.route)
        self.model, self.plan = model, plan
        self._futures: dict[Flow, Future[Chunk]] = {}
        self._lock = threading.Lock()
        self._streams = itertools.count()
        self._done: queue.SimpleQueue[tuple[Sequence[Flow], dict[str, Tensor], Stamp] | None] = queue.SimpleQueue()
        deepest = max(plan.batch_cap(d.name) for d in plan.devices)
        self.executors = {
            d.name: Executor(
                model, plan, d.name, slots=slots or 2 * deepest, streams=streams, depart=self._depart, fail=self._fail
            )
            for d in plan.devices
        }
        self._free_state = {d: Counter(state_slots(model, plan, d, streams)) for d in self.executors}
        self._finisher = threading.Thread(target=self._finish, name="engine finisher", daemon=True)

    def warm(self) -> None:
        """Capture all graphs, then start. Blocks until ready."""
        for executor in self.executors.values():
            executor.warm()
        for executor in self.executors.values():
            executor.start()
        self._finisher.start()

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @property
    def dead(self) -> str | None:
        """Why the engine cannot run any more, or None."""
        return next((e.dead for e in self.executors.values() if e.dead), None)

    @property
    def queue_depth(self) -> int:
        return sum(e.queue_depth for e in self.executors.values())

    @property
    def captures(self) -> int:
        return sum(e.graphs.captures for e in self.executors.values() if e.graphs)

    def open(self, *, stream_class: str | None = None, seed: int = 0) -> Stream:
        """Open a stream of a class of the plan (its only one by default).

        Raises:
            PlanError: if the plan has no such class.
            CapacityError: if a device has no room for its state.
        """
        name = stream_class or next(iter(self.plan.classes))
        placements = self.plan.placements(name)
        stream = Stream(self, next(self._streams), name, seed)
        need = {d: Counter(slots_per_stream(self.model, placements, d)) for d in self.executors}
        with self._lock:
            for d, wanted in need.items():
                if not wanted <= self._free_state[d]:
                    raise CapacityError(
                        "state", f"{d} has {dict(self._free_state[d])} state slots free, a stream needs {dict(wanted)}"
                    )
            for d, wanted in need.items():
                self._free_state[d].subtract(wanted)
        for executor in self.executors.values():
            executor.open_stream(stream.id, placements)
        return stream

    def close(self) -> None:
        """Stop all executors. Chunks in the queue fail with StreamClosedError."""
        for executor in self.executors.values():
            executor.close()
        if self._finisher.is_alive():
            self._done.put(None)
            self._finisher.join()

    def _submit(
        self,
        stream: Stream,
        inputs: Mapping[str, np.ndarray],
        lengths: Mapping[str, int],
        seed: int,
        deadline_s: float,
    ) -> Future[Chunk]:
        placements = self.plan.placements(stream.stream_class)
        executor = self.executors[placements[0].device]
        packed = executor.arenas.layout.pack(inputs, pin=executor.device.type == "cuda")
        future: Future[Chunk] = Future()
        flow = Flow(
            stream.id,
            stream.submitted,
            placements,
            seed=seed,
            submitted_s=self.now_s,
            deadline_s=deadline_s,
            lengths=dict(lengths),
            versions=dict(stream.versions),
            packed=packed,
        )
        with self._lock:
            self._futures[flow] = future
        executor.offer(flow)
        return future

    def _set_condition(self, stream: Stream, name: str, version: int, value: Tensor) -> None:
        spec = self.model.conditions.get(name)
        if spec is None or tuple(value.shape) != spec.shape:
            expected = f"one of { {n: list(s.shape) for n, s in self.model.conditions.items()} }"
            raise FieldError("condition", got=f"{name} {list(value.shape)}", expected=expected)
        for executor in self.executors.values():
            executor.set_condition(stream.id, name, version, value)

    def _close_stream(self, stream: Stream) -> None:
        placements = self.plan.placements(stream.stream_class)
        for name, executor in self.executors.items():
            slots = slots_per_stream(self.model, placements, name)
            executor.close_stream(stream.id, partial(self._freed, name, slots))

    def _freed(self, device: str, slots: Mapping[str, int]) -> None:
        with self._lock:
            self._free_state[device].update(slots)

    def _depart(self, flows: Sequence[Flow], values: Mapping[str, Tensor]) -> None:
        ahead = [f for f in flows if f.at < len(f.placements)]
        for flow in ahead:
            i = flows.index(flow)
            flow.values = {name: rows[i] for name, rows in values.items()}
            self.executors[flow.placement.device].offer(flow)
        if len(ahead) == len(flows):
            return
        host = {name: _to_host(values[name]) for name in self.model.route.outputs}
        device = next(iter(values.values())).device
        self._done.put(([f for f in flows if f not in ahead], host, Stamp(device)))

    def _finish(self) -> None:
        while (item := self._done.get()) is not None:
            flows, host, stamp = item
            stamp.wait()
            for i, flow in enumerate(flows):
                future = self._take(flow)
                if future is not None and future.set_running_or_notify_cancel():
                    outputs = {name: rows[i].numpy().copy() for name, rows in host.items()}
                    future.set_result(self._chunk(flow, outputs, stamp))

    def _chunk(self, flow: Flow, outputs: Mapping[str, np.ndarray], stamp: Stamp) -> Chunk:
        stage_ms: dict[str, float] = {}
        batches: dict[str, int] = {}
        for name, begin, end, batch in flow.spans:
            stage_ms[name] = stage_ms.get(name, 0.0) + end.ms_since(begin)
            batches[name] = max(batches.get(name, 0), batch)
        queue_ms = (flow.started_s - flow.submitted_s) * 1e3
        run_ms = stamp.ms_since(flow.spans[0][1])
        return Chunk(flow.stream, flow.chunk, outputs, self.plan.mode, queue_ms, run_ms, stage_ms, batches)

    def _take(self, flow: Flow) -> Future[Chunk] | None:
        with self._lock:
            return self._futures.pop(flow, None)

    def _fail(self, flow: Flow, error: Exception) -> None:
        future = self._take(flow)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_exception(error)


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return host.copy_(rows, non_blocking=True)
