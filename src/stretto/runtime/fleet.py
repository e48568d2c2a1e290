"""The processes of an engine: started together, heard on one thread, and watched.

A worker that ends, or that has work and does none, is dead: its streams fail with the cause and the others go on.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from stretto.core.errors import WorkerDiedError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.parallel.dist import open_store
from stretto.parallel.order import Mark
from stretto.parallel.peer import GONE, PeerInbox
from stretto.parallel.probe import shared_by
from stretto.runtime.layout import Streams, inputs_on
from stretto.runtime.passage import Passage
from stretto.runtime.remote import RemoteSeat
from stretto.runtime.ways import Ways
from stretto.runtime.worker import Carriage, ModelFactory, Pipes, Task, Transport, decode_error, home_layout, main

STOP_S = 20.0
log = logging.getLogger(__name__)

Heard = Callable[[tuple[int, int], Passage], None]
Failed = Callable[[tuple[int, int], Exception], None]
Died = Callable[[str, str], None]


@dataclass(frozen=True)
class Workers:
    """How an engine runs its devices in processes of their own."""

    factory: ModelFactory
    transport: Transport = "peer"
    """How chunks cross: `peer`, memory shared on this host; `dist`, torch.distributed (NCCL or gloo). Where processes cannot
    share the memory of their GPUs, which is tried before they are linked, `peer` becomes `dist` and the log says so."""
    pages: int = 0
    """Pages that a device keeps for each neighbour that sends to it; 0: two for each task of a batch."""
    threads: int = 0
    """Threads of a CPU worker's arithmetic; 0: as many as in this process. Results can depend on it."""
    start_s: float = 900.0
    """Most time from start to ready: weights are built or loaded in it."""
    hang_s: float = 300.0
    """A worker that has work and neither launches nor says anything for this long is ended."""
    beat_s: float = 0.5


@dataclass
class _Ends:
    """Pipe ends to hand to one worker."""

    control: Connection
    home: Connection
    ins: dict[str, Connection] = field(default_factory=dict)
    outs: dict[str, Connection] = field(default_factory=dict)

    def all(self) -> list[Connection]:
        return [self.control, self.home, *self.ins.values(), *self.outs.values()]


def carriage_of(transport: Transport, links: Sequence[tuple[str, str]]) -> Carriage:
    """Return how chunks will cross, after trying what these devices can share."""
    if transport == "dist":
        return "dist"
    tried = [shared_by(source, target) for source, target in links]
    for failed in (t for t in tried if not t.works):
        log.warning(
            "processes cannot share memory of %s with %s, so chunks cross by torch.distributed: %s",
            failed.target, failed.source, failed.said,
        )  # fmt: skip
        return "dist"
    if any(t.way == "memory" for t in tried):
        log.warning("processes share the memory of their GPUs here but not events, so the ends of a link wait for the device")
        return "waiting_peer"
    return "peer"


