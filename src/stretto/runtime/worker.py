"""A worker process: one device's executor with its share of the model, between links to other devices.

It is told what to do over a pipe from the engine, and ends with it: when the pipe closes, whatever the reason, so does
the worker. Pickle crosses only pipes between processes of one engine.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from stretto.core.errors import DeadlineError, RefusedError, StrettoError, SupersededError, WorkerDiedError
from stretto.core.errors import StreamClosedError as Closed
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.parallel.dist import CONSUMER, PRODUCER, DistInbox, DistOutbox, Pair, Store, open_store
from stretto.parallel.link import Link, LinkError, Values
from stretto.parallel.order import Mark
from stretto.parallel.pages import PageLayout
from stretto.parallel.peer import GONE, PeerInbox, PeerOutbox
from stretto.runtime.arena import PackedRow, torch_dtype
from stretto.runtime.executor import Executor
from stretto.runtime.flow import Flow, flow_of
from stretto.runtime.layout import Streams
from stretto.runtime.passage import Arrivals, Courier, Finisher, Passage
from stretto.runtime.ways import Ways

Transport = Literal["peer", "dist"]
Carriage = Literal["peer", "waiting_peer", "dist"]
"""What a transport comes to on a host: `waiting_peer` is `peer` where events cannot be shared."""
HOME = "the engine"
REFUSALS: Mapping[str, type[RefusedError]] = {c.__name__: c for c in (RefusedError, DeadlineError, SupersededError)}
log = logging.getLogger(__name__)


class ModelFactory(Protocol):
    """Builds a model, or a device's share of it. Must be picklable, and give the same weights in every process."""

    def __call__(self, *, device: str, only: Collection[str] | None) -> Model:
        """Build on a device with the weights of the stages in `only`; none of them: only describe the model."""
        ...


@dataclass(frozen=True)
class Task:
    """What a worker is started with."""

    device: str
    factory: ModelFactory
    plan: Plan
    ways: Ways
    slots: int
    streams: Streams
    pages: int
    carriage: Carriage
    store_port: int
    threads: int
    beat_s: float


@dataclass(frozen=True)
class Pipes:
    """A worker's pipes: to the engine, for finished chunks, and to its neighbours by device."""

    control: Connection
    home: Connection
    ins: Mapping[str, Connection]
    outs: Mapping[str, Connection]


def home_layout(model: Model, ways: Ways) -> PageLayout:
    """Return the pages in which finished chunks come home."""
    return PageLayout.of({name: model.values[name] for route in ways.routes.values() for name in route.outputs})


def link_layout(model: Model, ways: Ways, producer: str, consumer: str) -> PageLayout:
    return PageLayout.of({name: model.values[name] for name in ways.crossing(producer, consumer)})


def encode_error(error: Exception) -> tuple[str, str, str]:
    """Return an error as kind, reason and text."""
    if isinstance(error, RefusedError):
        text = str(error).removeprefix(f"refused ({error.reason}): ")
        return (type(error).__name__ if type(error).__name__ in REFUSALS else "RefusedError"), error.reason, text
    return type(error).__name__, "", str(error)


def decode_error(kind: str, reason: str, text: str) -> Exception:
    if kind in REFUSALS:
        return REFUSALS[kind](reason, text)
    known: Mapping[str, type[StrettoError]] = {c.__name__: c for c in (Closed, WorkerDiedError, LinkError)}
    return known.get(kind, WorkerDiedError)(text)


def pack_tensor(value: Tensor) -> tuple[bytes, str, tuple[int, ...]]:
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return raw, str(value.dtype).removeprefix("torch."), tuple(value.shape)


