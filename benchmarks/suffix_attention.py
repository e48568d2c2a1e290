"""Attention of the denoise loop for batches of robots: each cut checked against the reference, then timed in graphs.

A graph is a pass over layers whose keys and values all differ, so that the second-level cache holds none of them. A line of
output is one cut; `us` is the time of a call, `us_after` of one with the kernel ahead of it that rotates queries and keys.

    python benchmarks/suffix_attention.py --out suffix.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from stretto.deploy.provenance import provenance
from stretto.layers.cuda.suffix import CUTS, Arena, Cut, suffix_attention
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels.attention import prefix_attention_reference
from stretto.layers.kernels.rotate_write import rotate_write
from stretto.layers.kernels.suffix_attention import run_suffix
from stretto.layers.tuning import Config, tuned

LAYERS, TOKENS, HEADS, HEAD_DIM, PREFIX = 18, 50, 8, 256, 968
Call = Callable[[int, Tensor], Tensor]


class Case:
    """Inputs of all layers for some robots."""

    def __init__(self, robots: int, device: str, layers: int, tokens: int, prefix: int) -> None:
        g = torch.Generator(device).manual_seed(robots)
        make = {"device": device, "dtype": torch.bfloat16}
        self.robots, self.layers = robots, layers
        self.q = torch.randn(robots, tokens, HEADS, HEAD_DIM, generator=g, **make)
        self.arena = torch.randn(robots, 2, layers, prefix, 1, HEAD_DIM, generator=g, **make)
        self.fresh = torch.randn(layers, robots, tokens, 2, HEAD_DIM, generator=g, **make)
        self.qkv = torch.randn(robots, tokens, (HEADS + 2) * HEAD_DIM, generator=g, **make)
        angle = torch.rand(robots, tokens, HEAD_DIM // 2, generator=g, device=device)
        self.table, self.rows = (angle.cos(), angle.sin()), torch.arange(robots, device=device)
        self.slots = torch.randperm(robots, device=device)
        self.mask = torch.rand(robots, prefix, generator=g, device=device) < 0.9
        self.mask[:, : prefix * 3 // 4] = True
        self.length = torch.full((robots,), prefix, dtype=torch.int32, device=device)

    def old(self, layer: int) -> Arena:
        return Arena(self.arena[:, 0, layer], self.arena[:, 1, layer], self.slots, self.mask, self.length)

    def new(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.fresh[layer, :, :, :1], self.fresh[layer, :, :, 1:]

    def rotated(self, layer: int) -> Tensor:
        return rotate_write(self.qkv, self.table, *self.new(layer), self.rows, heads=HEADS)

    def want(self, layer: int) -> Tensor:
        k, v, slots, mask, length = self.old(layer)
        new = [x.float() for x in self.new(layer)]
        return prefix_attention_reference(
            self.q.float(), k.float(), v.float(), slots, key_mask_BP=mask, length_B=length,
            k_suffix_BTKd=new[0], v_suffix_BTKd=new[1],
        )  # fmt: skip


def calls(case: Case) -> Iterator[tuple[str, Call]]:
    """Yield what is to be timed: the choice of the table, others in Triton, and all cuts in CUDA C++."""
    key = (*case.q.shape, 1, case.arena.shape[3], case.q.shape[1])
    found: dict[str, Config | None] = {"chosen": tuned("suffix_attention", key, case.q.dtype, case.q.device)}
    if case.robots >= 8:
        found["hopper"] = hopper.Tiling(64, 2, 1).config
    for name, config in found.items():

        def run(layer: int, q: Tensor, config: Config | None = config) -> Tensor:
            return run_suffix(config, q, *case.old(layer), *case.new(layer))

        yield f"{name} {config}", run
    launches, reason = suffix_attention(0)
    if launches is None:
        print("not to be had:", reason)
        return
    for cut in CUTS:

        def launch(layer: int, q: Tensor, cut: Cut = cut) -> Tensor:
            return launches.run(q, case.old(layer), *case.new(layer), cut, early=True)

        yield f"cuda {cut.tall} {cut.cuts} {cut.shared}", launch


def timed(case: Case, call: Call, after: bool, repeats: int) -> float:
    """Return the median time of a call in us."""

    def step() -> None:
        for layer in range(case.layers):
            call(layer, case.rotated(layer) if after else case.q)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / case.layers)
    return statistics.median(times)


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--out", type=Path, required=True)
    parse.add_argument("--robots", type=int, nargs="*", default=[4, 8, 32, 2, 3, 16])
    parse.add_argument("--repeats", type=int, default=20)
    parse.add_argument("--small", action="store_true")
    args = parse.parse_args()
    rows: list[dict[str, object]] = []
    head = provenance(torch.device("cuda"))
    for robots in args.robots:
        case = Case(robots, "cuda", 2, 10, 100) if args.small else Case(robots, "cuda", LAYERS, TOKENS, PREFIX)
        for name, call in calls(case):
            # Anew each time: what is timed writes keys and values of the suffix.
            want = case.want(case.layers - 1)
            row: dict[str, object] = {"robots": robots, "call": name}
            try:
                got = call(case.layers - 1, case.q)
                row["off"] = float((got.float() - want).abs().max())
                row["same"] = bool(torch.equal(got, call(case.layers - 1, case.q)))
                row["us"] = timed(case, call, False, args.repeats)
                row["us_after"] = timed(case, call, True, args.repeats)
            except RuntimeError as error:
                row["error"] = str(error)[:200]
            print(row, flush=True)
            rows.append(row)
            args.out.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
