"""Products that are gated and added to a residual, with the next norm's rows: each cut checked, then timed.

    python benchmarks/added_products.py --out added_products.json
    python benchmarks/added_products.py --small          # the cuts' results only, on the CPU by the host build

A time is that of one product within a graph of many, each with weights of its own (more than 120 MB in all), each adding to the
residual that the one before left.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.layers.cuda import build
from stretto.layers.cuda.added import Added, AddedCut, AddedProduct, CodedRows
from stretto.layers.cuda.wide import E4M3, Cut
from stretto.layers.kernels import linear_folded_norm
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.fp8_linear import fp8_linear
from stretto.layers.kernels.fp8_norm import ada_rms_norm_fp8
from stretto.layers.tuning import tuned

Numbers = tuple[int, ...]
WIDTH, EPS = 1024, 1e-6
COLD_BYTES = 130e6
# Rows, tokens, groups by rows and by tokens, blocks across and along, stages, splits.
CUTS: dict[int, list[Numbers]] = {
    200: [
        (64, 104, 1, 1, 1, 1, 4, 4),
        (64, 104, 1, 1, 1, 1, 3, 4),
        (64, 112, 1, 2, 1, 1, 4, 4),
        (64, 56, 1, 1, 1, 1, 6, 2),
        (64, 56, 1, 1, 1, 1, 13, 2),
        (64, 56, 1, 1, 2, 1, 6, 2),
    ],
    400: [
        (64, 104, 1, 1, 1, 1, 4, 2),
        (64, 104, 1, 1, 1, 1, 9, 2),
        (64, 56, 1, 1, 1, 1, 6, 2),
        (128, 104, 2, 1, 1, 1, 5, 4),
    ],
    1600: [
        (128, 104, 2, 1, 1, 1, 7, 1),
        (64, 208, 1, 2, 1, 1, 6, 1),
        (64, 104, 1, 1, 1, 1, 5, 1),
    ],
    100: [
        (64, 56, 1, 1, 1, 1, 6, 4),
        (64, 56, 1, 1, 1, 1, 12, 4),
    ],
    800: [
        (64, 104, 1, 1, 1, 1, 10, 1),
        (128, 104, 2, 1, 1, 1, 6, 2),
    ],
    150: [
        (64, 80, 1, 1, 1, 1, 5, 4),
        (64, 40, 1, 1, 1, 1, 13, 2),
    ],
}


def cut_of(numbers: Numbers) -> AddedCut:
    return AddedCut(Cut(*numbers[:7]), numbers[7])


def host_library(cuts: list[Numbers], folder: Path, number: int) -> ctypes.CDLL:
    here = Path(__file__).resolve().parents[1] / "tests" / "layers" / "cuda_on_host"
    made = folder / f"added{number}.so"
    compiler = shutil.which("g++") or "g++"
    options = ["-O2", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{here}", f"-I{build.SOURCES}", *defined(cuts, folder)]
    subprocess.run([compiler, *options, str(here / "added.cpp"), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def device_library(cuts: list[Numbers]) -> ctypes.CDLL:
    compiler = build.nvcc()
    assert compiler is not None, "there is no nvcc"
    found = build.loaded(build.compiled("added", compiler, (*build.OPTIONS, *defined(cuts, build.cache_folder())))).library
    assert found is not None
    return found


def defined(cuts: list[Numbers], folder: Path) -> list[str]:
    """Return the options that make a library of these cuts."""
    text = "#define STRETTO_ADDED_CUTS(CUT) " + " ".join(f"CUT({', '.join(map(str, c))})" for c in cuts) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"added-cuts-{hashlib.sha256(text.encode()).hexdigest()[:16]}.h"
    path.write_text(text)
    return ["-include", str(path)]


def products(wanted: list[Numbers], device: str, at_once: int) -> dict[Numbers, AddedProduct]:
    """Compile cuts in several libraries at once."""
    runs = [wanted[i::at_once] for i in range(at_once) if wanted[i::at_once]]
    if device == "cpu":
        folder = Path(__file__).parent / "__pycache__"
        folder.mkdir(exist_ok=True)
        libraries = [host_library(cuts, folder, i) for i, cuts in enumerate(runs)]
    else:
        with ThreadPoolExecutor(at_once) as pool:
            libraries = list(pool.map(device_library, runs))
    made = [AddedProduct(library, 0) for library in libraries]
    return {cut: product for cuts, product in zip(runs, made, strict=True) for cut in cuts}


class Case:
    """Arguments of one product at one shape, as pi0.5's expert has them; weights of many layers."""

    def __init__(self, tokens: int, inner: int, coded: bool, device: str, layers: int) -> None:
        torch.manual_seed(tokens + inner)
        self.tokens, self.inner, self.is_coded, self.layers = tokens, inner, coded, layers
        batch = max(tokens // 50, 1)
        shape = batch, tokens // batch
        x, weights = torch.randn(3, *shape, inner, device=device), torch.randn(layers, WIDTH, inner, device=device)
        self.residual = torch.randn(*shape, WIDTH, device=device)
        one = torch.tensor(1 / 40, device=device)
        before = self.residual.square().view(*shape, -1, 64).sum(-1)
        self.coded = CodedRows(one, one * inner**-0.5, before) if coded else None
        self.xs = (x * 40).clamp(-448, 448).to(E4M3) if coded else x.bfloat16()
        self.weights = (weights * 40).clamp(-448, 448).to(E4M3) if coded else (weights * inner**-0.5).bfloat16()
        table, lines = torch.randn(11, 37, 3 * WIDTH, device=device) * 0.1, torch.arange(batch, device=device) * 3 % 11
        self.norms = [Modulation(table[:, i], lines) for i in range(37)]
        self.multiplier = torch.full((1,), 40.0, device=device)

    def run(self, product: AddedProduct, cut: AddedCut, i: int, residual: Tensor) -> Added:
        factors, norms = (self.xs[i % 3], self.weights[i]), self.norms[i % 36 : i % 36 + 2]
        return product.run(*factors, residual, *norms, cut, coded=self.coded, eps=EPS, early=True)

    def today(self, i: int, residual: Tensor) -> Tensor:
        x, weight, gate, norm = self.xs[i % 3], self.weights[i], self.norms[i % 36], self.norms[i % 36 + 1]
        if self.coded is not None:
            y = fp8_linear(x, weight, None, (self.coded.x_scale, self.coded.weight_scale), torch.bfloat16)
            return ada_rms_norm_fp8(residual, y, gate, norm, self.multiplier, EPS)[1]
        choice = tuned(linear_folded_norm.OP, (self.tokens, self.inner, WIDTH), x.dtype, x.device)
        return linear_folded_norm.run(choice, x, weight, residual, gate, norm, EPS, torch.bfloat16)[2]

    def wrong(self, got: Added) -> str | None:
        """Say what differs from a product in fp64; None if nothing does."""
        y = self.xs[0].double() @ self.weights[0].double().T
        if self.coded is not None:
            y = y * self.coded.x_scale.double() * self.coded.weight_scale.double()
        total = self.residual.double() + self.norms[0].parts()[2].double() * y
        scaled = total * (1.0 + self.norms[1].parts()[0].double())
        if self.coded is not None:
            scaled = scaled * torch.rsqrt(self.coded.before_BTP.double().sum(-1, keepdim=True) / WIDTH + EPS)
        squares = total.square().view(*total.shape[:2], -1, 64).sum(-1)
        step = 2**-4 if self.coded is not None else 2**-8
        wanted = {"scaled_BTD": (scaled, step * 1.02), "squares_BTP": (squares, 2e-4), "total_BTD": (total, 2e-4)}
        for name, (should, rtol) in wanted.items():
            off = (getattr(got, name).double() - should).abs() - rtol * should.abs()
            if not bool((off < 2e-3).all()):
                return f"{name} is {off.max().item():.3g} off"
        return None


def timed_us(step: Callable[[int, Tensor], Tensor], first: Tensor, layers: int) -> float:
    def all_layers() -> None:
        residual = first
        for i in range(layers):
            residual = step(i, residual)

    all_layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()
    graph.replay()
    took = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(6):
            graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1000 / 6 / layers)
    return statistics.median(took)


