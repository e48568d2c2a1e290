"""The expert's launches in CUDA C++ at true shape: each against its reference, where its time goes, the ten-step loop.

    python benchmarks/expert_chain.py --out expert_chain.json [--probe benchmarks/launch_chain.cu] [--variants A=1,B=2 C=1]
    python benchmarks/expert_chain.py --out expert_chain_fp8.json --fp8 [--variants ...]

Launches are checked one by one: a run stops behind each, so a fault is found where it begins. Stamps taken inside of them are
clock cycles of each CTA, and nanoseconds that all share. The loop runs ten denoise steps in one graph, with these launches and
with the separate kernels in turn; with --fp8, with products in e4m3 and in bf16, in turn. A case that fails is a row with its
error. JSON is written after every row.

Shape legend: as in layers.cuda.chain.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from expert import Report, captured, config_of, denoise, prefix_of, replayed_ms
from expert_chain_fp8 import CodedCase, check_coded_launches, check_coded_whole, coded_net, with_codes
from torch import Tensor

from stretto.layers.cuda import build
from stretto.layers.cuda.chain import LAUNCHES, Coded, ExpertChain, Memory, Weights, expert_chain
from stretto.layers.kernels.attention import PrefixKV, prefix_attention
from stretto.layers.kernels.gated_linear import gated_linear
from stretto.layers.kernels.norm_linear import norm_geglu, norm_qkv
from stretto.layers.kernels.stream import Stream, open_stream
from stretto.models import pi0
from stretto.models.pi0_expert import Expert, ExpertNorms
from stretto.models.pi0_net import Pi0Net

NAMES = ("qkv", "attention", "out", "gate_up", "down")
EVENTS = 10
MASKS = (1, 3, 32)


class Case:
    """One call: a random stream into the layers of a net at one denoise step."""

    def __init__(self, chain: ExpertChain, net: Pi0Net, tokens: int, step: int) -> None:
        self.chain, self.net, self.theta = chain, net, net.config.rope_theta
        device = net.table.device
        self.prefix = prefix_of(net.config, 1, device, net.dtype)
        self.norms = net.norms_of(net.tabled(torch.tensor([step], device=device)))
        self.weights = [Weights(b.qkv.weight, b.out.weight, b.gate_up.weight, b.down.weight) for b in net.expert.layers()]
        residual = torch.randn(1, tokens, net.config.expert.width, device=device)
        self.stream = open_stream.reference(residual, self.norms.lines(0), net.dtype)

    def run(self, launches: int | None = None, **more: Any) -> Stream:
        lines = self.norms.lines(0), self.norms.lines(1)
        keys, eps = self.prefix, self.norms.eps
        return self.chain.run(self.stream, self.weights, lines, keys, theta=self.theta, eps=eps, launches=launches, **more)

    def memory(self) -> Memory:
        return Memory(self.chain.sizes, self.stream.residual_BTD.shape[1], self.net.table.device)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def check_launches(case: Case, layers: int = 2) -> Iterator[dict[str, Any]]:
    """Compare what each launch leaves with its reference, given what those before left."""
    net, norms, prefix = case.net, case.norms, case.prefix
    blocks, dtype, stream = net.expert.layers(), net.dtype, case.stream
    for launch in range(layers * LAUNCHES):
        layer, kind = divmod(launch, LAUNCHES)
        block, (first, second, third) = blocks[layer], (norms.lines(2 * layer + i) for i in range(3))
        memory = case.memory()
        case.run(launch + 1, memory=memory)
        torch.cuda.synchronize()
        read = stream.scaled_BRD, stream.squares_MP
        if kind == 0:
            want = norm_qkv.reference(*read, block.qkv.weight, first, prefix.suffix_start_B, **block.rotary, eps=norms.eps)
            fresh = torch.cat((memory.queries(), *(x[:, None] for x in memory.fresh())), dim=1)[None]
            error = relative(fresh, want)
        elif kind == 1:
            q, k, v = torch.split(fresh, [block.heads, 1, 1], dim=2)
            kept = prefix.k_SNPKd[:, layer], prefix.v_SNPKd[:, layer], prefix.slots_B
            named = {"key_mask_BP": prefix.mask_BP, "length_B": prefix.length_B}
            want = prefix_attention.reference(q, *kept, **named, k_suffix_BTKd=k, v_suffix_BTKd=v).flatten(2)
            y = memory.attended()[None]
            error = relative(y, want)
        elif kind == 3:
            want = norm_geglu.reference(*read, block.gate_up.weight, second, norms.eps)
            y = memory.hidden()[None]
            error = relative(y, want)
        else:
            by = (block.out.weight, first, second) if kind == 2 else (block.down.weight, second, third)
            want = gated_linear.reference(y, by[0], stream.residual_BTD, *by[1:], dtype)
            scaled, squares = memory.stream(end=kind == 4)
            error = max(relative(scaled[None], want.scaled_BRD), relative(squares.sum(-1), want.squares_MP.sum(-1)))
            stream = Stream(want.residual_BTD, scaled[None].clone(), squares.clone())
        yield {"kind": "launch", "launch": launch, "name": NAMES[kind], "error": error}


def check_whole(case: Case) -> dict[str, Any]:
    got, again = case.run(), case.run()
    want = Expert.streamed(case.net.expert, case.stream, case.norms, case.prefix)
    return {
        "residual": relative(got.residual_BTD, want.residual_BTD),
        "scaled": relative(got.scaled_BRD, want.scaled_BRD),
        "squares": relative(got.squares_MP.sum(-1), want.squares_MP.sum(-1)),
        "twice_equal": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        "finite": bool(got.scaled_BRD.isfinite().all()),
    }


def time_whole(case: Case | CodedCase) -> dict[str, Any]:
    """Time one step's layers, ten times in a graph; with less asked for ahead; and of how much each launch makes it longer."""

    def us(launches: int | None = None, **more: Any) -> float:
        def ten() -> Tensor:
            for _ in range(10):
                out = case.run(launches, **more)
            return out.scaled_BRD

        return round(replayed_ms(captured(ten)[0], 10)["ms"] * 100, 1)

    begin = [us(LAUNCHES * 8 + i) for i in range(LAUNCHES + 1)]
    added = {name: round(b - a, 2) for name, (a, b) in zip(NAMES, itertools.pairwise(begin), strict=True)}
    return {"step_us": us(), "by_ahead_us": {mask: us(ahead=mask) for mask in MASKS}, "added_us": added}


