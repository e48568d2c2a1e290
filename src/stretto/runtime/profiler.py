"""Times a model's stages and whole route on the device at hand. What it measures is what `bench` prints and plans use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.model import Model, Row
from stretto.core.plan import Mode, whole
from stretto.core.route import Segment
from stretto.runtime.arena import Arenas
from stretto.runtime.engine import Engine
from stretto.runtime.layout import arenas_for
from stretto.runtime.program import Graphs, Member, Program
from stretto.runtime.timing import Stamp

SETS = 3  # different inputs in turn, so that no run repeats the one before it


@dataclass(frozen=True, slots=True)
class Times:
    """A sample of durations, in milliseconds."""

    ms: tuple[float, ...]

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.ms, q))

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


def time_on_device(run: Callable[[int], None], device: torch.device, *, warmup: int, n: int) -> Times:
    """Time `run(i)` by the device's clock, one call at a time; synchronises after each."""
    for i in range(warmup):
        run(i)
    samples = []
    for i in range(n):
        begin = Stamp(device)
        run(i)
        end = Stamp(device)
        end.wait()
        samples.append(end.ms_since(begin))
    return Times(tuple(samples))


class Bench:
    """One model on one device, with arenas that hold `SETS` input sets of a batch."""

    def __init__(self, model: Model, device: torch.device, mode: Mode, batch: int) -> None:
        self.model, self.device, self.mode, self.batch = model, device, mode, batch
        plan = whole(model.route, str(device), batch_cap=batch, mode=mode)
        self.arenas: Arenas = arenas_for(model, plan, str(device), device, slots=SETS * batch, streams=1)

    def load(self, inputs: Mapping[str, Tensor]) -> None:
        """Fill the slots with `SETS * batch` rows of inputs."""
        for slot in range(1, SETS * self.batch + 1):
            row = {name: value[slot - 1].numpy() for name, value in inputs.items()}
            self.arenas.load(slot, self.arenas.layout.pack(row, pin=False))

    def members(self, turn: int, start: int) -> list[Member]:
        first = 1 + (turn % SETS) * self.batch
        return [Member(Row(0, 0, 0, slot), start) for slot in range(first, first + self.batch)]

    def segment(self, segment: Segment, lengths: Mapping[str, int], *, warmup: int, n: int, at: int | None = None) -> Times:
        """Time one segment; `at` is the visit it stands for where several visits run the same stages."""
        program = Program(
            self.model,
            segment,
            self.arenas,
            mode=self.mode,
            batch_buckets=(self.batch,),
            graphs=Graphs(self.device) if self.mode == "graph" else None,
            shapes={axis: (n,) for axis, n in lengths.items()},
        )
        start = segment.start if at is None else at
        with torch.inference_mode():
            program.capture()
            return time_on_device(
                lambda i: _ignore(program.launch(self.members(i, start), lengths)), self.device, warmup=warmup, n=n
            )


def _ignore(_: object) -> None:
    return None


def stage_segments(model: Model) -> dict[str, tuple[Segment, int]]:
    """Return, for each stage, its first visit as a segment and how often the route visits it."""
    found: dict[str, tuple[Segment, int]] = {}
    for i, visit in enumerate(model.route.visits):
        segment, count = found.get(visit.stage, (Segment(i, i + 1), 0))
        found[visit.stage] = (segment, count + 1)
    return found


def time_requests(
    engine: Engine, rows: Sequence[Mapping[str, np.ndarray]], lengths: Mapping[str, int], *, batch: int, warmup: int, n: int
) -> Times:
    """Time `batch` requests at once through a warm engine: host inputs to host outputs, by the host's clock."""
    streams = [engine.open() for _ in range(batch)]
    feed = cycle(rows)
    samples = []
    for i in range(warmup + n):
        inputs = [next(feed) for _ in range(batch)]
        begin = time.perf_counter()
        futures: list[Future[Chunk]] = [s.submit(x, lengths=lengths) for s, x in zip(streams, inputs, strict=True)]
        for future in futures:
            future.result()
        if i >= warmup:
            samples.append((time.perf_counter() - begin) * 1e3)
    for stream in streams:
        stream.close()
    return Times(tuple(samples))
