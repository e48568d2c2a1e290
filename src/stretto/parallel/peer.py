"""A link between two processes of one host: the producer writes straight into the consumer's memory.

The consumer allocates a ring of pages once, in shared memory or, on a CUDA device, in memory that the producer opens by
handle. A page belongs to the producer until its message is sent, and again when its credit comes back. The consumer moves
a page's values out as soon as they are there, so pages are never held by a chunk that waits for its turn, and the ring
holds what one interval brings. Order on the devices is kept by shared events; where events cannot be shared
(`parallel.probe`), both ends wait for their device. A chunk is handed over when its values are there, so that a device never
commits itself to one that is still on its way while others are ready.

Messages, over a pipe between processes that trust each other:
    consumer -> producer   (pages, read events or None) once; then the number of a page, each time it is free again
    producer -> consumer   (written events, if it got some) once; then (page, names, header); None is goodbye
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # teaches pipes to carry tensors and events by handle
from torch import Tensor

from stretto.parallel.link import LinkError, Lost, Receive, Values
from stretto.parallel.order import Mark, hold_for_current_stream, side_stream
from stretto.parallel.outbox import Outbox
from stretto.parallel.pages import PageLayout

GONE = (EOFError, ConnectionResetError, BrokenPipeError)


class PeerInbox:
    """The consumer's end. Allocates the pages, offers them, and receives on a thread of its own."""

    def __init__(
        self,
        peer: str,
        pipe: Connection,
        layout: PageLayout,
        device: torch.device,
        *,
        pages: int,
        receive: Receive,
        lost: Lost,
        events: bool = True,
    ) -> None:
        """Make one.

        Args:
            pages: how many chunks the ring holds.
            events: whether CUDA events can be shared with the producer; if not, both ends wait for their device.

        Raises:
            LinkError: if memory of the device cannot be shared.
        """
        self.peer, self._pipe, self._layout, self._device = peer, pipe, layout, device
        self._receive, self._lost = receive, lost
        self.pages = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8, device=device)
        if device.type != "cuda":
            self.pages.share_memory_()  # type: ignore[no-untyped-call]
        self._waits = device.type == "cuda" and not events
        self._read = [Mark() if self._waits else Mark.new(device, shared=True) for _ in range(pages)]
        self._written = [Mark()] * pages
        try:
            pipe.send((self.pages, None if self._waits else [mark.handle() for mark in self._read]))
        except RuntimeError as e:
            raise LinkError(f"memory of {device} cannot be shared with {peer}: {e}") from e
        self._thread = threading.Thread(target=self._run, name=f"inbox from {peer}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), side_stream(self._device):
                if not self._waits:
                    self._written = [Mark(event) for event in self._pipe.recv()]
                while (message := self._pipe.recv()) is not None:
                    page, names, header = message
                    values, there = self._take(page, names)
                    if self._waits:
                        there.reach()
                    self._pipe.send(page)
                    there.reach()
                    self._receive(header, values, there)
        except GONE as e:
            self._lost(self.peer, f"its end of the link closed ({type(e).__name__})")
        finally:
            self._pipe.close()

    def _take(self, page: int, names: tuple[str, ...]) -> tuple[dict[str, Tensor], Mark]:
        self._written[page].wait()
        values = {name: view.clone() for name, view in self._layout.views(self.pages[page], names).items()}
        self._read[page].record()
        return values, Mark.now(self._device)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the producer has said goodbye or is gone."""
        self._thread.join(timeout_s)


class PeerOutbox(Outbox):
    """The producer's end; it writes pages as credits allow."""

    broken = GONE

    def __init__(self, peer: str, pipe: Connection, layout: PageLayout, device: torch.device, *, lost: Lost) -> None:
        """Open the consumer's pages. Blocks until it has offered them.

        Raises:
            LinkError: if they cannot be opened from here.
        """
        super().__init__(peer, device, lost)
        self._pipe, self._layout = pipe, layout
        try:
            self._pages, read = pipe.recv()
            shared = read is not None and self._pages.is_cuda
            self._read = [Mark(event) for event in read or [None] * len(self._pages)]
            # Without events that the consumer can wait for, and for a page on the host, this end waits.
            self._waits = device.type == "cuda" and not shared
            self._written = [Mark.new(device, shared=True) if shared else Mark() for _ in self._read]
            if read is not None:
                pipe.send([mark.handle() for mark in self._written])
        except GONE as e:
            raise LinkError(f"{peer} ended before its memory was offered") from e
        except RuntimeError as e:
            raise LinkError(f"memory of {peer} cannot be opened from {device}: {e}") from e
        self._free = deque(range(len(self._pages)))
        self._start()

    def _goodbye(self) -> None:
        """Say it, and take the last credits: a pipe that is closed with something in it breaks under the consumer."""
        self._pipe.send(None)
        with contextlib.suppress(*GONE):
            while True:
                self._pipe.recv()

    def _cause(self, error: Exception) -> str:
        return f"its end of the link closed ({type(error).__name__})"

    def _release(self) -> None:
        self._pipe.close()

    def _write(self, header: Any, values: Values, ready: Mark) -> None:
        page = self._page()
        ready.wait()
        self._read[page].wait()
        self._layout.store(self._pages[page], values)
        hold_for_current_stream(values.values())
        self._written[page].record()
        if self._waits:
            torch.cuda.current_stream().synchronize()
        self._pipe.send((page, tuple(values), header))

    def _page(self) -> int:
        while not self._free or self._pipe.poll():
            self._free.append(self._pipe.recv())
        return self._free.popleft()
