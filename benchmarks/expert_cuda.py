"""The expert's kernel in CUDA C++ at true shape: each phase against its reference, where its time goes, the ten-step loop.

    python benchmarks/expert_cuda.py --out expert_cuda.json [--seconds 60]

Phases are checked one by one: a run stops behind each, so a fault is found where it begins. Stamps taken inside the kernel
are clock cycles of each CTA. The loop runs ten denoise steps in one graph with the kernel and with the separate kernels in
turn. A case that fails is a row with its error. JSON is written after every row.

Shape legend: as in layers.cuda.expert.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from expert import Report, captured, config_of, denoise, prefix_of, replayed_ms
from torch import Tensor

from stretto.layers.cuda import build
from stretto.layers.cuda.expert import PHASES, Board, ExpertKernel, Weights, expert_kernel
from stretto.layers.kernels.attention import PrefixKV, prefix_attention
from stretto.layers.kernels.gated_linear import gated_linear
from stretto.layers.kernels.norm_linear import norm_geglu, norm_qkv
from stretto.layers.kernels.stream import Stream, open_stream
from stretto.models import pi0
from stretto.models.pi0_expert import Expert, ExpertNorms
from stretto.models.pi0_net import Pi0Net

NAMES = ("qkv", "attention", "out", "gate_up", "down")
EVENTS = 8


def weights_of(expert: Expert) -> list[Weights]:
    return [Weights(b.qkv.weight, b.out.weight, b.gate_up.weight, b.down.weight) for b in expert._layers()]


class Case:
    """One call: a random stream into the layers of a net at one denoise step."""

    def __init__(self, kernel: ExpertKernel, net: Pi0Net, tokens: int, step: int) -> None:
        self.kernel, self.net, self.theta = kernel, net, net.config.rope_theta
        device = net.table.device
        self.prefix = prefix_of(net.config, 1, device, net.dtype)
        self.norms = net.norms_of(net.tabled(torch.tensor([step], device=device)))
        self.weights = weights_of(net.expert)
        residual = torch.randn(1, tokens, net.config.expert.width, device=device)
        self.stream = open_stream.reference(residual, self.norms.lines(0), net.dtype)

    def run(self, phases: int | None = None, board: Board | None = None, stamps: Tensor | None = None) -> Stream:
        lines = self.norms.lines(0), self.norms.lines(1)
        more: dict[str, Any] = {"phases": phases, "board": board, "stamps": stamps}
        keys, eps = self.prefix, self.norms.eps
        return self.kernel.run(self.stream, self.weights, lines, keys, theta=self.theta, eps=eps, **more)

    def board(self) -> Board:
        return Board(self.kernel.sizes, self.stream.residual_BTD.shape[1], self.net.table.device)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def check_phases(case: Case, layers: int = 2) -> list[dict[str, Any]]:
    """Compare what each phase leaves with its reference, given what the phases before left."""
    net, norms, prefix = case.net, case.norms, case.prefix
    blocks, dtype, rows = net.expert._layers(), net.dtype, []
    stream = case.stream
    for phase in range(layers * PHASES):
        layer, kind = divmod(phase, PHASES)
        block, (first, second, third) = blocks[layer], (norms.lines(2 * layer + i) for i in range(3))
        board = case.board()
        begin = time.monotonic()
        case.run(phase + 1, board)
        torch.cuda.synchronize()
        read = stream.scaled_BRD, stream.squares_MP
        if kind == 0:
            want = norm_qkv.reference(*read, block.qkv.weight, first, prefix.suffix_start_B, **block.rotary, eps=norms.eps)
            fresh = board.fresh(layer)[None]
            error = relative(fresh, want)
        elif kind == 1:
            q, k, v = torch.split(fresh, [block.heads, 1, 1], dim=2)
            kept = prefix.k_SNPKd[:, layer], prefix.v_SNPKd[:, layer], prefix.slots_B
            named = {"key_mask_BP": prefix.mask_BP, "length_B": prefix.length_B}
            want = prefix_attention.reference(q, *kept, **named, k_suffix_BTKd=k, v_suffix_BTKd=v).flatten(2)
            y = board.attended(layer)[None]
            error = relative(y, want)
        elif kind == 3:
            want = norm_geglu.reference(*read, block.gate_up.weight, second, norms.eps)
            y = board.hidden(layer)[None]
            error = relative(y, want)
        else:
            by = (block.out.weight, first, second) if kind == 2 else (block.down.weight, second, third)
            want = gated_linear.reference(y, by[0], stream.residual_BTD, *by[1:], dtype)
            scaled, squares = board.stream(layer, end=kind == 4)
            error = max(relative(scaled[None], want.scaled_BRD), relative(squares.sum(-1), want.squares_MP.sum(-1)))
            stream = Stream(want.residual_BTD, scaled[None].clone(), squares.clone())
        seconds = round(time.monotonic() - begin, 2)
        rows.append({"kind": "phase", "phase": phase, "name": NAMES[kind], "error": error, "seconds": seconds})
    return rows


def by_reference(case: Case, stream: Stream) -> Stream:
    net = case.net
    counters = torch.zeros(4096, dtype=torch.int32, device=net.table.device)
    return Expert.streamed(net.expert, stream, case.norms, case.prefix, counters)


def check_whole(case: Case) -> dict[str, Any]:
    got, again, want = case.run(), case.run(), by_reference(case, case.stream)
    return {
        "residual": relative(got.residual_BTD, want.residual_BTD),
        "scaled": relative(got.scaled_BRD, want.scaled_BRD),
        "squares": relative(got.squares_MP.sum(-1), want.squares_MP.sum(-1)),
        "twice_equal": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        "finite": bool(got.scaled_BRD.isfinite().all()),
    }


def time_whole(case: Case) -> dict[str, Any]:
    """Time one step's layers, ten launches in a graph; and launches that do nothing, with all that goes along."""
    result = {}
    for name, phases in (("step_us", None), ("launch_us", 0), ("first_layer_us", PHASES)):

        def ten(phases: int | None = phases) -> Tensor:
            for _ in range(10):
                out = case.run(phases)
            return out.scaled_BRD

        graph, _ = captured(ten)
        times = replayed_ms(graph)
        result[name] = {key.removesuffix("ms") or "median": round(ms * 100, 1) for key, ms in times.items()}
    return result


