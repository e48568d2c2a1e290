"""What FP8 gains and costs pi0.5 at true shape: whole routes beside bf16, actions against fp32, products and kernels alone.

    python benchmarks/fp8.py --out benchmarks/results/fp8_h200.json [--parts routes,accuracy,...] [--table FILE]

The fp32 reference runs in a process of its own without Triton, on the same bf16-rounded weights; a second set of weights has
0.1 % of all residual channels scaled by 50. Rows are written as they come; what there is no time for is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8_alone import choices, gemms, kernels
from torch import Tensor, nn

from stretto.core.plan import whole
from stretto.deploy.provenance import provenance
from stretto.layers.fp8 import Fp8Linear, ObservedLinear, Reader
from stretto.layers.tuning import choices as choices_of
from stretto.models import pi0
from stretto.models.pi0_fp8 import Fp8Net, observed, quantised
from stretto.runtime.engine import Engine
from stretto.runtime.profiler import SETS, Bench, stage_segments

OBSERVATIONS, CALIBRATION, CAP = 64, 16, 8
PARTS = ("vision", "prefix", "expert")
OUTLIER_SHARE, OUTLIER_FACTOR = 0.001, 50.0


class Report:
    """Rows of results, on disk and on screen as they come."""

    def __init__(self, out: Path | None, device: torch.device, budget_s: float) -> None:
        self.out, self.begun = out, time.monotonic()
        self.budget_s = budget_s
        self.result: dict[str, Any] = {**provenance(device)}

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.result.setdefault(part, []).append(row)
        print(f"{time.monotonic() - self.begun:6.1f} s  {part}  {json.dumps(row)}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def has(self, seconds: float) -> bool:
        return time.monotonic() - self.begun + seconds < self.budget_s

    def attempt(self, part: str, case: dict[str, Any], run: Callable[[], dict[str, Any]], needs_s: float) -> None:
        """Run one case; its error, or that no time is left for it, is its row."""
        if not self.has(needs_s):
            self.add(part, {**case, "skipped": "no time left"})
            return
        # The edge of one case: whatever goes wrong in it, the others still run.
        try:
            self.add(part, {**case, **run()})
        except Exception as error:
            self.add(part, {**case, "error": f"{type(error).__name__}: {error}"[:400]})


def build(family: str, device: str, small: bool, *, outliers: bool) -> pi0.Pi0Model:
    """Build a policy in bf16 with random weights; with `outliers`, some channels of every residual stream are large."""
    config = pi0.tiny()[family == "pi0"].config if small else pi0.SPECS[family]
    model = pi0.build(config, device=device, dtype=torch.bfloat16)
    model.randomize(seed=0)
    if outliers:
        scale_outliers(model)
    return model


@torch.no_grad()
def scale_outliers(model: pi0.Pi0Model) -> None:
    net = model.module
    written: list[Tensor] = [net.vision.embed.weight, net.vision.project.weight, net.prefix.embed.t(), net.action_in.weight]
    written.append(net.vision.position.t())
    for blocks in (net.vision.blocks, net.prefix.blocks, net.expert.blocks):
        for block in blocks:
            written += [
                layer.weight for layer in (getattr(block, n, None) for n in ("out", "down")) if isinstance(layer, nn.Linear)
            ]
    for weight_NK in written:
        weight_NK[: max(1, round(weight_NK.shape[0] * OUTLIER_SHARE))] *= OUTLIER_FACTOR
    model.refresh()


def in_fp32(model: pi0.Pi0Model, device: str) -> pi0.Pi0Model:
    """Return the same weights, bit for bit, computing in fp32."""
    twin = pi0.build(model.config, device=device, dtype=torch.float32)
    with torch.no_grad():
        for mine, its in zip(twin.module.parameters(), model.module.parameters(), strict=True):
            mine.copy_(its)
    twin.refresh()
    return twin


def engine_for(model: pi0.Pi0Model, device: str, mode: str, cap: int) -> Engine:
    plan = whole(model.route, device, batch_cap=cap, mode=mode)  # type: ignore[arg-type]
    engine = Engine(model, plan.with_shapes({"batch": (cap,)}))
    engine.warm()
    return engine


def run(engine: Engine, inputs: dict[str, Tensor], n: int, cap: int) -> np.ndarray:
    """Run the first n observations in batches of `cap`; returns [n, H, A]."""
    streams = [engine.open() for _ in range(cap)]
    out: list[np.ndarray] = []
    longest = engine.model.buckets[0].lengths[-1]
    for first in range(0, n, cap):
        with engine.together():
            futures = [
                s.submit({name: v[first + j].numpy() for name, v in inputs.items()}, lengths={"prompt": longest})
                for j, s in enumerate(streams)
            ]
        out += [f.result(300).outputs["x"] for f in futures]
    for stream in streams:
        stream.close()
    return np.stack(out)


def actions(
    model: pi0.Pi0Model, device: str, inputs: dict[str, Tensor], n: int, *, mode: str = "eager", cap: int = CAP
) -> np.ndarray:
    engine = engine_for(model, device, mode, cap)
    try:
        return run(engine, inputs, n, cap)
    finally:
        engine.close()


def calibrate(model: pi0.Pi0Model, device: str) -> dict[str, float]:
    view, noted = observed(model.module)
    model.run_on(view)
    actions(model, device, model.example_inputs(CALIBRATION, seed=5), CALIBRATION)
    model.run_on(model.module)
    return {name: float(layer.largest) for name, layer in noted.items()}


def reference(folder: Path, family: str, device: str, small: bool, weights: str) -> None:
    """Write the fp32 actions of each of these sets of weights."""
    for name in weights.split(","):
        model = in_fp32(build(family, device, small, outliers=name == "outliers"), device)
        np.save(folder / f"{name}.npy", actions(model, device, model.example_inputs(OBSERVATIONS, seed=7), OBSERVATIONS))
        del model


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def likeness(got: np.ndarray, want: np.ndarray, noise: np.ndarray) -> dict[str, float]:
    """Compare actions, and what the network added to the noise (the stricter of the two)."""
    result: dict[str, float] = {}
    for name, (g, w) in {"actions": (got, want), "flow": (got - noise, want - noise)}.items():
        c = cosine(g, w)
        result |= {f"{name}_cosine_worst": round(float(c.min()), 7), f"{name}_cosine_mean": round(float(c.mean()), 7)}
    error = np.abs(got - want)
    return result | {"max_abs": float(error.max()), "mean_abs": float(error.mean()), "actions_std": float(want.std())}


def within(found: dict[str, float], coded: bool) -> bool:
    """Tell whether actions are as near to fp32 as is asked of their precision."""
    if coded:
        return found["actions_cosine_worst"] >= 0.995 and found["actions_cosine_mean"] >= 0.999
    return found["actions_cosine_worst"] >= 0.9995 and found["max_abs"] <= 2e-2


def partly(model: pi0.Pi0Model, scales: dict[str, float], parts: tuple[str, ...]) -> Fp8Net:
    """Return the network with the products of only some parts in FP8."""

    def make(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        if name.split(".")[0] in parts:
            return Fp8Linear(name, weight_NK, bias_N, scales[name])
        return ObservedLinear(name, weight_NK, bias_N)

    return Fp8Net(model.module, make, expert_rows=0 if "expert" in parts else 1 << 30, fold=False)


def accuracy(report: Report, family: str, device: str, small: bool, sets: str) -> None:
    if not report.has(35.0):
        report.add("accuracy", {"family": family, "skipped": "no time left"})
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--device", device, "--family", family, "--weights", sets, *(["--small"] if small else [])]
        command = [sys.executable, __file__, "--reference", folder, *flags]
        subprocess.run(command, check=True, env={**os.environ, "STRETTO_TRITON": "0"})
        for weights in sets.split(","):
            want = np.load(f"{folder}/{weights}.npy")
            model = build(family, device, small, outliers=weights == "outliers")
            accuracy_of(report, model, device, want, {"family": family, "weights": weights, "observations": OBSERVATIONS})


def accuracy_of(report: Report, model: pi0.Pi0Model, device: str, want: np.ndarray, head: dict[str, Any]) -> None:
    """Compare all parts in FP8, some, and none (bf16) with the fp32 actions."""
    inputs = model.example_inputs(OBSERVATIONS, seed=7)
    scales = calibrate(model, device)

    def compare(*parts: str) -> dict[str, Any]:
        model.run_on(partly(model, scales, parts) if parts else model.module)
        found = likeness(actions(model, device, inputs, OBSERVATIONS), want, inputs["x"].numpy())
        return {"met": within(found, bool(parts)), **found}

    def compare_others(others: dict[str, Tensor]) -> dict[str, Any]:
        model.run_on(model.module)
        return likeness(actions(model, device, others, OBSERVATIONS), want, inputs["x"].numpy())

    def one_by_one() -> dict[str, Any]:
        """As a server runs FP8 for one robot: where there is a chain of launches in e4m3, by it."""
        model.run_on(quantised(model.module, scales))
        found = likeness(actions(model, device, inputs, OBSERVATIONS, cap=1), want, inputs["x"].numpy())
        row = {"met": within(found, coded=True), **found}
        ran = choices_of(torch.device(device)).ran.get("expert_layers", set())
        return {**row, "expert_ran": sorted(ran)}

    report.attempt("accuracy", {**head, "fp8": "vision+prefix+expert", "rows": "one by one"}, one_by_one, 8.0)
    for parts in ((), PARTS, ("vision", "prefix"), ("vision",), ("prefix",), ("expert",)):
        report.attempt("accuracy", {**head, "fp8": "+".join(parts) or "none"}, partial(compare, *parts), 3.0)
    # How closely the flow follows what the robot sees, and so errors in it: weights that hardly look prove little.
    others = {**inputs, "images": inputs["images"].roll(1, 0)}
    report.attempt("accuracy", {**head, "check": "images of another robot"}, partial(compare_others, others), 3.0)
    if device.startswith("cuda"):
        # Last: they change the weights.
        for chain in (False, True):
            row = {**head, "check": "graph", "chain": chain}
            report.attempt("accuracy", row, partial(replay, model, device, scales, inputs, chain), 4.0)
            model.randomize(seed=0)


def replay(
    model: pi0.Pi0Model, device: str, scales: dict[str, float], inputs: dict[str, Tensor], chain: bool
) -> dict[str, Any]:
    """Tell whether graph equals eager, two runs equal each other and graphs follow new weights, bit for bit, all in FP8."""
    model.run_on(quantised(model.module, scales) if chain else quantised(model.module, scales, expert_rows=0))
    engine = engine_for(model, device, "graph", 1)
    graph, again = run(engine, inputs, 4, 1), run(engine, inputs, 4, 1)
    eager = actions(model, device, inputs, 4, cap=1)
    model.randomize(seed=1)
    renewed = run(engine, inputs, 4, 1)
    engine.close()
    fresh = actions(model, device, inputs, 4, cap=1)
    return {
        "graph_equals_eager": bool((graph == eager).all()),
        "two_runs_are_equal": bool((graph == again).all()),
        "graph_follows_new_weights": bool((renewed == fresh).all() and (renewed != graph).any()),
    }


def routes(report: Report, family: str, device: str, small: bool, batches: tuple[int, ...]) -> None:
    """Time whole routes and stages: as they are, in FP8 with the expert as it is, all in FP8, and as a server chooses."""
    model = build(family, device, small, outliers=False)
    scales = calibrate(model, device)
    ways = {
        "bf16": model.module,
        "fp8": quantised(model.module, scales, expert_rows=0),
        "fp8, bf16 expert": quantised(model.module, scales, expert_rows=1 << 30, fold=False),
        "fp8, as served": quantised(model.module, scales),
    }
    coded = sum(r.nbytes for r in ways["fp8"].readers.values() if isinstance(r, Fp8Linear))  # type: ignore[union-attr]
    weights = sum(p.nbytes for p in model.module.parameters())
    report.add("memory", {"weights_bytes": weights, "coded_bytes": coded, "products": len(scales)})
    for batch in batches:
        for way, net in ways.items():
            model.run_on(net)
            head = {"family": family, "batch": batch, "way": way}
            report.attempt("routes", head, partial(route_row, model, device, batch), 2.0 + 0.35 * batch)


def route_row(model: pi0.Pi0Model, device: str, batch: int) -> dict[str, Any]:
    where, longest = torch.device(device), model.buckets[0].lengths[-1]
    inputs = model.example_inputs(SETS * batch)
    inputs["token_count"] = torch.full_like(inputs["token_count"], longest)
    bench = Bench(model, where, "graph" if where.type == "cuda" else "eager", batch)
    bench.load(inputs)
    n = max(8, 60 // batch)
    gpu = bench.segment(model.route.whole, {"prompt": longest}, warmup=3, n=n)
    stages = {}
    for name, (segment, visits) in stage_segments(model).items():
        stages[name] = round(bench.segment(segment, {"prompt": longest}, warmup=3, n=max(6, n // 2)).p50 * visits, 3)
    tokens = model.config.image_tokens + longest
    return {"prefix_tokens": tokens, "gpu_ms_p50": round(gpu.p50, 3), "gpu_ms_p99": round(gpu.p99, 3), "stages_ms": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--family", default="pi05", choices=("pi05", "pi0"))
    parser.add_argument("--parts", default="routes,accuracy,choices,gemms,kernels")
    parser.add_argument("--table", type=Path, help="table of choices to write, or to go on with")
    parser.add_argument("--weights", default="plain,outliers", help="sets of weights whose actions are compared")
    parser.add_argument("--batches", default="1,4,32")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds")
    parser.add_argument("--small", action="store_true", help="tiny dimensions, to try the script on a CPU")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference:
        reference(args.reference, args.family, args.device, args.small, args.weights)
        return
    report = Report(args.out, torch.device(args.device), args.budget)
    batches = tuple(int(n) for n in args.batches.split(","))
    parts = {
        "routes": lambda: routes(report, args.family, args.device, args.small, batches),
        "accuracy": lambda: accuracy(report, args.family, args.device, args.small, args.weights),
        "choices": lambda: choices(report, args.device, args.small, args.table),
        "gemms": lambda: gemms(report, args.device, args.small),
        "kernels": lambda: kernels(report, args.device, args.small),
    }
    for part in args.parts.split(","):
        try:
            with torch.inference_mode():
                parts[part]()
        except Exception as error:
            report.add(part, {"error": f"{type(error).__name__}: {error}"[:400]})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
