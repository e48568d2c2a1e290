"""pi0.5's route and its stages on one device, ready to be launched, timed and profiled; for pi05_table.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from kernel_floor import profiled
from nvidia_smi import Chip

from stretto.core.plan import Mode
from stretto.core.route import Segment
from stretto.models import pi0
from stretto.runtime.profiler import SETS, Bench, stage_segments
from stretto.runtime.program import Graphs, Program
from stretto.runtime.timing import Stamp

SPIN_CYCLES = 1_000_000  # half a millisecond


def build(device: torch.device, small: bool) -> pi0.Pi0Model:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = pi0.build(pi0.tiny()[0].config if small else pi0.SPECS["pi05"], device=device, dtype=dtype)
    model.randomize(seed=0)
    return model


class Runner:
    """Whole route and stages of a model at one batch size, ready to launch."""

    def __init__(self, model: pi0.Pi0Model, device: torch.device, batch: int, prompt: int) -> None:
        self.model, self.device, self.lengths = model, device, {"prompt": prompt}
        self.mode: Mode = "graph" if device.type == "cuda" else "eager"
        self.bench = Bench(model, device, self.mode, batch)
        inputs = model.example_inputs(SETS * batch)
        inputs["token_count"] = torch.full_like(inputs["token_count"], prompt)
        self.bench.load(inputs)
        self.graphs = Graphs(device) if self.mode == "graph" else None

    def launch(self, segment: Segment, mode: Mode | None = None) -> Callable[[int], None]:
        """Return what launches a segment on the next set of inputs; captured before it is returned."""
        shapes = {"prompt": (self.lengths["prompt"],)}
        mode = mode or self.mode
        buckets = (self.bench.batch,)
        program = Program(
            self.model, segment, self.bench.arenas, mode=mode, batch_buckets=buckets, graphs=self.graphs, shapes=shapes
        )
        program.capture()

        def run(turn: int) -> None:
            program.launch(self.bench.members(turn, (segment.start,), len(segment)), self.lengths)

        return run

    def timed(self, run: Callable[[int], None], n: int, pause_s: float = 0.0, runup_s: float = 0.0) -> list[float]:
        """Return milliseconds of n launches, after a run-up; with a pause before each."""
        end = time.monotonic() + runup_s
        turn = 0
        while turn < 3 or time.monotonic() < end:
            run(turn)
            Stamp(self.device).wait()
            turn += 1
        times = []
        for i in range(n):
            time.sleep(pause_s)
            if self.device.type == "cuda":
                torch.cuda._sleep(SPIN_CYCLES)  # the launch is queued by the time the device comes to it
            begin = Stamp(self.device)
            run(turn + i)
            stop = Stamp(self.device)
            stop.wait()
            times.append(stop.ms_since(begin))
        return times


def quantiles(ms: list[float]) -> dict[str, float]:
    p50, p99 = (float(np.quantile(ms, q)) for q in (0.5, 0.99))
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "p99_over_p50_ms": round(p99 - p50, 3), "requests": len(ms)}


def measure(runner: Runner, chip: Chip, *, sustained: bool, share: float = 1.0) -> dict[str, Any]:
    """Time the whole route both ways, and each stage the way that counts; `share` makes for fewer requests."""
    batch = runner.bench.batch
    run = runner.launch(runner.model.route.whole)
    rested = 60 if batch == 1 else 16 if batch < 32 else 3
    ways: dict[str, dict[str, float]] = {
        "rested": {"n": max(3, rested * share), "pause_s": 0.02 if batch < 32 else 0.8},
        "sustained": {"n": max(5, 60 // batch * share), "runup_s": share * (1.0 if batch < 32 else 3.0)},
    }
    if runner.device.type != "cuda":
        ways = {name: {"n": 3} for name in ways}
    row: dict[str, Any] = {"measured": "sustained" if sustained else "rested"}
    for name, how in ways.items():
        begin = time.monotonic()
        row[name] = quantiles(runner.timed(run, int(how.pop("n")), **how))
        row[name] |= chip.between(begin, time.monotonic())
    row |= {key: row[row["measured"]][key] for key in ("p50_ms", "p99_over_p50_ms")}
    row["stages"] = {}
    for name, (segment, visits) in stage_segments(runner.model).items():
        n, pause_s = max(6, int(30 // batch * share)), 0.0 if sustained or runner.device.type != "cuda" else 0.01
        every = Segment(segment.start, segment.start + visits)  # visits of a stage follow each other
        launch, begin = runner.launch(every), time.monotonic()
        ms = float(np.median(runner.timed(launch, n, pause_s)))
        row["stages"][name] = {"ms": round(ms, 3), "visits": visits} | chip.between(begin, time.monotonic())
    return row


def profile(runner: Runner, row: dict[str, Any]) -> None:
    """Add to each stage its kernels, by the calls that launch them, and what the graph's time is beyond theirs."""
    for name, (segment, visits) in stage_segments(runner.model).items():
        run = runner.launch(segment, "eager")
        run(0)
        seen = profiled(lambda run=run: run(1))
        stage = row["stages"][name]
        stage["profile_of_one_visit"] = seen
        stage["beyond_kernels_ms"] = round(stage["ms"] - seen["kernel_us"] * visits / 1e3, 3)