def stamped(case: Case | CodedCase) -> dict[str, Any]:
    """Where the cycles of a launch go: mean and most over CTAs and layers between events; how launches overlap."""
    sizes, depth = case.chain.sizes, len(case.weights)
    stamps = torch.zeros(depth, LAUNCHES, sizes.most_ctas, EVENTS, dtype=torch.int64, device=case.net.table.device)
    graph, _ = captured(lambda: case.run(stamps=stamps).scaled_BRD)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    taken = stamps[1 : depth - 1].cpu()
    result: dict[str, Any] = {}
    for kind, name in enumerate(NAMES):
        events = taken[:, kind]
        ran = events[..., 0] > 0
        there = [e for e in range(8) if (events[..., e] > 0).any()]
        parts: dict[str, Any] = {}
        for a, b in itertools.pairwise(there):
            both = (events[..., a] > 0) & (events[..., b] > 0)
            spent = (events[..., b] - events[..., a])[both].double()
            parts[f"{a}-{b}"] = [round(spent.mean().item()), round(spent.max().item())]
        begins = torch.where(ran, events[..., 8], events[..., 8].max()).double()
        ends = events[..., 9].double().amax(1)
        before = taken[:, kind - 1, :, 9].double().amax(1) if kind > 0 else None
        if before is not None:
            parts["ns_from_end_to_end"] = round((ends - before).mean().item())
            parts["ns_first_and_last_begin_before_that_end"] = [
                round((before - begins.amin(1)).mean().item()),
                round((before - torch.where(ran, begins, 0.0).amax(1)).mean().item()),
            ]
        result[name] = parts
    return result


