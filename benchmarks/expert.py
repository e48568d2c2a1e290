"""The denoise loop of pi0.5's expert at true shape: kernels against their references, choices timed, the whole loop in a graph.

    python benchmarks/expert.py --out expert.json [--batch 1,4,8,32] [--seconds 90] [--small] [--skip-tune]

For each batch size: `check` rows compare every kernel with its reference; `loop` rows time ten denoise steps in one CUDA graph
with the plain layers and with the streamed ones, launches overlapped or not; `tune` rows time each choice at the loops'
shapes, over more weights than the second-level cache holds, and write a kernel table beside --out; then the loops run again
with that table. `profile` rows say what each kernel takes by itself. A case that fails is a row with its error. JSON is
written after every row.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.deploy import tune
from stretto.deploy.provenance import provenance
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.gated_linear import gated_linear
from stretto.layers.kernels.norm_linear import norm_geglu, norm_qkv
from stretto.layers.kernels.stream import Stream, open_stream
from stretto.layers.kernels.stream_ends import enter_stream, leave_stream
from stretto.layers.tuning import Table, choices, device_name, load_table
from stretto.models import pi0
from stretto.models.pi0_config import GemmaDims, Pi0Config, VisionDims
from stretto.models.pi0_net import Pi0Net, PrefixKV

# Most rows that are streamed, and whether launches overlap.
PATHS = {
    "plain layers": (0, "0"),
    "plain layers, overlapped": (0, "1"),
    "streamed, not overlapped": (10**6, "0"),
    "streamed": (10**6, "1"),
}
FEW = 16
"""Batches up to here are streamed; larger ones run the plain layers."""
# Enough sets of weights to leave the second-level cache behind.
tune.MAX_SETS = 40


class Report:
    """Rows as they come, printed and on disk."""

    def __init__(self, out: Path, device: torch.device) -> None:
        self.out, self.data = out, {**provenance(device), "rows": []}

    def add(self, **row: Any) -> None:
        self.data["rows"].append(row)
        print(json.dumps(row), flush=True)
        self.out.write_text(json.dumps(self.data, indent=1) + "\n")

    def attempt(self, work: Callable[[], Mapping[str, Any]], **row: Any) -> None:
        begin = time.monotonic()
        try:
            row |= work()
        except Exception as e:  # one failing case must not hide the others
            row["error"] = f"{type(e).__name__}: {e}"[:600]
        self.add(**row, seconds=round(time.monotonic() - begin, 1))


def config_of(small: bool) -> Pi0Config:
    """Return pi0.5 with a true expert; what is not run here is kept small."""
    if small:
        return replace(
            pi0.tiny()[0].config,
            language=GemmaDims(32, 2, 64, 2, 1, 32),
            expert=GemmaDims(64, 2, 64, 2, 1, 32),
            denoise_steps=2,
        )
    full = pi0.SPECS["pi05"]
    return replace(full, vision=VisionDims(depth=1), language=replace(full.language, mlp=64), vocab_size=64)


def prefix_of(config: Pi0Config, batch: int, device: torch.device, dtype: torch.dtype) -> PrefixKV:
    """Random keys and values in shuffled slots; prompts of half to full length, one camera absent in every other row."""
    g = torch.Generator().manual_seed(batch)
    d, tokens = config.language, config.prefix_tokens
    shape = (batch + 1, d.depth, tokens, d.kv_heads, d.head_dim)
    on_device = torch.Generator(device).manual_seed(batch)
    k, v = (torch.randn(shape, device=device, generator=on_device).to(dtype) for _ in range(2))
    longest = config.tokenizer_max_length
    length = config.image_tokens + torch.randint(longest // 2, longest + 1, (batch,), generator=g)
    length[0] = tokens
    mask = torch.arange(tokens) < length[:, None]
    mask[1::2, : config.tokens_per_camera] = False
    slots = torch.randperm(batch, generator=g) + 1
    start = mask.sum(-1, dtype=torch.int32)
    return PrefixKV(k, v, slots.to(device), mask.to(device), length.int().to(device), start.to(device))


def head(prefix: PrefixKV, rows: int) -> PrefixKV:
    first = (x[:rows] for x in (prefix.slots_B, prefix.mask_BP, prefix.length_B, prefix.suffix_start_B))
    return PrefixKV(prefix.k_SNPKd, prefix.v_SNPKd, *first)


def error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Return the largest difference over the largest value, worst over outputs."""
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in zip(got, want, strict=True))