def stamped(case: Case) -> dict[str, Any]:
    """Where the cycles of a layer go: mean over CTAs and layers between events of each phase, and the slowest CTA's work."""
    sizes, depth = case.kernel.sizes, len(case.weights)
    stamps = torch.zeros(sizes.ctas, sizes.max_layers, PHASES, EVENTS, dtype=torch.int64, device=case.net.table.device)
    for _ in range(3):
        stamps.zero_()
        case.run(stamps=stamps)
    torch.cuda.synchronize()
    taken = stamps[:, 1 : depth - 1].cpu()
    layers = (taken[:, -1, 0, 0] - taken[:, 0, 0, 0]).double().mean().item()
    result: dict[str, Any] = {"layer_cycles": round(layers / (depth - 3))}
    for kind, name in enumerate(NAMES):
        events = taken[:, :, kind]
        there = [e for e in range(EVENTS) if (events[..., e] > 0).any()]
        parts: dict[str, Any] = {}
        for a, b in itertools.pairwise(there):
            both = (events[..., a] > 0) & (events[..., b] > 0)
            if not both.any():
                continue
            spent = (events[..., b] - events[..., a])[both].double()
            parts[f"{a}-{b}"] = [round(spent.mean().item()), round(spent.max().item())]
        work = (events[..., 6] - events[..., 0]).double()
        parts["slowest_work"] = round(work.max(0).values.mean().item())
        parts["waits_least"] = round((events[..., 7] - events[..., 6]).min(0).values.double().mean().item())
        result[name] = parts
    return result


