"""A link over torch.distributed: gloo on CPUs, NCCL on GPUs where memory cannot be shared, and between hosts.

Every link is a process group of two, so a peer that dies breaks its own links and nothing else. A chunk is three
messages: sizes, header and page. Headers are JSON over gloo, pages go as bytes. Both ends post in the same order, and
the consumer always receives, so neither can block the other.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.parallel.link import LinkError, Lost, Receive, Values
from stretto.parallel.order import Mark, hold_for_current_stream, side_stream
from stretto.parallel.outbox import Outbox
from stretto.parallel.pages import PageLayout

PRODUCER: Literal[0] = 0
CONSUMER: Literal[1] = 1
FOR_EVER = timedelta(days=365)  # an idle link is not a broken one; a dead peer closes its socket
Store = Any
_dist: Any = dist  # these classes are documented, but carry no types


def open_store(port: int = 0, *, timeout_s: float = 60.0) -> Store:
    """Serve a store on a free port (`store.port`), or join the one at `port`."""
    serves = port == 0
    return _dist.TCPStore("127.0.0.1", port, None, serves, timedelta(seconds=timeout_s), wait_for_workers=False)


class Pair:
    """The process groups of one link: headers over gloo, pages over what the device needs.

    Blocks until both ends are there. Where several links are set up, all processes take them in the same order.
    """

    def __init__(self, store: Store, name: str, rank: Literal[0, 1], device: torch.device) -> None:
        self.rank, self.other = rank, 1 - rank
        try:
            self.headers = _dist.ProcessGroupGloo(_dist.PrefixStore(f"{name}/headers", store), rank, 2, FOR_EVER)
            self.pages: Any = self.headers
            if device.type == "cuda":
                with torch.cuda.device(device):
                    options = _dist.ProcessGroupNCCL.Options()
                    self.pages = _dist.ProcessGroupNCCL(_dist.PrefixStore(f"{name}/pages", store), rank, 2, options)
        except RuntimeError as e:
            raise LinkError(f"link {name} could not be set up: {e}") from e

    def send(self, group: Any, tensor: Tensor) -> None:
        group.send([tensor], self.other, 0).wait()

    def receive(self, group: Any, tensor: Tensor) -> Tensor:
        group.recv([tensor], self.other, 0).wait()
        return tensor


class DistInbox:
    """The consumer's end, with a thread that always receives."""

    def __init__(
        self, peer: str, pair: Pair, layout: PageLayout, device: torch.device, *, receive: Receive, lost: Lost
    ) -> None:
        self.peer, self._pair, self._layout, self._device = peer, pair, layout, device
        self._receive, self._lost = receive, lost
        self._thread = threading.Thread(target=self._run, name=f"inbox from {peer}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), side_stream(self._device):
                while size := int(self._pair.receive(self._pair.headers, torch.zeros(1, dtype=torch.int64))):
                    text = self._pair.receive(self._pair.headers, torch.empty(size, dtype=torch.uint8))
                    names, header = json.loads(text.numpy().tobytes())
                    page = torch.empty(self._layout.page_bytes, dtype=torch.uint8, device=self._device)
                    self._pair.receive(self._pair.pages, page)
                    there = Mark.now(self._device)
                    there.reach()
                    self._receive(header, self._layout.views(page, names), there)
        except RuntimeError as e:
            self._lost(self.peer, f"its link failed: {e}")

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the producer has said goodbye or is gone."""
        self._thread.join(timeout_s)


class DistOutbox(Outbox):
    """The producer's end. Headers must be JSON-able."""

    broken = (RuntimeError,)

    def __init__(self, peer: str, pair: Pair, layout: PageLayout, device: torch.device, *, lost: Lost) -> None:
        super().__init__(peer, device, lost)
        self._pair, self._layout = pair, layout
        self._start()

    def _goodbye(self) -> None:
        self._pair.send(self._pair.headers, torch.zeros(1, dtype=torch.int64))

    def _cause(self, error: Exception) -> str:
        return f"its link failed: {error}"

    def _release(self) -> None:
        """The process groups end with the process."""

    def _write(self, header: Any, values: Values, ready: Mark) -> None:
        text = torch.frombuffer(bytearray(json.dumps([list(values), header]).encode()), dtype=torch.uint8)
        page = torch.empty(self._layout.page_bytes, dtype=torch.uint8, device=self._device)
        ready.wait()
        self._layout.store(page, values)
        hold_for_current_stream(values.values())
        self._pair.send(self._pair.headers, torch.tensor([len(text)], dtype=torch.int64))
        self._pair.send(self._pair.headers, text)
        self._pair.send(self._pair.pages, page)