def kernel_checks(net: Pi0Net, batch: int, kind: str) -> dict[str, float]:
    """Compare every kernel with its reference on the layer's true weights and shapes."""
    c, block, dtype = net.config, net.expert.blocks[0], net.dtype
    dims, device, eps = c.expert, net.table.device, c.norm_eps
    steps = (batch, c.action_horizon) if kind == "token" else (batch,)
    rows = torch.randint(c.denoise_steps + 1, steps, device=device)
    first, second = (Modulation(net.table[:, i], rows) for i in (2, 3))
    residual = torch.randn(batch, c.action_horizon, dims.width, device=device)
    stream = open_stream.reference(residual, first, dtype)
    # Any sum of parts will do: kernels read as many as there are.
    read, starts = (stream.scaled_BRD, stream.squares_MP), torch.full((batch,), 800, dtype=torch.int32, device=device)
    attended = torch.randn(batch, c.action_horizon, dims.heads * dims.head_dim, device=device).to(dtype)
    add = attended, block.out.weight, residual, first, second, dtype
    last = open_stream.reference(residual, second, torch.float32)[1:]
    x = torch.randn(batch, c.action_horizon, c.action_dim, device=device)
    shape = {**block.rotary, "eps": eps}

    def both(op: FusedOp[Any, Any], *args: Any, **named: Any) -> float:
        return error(*(whole(run(*args, **named)) for run in (op.kernel, op.reference)))

    return {
        "open_stream": both(open_stream, residual, first, dtype),
        "norm_qkv": both(norm_qkv, *read, block.qkv.weight, first, starts, **shape),
        "gated_linear": both(gated_linear, *add),
        "norm_geglu": both(norm_geglu, *read, block.gate_up.weight, first, eps),
        "enter_stream": both(enter_stream, x, net.action_in.weight, net.action_in.bias, first, dtype),
        "leave_stream": both(leave_stream, *last, second, net.action_out.weight, net.action_out.bias, eps),
    }


def whole(value: Any) -> tuple[Tensor, ...]:
    """Return all outputs, of a stream with its sums of squares added up: kernels leave as many parts as they have tiles."""
    return (*value[:2], value[2].sum(-1)) if isinstance(value, Stream) else (value,)


