"""The server to compare with: requests in order of arrival, one at a time, each alone in its batch.

This is what openpi's server does: its event loop calls the policy and handles nothing else until the actions are there.
Here it runs on the same engine, weights and graphs as ours, so that only the order of work differs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from stretto.core.chunk import Chunk
from stretto.core.model import Model
from stretto.core.plan import Mode, whole
from stretto.runtime.engine import Engine

Inputs = Mapping[str, np.ndarray]


class SingleFlight:
    """Answers one request after the other; deadlines are not looked at."""

    def __init__(self, model: Model, device: str, mode: Mode, *, prompt: int, name: str = "single_flight") -> None:
        self.name = name
        plan = whole(model.route, device, mode=mode).with_shapes({"batch": (1,), "prompt": (prompt,)})
        self.engine = Engine(model, plan.with_dispatch("first_come_first_served"))
        self.engine.warm()
        self._stream = self.engine.open()
        self._lengths = {"prompt": prompt}
        self._waiting: queue.SimpleQueue[tuple[Inputs, Future[Chunk], float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="single flight", daemon=True)
        self._thread.start()

    def join(self, robot: int) -> None:
        """Make room for a robot: there is nothing to do."""

    def leave_all(self) -> None:
        """Forget all robots and their waiting requests."""
        while not self._waiting.empty():
            item = self._waiting.get()
            if item is not None:
                item[1].cancel()

    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]:
        answer: Future[Chunk] = Future()
        self._waiting.put((inputs, answer, time.monotonic()))
        return answer

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self.engine.close()

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            inputs, answer, arrived_s = item
            if not answer.set_running_or_notify_cancel():
                continue
            began_s = time.monotonic()
            # The edge of the server: an error is this request's answer.
            try:
                chunk = self._stream.submit(inputs, lengths=self._lengths).result()
                answer.set_result(replace(chunk, queue_ms=chunk.queue_ms + (began_s - arrived_s) * 1e3))
            except Exception as error:
                answer.set_exception(error)
