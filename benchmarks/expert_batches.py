"""Ten denoise steps of pi0.5's expert for batches of robots, by turns: in CUDA C++ and without, bf16 and FP8.

    python benchmarks/expert_batches.py --out expert_batches.json [--batch 4,8,32,2,16,3] [--rules] [--profile] [--small]

Every second loop runs without kernels in CUDA C++, and in FP8 with whole norms in e4m3, as a batch did before. A loop's result
is compared with that of plain torch operations in fp32 sums, its first row with the same row alone, its graph with eager.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from expert import Report, captured, config_of, denoise, head, prefix_of
from torch import Tensor

from stretto.layers.cuda import added, gated, rope, suffix
from stretto.layers.fp8 import Fp8Linear, ObservedLinear, Reader
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.tuning import choices
from stretto.models import pi0
from stretto.models.pi0_fp8 import Fp8Net
from stretto.models.pi0_net import Pi0Net


def tiling(m: int, n: int, k: int, stages: int, warps: int, **more: int) -> dict[str, int | str]:
    blocks = {"block_m": m, "block_n": n, "block_k": k, "stages": stages, "warps": warps}
    return {"impl": "triton", **blocks, "group": 8, "persistent": 0, **more}


def splitting(m: int, n: int, splits: int, warps: int, stages: int) -> dict[str, int | str]:
    return {"block_m": m, "block_n": n, "splits": splits, "warps": warps, "stages": stages, "described": 1}


BF16 = "bfloat16"
BEFORE = {
    ("folded_geglu", (200, 1024, 4096), BF16): {"impl": "cublas"},
    ("folded_geglu", (400, 1024, 4096), BF16): {"impl": "lt", "algo": 4},
    ("folded_geglu", (1600, 1024, 4096), BF16): {"impl": "lt", "algo": 2},
    ("folded_rope_write", (200, 1024, 8, 1, 256), BF16): tiling(64, 64, 64, 5, 4),
    ("folded_rope_write", (400, 1024, 8, 1, 256), BF16): {"impl": "lt", "algo": 1},
    ("linear_add_folded_norm", (200, 2048, 1024), BF16): tiling(64, 128, 64, 4, 4, splits=4),
    ("linear_add_folded_norm", (200, 4096, 1024), BF16): tiling(128, 128, 64, 3, 8, splits=8),
    ("linear_add_folded_norm", (400, 4096, 1024), BF16): {"impl": "cublas"},
    ("suffix_attention", (4, 50, 8, 256, 1, 968, 50), BF16): splitting(128, 64, 8, 8, 2),
    ("suffix_attention", (8, 50, 8, 256, 1, 968, 50), BF16): splitting(128, 32, 4, 8, 3),
    ("suffix_attention", (32, 50, 8, 256, 1, 968, 50), BF16): {"impl": "hopper", "block_n": 64, "stages": 2, "splits": 1},
}
"""Measured choices among the kernels that are not in CUDA C++."""


def fp8_nets(net: Pi0Net, x_BHA: Tensor, prefix: PrefixKV) -> dict[str, Fp8Net]:
    """Return the net with its expert in FP8, with folded norms and with calibrated ones, on scales of one run."""
    noted: dict[str, ObservedLinear] = {}

    def note(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        noted[name] = layer = ObservedLinear(name, weight_NK, bias_N)
        return layer

    def make(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        return Fp8Linear(name, weight_NK, bias_N, float(noted[name].largest)) if name.startswith("expert") else noted[name]

    denoise(Fp8Net(net, note, expert_rows=0), x_BHA, prefix)  # type: ignore[arg-type]
    return {
        "fp8 folded": Fp8Net(net, make, expert_rows=0),
        "fp8 calibrated": Fp8Net(net, make, expert_rows=0, fold=False),
    }


OPS = ("folded_rope_write", "folded_geglu", "linear_add_folded_norm", "fp8_linear_add_folded_norm", "suffix_attention")


@contextmanager
def kernels_of(kind: str, device: torch.device) -> Iterator[None]:
    """Run without kernels in CUDA C++ ("triton"), with those of the tables ("table"), or with those of rules ("rules")."""
    choices.cache_clear()
    its = choices(device)
    if kind == "rules":
        its.known = {place: config for place, config in its.known.items() if place[0] not in OPS}
    products = (added, "added_product"), (rope, "rope_product"), (gated, "gated_product"), (suffix, "suffix_attention")
    before = [getattr(module, name) for module, name in products]
    if kind == "triton":
        its.known = {place: config for place, config in its.known.items() if config.get("impl") != "cuda"} | BEFORE
        for module, name in products:
            setattr(module, name, lambda index: (None, "hidden"))
    try:
        yield
    finally:
        choices.cache_clear()
        for (module, name), made in zip(products, before, strict=True):
            setattr(module, name, made)


def loop(net: Pi0Net | Fp8Net, plain: Tensor, x: Tensor, prefix: PrefixKV) -> tuple[dict[str, Any], Any]:
    """Check one way to run the loop; return what came out, and its graph."""
    eager = denoise(net, x, prefix)  # type: ignore[arg-type]
    alone = denoise(net, x[:1], head(prefix, 1))  # type: ignore[arg-type]
    result = {
        "from_plain_max_abs": (eager - plain).abs().max().item(),
        "from_plain_cosine": torch.cosine_similarity((eager - x).flatten(1), (plain - x).flatten(1)).min().item(),
        "row_alone_max_abs": (eager[:1] - alone).abs().max().item(),
        "finite": bool(eager.isfinite().all()),
    }
    if not x.is_cuda:
        return result, None
    graph, out = captured(lambda: denoise(net, x, prefix))  # type: ignore[arg-type]
    graph.replay()
    first = out.clone()
    graph.replay()
    torch.cuda.synchronize()
    return result | {"graph_equals_eager": torch.equal(first, eager), "replays_equal": torch.equal(first, out)}, graph


def by_turns(graphs: dict[str, Any], rounds: int, replays: int) -> dict[str, float]:
    """Return milliseconds of each graph, timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / replays)
    return {name: round(statistics.median(ms), 4) for name, ms in times.items()}


