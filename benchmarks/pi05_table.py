"""pi0.5 at true shape against its targets: one table, one command, with a profile of every miss.

    python benchmarks/pi05_table.py --out benchmarks/results/pi05_table_h200.json
    python benchmarks/pi05_table.py --small                                        # a tiny model on the CPU, to try the script

Times are the device's, from pictures in uint8 to actions in fp32, of one graph; stages are graphs of their own. `rested`
requests come with a pause before each, their launch queued ahead; `sustained` ones back to back, after a run-up: the chip
lowers its clock under load, so clock and power stand beside each. `roofline_table.py` runs this with the rest of what was
asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8 import calibrate
from host_overhead import feed_of
from host_overhead import run as ask
from nvidia_smi import Chip
from overlap import alone, tried
from overlap_plans import TOGETHER, plans
from pi05_misses import missed_by
from pi05_route import Runner, build, measure, profile

from stretto.core.plan import Mode, whole
from stretto.core.route import Segment
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.models.pi0_fp8 import quantised
from stretto.runtime.engine import Engine
from stretto.runtime.profiler import stage_segments

PARTS = ("rows", "wall", "overlap", "profiles", "experts")
SHORT_S = 2.4
"""Of a closed loop of two robots; their requests at a rate come for half as long."""
OVERLAP_PLANS: dict[str, dict[bool, list[float]]] = {
    "two lanes, on 80 and 52 multiprocessors, a launch each": {True: [110.0, 115.0, 120.0]},
    "two lanes, on 88 and 44 multiprocessors, a launch each": {True: []},
    "one lane, whole route": {True: [110.0, 113.0, 115.0], False: [76.0]},
    TOGETHER: {True: []},
}
"""What two robots may be served by, and with FP8 or without the rates that are tried; the first that fails is the last."""


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table, milliseconds."""

    batch: int
    prompt: int
    fp8: bool
    must: float
    stretch: float
    floors: tuple[float, float, float]
    """Of vision, prefix and the denoise loop at the chip's peak rates."""
    sustained: bool = False

    @property
    def name(self) -> str:
        return f"B={self.batch}, prefix {768 + self.prompt}, {'FP8' if self.fp8 else 'bf16'}"


ROWS = (
    Target(1, 200, False, 13.0, 11.0, (0.84, 4.75, 1.49)),
    Target(1, 16, False, 11.8, 10.0, (0.84, 3.77, 1.49)),
    Target(1, 200, True, 9.5, 7.5, (0.47, 2.68, 0.77)),
    Target(4, 200, False, 34.0, 31.0, (3.34, 19.0, 1.96)),
    Target(4, 200, True, 22.0, 19.0, (1.89, 10.7, 1.10)),
    Target(8, 200, False, 66.0, 60.0, (6.68, 38.0, 3.92)),
    Target(32, 200, False, 235.0, 220.0, (26.8, 152.0, 15.7), sustained=True),
    Target(32, 200, True, 150.0, 135.0, (15.1, 85.9, 8.8), sustained=True),
)