def denoise(net: Pi0Net, x_BHA: Tensor, prefix: PrefixKV) -> Tensor:
    steps = torch.arange(net.config.denoise_steps, device=x_BHA.device)[:, None].expand(-1, x_BHA.shape[0]).contiguous()
    for step_B in steps:
        x_BHA = x_BHA - net.velocity(x_BHA, net.tabled(step_B), prefix) / net.config.denoise_steps
    return x_BHA


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def replayed_ms(graph: torch.cuda.CUDAGraph, replays: int = 25) -> dict[str, float]:
    times = []
    for _ in range(replays + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    kept = sorted(times[3:])
    return {"ms": round(statistics.median(kept), 3), "min_ms": round(kept[0], 3), "max_ms": round(kept[-1], 3)}


def loop(net: Pi0Net, batch: int, path: str, kept: dict[tuple[int, str], Tensor]) -> dict[str, Any]:
    """Time the loop on one path; compare graph with eager, replay with replay, and the result with the plain layers'."""
    rows, overlap = PATHS[path]
    os.environ["STRETTO_OVERLAP"] = overlap
    net.expert.few_rows = rows
    c, device = net.config, net.table.device
    prefix = prefix_of(c, batch, device, net.dtype)
    x = torch.randn(batch, c.action_horizon, c.action_dim, generator=torch.Generator().manual_seed(1)).to(device)
    eager = denoise(net, x, prefix)
    alone = denoise(net, x[:1], head(prefix, 1))
    kept[batch, path] = eager
    plain = kept.get((batch, "plain layers"), eager)
    result = {
        "against_plain_max_abs": (eager - plain).abs().max().item(),
        "against_plain_cosine": torch.cosine_similarity((eager - x).flatten(1), (plain - x).flatten(1)).min().item(),
        "row_alone_max_abs": (eager[:1] - alone).abs().max().item(),
        "finite": bool(eager.isfinite().all()),
    }
    if device.type != "cuda":
        return result
    graph, out = captured(lambda: denoise(net, x, prefix))
    graph.replay()
    first = out.clone()
    result |= replayed_ms(graph)
    return result | {"graph_equals_eager": torch.equal(first, eager), "replays_equal": torch.equal(first, out)}


def compile_all(net: Pi0Net, batches: list[int]) -> dict[str, Any]:
    """Run one step at each batch size, in threads, so that the kernels of all are compiled at once."""
    os.environ["STRETTO_OVERLAP"] = "1"

    def one(batch: int) -> str | None:
        c, device = net.config, net.table.device
        try:
            with torch.inference_mode():
                x = torch.randn(batch, c.action_horizon, c.action_dim, device=device)
                first_step = torch.zeros(batch, dtype=torch.int64, device=device)
                net.velocity(x, net.tabled(first_step), prefix_of(c, batch, device, net.dtype))
        except Exception as e:  # the loops say it again, one by one
            return f"{type(e).__name__}: {e}"[:300]
        return None

    errors: dict[str, Any] = {}
    for rows, some in ((10**6, [b for b in batches if b <= FEW]), (0, batches)):
        net.expert.few_rows = rows
        with ThreadPoolExecutor(len(batches) if net.table.is_cuda else 1) as pool:
            errors |= {f"{b}, few rows {rows}": e for b, e in zip(some, pool.map(one, some), strict=True) if e}
    return errors


def profile(net: Pi0Net, batch: int, path: str) -> dict[str, Any]:
    """Return how often each kernel runs in a denoise step, and its microseconds by itself."""
    rows, os.environ["STRETTO_OVERLAP"] = PATHS[path]
    net.expert.few_rows = rows
    c, device = net.config, net.table.device
    prefix = prefix_of(c, batch, device, net.dtype)
    x = torch.randn(batch, c.action_horizon, c.action_dim, device=device)
    denoise(net, x, prefix)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        denoise(net, x, prefix)
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    steps = c.denoise_steps
    return {
        "kernels": [
            [e.key[:48], e.count / steps, round(e.device_time_total / e.count, 2), round(e.device_time_total / steps, 1)]
            for e in events[:14]
        ],
        "us_a_step": round(sum(e.device_time_total for e in events) / steps, 1),
    }


def tuned_rows(device: torch.device, wanted: list[Any], end: float, path: Path) -> Iterator[dict[str, Any]]:
    """Time the choices at each shape; add the best to the table."""
    os.environ["STRETTO_OVERLAP"] = "1"
    for row, entry in tune.measured(wanted, device, end):
        yield {"kind": "tune", **row}
        if entry is not None:
            table = tune.table_at(path, device_name(device))
            table.merged(replace(table, entries=(entry,))).save(path)


def shapes(config: Pi0Config, batches: list[int]) -> list[Any]:
    """Return what to tune, what counts most first."""
    d, h = config.expert, config.action_horizon
    dtype = "bfloat16"
    inner = d.heads * d.head_dim

    def attention(b: int) -> Any:
        return "suffix_attention", (b, h, d.heads, d.head_dim, d.kv_heads, config.prefix_tokens, h), dtype

    def products(b: int) -> list[Any]:
        qkv, up = (b, h, d.width, d.heads, d.kv_heads, d.head_dim), (b, h, d.width, d.mlp)
        both = [("gated_linear", (b * h, d.width, n), dtype) for n in (inner, d.mlp)]
        return [("norm_geglu", up, dtype), *both, ("norm_qkv", qkv, dtype)]

    few = [b for b in batches if b <= FEW]
    wanted = [x for b in few[:1] for x in (attention(b), *products(b))]
    wanted += [attention(b) for b in batches if b not in few[:1]]
    return wanted + [x for b in few[1:] for x in products(b)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default="1,4,8,32")
    parser.add_argument("--seconds", type=float, default=90.0, help="for everything; choices are timed in three quarters of it")
    parser.add_argument("--small", action="store_true", help="tiny dimensions; on the CPU, where kernels are interpreted")
    parser.add_argument("--skip-tune", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + 0.75 * options.seconds
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = pi0.build(config_of(options.small), device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.randomize(seed=0)
    net, report, batches = model.module, Report(options.out, device), [int(b) for b in options.batch.split(",")]
    table = options.out.with_suffix(".table.json")
    Table(device_name(device), torch.__version__, tune._triton(), ()).save(table)
    kept: dict[tuple[int, str], Tensor] = {}

    def loops(paths: Mapping[int, list[str]], table: bool) -> None:
        for batch, names in paths.items():
            for path in names:
                report.attempt(lambda b=batch, p=path: loop(net, b, p, kept), kind="loop", batch=batch, path=path, table=table)

    plain, overlapped, _, streamed = PATHS
    with torch.inference_mode():
        report.attempt(lambda: compile_all(net, batches), kind="compile")
        for batch in batches[:2]:
            for kind in ("row", "token") if batch == batches[0] else ("row",):
                report.attempt(lambda b=batch, k=kind: kernel_checks(net, b, k), kind="check", batch=batch, lines=kind)
        loops({b: [plain, streamed] if b <= FEW else [plain] for b in batches}, table=False)
        if not options.skip_tune:
            for row in tuned_rows(device, shapes(net.config, batches), end, table):
                report.add(**row)
            os.environ["STRETTO_KERNEL_TABLE"] = str(table)
            choices.cache_clear()
            loops(
                {b: list(PATHS) if b == 1 else [overlapped, streamed] if b <= FEW else [plain, overlapped] for b in batches},
                True,
            )
        for batch, path in ((1, streamed), (4, streamed), (8, plain), (32, plain)) if device.type == "cuda" else ():
            report.attempt(lambda b=batch, p=path: profile(net, b, p), kind="profile", batch=batch, path=path)
    report.add(kind="table", entries=len(load_table(table).entries), path=str(table))


if __name__ == "__main__":
    main()