def unpack_tensor(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(torch_dtype(dtype)).reshape(shape)


class Gate:
    """Holds back chunks of streams that the engine has not announced here yet: links may be faster than the pipe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._opened = -1
        self._early: list[Flow] = []

    def open(self, stream: int, stream_class: str) -> None:
        with self._lock:
            self._executor.open_stream(stream, stream_class)
            self._opened = stream
            ready = [f for f in self._early if f.stream <= stream]
            self._early = [f for f in self._early if f.stream > stream]
            self._executor.offer_all(ready)

    def offer_all(self, flows: Sequence[Flow]) -> None:
        with self._lock:
            self._early += [f for f in flows if f.stream > self._opened]
            self._executor.offer_all([f for f in flows if f.stream <= self._opened])


class Worker:
    """Everything that runs in the process of one device."""

    def __init__(self, task: Task, pipes: Pipes) -> None:
        self.task, self._pipes = task, pipes
        self._sending = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self.executor: Executor | None = None
        self.model = task.factory(device=task.device, only=task.ways.stages(task.device))
        self.finisher = Finisher(self._passed)
        self.links: dict[str, Link] = {}
        outputs = {name: route.outputs for name, route in task.ways.routes.items()}
        courier = Courier(outputs, self.links, self.finisher, names=Flow.header, every_device=True)
        self.executor = Executor(
            self.model, task.plan, task.device, slots=task.slots, streams=task.streams, ways=task.ways,
            depart=courier.depart, fail=self._fail, died=self._died,
        )  # fmt: skip
        self.gate = Gate(self.executor)
        self._arrivals = Arrivals(self.gate.offer_all)
        self._connect(self.executor.device)
        self.home = PeerOutbox(HOME, pipes.home, home_layout(self.model, task.ways), torch.device("cpu"), lost=self._orphaned)

    def _connect(self, device: torch.device) -> None:
        """Link up with the neighbours; all ends are offered before any is opened, so that nobody waits in a circle."""
        me, ways = self.task.device, self.task.ways
        if self.task.carriage == "dist":
            store = open_store(self.task.store_port)
            for a, b in ways.links():
                if me in (a, b):
                    self._pair(store, a, b, device)
            return
        inboxes = [
            PeerInbox(
                peer, pipe, link_layout(self.model, ways, peer, me), device,
                pages=self.task.pages, receive=self._receive, lost=self._lost, events=self.task.carriage == "peer",
            )
            for peer, pipe in self._pipes.ins.items()
        ]  # fmt: skip
        self._inboxes: list[PeerInbox | DistInbox] = list(inboxes)
        for peer, pipe in self._pipes.outs.items():
            self.links[peer] = PeerOutbox(peer, pipe, link_layout(self.model, ways, me, peer), device, lost=self._lost)

    def _pair(self, store: Store, producer: str, consumer: str, device: torch.device) -> None:
        layout = link_layout(self.model, self.task.ways, producer, consumer)
        name = f"{producer}-{consumer}"
        if self.task.device == producer:
            pair = Pair(store, name, PRODUCER, device)
            self.links[consumer] = DistOutbox(consumer, pair, layout, device, lost=self._lost)
        else:
            pair = Pair(store, name, CONSUMER, device)
            DistInbox(producer, pair, layout, device, receive=self._receive, lost=self._lost)

    def run(self) -> None:
        """Warm, say so, and do what the engine asks until it says stop."""
        assert self.executor is not None
        self.executor.warm()
        self.executor.start()
        self.finisher.start()
        costs = {stages: tuple(seconds) for stages, seconds in self.executor.costs.items()}
        self._tell("ready", self.executor.captures, costs)
        while (message := self._pipes.control.recv()) is not None:
            verb, *given = message
            getattr(self, f"_do_{verb}")(*given)
        self._stop.set()
        self.executor.close()
        self.finisher.close()
        self.home.close()
        for link in self.links.values():
            link.close()

    def _do_open(self, stream: int, stream_class: str) -> None:
        self.gate.open(stream, stream_class)

    def _do_close(self, stream: int) -> None:
        assert self.executor is not None
        self.executor.close_stream(stream, lambda: self._tell("closed", stream))

    def _do_condition(self, stream: int, name: str, version: int, value: tuple[bytes, str, tuple[int, ...]]) -> None:
        assert self.executor is not None
        self.executor.set_condition(stream, name, version, unpack_tensor(*value))

    def _do_offer(self, header: Mapping[str, Any], packed: bytes) -> None:
        flow = flow_of(header, self.task.ways.placements)
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        flow.packed = PackedRow(data.pin_memory() if self.task.device.startswith("cuda") else data)
        self.gate.offer_all((flow,))

    def _receive(self, header: Any, values: Values, there: Mark) -> None:
        self._arrivals.receive(flow_of(header, self.task.ways.placements), values, there)

    def _passed(self, flow: Flow, passage: Passage) -> None:
        if passage.outputs is None:
            self._tell("passed", flow.key, passage)
            return
        said = Passage(passage.spans, passage.started_s, passage.run_ms, passage.ran_eagerly)
        self.home.send((flow.key, said), {name: torch.from_numpy(value) for name, value in passage.outputs.items()})

    def _fail(self, flow: Flow, error: Exception) -> None:
        self._tell("failed", flow.key, encode_error(error))

    def _died(self, device: str, reason: str) -> None:
        self._tell("dead", "WorkerDiedError", "", reason)
        os._exit(1)

    def _lost(self, peer: str, why: str) -> None:
        # The engine sees the death of a process by itself, and drops its streams here too.
        log.warning("%s: %s is gone: %s", self.task.device, peer, why)

    def _orphaned(self, peer: str, why: str) -> None:
        if not self._stop.is_set():
            os._exit(1)

    def _tell(self, *message: object) -> None:
        try:
            with self._sending:
                self._pipes.control.send(message)
        except GONE:
            self._orphaned(HOME, "its pipe closed")

    def _beat(self) -> None:
        """Say at intervals how far the executor has come."""
        while not self._stop.wait(self.task.beat_s):
            executor = self.executor
            if executor is not None:
                self._tell("beat", executor.launches, executor.busy, executor.queue_depth, executor.captures, _resident())


def _resident() -> int:
    """Return the bytes of host memory that this process holds."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(task: Task, pipes: Pipes) -> None:
    """Be the worker of one device. The engine's own process handles the keyboard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(task.threads)
    if task.device.startswith("cuda"):
        torch.cuda.set_device(task.device)
    try:
        Worker(task, pipes).run()
        os._exit(0)  # nothing is left to do, and taking an interpreter down in order costs seconds
    except GONE:
        os._exit(1)  # the engine is gone, and nobody is left to tell
    except Exception as e:  # the edge of the process
        log.exception("worker %s is down", task.device)
        pipes.control.send(("dead", *encode_error(e)))
        os._exit(1)