def case_rows(case: Case, made: dict[Numbers, AddedProduct], on_gpu: bool) -> list[dict[str, Any]]:
    head = {"tokens": case.tokens, "inner": case.inner, "dtype": "e4m3" if case.is_coded else "bf16"}
    rows: list[dict[str, Any]] = []
    if on_gpu:
        rows.append({**head, "impl": "today", "us": round(timed_us(case.today, case.residual, case.layers), 2)})
    for numbers in CUTS[case.tokens]:
        row: dict[str, Any] = {**head, "impl": "cuda", "cut": numbers}
        try:
            product, cut = made[numbers], cut_of(numbers)
            got = case.run(product, cut, 0, case.residual)
            row["wrong"] = case.wrong(got)
            if on_gpu:
                again = case.run(product, cut, 0, case.residual)
                row["same_twice"] = all(torch.equal(a.float(), b.float()) for a, b in zip(got, again, strict=True))

                def step(i: int, residual: Tensor, product: AddedProduct = product, cut: AddedCut = cut) -> Tensor:
                    return case.run(product, cut, i, residual).total_BTD

                row["us"] = round(timed_us(step, case.residual, case.layers), 2)
        except RuntimeError as e:
            row["error"] = str(e)[:200]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile the cuts and end")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(CUTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further shape is begun")
    parser.add_argument("--at-once", type=int, default=12, help="compilers that run at the same time")
    parser.add_argument("--layers", type=int, help="sets of weights; few of them stay in the second-level cache")
    given = parser.parse_args()
    device = "cpu" if given.small else "cuda"
    wanted = list(dict.fromkeys(cut for tokens in given.tokens for cut in CUTS[tokens]))
    begin = time.monotonic()
    if given.compile:
        with ThreadPoolExecutor(given.at_once) as pool:
            list(pool.map(device_library, [wanted[i :: given.at_once] for i in range(given.at_once)]))
        return
    made = products(wanted, device, 1 if given.small else given.at_once)
    print(f"{len(wanted)} cuts compiled in {time.monotonic() - begin:.0f} s", flush=True)
    result: list[dict[str, Any]] = []
    for tokens in given.tokens:
        for inner in (512,) if given.small else (2048, 4096):
            for coded in (False, True):
                if time.monotonic() - begin > given.seconds:
                    continue
                layers = 1 if given.small else given.layers or int(COLD_BYTES / (inner * WIDTH * (1 if coded else 2))) + 1
                for row in case_rows(
                    Case(tokens, inner * (2 if given.small and coded else 1), coded, device, layers), made, not given.small
                ):
                    print(json.dumps(row), flush=True)
                    result.append(row)
                    if given.out is not None:
                        head = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
                        given.out.write_text(json.dumps({**head, "rows": result}, indent=1))


if __name__ == "__main__":
    main()
