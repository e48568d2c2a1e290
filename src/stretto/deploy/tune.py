"""Measures which kernel is fastest at every shape that a model runs, and writes the table that `layers.tuning` reads."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.deploy.bench import build_policy, sized_inputs
from stretto.deploy.calibration import calibrate_at_random
from stretto.deploy.device import resolve_device, resolve_dtype
from stretto.deploy.precision import check_precision, use_fp8
from stretto.deploy.profile import SAMPLE
from stretto.deploy.provenance import commit
from stretto.deploy.worlds import NAMES, RandomWorld, config_of
from stretto.layers.tuning import (
    Config,
    Entry,
    Key,
    Table,
    Tunable,
    choices,
    device_name,
    load_table,
    tunables,
    user_tables,
)
from stretto.models.wan_config import WanConfig
from stretto.runtime.graphs import Graphs
from stretto.runtime.profiler import SETS, Bench, stage_segments

ROTATED_BYTES = 160 * 2**20  # past the second-level cache
MAX_SETS = 32
REPLAY_MS = 2.5
REPLAYS = 5
COMPILERS = 8
Wanted = tuple[str, Key, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class TuneOptions:
    model: str = "pi0.5"
    checkpoint: Path | None = None
    """Policies: tune the shapes of this one (its cameras, its chunk) instead of the preset's."""
    batches: tuple[int, ...] = (1,)
    prompt: int | None = None
    """Policies: real prompt tokens; every bucket by default, the longest first."""
    seconds: float = 120.0
    device: str = "auto"
    dtype: str = "auto"
    precision: str = "dtype"
    """Policies: tune the products of FP8 too, at the shapes that it runs."""
    out: Path | None = None
    worlds: tuple[Mapping[str, Any], ...] = ({},)
    """World models: changes to the configuration, such as `frames_per_chunk`; the shapes of each are tuned."""


def tune_model(options: TuneOptions, said: Callable[[Row], None] = lambda row: None) -> dict[str, Any]:
    """Time every choice at the shapes that a model runs, and write the table after each shape.

    `said` is given one row a shape as it is measured. Shapes for which no time was left are in `left`.

    Raises:
        ConfigError: if the model is unknown, or the file holds a table of another device or other versions.
        CheckpointError: if the checkpoint cannot be loaded.
    """
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    name = device_name(device)
    path = options.out or user_tables() / f"{name.lower().replace(' ', '-')}.json"
    table = table_at(path, name)
    end = time.monotonic() + options.seconds
    wanted = wanted_by(options, device, dtype)
    rows: list[Row] = []
    for row, entry in measured(wanted, device, end):
        rows.append(row)
        said(row)
        if entry is not None:
            table = table.merged(replace(table, entries=(entry,)))
            table.save(path)
    choices.cache_clear()
    return {"table": str(path), "device": name, "commit": commit(), "torch": table.torch, "triton": table.triton, "rows": rows}


