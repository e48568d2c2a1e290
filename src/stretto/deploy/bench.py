"""Benchmarks of whole models, in the one form that `stretto bench` prints and `benchmarks/results/` keeps."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.core.plan import Mode, whole
from stretto.deploy.calibration import calibrate_at_random
from stretto.deploy.checkpoint import find_checkpoint, read_network
from stretto.deploy.device import resolve_device, resolve_dtype, resolve_mode
from stretto.deploy.models import build_preset
from stretto.deploy.precision import FILE, Calibration, check_precision, use_fp8
from stretto.deploy.provenance import provenance
from stretto.layers.tuning import choices
from stretto.models.pi0 import build
from stretto.runtime.engine import Engine
from stretto.runtime.profiler import SETS, Bench, stage_segments, time_requests
from stretto.runtime.weights import load_weights


@dataclass(frozen=True)
class BenchOptions:
    model: str = "pi0.5"
    checkpoint: Path | None = None
    batches: tuple[int, ...] = (1,)
    prompt: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "auto"
    precision: str = "dtype"
    warmup: int = 20
    n: int = 100


def bench_policy(options: BenchOptions) -> dict[str, Any]:
    """Time a policy at each batch size: whole route, per stage, and end to end through the engine.

    Raises:
        ConfigError: if the model is not known, or the checkpoint is of another one.
        CheckpointError: if the checkpoint cannot be loaded.
    """
    device = resolve_device(options.device)
    mode = resolve_mode(options.mode, device)
    dtype = resolve_dtype(options.dtype, device)
    check_precision(options.precision, device, dtype)
    model = build_policy(options.model, options.checkpoint, device, dtype)
    calibrated = {} if options.precision == "dtype" else {"calibration": _use_fp8(model, options, device)}
    rows = [_row(model, options, batch, device, mode, dtype) for batch in options.batches]
    return {**provenance(device), **calibrated, "rows": rows, "kernels": choices(device).report()}


def _use_fp8(model: Any, options: BenchOptions, device: torch.device) -> dict[str, object]:
    """Run in FP8 on the checkpoint's calibration if there is one; times do not depend on the scales."""
    path = find_checkpoint(options.checkpoint) / FILE if options.checkpoint is not None else None
    there = path is not None and path.is_file()
    calibration = Calibration.read(path) if path is not None and there else calibrate_at_random(model, str(device))
    return {"coded_bytes": use_fp8(model, calibration), **calibration.describe()}


def build_policy(name: str, checkpoint: Path | None, device: torch.device, dtype: str) -> Any:
    """Return a policy with the weights of a checkpoint, or a preset with random ones.

    Raises:
        ConfigError: if the preset is not known, or the checkpoint is of another model.
        CheckpointError: if the checkpoint cannot be loaded.
    """
    if checkpoint is None:
        return build_preset(name, device=str(device), dtype=dtype)
    config = read_network(checkpoint)
    if config.family != name.replace(".", ""):
        raise ConfigError("checkpoint", got=f"a {config.family} in {checkpoint}", expected=name)
    model = build(config, device=device, dtype=dtype)
    load_weights(model, find_checkpoint(checkpoint))
    return model


def _row(model: Any, options: BenchOptions, batch: int, device: torch.device, mode: Mode, dtype: str) -> dict[str, Any]:
    longest = model.buckets[0].lengths[-1]
    prompt = longest if options.prompt is None else options.prompt
    lengths = {"prompt": prompt}
    inputs = sized_inputs(model, batch, prompt)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    bench = Bench(model, device, mode, batch)
    bench.load(inputs)
    gpu = bench.segment(model.route.whole, lengths, warmup=options.warmup, n=options.n)
    stages, warmup, n = {}, min(3, options.warmup), min(options.n, max(10, options.n // 5))
    for name, (segment, visits) in stage_segments(model).items():
        stages[name] = round(bench.segment(segment, lengths, warmup=warmup, n=n).p50 * visits, 4)
    del bench
    wall = _wall(model, options, batch, inputs, lengths, device, mode)
    return {
        "model": options.model,
        "batch": batch,
        "dtype": dtype,
        "precision": options.precision,
        "prefix_tokens": model.config.image_tokens + model.buckets[0].fit(prompt),
        "mode": mode,
        "gpu_ms_p50": round(gpu.p50, 4),
        "gpu_ms_p99": round(gpu.p99, 4),
        "wall_ms_p50": round(wall.p50, 4),
        "wall_ms_p99": round(wall.p99, 4),
        "stages": stages,
        "memory_bytes": _peak_bytes(device),
        "n": options.n,
    }


def _peak_bytes(device: torch.device) -> int:
    """Return what the row took at most on its GPU; on the CPU, what the process has taken at most so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def sized_inputs(model: Any, batch: int, prompt: int) -> dict[str, Tensor]:
    """Return `SETS` batches of random inputs, all with prompts of this length."""
    inputs: dict[str, Tensor] = model.example_inputs(SETS * batch)
    inputs["token_count"] = torch.full_like(inputs["token_count"], prompt)
    return inputs


def _wall(
    model: Any,
    options: BenchOptions,
    batch: int,
    inputs: Mapping[str, Tensor],
    lengths: Mapping[str, int],
    device: torch.device,
    mode: Mode,
) -> Any:
    plan = whole(model.route, str(device), batch_cap=batch, mode=mode)
    shapes = {"batch": (batch,), **{axis: (n,) for axis, n in lengths.items()}}
    engine = Engine(model, plan.with_shapes(shapes))
    engine.warm()
    try:
        feed = [{name: value[i].numpy() for name, value in inputs.items()} for i in range(SETS * batch)]
        return time_requests(engine, feed, lengths, batch=batch, warmup=options.warmup // 2, n=options.n)
    finally:
        engine.close()
