"""Products and kernels of FP8 by themselves, at the shapes of pi0.5; parts of fp8.py.

Inputs and weights go round sets that are together larger than any cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.deploy.tune import measured, table_at
from stretto.layers.kernels.activation import geglu
from stretto.layers.kernels.fp8_activation import E4M3, geglu_fp8, gelu_tanh_fp8, to_fp8
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.rms_norm import sum_rms_norm
from stretto.layers.tuning import device_name

if TYPE_CHECKING:
    from fp8 import Report

ROTATED_BYTES = 150e6
VISION = {"qkv": (3456, 1152), "out": (1152, 1152), "up": (4304, 1152), "down": (1152, 4304)}
PREFIX = {"qkv": (2560, 2048), "out": (2048, 2048), "gate_up": (32768, 2048), "down": (2048, 16384)}
EXPERT = {"qkv": (2560, 1024), "out": (1024, 2048), "gate_up": (8192, 1024), "down": (1024, 4096)}
PRODUCTS = (
    ("prefix", PREFIX, (968, 3872, 7744, 30976)),
    ("expert", EXPERT, (50, 200, 400, 1600)),
    ("vision", VISION, (768, 3072, 24576)),
)


def timed(calls: list[Callable[[], object]], device: str) -> float:
    """Return microseconds a call, the calls in turn; replayed from one graph on a GPU."""
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls) * 1e6
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return spans[len(spans) // 2] * 1e3 / len(calls)


def product_calls(way: str, m: int, n: int, k: int, device: str, copies: int) -> Iterator[Callable[[], object]]:
    """Yield products over different weights and inputs, together larger than any cache."""
    one = torch.ones((), device=device)
    for i in range(copies):
        generator = torch.Generator(device).manual_seed(i)
        x_MK = torch.randn(m, k, device=device, generator=generator, dtype=torch.bfloat16)
        w_NK = torch.randn(n, k, device=device, generator=generator, dtype=torch.bfloat16)
        if way == "bf16":
            yield partial(torch.nn.functional.linear, x_MK, w_NK)
            continue
        a, b = x_MK.mul_(60).clamp_(-448, 448).to(E4M3), w_NK.mul_(60).clamp_(-448, 448).to(E4M3)
        rows = way.endswith("rowwise")
        sa = torch.rand(m, 1, device=device) if rows else one
        sb = torch.rand(1, n, device=device) if rows else one
        fast = not way.endswith("exact sums")
        yield partial(torch._scaled_mm, a, b.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=fast)


def gemms(report: Report, device: str, small: bool) -> None:
    for part, shapes, rows in PRODUCTS:
        for m in rows[:1] if small else rows:
            for field, (n, k) in shapes.items():
                n, k = (n // 16, k // 16) if small else (n, k)
                head = {"product": f"{part}.{field}", "m": m, "n": n, "k": k}
                report.attempt("gemms", head, partial(product_row, m, n, k, device, 2 if small else 48), 2.0)


def product_row(m: int, n: int, k: int, device: str, most: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for way in ("bf16", "fp8", "fp8 rowwise", "fp8 exact sums"):
        each = (m * k + n * k) * (2 if way == "bf16" else 1) + 2 * m * n
        try:
            us = timed(list(product_calls(way, m, n, k, device, max(2, min(most, int(ROTATED_BYTES / each) + 1)))), device)
            row[way] = {"us": round(us, 2), "tflop_s": round(2 * m * n * k / us / 1e6, 1)}
        except RuntimeError as error:  # a way that a shape or a version does not take; the others are still of use
            row[way] = str(error)[:120]
    return row


def choices(report: Report, device: str, small: bool, path: Path | None) -> None:
    """Time every way of the products whose result is coded, and write the table of the fastest."""
    where = torch.device(device)
    shapes = [("fp8_linear_geglu", (m, 2048, 16384)) for m in (968, 3872, 30976)]
    shapes += [("fp8_linear_gelu", (m, 1152, 4304)) for m in (768, 3072, 24576)] + [("fp8_linear_geglu", (1600, 1024, 4096))]
    shapes = [("fp8_linear_geglu", (8, 64, 64)), ("fp8_linear_gelu", (8, 64, 64))] if small else shapes
    end = report.begun + report.budget_s
    table = table_at(path, device_name(where)) if path is not None else None
    for row, entry in measured([(op, key, "float8_e4m3fn") for op, key in shapes], where, end):
        report.add("choices", dict(row))
        if entry is not None and table is not None and path is not None:
            table = table.merged(replace(table, entries=(entry,)))
            table.save(path)


def kernels(report: Report, device: str, small: bool) -> None:
    """Time what writes e4m3, beside its bf16 counterpart."""
    one = torch.full((1,), 40.0, device=device)
    for m in (8,) if small else (50, 968, 30976):

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
            copies = max(2, min(24, int(ROTATED_BYTES / (np.prod(shape) * 2)) + 1))
            return [torch.randn(*shape, device=device, dtype=dtype) for _ in range(copies)]

        d, f = (64, 128) if small else (2048, 16384)
        w = torch.randn(d, device=device)
        xs, rs, gs = make(m, d), make(m, d, dtype=torch.float32), make(m, 2 * f)
        pairs = list(zip(xs, rs, strict=False))
        cases: dict[str, list[Callable[[], object]]] = {
            "sum_rms_norm": [partial(sum_rms_norm, r, (x,), w, 1e-6) for x, r in pairs],
            "sum_rms_norm in e4m3": [partial(sum_rms_norm, r, (x,), w, 1e-6, multiplier=one) for x, r in pairs],
            "sum_layer_norm in e4m3": [partial(sum_layer_norm, r, (x,), w, w, 1e-6, multiplier=one) for x, r in pairs],
            "geglu": [partial(geglu, g) for g in gs],
            "geglu_fp8": [partial(geglu_fp8, g, one) for g in gs],
            "gelu_tanh_fp8": [partial(gelu_tanh_fp8, g, one) for g in gs],
            "to_fp8": [partial(to_fp8, x, one) for x in xs],
        }
        for name, calls in cases.items():
            report.attempt("kernels", {"op": name, "rows": m}, lambda c=calls: {"us": round(timed(c, device), 2)}, 1.0)
