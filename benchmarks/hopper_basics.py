"""What this GPU gives, before anything is optimised: products, attention, launch gaps, two streams side by side.

    python benchmarks/hopper_basics.py --out benchmarks/results/hopper_basics_h200.json

Products (`gemm`): cuBLAS in bf16 and `_scaled_mm` in e4m3 at the shapes of pi0.5, weights rotated through more memory than
the L2 holds. Attention (`sdpa`): torch's backends at the shapes of SigLIP, the prefix, the expert and Wan. Launch gaps
(`gap`): chains of a small kernel in a graph, with and without programmatic dependent launch. Two streams (`streams`): a chain
of memory-bound products beside compute-bound ones, alone and together. Inputs are random numbers. Times are the median
of graph replays. A case that fails is a row with its error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stretto.deploy.provenance import provenance

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PRODUCTS = {  # name: (K, N), the linear layers of pi0.5
    "expert.qkv": (1024, 2560), "expert.out": (2048, 1024), "expert.gate_up": (1024, 8192), "expert.down": (4096, 1024),
    "prefix.qkv": (2048, 2560), "prefix.out": (2048, 2048), "prefix.gate_up": (2048, 32768), "prefix.down": (16384, 2048),
    "vision.qkv": (1152, 3456), "vision.out": (1152, 1152), "vision.fc1": (1152, 4304), "vision.fc1_padded": (1152, 4352),
    "vision.fc2": (4304, 1152), "vision.fc2_padded": (4352, 1152),
}  # fmt: skip
ROWS = {"expert": (50, 200, 400, 1600), "prefix": (968, 3872, 7744, 30976), "vision": (768, 3072, 6144, 24576)}
ATTENTION = {  # name: (batch, query heads, key heads, queries, keys, head size)
    "siglip.1": (3, 16, 16, 256, 256, 72), "siglip.32": (96, 16, 16, 256, 256, 72),
    "prefix.1": (1, 8, 1, 968, 968, 256), "prefix.32": (32, 8, 1, 968, 968, 256),
    "expert.1": (1, 8, 1, 50, 1018, 256), "expert.32": (32, 8, 1, 50, 1018, 256),
    "wan1.3b.1": (1, 12, 12, 1560, 32760, 128), "wan1.3b.3": (1, 12, 12, 4680, 32760, 128),
    "wan14b.1": (1, 40, 40, 1560, 32760, 128), "wan5b.1": (1, 24, 24, 880, 18480, 128),
    "wan1.3b.1 half of the keys": (1, 12, 12, 1560, 16380, 128),
}  # fmt: skip
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(run: Callable[[], object], calls: int, replays: int = 12) -> float:
    """Return microseconds a call of a run that makes `calls` of them."""
    graph, times = captured(run), []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return round(statistics.median(times[2:]), 3)


def products(weights: list[Tensor], x: list[Tensor]) -> dict[str, Callable[[], None]]:
    """Return one run a precision: every weight once, in turn."""
    small, x8 = [w.to(FP8) for w in weights], [one.to(FP8) for one in x]
    unit, columns = torch.ones((), device="cuda"), torch.ones(1, weights[0].shape[0], device="cuda")
    lines = torch.ones(x[0].shape[0], 1, device="cuda")

    def bf16() -> None:
        for i, w in enumerate(weights):
            torch.nn.functional.linear(x[i % len(x)], w)

    def scaled(row_scale: Tensor, column_scale: Tensor) -> None:
        for i, w in enumerate(small):
            torch._scaled_mm(x8[i % len(x8)], w.t(), row_scale, column_scale, out_dtype=BF16, use_fast_accum=True)

    return {"bf16": bf16, "fp8": partial(scaled, unit, unit), "fp8_rowwise": partial(scaled, lines, columns)}


def gemm() -> Iterator[dict[str, Any]]:
    for name, (k, n) in PRODUCTS.items():
        sets = max(2, min(24, -(-160 * 2**20 // (k * n * 2))))
        weights = [torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5 for _ in range(sets)]
        for m in ROWS[name.split(".")[0]]:
            row: dict[str, Any] = {"case": name, "m": m, "k": k, "n": n}
            x = [torch.randn(m, k, device="cuda", dtype=BF16) for _ in range(min(sets, 3))]
            for kind, run in products(weights, x).items():
                try:
                    us = replay_us(run, sets, 8)
                    row |= {f"{kind}_us": us, f"{kind}_tflop_s": round(2 * m * n * k / us / 1e6, 1)}
                except Exception as e:  # one case must not cost the others their figures
                    row[f"{kind}_error"] = str(e).splitlines()[0][:160]
            yield row


def sdpa() -> Iterator[dict[str, Any]]:
    for name, (batch, heads, kv_heads, queries, keys, d) in ATTENTION.items():
        q = torch.randn(batch, queries, heads, d, device="cuda", dtype=BF16).transpose(1, 2)
        k, v = (torch.randn(batch, keys, kv_heads, d, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(2))
        row: dict[str, Any] = {"case": name, "shape": (batch, heads, kv_heads, queries, keys, d)}
        for backend, which in BACKENDS.items():

            def run(which: SDPBackend = which, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                with sdpa_kernel(which):
                    for _ in range(4):
                        scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

            try:
                us = replay_us(run, 4, 8)
                row |= {f"{backend}_us": us, f"{backend}_tflop_s": round(4 * batch * heads * queries * keys * d / us / 1e6, 1)}
            except Exception as e:
                row[f"{backend}_error"] = str(e).splitlines()[0][:160]
        yield row


@triton.jit
def _step(x, y, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) * 0.5 + 1.0)


def gap() -> Iterator[dict[str, Any]]:
    a, b = (torch.randn(132 * 256, device="cuda") for _ in range(2))
    for dependent in (False, True):

        def run(dependent: bool = dependent) -> None:
            for i in range(100):
                source, target = (a, b) if i % 2 == 0 else (b, a)
                _step[(132,)](source, target, BLOCK=256, DEPENDENT=dependent, launch_pdl=dependent)

        row: dict[str, Any] = {"case": "chain of 100 small kernels", "programmatic": dependent}
        try:
            a.normal_()
            run()
            torch.cuda.synchronize()
            row["us_a_kernel"] = replay_us(run, 100)
            a.fill_(3.0)
            captured(run).replay()
            torch.cuda.synchronize()
            row["right"] = bool((a - 2.0).abs().max() < 1e-5)
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
        yield row


def streams() -> Iterator[dict[str, Any]]:
    narrow = [torch.randn(8192, 1024, device="cuda", dtype=BF16) for _ in range(12)]
    wide = [torch.randn(32768, 2048, device="cuda", dtype=BF16) for _ in range(2)]
    x, y = torch.randn(50, 1024, device="cuda", dtype=BF16), torch.randn(968, 2048, device="cuda", dtype=BF16)

    def small() -> None:
        for i in range(180):
            torch.nn.functional.linear(x, narrow[i % 12])

    def large() -> None:
        for i in range(8):
            torch.nn.functional.linear(y, wide[i % 2])

    graphs = captured(small), captured(large)
    side = [torch.cuda.Stream() for _ in range(2)]

    def both() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for stream, graph in zip(side, graphs, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    alone = [replay_us(small, 1), replay_us(large, 1)]
    together = statistics.median([both() for _ in range(12)])
    yield {"case": "180 expert products beside 8 prefix products", "alone_us": alone, "together_us": round(together, 1)}


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"gap": gap, "streams": streams, "sdpa": sdpa, "gemm": gemm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = provenance(torch.device("cuda"))
    with torch.inference_mode():
        for part in args.parts:
            rows = result[part] = []
            for row in PARTS[part]():
                rows.append(row)
                print(json.dumps(row), flush=True)
                args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