class Report:
    """Results on disk and on screen as they come, within a budget of time."""

    def __init__(self, out: Path | None, budget_s: float, head: dict[str, Any]) -> None:
        self.out, self.budget_s, self.result = out, budget_s, {**head, "rows": {}}
        self.begun = time.monotonic()

    def attempt(self, name: str, needs_s: float, run: Callable[[], dict[str, Any]]) -> None:
        """Add one row; its error, or that no time is left for it, is its row."""
        begin = time.monotonic()
        if begin - self.begun + needs_s > self.budget_s:
            if name in self.result["rows"]:
                return
            row: dict[str, Any] = {"skipped": "no time left"}
        else:
            # The edge of one row: whatever goes wrong in it, the others still run.
            try:
                row = run()
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"[:600]}
        row["seconds"] = round(time.monotonic() - begin, 1)
        # A row that could not be added to stays as it was.
        self.result["rows"][name] = self.result["rows"].get(name, {}) | row
        print(f"{time.monotonic() - self.begun:6.1f} s  {name}  {json.dumps(row)}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.result, indent=1) + "\n")


def table_row(target: Target, model: pi0.Pi0Model, device: torch.device, chip: Chip) -> dict[str, Any]:
    longest = model.buckets[0].lengths[-1]
    with torch.inference_mode():
        runner = Runner(model, device, target.batch, min(target.prompt, longest))
        row: dict[str, Any] = {"must_ms": target.must, "stretch_ms": target.stretch, "floor_ms": round(sum(target.floors), 2)}
        row |= measure(runner, chip, sustained=target.sustained)
        for stage, floor in zip(row["stages"].values(), target.floors, strict=True):
            stage["floor_ms"] = floor
        row["met"] = row["p50_ms"] <= target.must
        row["stretch_met"] = row["p50_ms"] <= target.stretch
        if target.batch == 1:
            row["p99_met"] = row["p99_over_p50_ms"] <= 0.3
    if device.type == "cuda":
        del runner
        torch.cuda.empty_cache()
    return row


def profile_row(target: Target, model: pi0.Pi0Model, device: torch.device, row: dict[str, Any]) -> dict[str, Any]:
    """Profile the stages of a row that was timed before."""
    with torch.inference_mode():
        profile(Runner(model, device, target.batch, min(target.prompt, model.buckets[0].lengths[-1])), row)
    if not row["met"]:
        row["missed_by"] = missed_by(row)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def expert_row(model: pi0.Pi0Model, device: torch.device, ways: dict[str, Any], batch: int) -> dict[str, Any]:
    """Time the denoise loop both ways at a batch size at which either may win."""
    row: dict[str, Any] = {}
    segment, visits = stage_segments(model)["denoise"]
    for name, net in ways.items():
        model.run_on(net)
        with torch.inference_mode():
            runner = Runner(model, device, batch, model.buckets[0].lengths[-1])
            loop = Segment(segment.start, segment.start + visits)
            row[name] = round(float(np.median(runner.timed(runner.launch(loop), 20))), 3)
    return row


def wall_row(model: pi0.Pi0Model, device: str, chip: Chip, n: int) -> dict[str, Any]:
    """Ask through an engine in this process; what the host adds is wall time less the device's."""
    mode: Mode = "graph" if device != "cpu" else "eager"
    prompt = model.buckets[0].lengths[-1]
    engine = Engine(model, whole(model.route, device, mode=mode).with_shapes({"batch": (1,), "prompt": (prompt,)}))
    engine.warm()
    begin = time.monotonic()
    row = ask(engine, feed_of(model, prompt), prompt, n, "plain")
    engine.close()
    return {"must_ms": 0.4, "stretch_ms": 0.2, "met": row["over_device_ms"]["p50"] <= 0.4, **row} | chip.between(
        begin, time.monotonic()
    )


def overlap_row(model: pi0.Pi0Model, device: str, chip: Chip, name: str, rates: list[float], seconds: float) -> dict[str, Any]:
    """Serve two robots by one plan."""
    mode: Mode = "graph" if device != "cpu" else "eager"
    prompt = model.buckets[0].lengths[-1]
    feed = feed_of(model, prompt)
    want = alone(model, device, mode, feed, prompt)
    args = argparse.Namespace(prompt=prompt, robots=2, seconds=seconds, rates=rates, closer=0, p99_ms=18.0)
    begin = time.monotonic()
    row = tried(model, plans(model.route, device, mode, 2)[name], feed, want, args, together=name == TOGETHER)
    row |= {"must_per_s": 115, "stretch_per_s": 130, "met": row["requests_per_s_at_p99"] >= 115}
    return row | chip.between(begin, time.monotonic())


class Session:
    """One model in one process, whose parts of the table are made one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.report = Report(args.out, args.budget, {**provenance(self.device), "small": args.small})
        self.chip, self.model = Chip(), build(self.device, args.small)
        self.nets: dict[bool, Any] = {False: self.model.module}
        self.scales: dict[str, float] = {}
        if self.device.type == "cuda":
            self.report.attempt("FP8 calibration", 5.0, self.calibrate)

    def calibrate(self) -> dict[str, Any]:
        self.scales = calibrate(self.model, self.args.device)
        self.nets[True] = quantised(self.model.module, self.scales)
        return {"products": len(self.scales)}

    def attempt(self, name: str, needs_s: float, fp8: bool, run: Callable[[], dict[str, Any]]) -> None:
        def on_net() -> dict[str, Any]:
            if fp8 not in self.nets:
                return {"skipped": "FP8 needs a GPU and a calibration"}
            self.model.run_on(self.nets[fp8])
            return run()

        self.report.attempt(name, needs_s, on_net)

    def rows(self) -> None:
        for t in ROWS:
            run = partial(table_row, t, self.model, self.device, self.chip)
            self.attempt(t.name, 3.0 + 0.2 * t.batch, t.fp8, run)

    def profiles(self) -> None:
        """Add a profile to every row that misses its target. Once it has run, a profiler slows every launch of its process."""
        for t in ROWS:
            row = self.report.result["rows"].get(t.name, {})
            if "stages" in row and (self.args.profile_all or not row["stretch_met"]):
                self.attempt(t.name, 2.0, t.fp8, partial(profile_row, t, self.model, self.device, row))

    def wall(self) -> None:
        n = 200 if self.device.type == "cuda" else 5
        run = partial(wall_row, self.model, self.args.device, self.chip, n)
        self.attempt("wall over device time, B=1 in this process, bf16", 4.0, False, run)

    def experts(self) -> None:
        if True not in self.nets:
            return
        for batch in (4, 8):
            ways = {"bf16": self.model.module, "FP8": quantised(self.model.module, self.scales, expert_rows=0)}
            run = partial(expert_row, self.model, self.device, ways, batch)
            self.report.attempt(f"denoise loop, B={batch}, by precision of the expert", 3.0, run)

    def overlap(self) -> None:
        seconds = SHORT_S if self.device.type == "cuda" else 0.4
        for plan, ways in OVERLAP_PLANS.items():
            for fp8, rates in ways.items():
                run = partial(overlap_row, self.model, self.args.device, self.chip, plan, rates, seconds)
                self.attempt(f"two robots, {'FP8' if fp8 else 'bf16'}: {plan}", 5.0, fp8, run)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds")
    parser.add_argument(
        "--parts", nargs="+", default=PARTS[:-1], choices=PARTS, help="in this order; nothing of this process after profiles"
    )
    parser.add_argument("--profile-all", action="store_true", help="profile rows that meet their target, too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.small |= args.device == "cpu"
    session = Session(args)
    for part in args.parts:
        getattr(session, part)()
    session.chip.close()


if __name__ == "__main__":
    main()
