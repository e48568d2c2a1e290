"""The producer's end of a link between processes: a queue, and a thread that writes from it."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

from stretto.parallel.link import Lost, Values
from stretto.parallel.order import Mark, side_stream


class Outbox(ABC):
    """What every carrier shares: chunks leave in order, a peer that is gone is reported once, and closing says goodbye.

    A carrier calls `_start` at the end of its construction.
    """

    broken: tuple[type[Exception], ...]
    """How the carrier tells that the peer is gone."""

    def __init__(self, peer: str, device: torch.device, lost: Lost) -> None:
        self.peer, self._device, self._lost = peer, device, lost
        self._queue: queue.SimpleQueue[tuple[Any, Values, Mark] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"outbox to {peer}", daemon=True)

    def _start(self) -> None:
        self._thread.start()

    def send(self, header: Any, values: Values) -> None:
        self._queue.put((header, values, Mark.now(self._device)))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), side_stream(self._device):
                while (item := self._queue.get()) is not None:
                    self._write(*item)
                self._goodbye()
        except self.broken as e:
            self._lost(self.peer, self._cause(e))
            while not self._closed and self._queue.get() is not None:
                pass
        finally:
            self._release()

    @abstractmethod
    def _write(self, header: Any, values: Values, ready: Mark) -> None:
        """Carry one chunk, whose values are there from `ready` on."""

    @abstractmethod
    def _goodbye(self) -> None:
        """Tell the peer that nothing more comes."""

    @abstractmethod
    def _cause(self, error: Exception) -> str:
        """Say in words how the link ended."""

    @abstractmethod
    def _release(self) -> None:
        """Free the carrier's end."""
