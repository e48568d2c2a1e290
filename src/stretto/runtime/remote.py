"""A device of an engine that is a process of its own, as the engine's process sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from stretto.parallel.peer import GONE
from stretto.runtime.arena import InputLayout, PackedRow
from stretto.runtime.flow import Flow
from stretto.runtime.worker import pack_tensor


class RemoteSeat:
    """One device as the engine sees it from its own process."""

    def __init__(self, name: str, pipe: Connection, process: Any, layout: InputLayout) -> None:
        self.name, self.pipe, self.process = name, pipe, process
        self.row: Callable[[], PackedRow] = layout.row
        self.pack = layout.pack
        self.dead: str | None = None
        self.queue_depth = self.captures = 0
        self.costs: Mapping[tuple[str, ...], Sequence[float]] = {}
        self.resident_bytes = 0
        self.ready = threading.Event()
        self.cause: Exception | None = None
        self._sending = threading.Lock()
        self._closing: dict[int, Callable[[], None]] = {}
        self.launches, self.busy = -1, False
        self.moved_s = self.said_s = time.monotonic()

    def warm(self) -> None:
        """The fleet waits for all workers at once."""

    def start(self) -> None:
        """Workers start by themselves."""

    def open_stream(self, stream: int, stream_class: str) -> None:
        self.tell("open", stream, stream_class)

    def close_stream(self, stream: int, closed: Callable[[], None]) -> None:
        with self._sending:
            self._closing[stream] = closed
        if not self.tell("close", stream):
            self.freed(stream)

    def freed(self, stream: int) -> None:
        with self._sending:
            closed = self._closing.pop(stream, None)
        if closed is not None:
            closed()

    def set_condition(self, stream: int, name: str, version: int, value: Tensor) -> None:
        self.tell("condition", stream, name, version, pack_tensor(value))

    def offer(self, flow: Flow) -> None:
        assert flow.packed is not None
        packed, flow.packed = flow.packed.data.numpy().tobytes(), None
        self.tell("offer", flow.header(), packed)

    def close(self) -> None:
        """Ask the worker to stop; the fleet waits for it."""
        self._send(None)

    def tell(self, *message: object) -> bool:
        """Send a message; False if nobody is there. What was under way to a dead worker is failed by the engine."""
        return self._send(message)

    def _send(self, message: object) -> bool:
        if self.dead is not None:
            return False
        try:
            with self._sending:
                self.pipe.send(message)
        except (*GONE, OSError):
            return False
        return True

    def ended(self, cause: Exception, reason: str) -> None:
        """Note that the process is gone, and give back what it was still asked to free."""
        self.said_s = time.monotonic()
        self.cause, self.dead = cause, reason
        self.ready.set()
        for stream in list(self._closing):
            self.freed(stream)

    def beat(self, launches: int, busy: bool, depth: int, captures: int, resident_bytes: int) -> None:
        self.said_s = time.monotonic()
        if launches != self.launches or not busy:
            self.moved_s = self.said_s
        self.launches, self.busy = launches, busy
        self.queue_depth, self.captures, self.resident_bytes = depth, captures, resident_bytes

    def hangs(self, hang_s: float, now_s: float) -> str:
        """Return what is wrong, or nothing."""
        if not self.ready.is_set() or self.dead is not None:
            return ""
        if now_s - self.said_s > hang_s:
            return f"it has said nothing for {hang_s:g} s"
        if self.busy and now_s - self.moved_s > hang_s:
            return f"a batch has not ended for {hang_s:g} s"
        return ""
