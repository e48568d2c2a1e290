"""Which kernels a run launches, how long each takes, and how far that is from what the chip could do.

The run is traced eagerly. A kernel belongs to the fused op in whose call it was launched, else to the torch op, by the shapes
of that call. The floor of a call is the longer of its arithmetic at the chip's measured rate and of its bytes at that of its
memory; where neither is known from the shapes, there is none.
"""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from stretto.layers import cublas_lt
from stretto.layers.cuda.chain import ExpertChain
from stretto.layers.dispatch import FusedOp

BF16_FLOP_S, FP8_FLOP_S, BYTES_S = 790e12, 1400e12, 4.3e12  # measured on an H200; FP8 as assumed for the floors
MARK = "op:"
PRODUCTS = {
    *("dense", "linear_geglu", "linear_gelu", "linear_rope_write"),
    *("linear_add_layer_norm", "linear_add_rms_norm", "linear_add_ada_rms_norm"),
    *("linear_add_folded_norm", "folded_geglu", "folded_rope_write"),
    *(
        "product",
        "norm_qkv",
        "norm_geglu",
        "gated_linear",
        "enter_stream",
        "leave_stream",
        "fp8_linear_geglu",
        "fp8_linear_gelu",
    ),
}
ATTENTIONS = {"attention", "prefix_attention", "attention_fp8", "prefix_attention_fp8", "suffix_attention_fp8"}
HELPERS = ("Memset", "splitKreduce")
"""Launches of a product that are no product of their own."""
TORCH_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
"""Torch's products, and which of their arguments is the left matrix."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to do at least."""

    label: str
    flop: float = 0.0
    nbytes: float = 0.0
    coded: bool = False
    """In FP8."""

    @property
    def floor_us(self) -> float | None:
        """Return the least time, or None where the shapes do not tell."""
        least = max(self._arithmetic_s, self.nbytes / BYTES_S)
        return least * 1e6 if least else None

    @property
    def bound(self) -> str:
        """What the floor is of: arithmetic, which follows the clock, or memory."""
        return "arithmetic" if self._arithmetic_s > self.nbytes / BYTES_S else "memory"

    @property
    def _arithmetic_s(self) -> float:
        return self.flop / (FP8_FLOP_S if self.coded else BF16_FLOP_S)


