"""The expert's launches in CUDA C++ for several robots: checks, time of each launch, ten steps against separate kernels.

    python benchmarks/expert_chain_batches.py --out expert_chain_batches.json [--batches 1,2] [--variants A=1,B=2 C=1]
    python benchmarks/expert_chain_batches.py --only-loops --batches 1,2,3,4 --out expert_chain_loops.json

Of each batch size: every launch against its reference, two runs against each other, and each robot's bits against those that it
has alone. Robots are at denoise steps of their own, with prefixes of their own length. Then ten steps in a graph by turns,
chain and separate kernels, and what each launch adds to a step. A case that fails is a
row with its error. JSON is written after every row.

Shape legend: as in layers.cuda.chain.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from expert import Report, captured, config_of, denoise, replayed_ms
from expert_chain import NAMES, Case, check_launches, check_whole, stamped, variant
from expert_chain_fp8 import coded_net
from torch import Tensor

from stretto.layers.cuda import build
from stretto.layers.cuda.chain import LAUNCHES, MOST_CODED, MOST_PLAIN, ExpertChain, expert_chain
from stretto.layers.kernels import expert_layers
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.stream import Stream
from stretto.models import pi0
from stretto.models.pi0_net import Pi0Net


def of_robot(prefix: PrefixKV, b: int) -> PrefixKV:
    own = (x[b : b + 1] for x in (prefix.slots_B, prefix.mask_BP, prefix.length_B, prefix.suffix_start_B))
    return PrefixKV(prefix.k_SNPKd, prefix.v_SNPKd, *own)


def alone(case: Case) -> dict[str, Any]:
    """Compare each robot's rows with those that it has alone."""
    got, tokens, equal, most = case.run(), case.tokens, 0, 0.0
    for b in range(case.batch):
        chain, rows = expert_chain(0)[0], slice(b, b + 1)
        assert chain is not None
        one = Case(chain, case.net, tokens, 0)
        one.prefix, one.norms = of_robot(case.prefix, b), case.net.norms_of(case.net.tabled(case.steps[rows]))
        squares = case.stream.squares_MP[b * tokens : (b + 1) * tokens]
        one.stream = Stream(case.stream.residual_BTD[rows], case.stream.scaled_BRD[rows], squares)
        want = one.run()
        equal += torch.equal(got.scaled_BRD[rows], want.scaled_BRD) and torch.equal(got.residual_BTD[rows], want.residual_BTD)
        most = max(most, (got.scaled_BRD[rows] - want.scaled_BRD).abs().max().item())
    return {"robots_with_the_bits_that_they_have_alone": equal, "max_abs": most}


def step_us(case: Case, launches: int | None = None, **more: Any) -> float:
    """Time one step's layers, ten times in a graph."""

    def ten() -> Tensor:
        for _ in range(10):
            out = case.run(launches, **more)
        return out.scaled_BRD

    return round(replayed_ms(captured(ten)[0], 8)["ms"] * 100, 1)


def time_launches(case: Case) -> dict[str, Any]:
    begin = [step_us(case, LAUNCHES * 8 + i) for i in range(LAUNCHES + 1)]
    added = {name: round(b - a, 2) for name, (a, b) in zip(NAMES, itertools.pairwise(begin), strict=True)}
    return {"step_us": step_us(case), "added_us": added}


def loops(case: Case, turns: int) -> dict[str, Any]:
    """Time ten denoise steps in a graph by turns: chain, chain in e4m3, separate kernels; and say what they differ by."""
    net, c, batch = case.net, case.net.config, case.batch
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, c.action_horizon, c.action_dim, generator=g).to(net.table.device)
    graphs, made, result = {}, {}, dict[str, Any]()
    coded: Any = coded_net(net, x, case.prefix)
    ways = [("separate", net, 0), ("chain", net, MOST_PLAIN), ("chain_in_e4m3", coded, MOST_CODED)]
    for by, of, until in ways if batch <= MOST_PLAIN else ways[::2]:
        expert_layers.CHAINED_UNTIL = expert_layers.CHAINED_CODED_UNTIL = until
        eager = denoise(of, x, case.prefix)
        graphs[by], out = captured(lambda of=of: denoise(of, x, case.prefix))
        graphs[by].replay()
        result[f"{by}_graph_equals_eager"], made[by] = torch.equal(out, eager), eager
    expert_layers.CHAINED_UNTIL = 1
    rows = [denoise(net, x[b : b + 1], of_robot(case.prefix, b)) for b in range(batch)]
    scale = torch.cat(rows).square().mean().sqrt().item()
    for by, out in made.items():
        result[f"{by}_from_alone"] = (out - torch.cat(rows)).abs().max().item() / scale
    times = {by: [replayed_ms(graph, 8)["ms"] for _ in range(turns)] for by, graph in graphs.items()}
    return result | {f"{by}_ms": round(statistics.median(of), 3) for by, of in times.items()}


def launches_of(case: Case) -> dict[str, Any]:
    errors = {f"{row['name']} {row['launch']}": round(row["error"], 5) for row in check_launches(case)}
    return {"errors": errors}


def cases_of(text: str, net: Pi0Net) -> dict[str, Case]:
    """Make a case of each number of robots that there are launches for."""
    made = {}
    for name in text.split(","):
        chain, said = expert_chain(0, int(name))
        if chain is None:
            raise RuntimeError(said)
        made[name] = Case(chain, net, net.config.action_horizon, 3, int(name))
    return made


def one_variant(cases: dict[str, Case], text: str, path: Future[Path]) -> dict[str, Any]:
    chain = ExpertChain(ctypes.CDLL(str(path.result())), 0)
    result: dict[str, Any] = {"macros": text}
    for name, case in cases.items():
        before, case.chain = case.chain, chain
        checked = check_whole(case)
        row = {"residual": checked["residual"], "twice_equal": checked["twice_equal"]}
        row |= stamped(case) if "STRETTO_STAMPS" in text else time_launches(case)
        result[name], case.chain = row, before
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="2")
    parser.add_argument("--variants", nargs="*", default=[], help="macros to compile others with: A=1,B=2")
    parser.add_argument("--variant-batches", default="2")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only-loops", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    report = Report(options.out, device)
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        made = {text: pool.submit(variant, text, "several") for text in options.variants}
        first = pool.submit(expert_chain, 0, 2)
        model = pi0.build(config_of(False), device=device, dtype=torch.bfloat16)
        model.randomize(seed=0)
        chain, where = first.result()
    report.add(kind="build", seconds=round(time.monotonic() - begin, 1), where=where, nvcc=build.nvcc())
    if chain is None:
        return
    with torch.inference_mode():
        cases = cases_of(options.batches, model.module)
        for name, case in cases.items() if not options.only_loops else ():
            report.attempt(lambda c=case: launches_of(c), kind="launches", batch=name)
            report.attempt(lambda c=case: check_whole(c) | alone(c), kind="whole", batch=name)
            report.attempt(lambda c=case: time_launches(c), kind="time", batch=name)
        some = {name: case for name, case in cases.items() if name in options.variant_batches.split(",")}
        for text, future in made.items():
            report.attempt(lambda t=text, f=future: one_variant(some, t, f), kind="variant")
        for name, case in cases.items():
            report.attempt(lambda c=case: loops(c, options.turns), kind="loop", batch=name)


if __name__ == "__main__":
    main()
