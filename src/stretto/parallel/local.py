"""A link within one process.

Devices on the host get the producer's own tensors, at once. Between GPUs values are copied on streams of their own: torch
would let both devices wait for each other at every copy between their main streams.
"""

from __future__ import annotations

from typing import Any

import torch

from stretto.parallel.link import Receive, Values
from stretto.parallel.order import Mark, hold_for_current_stream
from stretto.parallel.outbox import Outbox


class LocalLink:
    """The way to one device, for every other device of the process."""

    def __init__(self, peer: str, receive: Receive) -> None:
        self.peer = peer
        self._receive = receive
        self._copies: dict[torch.device, CopyOutbox] = {}

    def send(self, header: Any, values: Values) -> None:
        """Hand over one chunk: at once on the caller's thread, or from a CUDA device when a copy is there."""
        source = next(iter(values.values())).device
        if source.type != "cuda":
            self._receive(header, values, Mark())
            return
        outbox = self._copies.get(source)  # chunks of one device come from one thread
        if outbox is None:
            outbox = self._copies[source] = CopyOutbox(self.peer, source, self._receive)
        outbox.send(header, values)

    def close(self) -> None:
        """Deliver what is queued and stop. Safe to call twice."""
        for outbox in self._copies.values():
            outbox.close()


class CopyOutbox(Outbox):
    """From one GPU to another of the same process; hands over what is there, not what will be."""

    broken = ()

    def __init__(self, peer: str, device: torch.device, receive: Receive) -> None:
        super().__init__(peer, device, lambda *_: None)
        self._receive = receive
        self._there = torch.device(peer)
        self._arriving = torch.cuda.Stream(self._there, priority=-1)  # type: ignore[no-untyped-call]
        self._start()

    def _write(self, header: Any, values: Values, ready: Mark) -> None:
        ready.wait()
        # A copy uses the current stream of both devices: this thread's own on the producer, the arriving one here.
        with torch.cuda.stream(self._arriving):
            copies = {name: torch.empty_like(value, device=self._there) for name, value in values.items()}
            for name, value in values.items():
                copies[name].copy_(value, non_blocking=True)
            hold_for_current_stream(values.values())
            there = Mark.now(self._there)
        self._arriving.synchronize()
        self._receive(header, copies, there)

    def _goodbye(self) -> None:
        """The peer ends with this process."""

    def _cause(self, error: Exception) -> str:
        return str(error)

    def _release(self) -> None:
        """Nothing is held."""