def work_of(name: str, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> Work:
    """Return what a call of a fused op has to do."""
    first: Tensor = args[0]
    rows = first.numel() // first.shape[-1]
    if name in ATTENTIONS:
        batch, tokens, heads, width = first.shape
        suffix = named.get("k_suffix_BTKd")
        keys = args[1].shape[1] + (0 if suffix is None else suffix.shape[1])
        kv = 2 * batch * keys * args[1].shape[2] * width * args[1].element_size()
        label = f"{name} {batch}x{tokens} over {keys}, {heads}/{args[1].shape[2]} heads of {width}"
        return Work(label, 4.0 * batch * tokens * heads * keys * width, kv + 2 * first.nbytes)
    if name == "coded_prefix_attention":  # queries, keys and values side by side, all tokens over all
        batch, tokens, columns = first.shape
        heads = named["heads"]
        width = columns // (heads + 2)
        label = f"{name} {batch}x{tokens} over {tokens}, {heads}/1 heads of {width}"
        # Rotated and coded once, and read as codes; the arenas are written, what was attended is in codes too.
        nbytes = batch * tokens * width * (3.0 * (heads + 2) + 4.0 + (heads + 2) + heads)
        return Work(label, 4.0 * batch * tokens * heads * tokens * width, nbytes, True)
    if name == "prefix_stream":  # of the embedding only a line a token is read
        return Work(f"{name} {rows}x{first.shape[-1]}", 0.0, float(first.nbytes + result.nbytes))
    # A KV arena holds other rows too; what is written there is small beside what is read.
    tensors = [t for t in (*_tensors(args), *_tensors(tuple(named.values())), *_tensors(result)) if t.dim() < 4]
    nbytes = float(sum({t.data_ptr(): t.nbytes for t in tensors}.values()))
    if name in PRODUCTS:
        weight = next((t for t in args[1:] if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == first.shape[-1]), None)
        if weight is not None:
            n, k = weight.shape
            return Work(f"{name} {rows}x{n}x{k}", 2.0 * rows * n * k, nbytes, weight.element_size() == 1)
    return Work(f"{name} {rows}x{first.shape[-1]}", 0.0, nbytes)


def torch_work(name: str, dims: Sequence[Any], kinds: Sequence[str]) -> Work:
    """Return what a call of a torch op has to do, by the shapes and dtypes that a trace tells."""
    if name in TORCH_PRODUCTS and len(dims) > (at := TORCH_PRODUCTS[name]) + 1:
        (m, k), (_, n) = dims[at], dims[at + 1]
        coded = name == "aten::_scaled_mm"
        size = 1 if coded else 4 if at < len(kinds) and kinds[at] == "float" else 2
        nbytes = float(size * (m * k + k * n) + (2 if coded else size) * m * n)
        return Work(f"{name} {m}x{n}x{k}", 2.0 * m * n * k, nbytes, coded)
    return Work(f"{name} {'x'.join(map(str, next((d for d in dims if d), ())))}".strip())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


@contextmanager
def watched(calls: dict[str, Work]) -> Iterator[None]:
    """Mark every call of a fused op in the trace, of cuBLASLt outside of one, of the expert's chain; note what it has to do."""
    fused, product, chain = FusedOp.__call__, cublas_lt.matmul, ExpertChain.run
    depth = 0

    def noted(run: Callable[..., Any], work: Callable[[Any], Work], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        nonlocal depth
        if depth:  # a fused op's own calls are its own
            return run(*args, **named)
        mark = f"{MARK}{len(calls)}"
        depth += 1
        try:
            with torch.profiler.record_function(mark):
                result = run(*args, **named)
        finally:
            depth -= 1
        calls[mark] = work(result)
        return result

    def op(self: FusedOp[Any, Any], *args: Any, **named: Any) -> Any:
        return noted(partial(fused, self), lambda result: work_of(self.name, args, named, result), args, named)

    def lt(*args: Any, **named: Any) -> Any:
        return noted(product, lambda result: work_of("product", args, named, result), args, named)

    def chained(self: ExpertChain, stream: Any, weights: Any, lines: Any, keys: Any, **named: Any) -> Any:
        coded = named.get("coded")
        read = weights if coded is None else coded.weights
        work = chain_work(stream.residual_BTD, read, keys.mask_BP.shape[1])
        return noted(partial(chain, self), lambda _: work, (stream, weights, lines, keys), named)

    lent = patch.object(cublas_lt, "matmul", lt), patch.object(ExpertChain, "run", chained)
    with patch.object(FusedOp, "__call__", op), lent[0], lent[1]:
        yield


def chain_work(residual_BTD: Tensor, weights: Sequence[Sequence[Tensor]], prefix: int) -> Work:
    """Return what a chain of an expert's layers has to do; its kernels overlap, so that their times add up to more."""
    rows = residual_BTD.numel() // residual_BTD.shape[-1]
    inner = weights[0][1].shape[1]
    products = sum(w.numel() for layer in weights for w in layer)
    attended = len(weights) * inner * (prefix + residual_BTD.shape[1])
    kept = 4 * residual_BTD.shape[0] * prefix * len(weights) * (weights[0][0].shape[0] - inner) // 2
    read = weights[0][0].itemsize * products + kept
    return Work(f"expert chain, {len(weights)} layers, {rows} rows", rows * (2.0 * products + 4.0 * attended), read)


class _Spans:
    """Host time ranges that nest; finds the outermost or innermost round a moment."""

    def __init__(self, spans: Sequence[dict[str, Any]]) -> None:
        self.spans = sorted(spans, key=lambda e: e["ts"])
        self.begins = [e["ts"] for e in self.spans]

    def innermost(self, ts: float, back: int = 64) -> dict[str, Any] | None:
        end = bisect_right(self.begins, ts)
        for span in reversed(self.spans[max(0, end - back) : end]):
            if span["ts"] + span["dur"] >= ts:
                return span
        return None


def by_call(events: Sequence[dict[str, Any]], calls: Mapping[str, Work]) -> list[tuple[Work, str, float]]:
    """Return (what it works on, kernel, microseconds) of every kernel of a trace, in the trace's order."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            kinds.setdefault(event.get("cat", ""), []).append(event)
    launched = {
        e["args"]["correlation"]: e["ts"]
        for cat in ("cuda_runtime", "cuda_driver")
        for e in kinds.get(cat, ())
        if "correlation" in e.get("args", {})
    }
    marks = _Spans([e for e in kinds.get("user_annotation", ()) if e["name"].startswith(MARK)])
    ops = _Spans(kinds.get("cpu_op", ()))
    found = []
    for kernel in (e for cat in ("kernel", "gpu_memcpy", "gpu_memset") for e in kinds.get(cat, ())):
        ts = launched.get(kernel.get("args", {}).get("correlation"), math.inf)
        mark, op = marks.innermost(ts), ops.innermost(ts)
        if mark is not None and mark["name"] in calls:
            work = calls[mark["name"]]
        elif op is not None:
            work = torch_work(op["name"], op["args"].get("Input Dims", ()), op["args"].get("Input type", ()))
        else:
            work = Work(kernel["name"][:80])
        found.append((work, kernel["name"][:80], float(kernel["dur"])))
    return found


def top(found: Sequence[tuple[Work, str, float]], calls: Mapping[str, Work], most: int) -> dict[str, Any]:
    """Sum a trace up: the calls that take most, with their floors, and everything together."""
    floors: dict[str, float | None] = {}  # of all calls of a name together: they may have more or less to read
    for work in calls.values():
        before, more = floors.get(work.label, 0.0), work.floor_us
        floors[work.label] = None if before is None or more is None else before + more
    rows: dict[str, dict[str, Any]] = {}
    for work, kernel, us in found:
        row = rows.setdefault(work.label, {"us": 0.0, "launches": 0, "products": 0, "kernels": {}, "work": work})
        row["us"] += us
        row["launches"] += 1
        row["products"] += not any(name in kernel for name in HELPERS)
        row["kernels"][kernel] = row["kernels"].get(kernel, 0.0) + us
    shown = []
    for label, row in sorted(rows.items(), key=lambda r: -r[1]["us"])[:most]:
        one = row["work"].floor_us
        # A torch op is one kernel, as far as products go.
        floor = floors[label] if label in floors else None if one is None else one * row["products"]
        kernels = {name: round(us, 1) for name, us in sorted(row["kernels"].items(), key=lambda k: -k[1])[:3]}
        shown.append(
            {
                "call": label,
                "us": round(row["us"], 1),
                "launches": row["launches"],
                "floor_us": None if floor is None else round(floor, 1),
                "bound": row["work"].bound,
                "over_floor_us": None if floor is None else round(row["us"] - floor, 1),
                "kernels": kernels,
            }
        )
    return {"kernel_us": round(sum(us for *_, us in found), 1), "launches": len(found), "calls": shown}


def profiled(run: Callable[[], object], most: int = 8) -> dict[str, Any]:
    """Trace one run, after one that is not traced. Synchronises the device."""
    run()
    calls: dict[str, Work] = {}
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with watched(calls), torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return top(by_call(events, calls), calls, most)