def with_kernel(case: Case) -> None:
    """Let the net's expert run by the kernel."""

    def streamed(stream: Stream, norms: ExpertNorms, prefix: PrefixKV, counters: Tensor) -> Stream:
        lines = norms.lines(0), norms.lines(1)
        return case.kernel.run(stream, case.weights, lines, prefix, theta=case.theta, eps=norms.eps)

    object.__setattr__(case.net.expert, "streamed", streamed)


def loops(case: Case) -> dict[str, Any]:
    """Ten denoise steps in a graph, with the separate kernels and with the one."""
    net, c = case.net, case.net.config
    x = torch.randn(1, c.action_horizon, c.action_dim, device=net.table.device)
    result: dict[str, Any] = {}
    outs = []
    for name in ("separate", "one"):
        if name == "one":
            with_kernel(case)
        eager = denoise(net, x, case.prefix)
        graph, out = captured(lambda: denoise(net, x, case.prefix))
        graph.replay()
        first = out.clone()
        result[name] = replayed_ms(graph) | {
            "graph_equals_eager": torch.equal(first, eager),
            "replays_equal": torch.equal(first, out),
        }
        outs.append(eager)
    result["max_abs"] = (outs[0] - outs[1]).abs().max().item()
    result["cosine"] = torch.cosine_similarity((outs[0] - x).flatten(), (outs[1] - x).flatten(), dim=0).item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--probe", type=Path, help="a program in CUDA C++ to build and run as well")
    parser.add_argument("--variants", nargs="*", default=[], help="macros to compile others with: A=1,B=2")
    options = parser.parse_args()
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    report = Report(options.out, device)
    begin = time.monotonic()
    kernel, where = expert_kernel(0)
    report.add(kind="build", seconds=round(time.monotonic() - begin, 1), where=where, nvcc=build.nvcc())
    if options.probe is not None:
        report.attempt(lambda: {"said": probe(options.probe)}, kind="probe")
    if kernel is None:
        return
    model = pi0.build(config_of(False), device=device, dtype=torch.bfloat16)
    model.randomize(seed=0)
    net = model.module
    with torch.inference_mode():
        case = Case(kernel, net, net.config.action_horizon, 3)
        try:
            for row in check_phases(case):
                report.add(**row)
        except Exception as e:  # what comes next may still say more
            report.add(kind="phase", error=f"{type(e).__name__}: {e}"[:600])
        report.attempt(lambda: check_whole(case), kind="whole")
        report.attempt(lambda: check_whole(Case(kernel, net, 10, 9)), kind="whole", tokens=10)
        report.attempt(lambda: time_whole(case), kind="time")
        report.attempt(lambda: loops(case), kind="loop")
        for row in variants(case, options.variants):
            report.add(**row)


def variants(case: Case, macros: list[str]) -> Iterator[dict[str, Any]]:
    """Time other versions of the kernel; compile them all at once."""

    def made(text: str) -> Path:
        options = (*build.OPTIONS, *(f"-D{macro}" for macro in text.split(",")))
        return build.compiled("expert", build.nvcc() or "nvcc", options)

    with ThreadPoolExecutor(8) as pool:
        for text, path in zip(macros, pool.map(made, macros), strict=True):
            row: dict[str, Any] = {"kind": "variant", "macros": text}
            try:
                case.kernel = ExpertKernel(ctypes.CDLL(str(path)), 0)
                row |= check_whole(case) | time_whole(case)
                row |= stamped(case) if "STRETTO_STAMPS" in text else {}
            except Exception as e:  # the next version may do better
                row["error"] = f"{type(e).__name__}: {e}"[:600]
            yield row


def probe(source: Path) -> list[str]:
    program = Path("/tmp/stretto_probe")
    command = [build.nvcc() or "nvcc", *build.OPTIONS[:3], "-o", str(program), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=20).stdout.splitlines()


if __name__ == "__main__":
    main()
