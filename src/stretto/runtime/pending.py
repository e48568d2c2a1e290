"""A chunk that is not finished yet, as the engine's books have it."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field

from stretto.core.chunk import Chunk
from stretto.core.plan import Mode
from stretto.runtime.flow import Flow
from stretto.runtime.passage import Finisher, Passage
from stretto.runtime.stream import Stream


class Answer(Future[Chunk]):
    """A chunk to come. Who waits for it without a time limit waits for the device itself, if the chunk is on it by then."""

    def __init__(self, finisher: Finisher) -> None:
        super().__init__()
        self._finisher = finisher
        self._chunk: Chunk | None = None

    def set_result(self, result: Chunk) -> None:
        self._chunk = result
        super().set_result(result)

    def settled(self) -> bool:
        """Tell the same as `done`, without a lock where there is a chunk."""
        return self._chunk is not None or self.done()

    def result(self, timeout: float | None = None) -> Chunk:
        if timeout is None and not self.settled():
            self._finisher.help(self.settled)
        return self._chunk if self._chunk is not None else super().result(timeout)


@dataclass
class Pending:
    """Collects what the devices say of one chunk."""

    stream: Stream
    flow: Flow
    future: Future[Chunk]
    every_device: bool = False
    """Whether each device on the way tells of the chunk, or only the last one of all."""
    passages: list[Passage] = field(default_factory=list)

    def add(self, passage: Passage) -> bool:
        """Note what a device said; True when nothing is missing any more. The order does not matter."""
        self.passages.append(passage)
        if not self.every_device:
            return passage.outputs is not None
        return len(self.passages) == self._expected() and any(p.outputs is not None for p in self.passages)

    def _expected(self) -> int:
        return 1 + sum(a.device != b.device for a, b in itertools.pairwise(self.flow.placements))

    def chunk(self) -> Chunk:
        """Return the finished chunk."""
        stage_ms: dict[str, float] = {}
        batches: dict[str, int] = {}
        shares: dict[str, float] = {}
        for name, ms, batch, device in (span for p in self.passages for span in p.spans):
            stage_ms[name] = stage_ms.get(name, 0.0) + ms
            shares[device] = shares.get(device, 0.0) + ms / batch
            batches[name] = max(batches.get(name, 0), batch)
        last = next(p for p in self.passages if p.outputs is not None)
        assert last.outputs is not None
        mode: Mode = "eager" if any(p.ran_eagerly for p in self.passages) else "graph"
        flow, queue_ms = self.flow, (last.started_s - self.flow.submitted_s) * 1e3
        return Chunk(flow.stream, flow.chunk, last.outputs, mode, queue_ms, last.run_ms, stage_ms, batches, shares)