def with_chain(case: Case) -> None:
    """Let the net's expert run by these launches."""

    def streamed(stream: Stream, norms: ExpertNorms, prefix: PrefixKV, _: Coded | None = None) -> Stream:
        lines = norms.lines(0), norms.lines(1)
        return case.chain.run(stream, case.weights, lines, prefix, theta=case.theta, eps=norms.eps)

    object.__setattr__(case.net.expert, "streamed", streamed)


def loop(case: Case, kept: dict[str, Tensor]) -> dict[str, Any]:
    """Ten denoise steps in a graph."""
    net, c = case.net, case.net.config
    x = torch.randn(1, c.action_horizon, c.action_dim, generator=torch.Generator().manual_seed(1)).to(net.table.device)
    eager = denoise(net, x, case.prefix)
    graph, out = captured(lambda: denoise(net, x, case.prefix))
    graph.replay()
    first = out.clone()
    result: dict[str, Any] = replayed_ms(graph)
    result |= {"graph_equals_eager": torch.equal(first, eager), "replays_equal": torch.equal(first, out)}
    other = kept.setdefault("first", eager)
    result["max_abs"] = (eager - other).abs().max().item()
    return result | {"cosine": torch.cosine_similarity((eager - x).flatten(1), (other - x).flatten(1)).min().item()}


def fits(library: str) -> dict[str, Any]:
    """How many clusters of each launch the device holds at once, in bf16 and in e4m3."""
    ask, counts = ctypes.CDLL(library).stretto_chain_fits, (ctypes.c_int * (2 * LAUNCHES))()
    ask.restype = ctypes.c_char_p
    error = ask(counts)
    names = [*NAMES, *(f"{name} e4m3" for name in NAMES)]
    return {"error": error.decode()} if error else dict(zip(names, counts, strict=True))


def run_coded(report: Report, case: Case, variants: dict[str, Future[Path]]) -> None:
    """Check and time the launches in e4m3, and the loop with either form by turns."""
    net, chain, prefix = case.net, case.chain, case.prefix
    x = torch.randn(1, net.config.action_horizon, net.config.action_dim, device=net.table.device)
    coded_view, kept = coded_net(net, x, prefix), dict[str, Tensor]()
    of = CodedCase(chain, coded_view, prefix, net.config.action_horizon, 3)
    of.stream = case.stream
    try:
        for row in check_coded_launches(of):
            report.add(**row)
    except Exception as e:  # what comes next may still say more
        report.add(kind="launch", form="e4m3", error=f"{type(e).__name__}: {e}"[:600])
    report.attempt(lambda: check_coded_whole(of, case.run()), kind="whole", form="e4m3")
    for turn in range(2):
        with_chain(case)
        report.attempt(lambda: loop(case, kept), kind="loop", by="chain", turn=turn)
        with_codes(net, chain, of.coded, of.theta)
        report.attempt(lambda: loop(case, kept), kind="loop", by="chain in e4m3", turn=turn)
    report.attempt(lambda: time_whole(case), kind="time", form="bf16")
    report.attempt(lambda: time_whole(of), kind="time", form="e4m3")
    for text, future in variants.items():
        report.attempt(lambda t=text, f=future: coded_variant(of, case, t, f), kind="variant", form="e4m3", macros=text)


def coded_variant(case: CodedCase, plain: Case, text: str, path: Future[Path]) -> dict[str, Any]:
    case.chain = ExpertChain(ctypes.CDLL(str(path.result())), 0)
    row = check_coded_whole(case, plain.run()) | time_whole(case)
    before, plain.chain = plain.chain, case.chain
    row["plain_step_us"], plain.chain = time_whole(plain)["step_us"], before
    return row | stamped(case) if "STRETTO_STAMPS" in text else row


