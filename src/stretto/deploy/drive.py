"""Keeps a stream busy for a while and says how it went: output interval, response latency, what each device did."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from stretto.core.chunk import Chunk
from stretto.runtime.engine import Engine, Stream

Inputs = Mapping[str, np.ndarray]
Feed = Callable[[int, int], Inputs]
"""(stream number, chunk) -> the route's inputs."""


@dataclass(frozen=True)
class Done:
    """One finished chunk with the host's times around it."""

    chunk: Chunk
    submitted_s: float
    done_s: float


@dataclass(frozen=True)
class Measured:
    """Steady state of some streams under one engine."""

    done: Sequence[Sequence[Done]]
    """Of each stream, from the chunk that opens the span on."""
    warm_chunks: int
    captures: int
    captures_before: int = 0
    """Of these, before the span."""

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks completed within the span."""
        return [d.chunk for row in self.done for d in row[1:]]

    @property
    def intervals_ms(self) -> list[float]:
        return [(b.done_s - a.done_s) * 1e3 for row in self.done for a, b in itertools.pairwise(row)]

    @property
    def interval_ms(self) -> float:
        """Mean time between two chunks of a stream."""
        return sum(self.intervals_ms) / len(self.intervals_ms)

    @property
    def latencies_ms(self) -> list[float]:
        return [(d.done_s - d.submitted_s) * 1e3 for row in self.done for d in row[1:]]

    def busy_ms(self) -> dict[str, float]:
        """Return device -> its busy time for each interval."""
        busy: dict[str, float] = {}
        for chunk in self.chunks:
            for device, ms in chunk.device_ms.items():
                busy[device] = busy.get(device, 0.0) + ms
        rounds = len(self.chunks) / len(self.done)
        return {device: ms / rounds for device, ms in busy.items()}


class _Runner:
    """One stream with its chunks in flight."""

    def __init__(self, stream: Stream, number: int, feed: Feed, first_chunk: int) -> None:
        self.stream, self.number, self.feed, self.next = stream, number, feed, first_chunk
        self.under_way: deque[tuple[float, Future[tuple[Chunk, float]]]] = deque()

    def submit(self) -> None:
        inputs = self.feed(self.number, self.next)
        finished: Future[tuple[Chunk, float]] = Future()

        def note(future: Future[Chunk]) -> None:
            at = time.perf_counter()
            error = future.exception()
            finished.set_exception(error) if error else finished.set_result((future.result(), at))

        submitted = time.perf_counter()
        self.stream.submit(inputs, chunk=self.next).add_done_callback(note)
        self.under_way.append((submitted, finished))
        self.next += 1

    def take(self, timeout_s: float) -> Done:
        submitted, finished = self.under_way.popleft()
        chunk, at = finished.result(timeout_s)
        return Done(chunk, submitted, at)


def drive(
    engine: Engine,
    streams: Sequence[Stream],
    feed: Feed,
    *,
    first_chunk: int,
    in_flight: int,
    warm_chunks: int,
    warm_s: float = 0.0,
    seconds: float,
    least: int = 4,
    burst: int = 1,
    timeout_s: float = 120.0,
) -> Measured:
    """Run streams with `in_flight` chunks each under way, and measure once they are steady.

    Steady means: `warm_chunks` chunks of each are done, for `warm_s`, and the last of them needed no new capture. The span
    then lasts `seconds`, or until `least` chunks of each stream where that is longer, and on until `burst` divides their
    number: chunks that come out together count together. Chunks are left under way.

    Raises:
        StrettoError: whatever a chunk failed with.
    """
    runners = [_Runner(stream, i, feed, first_chunk) for i, stream in enumerate(streams)]
    for _ in range(in_flight):
        for runner in runners:
            runner.submit()

    def turn() -> list[Done]:
        taken = []
        for runner in runners:
            taken.append(runner.take(timeout_s))
            runner.submit()
        return taken

    warmed, captures, warm_until = 0, -1, time.perf_counter() + warm_s
    while (
        warmed < warm_chunks or time.perf_counter() < warm_until or (captures != engine.captures and warmed < 4 * warm_chunks)
    ):
        captures = engine.captures
        last = turn()
        warmed += 1
    rows = [[done] for done in last]
    before = engine.captures
    until = time.perf_counter() + seconds
    while len(rows[0]) <= least or time.perf_counter() < until or (len(rows[0]) - 1) % burst:
        for row, done in zip(rows, turn(), strict=True):
            row.append(done)
    return Measured(rows, warmed, engine.captures, before)
