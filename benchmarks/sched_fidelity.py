"""The simulator against the real executor: stages that take a controlled time, 1, 2 and 4 executors of one engine.

    python benchmarks/sched_fidelity.py --out benchmarks/results/sched_fidelity_cpu.json

A stage takes a + b n for a batch of n, by sleeping, so that two cores are enough for four devices. As on a GPU that has
launches queued ahead, up to `HIDDEN_S` of host time between two stages of a device does not show; more does. The
simulator predicts every case from the same plan, and the output interval of every stream is compared. Streams run flat
out, with as many chunks in flight as the plan gives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from stretto.core.chunk import Chunk
from stretto.core.errors import StreamClosedError
from stretto.core.model import Buckets, Rows, Stage, StateKey
from stretto.core.plan import Device, Plan
from stretto.core.route import Route, StageSpec, TensorSpec, Visit
from stretto.deploy.world_trial import Track
from stretto.runtime.engine import Engine, Stream
from stretto.sched.columns import Rank
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import Link
from stretto.sched.plans import by_block, by_step, of_ranks, whole
from stretto.sched.profile import Profile, Provenance, StageProfile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

FIXED_S, PER_ROW_S = 0.090, 0.060
HIDDEN_S = 0.015
STRETCH = 6.0  # of all durations below
UNEVEN = (1.0, 1.0, 1.1, 1.0, 0.9, 1.0, 1.06, 1.1)
"""Share of these times that each stage takes, over and over. Equal devices end at the same time, and whether one of them sees a
chunk that comes at that very time is for microseconds to decide."""


def share_of(stage: int) -> float:
    return UNEVEN[stage % len(UNEVEN)]


class DeviceClock(threading.local):
    """When the device of this thread is free."""

    free_s = 0.0

    def spend(self, seconds: float) -> None:
        now = time.monotonic()
        begin = self.free_s if now - self.free_s < HIDDEN_S else now
        self.free_s = begin + seconds
        time.sleep(max(0.0, self.free_s - now))


CLOCK = DeviceClock()


class Sleep:
    """A stage with state that takes a controlled time."""

    def __init__(self, index: int, fixed_s: float, per_row_s: float) -> None:
        self.fixed_s, self.per_row_s = fixed_s, per_row_s
        self.state = f"left.{index}"
        self.spec = StageSpec(f"block.{index}", ("x",), ("x",), (self.state,))

    def run(self, rows: Rows) -> None:
        CLOCK.spend(self.fixed_s + self.per_row_s * rows.size)
        rows.put("x", rows.get("x") + 1)


class SleepModel:
    """Blocks visited for each step; the previous chunk must have passed the same visit."""

    name = "sleep"

    def __init__(self, blocks: int, steps: int, fixed_s: float, per_row_s: float) -> None:
        self.module = nn.Identity()
        stages = [Sleep(i, fixed_s * share_of(i), per_row_s * share_of(i)) for i in range(blocks)]
        self.stages: Mapping[str, Stage] = {s.spec.name: s for s in stages}
        visits = tuple(Visit(s.spec.name, step) for step in range(steps) for s in stages)
        self.route = Route({n: s.spec for n, s in self.stages.items()}, visits, ("x",), ("x",))
        self.values = {"x": TensorSpec((), "float64")}
        self.state = {s.state: TensorSpec((), "float64") for s in stages}
        self.conditions: Mapping[str, TensorSpec] = {}
        self.buckets: tuple[Buckets, ...] = ()

    def state_key(self, visit: Visit) -> StateKey | None:
        return StateKey("left", visit.step)

    def carry(self, visit: Visit) -> Visit | None:
        return visit


def profile_of(blocks: int, steps: int, fixed_s: float = FIXED_S, per_row_s: float = PER_ROW_S) -> Profile:
    costs = {i: BatchCost.line(fixed_s * share_of(i), per_row_s * share_of(i)) for i in range(blocks)}
    links = {"peer": Link(0.0, 1e18), "node": Link(0.0, 1e18)}
    names = tuple(f"block.{i}" for i in range(blocks))
    passes = ((names, tuple(range(steps))),)
    stages = {f"block.{i}": StageProfile(cost, 1, 1, "visit", 1) for i, cost in costs.items()}
    return Profile("sleep", "CPU", passes, stages, Provenance("computed"), links=links, max_batch=16)


@dataclass(frozen=True)
class Case:
    """A plan, and streams of its classes with the time at which each begins and ends."""

    name: str
    plan: Plan
    blocks: int
    steps: int
    streams: Sequence[tuple[str, float, float]]
    seconds: float
    spans: Sequence[tuple[float, float]]
    """Spans to compare, in seconds."""
    fixed_s: float = FIXED_S
    per_row_s: float = PER_ROW_S

    @staticmethod
    def of(
        name: str,
        plan: Plan,
        blocks: int,
        steps: int,
        streams: Sequence[tuple[str, float, float]],
        seconds: float,
        spans: Sequence[tuple[float, float]] = (),
    ) -> Case:
        """Make a case; its last two thirds are compared where no spans are given."""
        spans = spans or ((seconds / 3, seconds),)
        longer = [(c, a * STRETCH, b * STRETCH) for c, a, b in streams]
        return Case(name, plan, blocks, steps, longer, seconds * STRETCH, [(a * STRETCH, b * STRETCH) for a, b in spans])


def devices(count: int) -> tuple[Device, ...]:
    return tuple(Device(f"cpu:{i}") for i in range(count))


def cases() -> list[Case]:
    p = profile_of(8, 2)
    one, two, four = devices(1), devices(2), devices(4)
    alone = (("default", 0.0, math.inf),)

    def tuned(plan: Plan, cap: int, flying: int, dispatch: str = "first_come_first_served") -> Plan:
        caps = {d.name: cap for d in plan.devices}
        return replace(plan, batch_caps=caps, in_flight=flying, dispatch=dispatch)

    mixed = of_ranks(
        p,
        two,
        {
            "first": [Rank(0, 8, "cpu:0")],
            "second": [Rank(0, 4, "cpu:0"), Rank(4, 8, "cpu:1")],
            "third": [Rank(0, 8, "cpu:1")],
        },
        quantum=2,
        credits={"first": 2, "second": 2, "third": 2},
        dispatch="oldest_chunk_first",
    )
    ring = by_block(p, four, quantum=2)
    ring_of_four = tuned(ring, 4, 4)
    several = tuple(("default", 0.02 * i, math.inf) for i in range(4))
    out = [
        Case.of("1 device, 1 stream", tuned(whole(p, one[0], quantum=2), 1, 1), 8, 2, alone, 4.0),
        Case.of("1 device, 1 stream, batches over steps", tuned(whole(p, one[0], quantum=2), 2, 2), 8, 2, alone, 5.0),
        Case.of("2 devices by block, 1 stream", tuned(by_block(p, two, quantum=2), 1, 4), 8, 2, alone, 4.0),
        Case.of("2 devices by step, 1 stream", tuned(by_step(p, two), 1, 2), 8, 2, alone, 4.0),
        Case.of("4 devices by block, 1 stream", tuned(ring, 1, 8), 8, 2, alone, 4.0),
        Case.of("4 devices by block, 4 streams, capped batches", ring_of_four, 8, 2, several, 6.0),
        Case.of("2 devices, 3 streams with other cuts", mixed, 8, 2, [(c, 0.0, math.inf) for c in mixed.classes], 6.0),
        Case.of(
            "2 devices, 3 streams, one arrives and one is cancelled",
            mixed,
            8,
            2,
            [("first", 0.0, math.inf), ("second", 4.0, math.inf), ("third", 0.0, 8.0)],
            12.0,
            ((0.5, 4.0), (4.8, 8.0), (8.8, 12.0)),
        ),
    ]
    return out + [convoy(cap) for cap in (1, 2, 8)]


def convoy(cap: int) -> Case:
    """Eight chunks in flight over a ring of four devices: the cap decides whether batches help or form convoys.

    A row costs eight times what a launch does, so a batch gains next to nothing, and chunks that run together leave the
    other devices idle. That is how a compute-bound model behaves.
    """
    fixed_s, per_row_s = 0.0015, 0.012
    p = profile_of(30, 4, fixed_s, per_row_s)
    plan = by_block(p, devices(4), quantum=5)
    plan = replace(plan, batch_caps={d.name: cap for d in plan.devices}, in_flight=2, dispatch="first_come_first_served")
    streams = tuple(("default", 0.02 * i, math.inf) for i in range(4))
    case = Case.of(f"convoy: 4 devices, 8 chunks in flight, batch cap {cap}", plan, 30, 4, streams, 8.0)
    return replace(case, fixed_s=fixed_s, per_row_s=per_row_s)


class Driver:
    """Keeps the chunks of one stream in flight until it is told to stop."""

    def __init__(self, stream: Stream, credit: int, begin: float) -> None:
        self.stream, self.credit, self.begin = stream, credit, begin
        self.done: list[float] = []
        self.stopped = False

    def start(self) -> None:
        for _ in range(self.credit):
            self._submit()

    def _submit(self) -> None:
        try:
            self.stream.submit({"x": np.asarray(0.0)}).add_done_callback(self._finished)
        except StreamClosedError:
            self.stopped = True

    def _finished(self, future: Future[Chunk]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        self.done.append(time.monotonic() - self.begin)
        if not self.stopped:
            self._submit()


def measure(case: Case) -> list[list[float]]:
    """Run a case on the engine; completion times of each stream."""
    engine = Engine(SleepModel(case.blocks, case.steps, case.fixed_s, case.per_row_s), case.plan, slots=32, streams=8)
    engine.warm()
    begin = time.monotonic()
    drivers: list[Driver] = []
    timers: list[threading.Timer] = []

    def at(seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(max(0.0, begin + seconds - time.monotonic()), action)
        timer.start()
        timers.append(timer)

    try:
        begins: dict[float, list[Driver]] = {}
        for stream_class, start, stop in case.streams:
            driver = Driver(engine.open(stream_class=stream_class), case.plan.credit(stream_class), begin)
            drivers.append(driver)
            begins.setdefault(start, []).append(driver)
            if stop < case.seconds:
                at(stop, driver.stream.close)
        for start, some in begins.items():
            at(start, lambda some=some: [d.start() for d in some])
        time.sleep(max(0.0, begin + case.seconds - time.monotonic()))
        for driver in drivers:
            driver.stopped = True
    finally:
        for timer in timers:
            timer.cancel()
        engine.close()
    return [d.done for d in drivers]


def predict(case: Case, *, together: bool = True) -> list[list[float]]:
    """Simulate a case; completion times of each stream."""
    profile = profile_of(case.blocks, case.steps, case.fixed_s, case.per_row_s)
    runs = [StreamRun(f"s{i}", "m", c, start_s=a, stop_s=b) for i, (c, a, b) in enumerate(case.streams)]
    weather = Weather(seed=0, noise=0.002)  # as unsteady as sleeping is
    simulation = Simulation({"m": Load(case.plan, profile)}, runs, slots=32, together=together, weather=weather)
    return [[out for _, _, out in s.done] for s in simulation.run(case.seconds).streams]


def interval(done: Sequence[float], span: tuple[float, float], burst: int) -> float:
    """Return the mean time between chunks within a span, of which up to `burst` can come together; NaN if there are few."""
    return Track([(0.0, t) for t in done], burst=burst).interval_s(span)


def rate(table: Sequence[Sequence[float]], span: tuple[float, float], bursts: Sequence[int]) -> float:
    """Return the chunks a second of all streams together."""
    found = [interval(done, span, burst) for done, burst in zip(table, bursts, strict=True)]
    return sum(1 / x for x in found if not math.isnan(x))


def compare(case: Case) -> dict[str, Any]:
    measured, predicted = measure(case), predict(case)
    bursts = [case.plan.credit(stream_class) for stream_class, _, _ in case.streams]
    rows = []
    for span in case.spans:
        for i, (real, simulated) in enumerate(zip(measured, predicted, strict=True)):
            a, b = interval(real, span, bursts[i]), interval(simulated, span, bursts[i])
            if not (math.isnan(a) or math.isnan(b)):
                row = {"stream": i, "span_s": list(span), "measured_ms": a * 1e3, "simulated_ms": b * 1e3, "error": b / a - 1}
                rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    # Streams of one class are alike: what one gains another loses, so the pool's rate is compared too. An executor hands
    # the chunks of a batch over one by one, so a device that waits for them may start with the first alone.
    apart = predict(case, together=False)
    pooled = []
    for span in case.spans:
        real, one, other = (rate(table, span, bursts) for table in (measured, predicted, apart))
        row = {"measured": real, "simulated": one, "simulated_one_by_one": other, "error": real / one - 1}
        pooled.append({"span_s": list(span), **{k: round(v, 4) for k, v in row.items()}})
    return {"case": case.name, "devices": len(case.plan.devices), "rows": rows, "chunks_per_s": pooled}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    found, load = [], os.getloadavg()
    for case in cases():
        if args.only not in case.name:
            continue
        found.append(compare(case))
        worst = max((abs(r["error"]) for r in found[-1]["rows"]), default=math.nan)
        print(f"{case.name:60s} worst {worst:.1%}  together {found[-1]['chunks_per_s']}", flush=True)
    errors = [abs(r["error"]) for f in found for r in f["rows"]]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "what": "output interval, simulator against executor, stages of controlled time",
        "device": f"CPU ({platform.machine()}), executors as threads of one process",
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "stage_ms": {"fixed": FIXED_S * 1e3, "per_row": PER_ROW_S * 1e3},
        "stage_shares": list(UNEVEN),
        "hidden_host_ms": HIDDEN_S * 1e3,
        "host": {"cores": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()},
        "error_mean": round(statistics.mean(errors), 4),
        "error_worst": round(max(errors), 4),
        "cases": found,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