def one_split() -> dict[str, Any]:
    """Let all kernels in Triton take the same split of the cache, as those here do."""
    from triton.runtime.jit import JITFunction

    driver, count = ctypes.CDLL("libcuda.so.1"), 0
    folder = build.SOURCES.parent / "kernels"
    for file in folder.glob("*.py"):
        module = __import__(f"stretto.layers.kernels.{file.stem}", fromlist=["x"])
        for value in vars(module).values():
            for compiled in value.device_caches[0][0].values() if isinstance(value, JITFunction) else ():
                count += driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), 9, 100) == 0
    return {"functions": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--probe", type=Path, help="a program in CUDA C++ to build and run as well")
    parser.add_argument("--fp8", action="store_true", help="the launches in e4m3, and only they and bf16 beside them")
    parser.add_argument("--variants", nargs="*", default=[], help="macros to compile others with: A=1,B=2")
    parser.add_argument(
        "--one-split", action="store_true", help="time the separate kernels with one split of the cache as well"
    )
    options = parser.parse_args()
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    report = Report(options.out, device)
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        made = {text: pool.submit(variant, text) for text in options.variants}
        program = None if options.probe is None else pool.submit(probe, options.probe)
        chain, where = expert_chain(0)
    report.add(kind="build", seconds=round(time.monotonic() - begin, 1), where=where, nvcc=build.nvcc())
    if chain is None:
        return
    model = pi0.build(config_of(False), device=device, dtype=torch.bfloat16)
    model.randomize(seed=0)
    net = model.module
    with torch.inference_mode():
        case, kept = Case(chain, net, net.config.action_horizon, 3), dict[str, Tensor]()
        if options.fp8:
            report.attempt(lambda: fits(where), kind="clusters at once")
            run_coded(report, case, made)
            return
        report.attempt(lambda: loop(case, kept), kind="loop", by="separate")
        if options.one_split:
            report.attempt(one_split, kind="one split")
            report.attempt(lambda: loop(case, kept), kind="loop", by="separate, one split")
        if program is not None:
            report.attempt(lambda: {"said": said(program.result())}, kind="probe")
        report.attempt(lambda: fits(where), kind="clusters at once")
        try:
            for row in check_launches(case):
                report.add(**row)
        except Exception as e:  # what comes next may still say more
            report.add(kind="launch", error=f"{type(e).__name__}: {e}"[:600])
        report.attempt(lambda: check_whole(case), kind="whole")
        report.attempt(lambda: check_whole(Case(chain, net, 10, 9)), kind="whole", tokens=10)
        report.attempt(lambda: time_whole(case), kind="time")
        for text, future in made.items():
            report.attempt(lambda t=text, f=future: one_variant(case, t, f), kind="variant", macros=text)
        case.chain = chain
        with_chain(case)
        report.attempt(lambda: loop(case, kept), kind="loop", by="chain")


def variant(text: str) -> Path:
    options = (*build.OPTIONS, *(f"-D{macro}" for macro in text.split(",")))
    return build.compiled("chain", build.nvcc() or "nvcc", options)


def one_variant(case: Case, text: str, path: Future[Path]) -> dict[str, Any]:
    case.chain = ExpertChain(ctypes.CDLL(str(path.result())), 0)
    row = check_whole(case) | time_whole(case)
    return row | stamped(case) if "STRETTO_STAMPS" in text else row


def probe(source: Path) -> Path:
    program = Path(f"/tmp/stretto_{source.stem}")
    command = [build.nvcc() or "nvcc", *build.OPTIONS[:3], "-o", str(program), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def said(program: Path) -> list[str]:
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=20).stdout.splitlines()


if __name__ == "__main__":
    main()