class Fleet:
    """Starts a worker for each device of a plan, and listens to them."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        ways: Ways,
        workers: Workers,
        *,
        slots: int,
        streams: Streams,
        passed: Heard,
        failed: Failed,
        died: Died,
    ) -> None:
        self._workers, self._passed, self._failed, self._died = workers, passed, failed, died
        self._closing = False
        self._last_words: dict[str, tuple[str, str, str]] = {}
        context = multiprocessing.get_context("spawn")
        self.carriage = carriage_of(workers.transport, ways.links())
        self._store = open_store() if self.carriage == "dist" else None
        ends, controls, homes = self._pipes(context, plan, ways)
        self.seats: dict[str, RemoteSeat] = {}
        for device in plan.devices:
            name, mine = device.name, ends[device.name]
            task = Task(
                name, workers.factory, plan, ways, slots, streams,
                workers.pages or max(2, 2 * plan.batch_cap(name)), self.carriage,
                self._store.port if self._store else 0, workers.threads or torch.get_num_threads(), workers.beat_s,
            )  # fmt: skip
            pipes = Pipes(mine.control, mine.home, mine.ins, mine.outs)
            process = context.Process(target=main, args=(task, pipes), name=f"stretto {name}", daemon=True)
            process.start()
            layout = inputs_on(model, ways, name)
            self.seats[name] = RemoteSeat(name, controls[name], process, layout)
        for mine in ends.values():
            # The last holder of an end must be its worker, or its death would go unnoticed.
            for end in mine.all():
                end.close()
        self._homes = [self._home(name, pipe, model, ways, plan) for name, pipe in homes.items()]
        self._started_s = time.monotonic()
        self._listener = threading.Thread(target=self._listen, name="fleet", daemon=True)
        self._listener.start()

    @staticmethod
    def _pipes(context: Any, plan: Plan, ways: Ways) -> tuple[dict[str, _Ends], dict[str, Connection], dict[str, Connection]]:
        controls, homes, ends = {}, {}, {}
        for device in plan.devices:
            controls[device.name], theirs = context.Pipe()
            homes[device.name], home = context.Pipe()
            ends[device.name] = _Ends(theirs, home)
        for producer, consumer in ways.links():
            ends[producer].outs[consumer], ends[consumer].ins[producer] = context.Pipe()
        return ends, controls, homes

    def _home(self, name: str, pipe: Connection, model: Model, ways: Ways, plan: Plan) -> PeerInbox:
        pages = max(2, 2 * plan.batch_cap(name))
        return PeerInbox(
            name, pipe, home_layout(model, ways), torch.device("cpu"), pages=pages, receive=self._arrived, lost=self._gone
        )

    def _arrived(self, header: Any, values: Mapping[str, Tensor], there: Mark) -> None:
        key, said = header
        outputs = {name: value.numpy() for name, value in values.items()}
        self._passed(key, Passage(said.spans, said.started_s, said.run_ms, said.ran_eagerly, outputs))

    def _gone(self, peer: str, why: str) -> None:
        """The control pipe tells of the same death."""

    @property
    def pids(self) -> dict[str, int]:
        return {name: seat.process.pid for name, seat in self.seats.items()}

    @property
    def resident_bytes(self) -> dict[str, int]:
        return {name: seat.resident_bytes for name, seat in self.seats.items()}

    def await_ready(self) -> None:
        """Wait until all workers can run.

        Raises:
            WorkerDiedError: if one ended, or is not ready in time.
            LinkError: if two could not be linked.
        """
        for seat in self.seats.values():
            left_s = self._workers.start_s - (time.monotonic() - self._started_s)
            if not seat.ready.wait(max(0.0, left_s)):
                raise WorkerDiedError(f"worker {seat.name} was not ready after {self._workers.start_s:g} s")
        # The first to die explains the others, which only lost their neighbour.
        for seat in sorted((s for s in self.seats.values() if s.cause), key=lambda s: s.said_s):
            assert seat.cause is not None
            raise seat.cause

    def _listen(self) -> None:
        by_pipe: dict[object, RemoteSeat] = {seat.pipe: seat for seat in self.seats.values()}
        period_s = max(0.05, min(1.0, self._workers.hang_s / 4))
        while by_pipe:
            for ready in wait(list(by_pipe), timeout=period_s):  # type: ignore[arg-type]
                seat = by_pipe[ready]
                try:
                    message = seat.pipe.recv()
                except (*GONE, OSError):
                    del by_pipe[ready]
                    self._ended(seat)
                else:
                    self._hear(seat, *message)
            for seat in list(by_pipe.values()):
                why = "" if self._closing else seat.hangs(self._workers.hang_s, time.monotonic())
                if why:
                    self._last_words[seat.name] = ("WorkerDiedError", "", f"worker {seat.name} hangs: {why}")
                    seat.process.kill()

    def _hear(self, seat: RemoteSeat, verb: str, *said: Any) -> None:
        if verb == "beat":
            seat.beat(*said)
        elif verb == "passed":
            self._passed(*said)
        elif verb == "failed":
            key, error = said
            self._failed(key, decode_error(*error))
        elif verb == "closed":
            seat.freed(*said)
        elif verb == "ready":
            seat.captures, seat.costs = said
            seat.said_s = seat.moved_s = time.monotonic()
            seat.ready.set()
        elif verb == "dead":
            self._last_words[seat.name] = (said[0], said[1], said[2])

    def _ended(self, seat: RemoteSeat) -> None:
        seat.process.join(STOP_S)
        code = seat.process.exitcode
        how = f"was ended by signal {-code}" if code and code < 0 else f"exited with {code}"
        why = f"worker {seat.name} {how}"
        words = self._last_words.get(seat.name, ("WorkerDiedError", "", why))
        seat.ended(decode_error(*words) if words[0] == "LinkError" else WorkerDiedError(words[2]), words[2])
        if not self._closing:
            log.error("%s", words[2])
            self._died(seat.name, words[2])

    def close(self) -> None:
        """Wait for the workers to stop, and end those that do not."""
        self._closing = True
        deadline_s = time.monotonic() + STOP_S
        for seat in self.seats.values():
            seat.close()
        for seat in self.seats.values():
            if seat.process.is_alive():
                seat.process.join(max(0.1, deadline_s - time.monotonic()))
            if seat.process.is_alive():
                seat.process.kill()
                seat.process.join()
        self._listener.join()
        for home in self._homes:
            home.join(1.0)
        for seat in self.seats.values():
            seat.pipe.close()
