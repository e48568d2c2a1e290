"""Times a model's stages and whole route on the device at hand. What it measures is what `bench` prints and plans use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.model import Model, Row
from stretto.core.plan import Mode, whole
from stretto.core.route import Segment
from stretto.runtime.arena import Arenas, torch_dtype
from stretto.runtime.engine import Engine
from stretto.runtime.layout import state_on
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
    def mean(self) -> float:
        return float(np.mean(self.ms))

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


class InTurn(NamedTuple):
    """What launches took of the device, and of the host that launched them."""

    device: Times
    host: Times


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


def time_in_turn(
    runs: Sequence[Callable[[int], None]], device: torch.device, *, seconds: float, ahead: int = 3
) -> list[InTurn]:
    """Time `run(turn)` of each in turn by the device's clock, launched one behind the other.

    The second half of `seconds` counts: a device under load draws all the power that it may, and its clock falls, so what is
    timed one call at a time, or before the others, is faster than it will be. The clock then goes up and down by some
    percent, so means over a second say more than single times. In turn, all see the same clock. Short ones belong between
    long ones, so that they are queued by the time that the device comes to them.
    """
    under_way: deque[tuple[int, Stamp, Stamp, float]] = deque()
    samples: list[list[float]] = [[] for _ in runs]
    on_host: list[list[float]] = [[] for _ in runs]
    start_s = time.monotonic()
    turn = 0
    while time.monotonic() - start_s < seconds or min(len(some) for some in samples) < 3:
        for i, run in enumerate(runs):
            begin, begin_s = Stamp(device), time.perf_counter()
            run(turn)
            on_host[i].append((time.perf_counter() - begin_s) * 1e3)
            under_way.append((i, begin, Stamp(device), time.monotonic() - start_s))
            if len(under_way) > ahead:
                which, begin, end, at_s = under_way.popleft()
                end.wait()
                if at_s > 0.5 * seconds:
                    samples[which].append(end.ms_since(begin))
        turn += 1
    under_way[-1][2].wait()
    return [InTurn(Times(tuple(a)), Times(tuple(b))) for a, b in zip(samples, on_host, strict=True)]


class Bench:
    """One model on one device, with arenas that hold `SETS` input sets of a batch and state for each of its rows.

    Args:
        chunk: which chunk of its stream every row is; late enough, and rings count as full.
    """

    def __init__(self, model: Model, device: torch.device, mode: Mode, batch: int, *, chunk: int = 0) -> None:
        self.model, self.device, self.mode, self.batch, self.chunk = model, device, mode, batch, chunk
        plan = whole(model.route, str(device), batch_cap=batch, mode=mode)
        inputs = {name: model.values[name] for name in model.route.inputs}
        values = {name: spec for name, spec in model.values.items() if name not in inputs}
        state = state_on(model, plan, str(device))
        slots = dict.fromkeys(state, batch)
        self.arenas = Arenas(inputs, values, state, device=device, slots=SETS * batch, state_slots=slots)
        self._graphs = Graphs(device) if mode == "graph" else None
        self._conditions = {
            name: (0, torch.randn(spec.shape, device=device).to(torch_dtype(spec.dtype)))
            for name, spec in model.conditions.items()
        }

    def load(self, inputs: Mapping[str, Tensor]) -> None:
        """Fill the slots with `SETS * batch` rows of inputs."""
        for slot in range(1, SETS * self.batch + 1):
            row = {name: value[slot - 1].cpu().numpy() for name, value in inputs.items()}
            self.arenas.load(slot, self.arenas.layout.pack(row, pin=False))

    def fill(self, seed: int) -> None:
        """Fill every value between stages and all state with normal numbers: a chip draws less power on zeros."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for name in sorted({*self.model.values, *self.model.state} - set(self.model.route.inputs)):
            if self.arenas[name].dtype.is_floating_point:
                self.arenas[name].normal_(generator=generator)

    def members(self, turn: int, starts: Sequence[int], visits: int) -> list[Member]:
        """Return the rows of one launch; row i stands at visit `starts[i % len(starts)]` and has state slot i + 1."""
        first = 1 + (turn % SETS) * self.batch
        return [
            Member(
                Row(i, self.chunk, 0, first + i),
                starts[i % len(starts)],
                (1 + i,) * visits if self.model.state else (),
                self._conditions,
            )
            for i in range(self.batch)
        ]

    def segment(
        self, segment: Segment, lengths: Mapping[str, int], *, warmup: int, n: int, starts: Sequence[int] = ()
    ) -> Times:
        """Time one segment, one launch at a time.

        Args:
            starts: the visits at which rows stand, where several segments run the same stages.
        """
        with self._current():
            run = self.runner(segment, lengths, starts)
            return time_on_device(run, self.device, warmup=max(warmup, 2), n=n)

    def in_turn(
        self,
        segments: Sequence[tuple[Segment, Sequence[int]]],
        lengths: Mapping[str, int],
        *,
        seconds: float,
        timing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[InTurn]:
        """Time segments, each with the visits at which rows stand, in turn and launched one behind the other.

        `timing` is entered when all is captured and warm.
        """
        with self._current():
            runs = [self.runner(segment, lengths, starts) for segment, starts in segments]
            for run in runs:
                time_on_device(run, self.device, warmup=2, n=1)
            with timing():
                return time_in_turn(runs, self.device, seconds=seconds)

    @contextmanager
    def _current(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            yield

    def runner(self, segment: Segment, lengths: Mapping[str, int], starts: Sequence[int] = ()) -> Callable[[int], None]:
        """Return what launches a segment, with the input set of a turn. Captures it, where that needs no rows."""
        program = Program(
            self.model,
            segment,
            self.arenas,
            mode=self.mode,
            batch_buckets=(self.batch,),
            graphs=self._graphs,
            shapes={axis: (n,) for axis, n in lengths.items()},
        )
        program.capture()

        def run(turn: int) -> None:
            program.launch(self.members(turn, starts or (segment.start,), len(segment)), lengths)

        return run


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
        with engine.together():
            futures: list[Future[Chunk]] = [s.submit(x, lengths=lengths) for s, x in zip(streams, inputs, strict=True)]
        for future in futures:
            future.result()
        if i >= warmup:
            samples.append((time.perf_counter() - begin) * 1e3)
    for stream in streams:
        stream.close()
    return Times(tuple(samples))


def hop_ms(source: str, target: str, nbytes: int) -> float:
    """Time one copy between two CUDA devices, alone; median of 10. Synchronises both."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=target)
    here = torch.ones(nbytes, dtype=torch.uint8, device=source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        with torch.cuda.device(target):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            there.copy_(here, non_blocking=True)
            end.record()
            end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times[2:])[5]