def table_at(path: Path, device: str) -> Table:
    """Return the table of a file, or an empty one for this device and these versions."""
    here = Table(device, torch.__version__, _triton(), ())
    if not path.exists():
        return here
    there = load_table(path)
    for field in ("device", "torch", "triton"):
        if getattr(there, field) != getattr(here, field):
            hint = "Write to another file with --out, or remove this one."
            raise ConfigError(f"{path}: {field}", got=getattr(there, field), expected=getattr(here, field), hint=hint)
    return there


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def wanted_by(options: TuneOptions, device: torch.device, dtype: str) -> list[Wanted]:
    """Run every stage once at each batch size and prompt bucket; return the shapes that were asked for, in that order."""
    asked = choices(device).asked
    asked.clear()
    with torch.inference_mode():
        if options.model in NAMES:
            for changes in options.worlds:
                _run_world(config_of(options.model, dtype=dtype, **changes), device, options.batches)
        else:
            _run_policy(options, device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [place for place in asked if place[0] in tunables()]


def _run_policy(options: TuneOptions, device: torch.device, dtype: str) -> None:
    check_precision(options.precision, device, dtype)
    model: Any = build_policy(options.model, options.checkpoint, device, dtype)
    if options.precision != "dtype":
        use_fp8(model, calibrate_at_random(model, str(device), count=1))
    buckets = model.buckets[0]
    prompts = reversed(buckets.lengths) if options.prompt is None else (buckets.fit(options.prompt),)
    for prompt, batch in itertools.product(prompts, options.batches):
        bench = Bench(model, device, "eager", batch)
        bench.load(sized_inputs(model, batch, prompt))
        _run_stages(bench, {buckets.axis: prompt})


def _run_world(config: WanConfig, device: torch.device, batches: Sequence[int]) -> None:
    sample = RandomWorld(replace(config, blocks=min(SAMPLE, config.blocks)))
    model: Any = sample.on([str(device)]).first
    for batch in batches:
        bench = Bench(model, device, "eager", batch, chunk=-(-config.window_frames // config.frames_per_chunk))
        bench.load(model.example_inputs(SETS * batch))
        bench.fill(seed=batch)
        _run_stages(bench, {b.axis: b.lengths[-1] for b in model.buckets})


def _run_stages(bench: Bench, lengths: dict[str, int]) -> None:
    for segment, _ in stage_segments(bench.model).values():
        bench.segment(segment, lengths, warmup=0, n=1)


def measured(wanted: Sequence[Wanted], device: torch.device, end: float) -> Iterator[tuple[Row, Entry | None]]:
    """Yield a row, and the best choice as an entry, for each shape; what cannot be measured before `end` says so."""
    for op, key, dtype in wanted:
        row: Row = {"op": op, "key": key, "dtype": dtype}
        if time.monotonic() > end:
            yield row | {"left": "no time was left"}, None
            continue
        results = _race(tunables()[op], key, getattr(torch, dtype), device, end)
        rule_us = results.pop("rule", float("inf"))
        timed = {name: us for name, us in results.items() if isinstance(us, float)}
        row |= {"rule_us": rule_us, "choices": results}
        if not timed or not isinstance(rule_us, float):
            yield row | {"left": "it could not be timed"}, None
            continue
        best = min(timed, key=lambda name: timed[name])
        config = next(c for c in tunables()[op].candidates(key) if named(c) == best)
        yield row | {"best": best, "us": timed[best]}, Entry(op, key, dtype, config, timed[best], rule_us, commit())


def named(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _race(tunable: Tunable, key: Key, dtype: torch.dtype, device: torch.device, end: float) -> dict[str, Any]:
    """Return microseconds of the rule and of every choice by its name; a choice that fails has the text of its error."""
    first = tunable.inputs(key, dtype, device)
    try:
        wanted = tunable.run(None, *first)
    except Exception as e:  # an op that this device cannot run must not cost the others their figures
        return {"rule": _said(e)}
    runs = {"rule": partial(tunable.run, None)} | {named(c): partial(tunable.run, c) for c in tunable.candidates(key)}
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(COMPILERS if device.type == "cuda" else 1) as pool:
        tried = {name: pool.submit(_tried, run, first, wanted) for name, run in runs.items()}
        for name, error in tried.items():
            # Once more by itself: not every compiler is at ease with threads.
            if error.result() is not None and (text := _tried(runs[name], first, wanted)) is not None:
                results[name] = text
    sets = [first, *(tunable.inputs(key, dtype, device) for _ in range(_sets(first) - 1))]
    for name, run in runs.items():
        if name not in results:
            results[name] = "no time was left" if time.monotonic() > end else round(time_us(run, sets, device), 2)
    return results


def _tried(run: Callable[..., Any], inputs: tuple[Any, ...], wanted: Any) -> str | None:
    """Run once, which also compiles; return what is wrong with it, or None."""
    try:
        with torch.inference_mode():
            got = run(*inputs)
            for a, b in zip(_tensors(got), _tensors(wanted), strict=True):
                error = ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-6)).item()
                if not error < (8e-2 if b.dtype is torch.float8_e4m3fn else 2e-2):  # one code, or few bits of bf16
                    return f"wrong: off by {error:.3g} of the largest value"
    except Exception as e:  # one choice that does not compile must not cost the others their figures
        return _said(e)
    return None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for x in value if isinstance(x, Tensor)]


def _sets(inputs: tuple[Any, ...]) -> int:
    size = sum(x.nbytes for x in inputs if isinstance(x, Tensor))
    return min(MAX_SETS, max(2, ROTATED_BYTES // max(size, 1) + 1))


def time_us(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], device: torch.device) -> float:
    """Return the median time of one call going round sets of inputs; on CUDA inside a graph. Synchronises the device."""
    if device.type != "cuda":
        return _host_us(run, sets)
    with torch.inference_mode(), torch.cuda.device(device):
        graphs = Graphs(device)
        once = _replay_ms(graphs.capture_at_rest(partial(_go_round, run, sets, len(sets)))) / len(sets)
        calls = len(sets) * max(1, min(8, int(REPLAY_MS / max(once * len(sets), 1e-3))))
        graph = graphs.capture_at_rest(partial(_go_round, run, sets, calls))
        return statistics.median(_replay_ms(graph) for _ in range(REPLAYS)) * 1e3 / calls


def _go_round(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], calls: int) -> None:
    for i in range(calls):
        run(*sets[i % len(sets)])


def _host_us(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    samples = []
    for x in sets:
        begin = time.perf_counter()
        run(*x)
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