def kernels(net: Pi0Net | Fp8Net, x: Tensor, prefix: PrefixKV) -> list[list[Any]]:
    """Return each kernel's name, calls in a denoise step, microseconds of one and of all of a step."""
    steps = net.config.denoise_steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        denoise(net, x, prefix)  # type: ignore[arg-type]
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:12]
    return [
        [e.key[:90], e.count / steps, round(e.device_time_total / e.count, 2), round(e.device_time_total / steps, 1)]
        for e in events
    ]


class Robots:
    """The loop of one batch size in all ways."""

    def __init__(self, net: Pi0Net, batch: int, device: torch.device) -> None:
        c = net.config
        self.batch, self.device, self.prefix = batch, device, prefix_of(c, batch, device, net.dtype)
        self.x = torch.randn(batch, c.action_horizon, c.action_dim, generator=torch.Generator().manual_seed(1)).to(device)
        with kernels_of("triton", device):
            self.plain = denoise(net, self.x, self.prefix)
        self.net = net
        self.nets: dict[str, Pi0Net | Fp8Net] = {"bf16": net, **fp8_nets(net, self.x, self.prefix)}

    def measure(self, report: Report, kind: str, profile: bool) -> None:
        graphs: dict[str, Any] = {}

        def checked(net: Pi0Net | Fp8Net, kind: str, way: str) -> dict[str, Any]:
            with kernels_of(kind, self.device):
                found, graph = loop(net, self.plain, self.x, self.prefix)
                if graph is not None:
                    graphs[way] = graph
                if profile and graph is not None:
                    found["kernels"] = kernels(net, self.x, self.prefix)
            return found

        ways = {"bf16": ("bf16", kind), "bf16 before": ("bf16", "triton")}
        ways |= {"fp8": ("fp8 folded", kind), "fp8 before": ("fp8 calibrated", "triton")}
        for way, (name, of) in ways.items():
            report.attempt(partial(checked, self.nets[name], of, way), kind="check", batch=self.batch, way=way)
        if graphs:
            report.attempt(lambda: by_turns(graphs, 7, max(2, 24 // self.batch)), kind="loops", batch=self.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default="4,8,32,2,16,3")
    parser.add_argument("--rules", action="store_true", help="take the rules' cuts instead of the tables'")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small", action="store_true", help="tiny dimensions")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = pi0.build(config_of(options.small), device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.randomize(seed=0)
    report = Report(options.out, device)
    kind = "rules" if options.rules else "table"
    with torch.inference_mode():
        for batch in (int(b) for b in options.batch.split(",")):
            Robots(model.module, batch, device).measure(report, kind, options.profile)


if __name__ == "__main__":
    main()
