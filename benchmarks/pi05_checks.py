"""What pi0.5 at true shape must hold on a GPU: accuracy against fp32, graph = eager, batch = single, replay, no drift.

    python benchmarks/pi05_checks.py --out benchmarks/results/pi05_checks_h200.json

The fp32 reference runs first, in a process of its own without Triton, on the same bf16-rounded weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.core.plan import whole
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.runtime.engine import Engine

OBSERVATIONS = 64


def build(dtype: torch.dtype, device: str, small: bool) -> pi0.Pi0Model:
    """Build pi0.5 with bf16-rounded random weights, held in `dtype`."""
    if small:
        model = pi0.build(pi0.tiny()[0].config, device=device, dtype=dtype)
    else:
        model = pi0.build(pi0.SPECS["pi05"], device=device, dtype=dtype)
    model.randomize(seed=0)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(parameter.bfloat16())
    model.refresh()
    return model


def observations(model: pi0.Pi0Model) -> dict[str, Tensor]:
    return model.example_inputs(OBSERVATIONS, seed=7)


def rows_of(inputs: dict[str, Tensor], i: int) -> dict[str, np.ndarray]:
    return {name: value[i].numpy() for name, value in inputs.items()}


def engine_for(model: pi0.Pi0Model, device: str, mode: str, cap: int, batches: tuple[int, ...]) -> Engine:
    plan = whole(model.route, device, batch_cap=cap, mode=mode)  # type: ignore[arg-type]
    engine = Engine(model, plan.with_shapes({"batch": batches}))
    engine.warm()
    return engine


def run_each(engine: Engine, inputs: dict[str, Tensor], order: list[int]) -> np.ndarray:
    """Run observations one at a time; returns actions [n, H, A]."""
    stream = engine.open()
    out = []
    for i in order:
        lengths = {"prompt": int(inputs["token_count"][i])}
        out.append(stream.submit(rows_of(inputs, i), lengths=lengths).result(120).outputs["x"])
    stream.close()
    return np.stack(out)


def reference(path: str, device: str, small: bool) -> None:
    model = build(torch.float32, device, small)
    inputs = observations(model)
    engine = engine_for(model, device, "eager", 1, (1,))
    np.save(path, run_each(engine, inputs, list(range(OBSERVATIONS))))
    engine.close()


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def accuracy(got: np.ndarray, want: np.ndarray, noise: np.ndarray) -> dict[str, float]:
    """Compare actions, and what the network added to the noise (the stricter of the two)."""
    both = {"actions": (got, want), "flow": (got - noise, want - noise)}
    result: dict[str, float] = {}
    for name, (g, w) in both.items():
        c = cosine(g, w)
        result |= {f"{name}_cosine_worst": float(c.min()), f"{name}_cosine_mean": float(c.mean())}
    error = np.abs(got - want)
    return result | {"max_abs": float(error.max()), "mean_abs": float(error.mean()), "actions_std": float(want.std())}


def drift(engine: Engine, model: pi0.Pi0Model, inputs: dict[str, Tensor], n: int) -> dict[str, Any]:
    """Serve `n` requests whose prompt length and state change every time; nothing may be captured or grow."""
    stream = engine.open()
    longest = model.config.tokenizer_max_length
    wall, gpu = [], []
    captures, memory = engine.captures, torch.cuda.memory_reserved()
    for i in range(n):
        row = rows_of(inputs, i % OBSERVATIONS)
        count = 1 + (i * 37) % longest
        row["token_count"] = np.asarray(count, np.int32)
        row["tokens"] = np.roll(row["tokens"], i)
        begin = time.perf_counter()
        chunk = stream.submit(row, lengths={"prompt": count}).result(120)
        wall.append((time.perf_counter() - begin) * 1e3)
        gpu.append(sum(chunk.stage_ms.values()))
    stream.close()
    return {
        "requests": n,
        "captures": engine.captures - captures,
        "memory_growth_bytes": torch.cuda.memory_reserved() - memory,
        "wall_ms": {q: float(np.quantile(wall, v)) for q, v in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "gpu_ms": {q: float(np.quantile(gpu, v)) for q, v in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        "worst_over_median": float(np.max(wall) / np.median(wall)),
    }


def batched(engine: Engine, inputs: dict[str, Tensor], cap: int) -> np.ndarray:
    """Run all observations in full batches."""
    streams = [engine.open() for _ in range(cap)]
    out = []
    for first in range(0, OBSERVATIONS, cap):
        futures = [
            s.submit(rows_of(inputs, first + j), lengths={"prompt": int(inputs["token_count"][first + j])})
            for j, s in enumerate(streams)
        ]
        out += [f.result(120).outputs["x"] for f in futures]
    for s in streams:
        s.close()
    return np.stack(out)


def checks(device: str, small: bool, want: np.ndarray, n: int) -> dict[str, Any]:
    model = build(torch.bfloat16, device, small)
    inputs = observations(model)
    everyone = list(range(OBSERVATIONS))
    eager_engine = engine_for(model, device, "eager", 1, (1,))
    eager = run_each(eager_engine, inputs, everyone)
    eager_engine.close()
    if not device.startswith("cuda"):
        return {"bf16_against_fp32": accuracy(eager, want, inputs["x"].numpy())}
    engine = engine_for(model, device, "graph", 8, (1, 8))
    graph = run_each(engine, inputs, everyone)
    again = run_each(engine, inputs, [0, *range(1, 51), 0])
    in_batch = batched(engine, inputs, 8)
    result = {
        "bf16_against_fp32": accuracy(graph, want, inputs["x"].numpy()),
        "graph_equals_eager": bool((graph == eager).all()),
        "graph_eager_max_abs": float(np.abs(graph - eager).max()),
        "batched_row_max_abs": float(np.abs(in_batch - graph).max()),
        "same_request_after_fifty_others_is_bit_equal": bool((again[0] == again[-1]).all()),
        "drift": drift(engine, model, inputs, n),
    }
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="tiny dimensions, to try the script on a CPU")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reference:
        reference(args.reference, args.device, args.small)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/reference.npy"
        command = [sys.executable, __file__, "--reference", path, "--device", args.device, *(["--small"] if args.small else [])]
        subprocess.run(command, check=True, env={**os.environ, "STRETTO_TRITON": "0"})
        result = {**provenance(torch.device(args.device)), **checks(args.device, args.small, np.load(path), args.requests)}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
