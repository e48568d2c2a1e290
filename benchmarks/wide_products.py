"""Cuts of the products of many tokens in CUDA C++, at the sizes of pi0.5's expert: each is checked, then timed beside what
the tables choose.

18 layers with weights of their own are one graph, so weights come from where they come from in the denoise loop. Cuts that a
library does not have are compiled first; `--build` does only that.

    python benchmarks/wide_products.py --libraries /tmp/wide --build
    python benchmarks/wide_products.py --libraries /tmp/wide --json benchmarks/results/wide_products_h200.json

With `--small` everything is built for the host, and small enough for it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.deploy.tune import time_us
from stretto.layers.cuda import build
from stretto.layers.cuda.gated import GatedProduct
from stretto.layers.cuda.rope import RopeProduct
from stretto.layers.cuda.wide import E4M3, Cut, Left
from stretto.layers.kernels import fp8_linear, linear_rope
from stretto.layers.kernels.fold import ShiftLines
from stretto.layers.kernels.folded_linear import folded_geglu, folded_rope_write
from stretto.layers.kernels.rotate_write import rotate_write

HOST = Path(__file__).parent.parent / "tests/layers/cuda_on_host"
LAYERS, WIDTH, HIDDEN, HEADS, TOKENS = 18, 1024, 4096, 8, 50
CLOCK_MHZ, MULTIPROCESSORS = 1980, 132
# Rows, tokens, groups by rows and by tokens, blocks across and along, stages.
GATE_UP: dict[int, list[tuple[int, ...]]] = {
    50: [(128, 56, 2, 1, 1, 1, 4), (64, 56, 1, 1, 2, 1, 6)],
    100: [(128, 104, 2, 1, 1, 2, 6), (64, 104, 1, 1, 2, 1, 6)],
    200: [(128, 104, 2, 1, 1, 2, 6), (128, 104, 2, 1, 1, 2, 3), (64, 208, 1, 2, 2, 1, 5)],
    400: [(128, 200, 2, 1, 1, 2, 4), (256, 104, 2, 1, 1, 2, 4)],
    800: [(128, 200, 2, 1, 1, 2, 4)],
    1600: [(128, 200, 2, 1, 1, 2, 4), (256, 104, 2, 1, 1, 2, 4), (128, 104, 2, 1, 1, 2, 3)],
}
QKV: dict[int, list[tuple[int, ...]]] = {
    50: [(64, 56, 1, 1, 1, 1, 6)],
    100: [(64, 72, 1, 1, 2, 1, 8), (64, 56, 1, 1, 2, 1, 6)],
    200: [(64, 72, 1, 1, 2, 1, 8), (64, 56, 1, 1, 4, 1, 6)],
    400: [(64, 136, 1, 1, 2, 1, 6), (128, 72, 2, 1, 2, 2, 4)],
    800: [(64, 136, 1, 1, 2, 1, 6), (128, 136, 2, 1, 1, 2, 4)],
    1600: [(128, 136, 2, 1, 2, 2, 4), (128, 136, 2, 1, 1, 2, 4)],
}
OPS = {"gate_up": (GATE_UP, "gated"), "qkv": (QKV, "rope")}
SMALL = {"gate_up": (128, 104, 2, 1, 1, 2, 3), "qkv": (64, 104, 1, 1, 2, 1, 4)}


class Sizes:
    """The layer's, or smaller ones for the host."""

    def __init__(self, small: bool) -> None:
        self.layers, self.width, self.hidden, self.heads = (2, 256, 512, 2) if small else (LAYERS, WIDTH, HIDDEN, HEADS)
        self.device = torch.device("cpu" if small else "cuda")

    def columns(self, op: str) -> int:
        return 2 * self.hidden if op == "gate_up" else (self.heads + 2) * 256


def library(op: str, cut: Cut, folder: Path, small: bool) -> Path:
    """Return the library of one cut, compiled unless it is there."""
    source = OPS[op][1]
    made = folder / f"{source}_{'_'.join(map(str, cut))}.so"
    if not made.exists():
        cuts = made.with_suffix(".h")
        cuts.write_text(f"#define STRETTO_{source.upper()}_CUTS(CUT) CUT({', '.join(map(str, cut))})\n")
        if small:
            command = [
                "g++",
                "-O2",
                "-fno-ipa-icf",
                "-std=c++17",
                "-shared",
                "-fPIC",
                "-w",
                f"-I{HOST}",
                f"-I{build.SOURCES}",
                str(HOST / f"{source}.cpp"),
            ]
        else:
            command = [str(build.nvcc()), *build.OPTIONS, str(build.SOURCES / f"{source}.cu")]
        subprocess.run([*command, "-include", str(cuts), "-o", f"{made}.part"], check=True, capture_output=True, text=True)
        Path(f"{made}.part").rename(made)
    return made


Launch = Callable[..., Tensor]


def launcher(op: str, cut: Cut, made: Path) -> Launch:
    """Return what runs one layer's inputs by a cut."""
    loaded = ctypes.CDLL(str(made))
    if op == "gate_up":
        gated = GatedProduct(loaded, 0)
        return lambda x, w, left, _, multiplier: gated.run(x, w, cut, None, multiplier, left, early=True)
    rope = RopeProduct(loaded)
    return lambda x, w, left, _, __, table, k, v, slots, heads: rope.run(
        x, w, *table, k, v, slots, heads, cut, left, early=True
    )


def layers(op: str, rows: int, coded: bool, sizes: Sizes) -> list[tuple[Any, ...]]:
    """Return inputs of the layers: rows, weight, a norm or scales, and for heads what rotates and where it goes."""
    d, columns, batch = sizes.device, sizes.columns(op), rows // TOKENS
    lines, made = torch.randint(11, (batch,), device=d), []
    positions = torch.arange(TOKENS, device=d).expand(batch, TOKENS) + 968
    angles = linear_rope.rotary_table(positions, 256, 1e4) if op == "qkv" else None
    for _ in range(sizes.layers):
        x, w = (
            torch.randn(batch, TOKENS, sizes.width, device=d),
            torch.randn(columns, sizes.width, device=d) * sizes.width**-0.5,
        )
        given: tuple[Any, ...]
        factor, shifts = torch.rand(rows, device=d) + 0.5, torch.randn(11, columns, device=d)
        if coded:
            scales = torch.tensor(1 / 60, device=d), torch.tensor(sizes.width**-0.5 / 60, device=d)
            codes = ((t * 60).clamp(-448, 448).to(E4M3) for t in (x, w * sizes.width**0.5))
            left = Left(factor * scales[0] * scales[1], shifts, lines)
            given = (*codes, left, scales, torch.full((1,), 40.0, device=d))
        else:
            given = (x.bfloat16(), w.bfloat16(), Left(factor, shifts, lines), None, None)
        if op == "qkv":
            k, v = torch.zeros(2, batch, TOKENS, 1, 256, dtype=torch.bfloat16, device=d)
            given = (*given, angles, k, v, torch.arange(batch, device=d), sizes.heads)
        made.append(given)
    return made


def today(op: str, coded: bool) -> Launch:
    """Return what runs a layer's inputs now, by the tables."""

    def run(x: Tensor, w: Tensor, left: Left, scales: Any, multiplier: Tensor, *rest: Any) -> Tensor:
        if coded:
            if op == "gate_up":
                return fp8_linear.fp8_linear_geglu(x, w, scales, multiplier)
            *written, heads = rest
            return rotate_write(fp8_linear.fp8_linear(x, w, None, scales, torch.bfloat16), *written, heads=heads)
        assert left.factor_M is not None
        assert left.table_SN is not None
        assert left.lines is not None
        factor, shift = left.factor_M.view(x.shape[:2]), ShiftLines(left.table_SN, left.lines)
        if op == "gate_up":
            return folded_geglu(x, factor, w, shift)
        *written, heads = rest
        return folded_rope_write(x, factor, w, shift, *written, heads=heads)

    return run


def wanted(op: str, coded: bool, given: tuple[Any, ...]) -> list[Tensor]:
    """Return what the first layer should give, by references in fp32: the result, and keys and values."""
    x, w, left, _, multiplier, *rest = given
    rest = [torch.zeros_like(t) if torch.is_tensor(t) and t.dtype == torch.bfloat16 else t for t in rest]
    factor, shift = left.factor_M.view(x.shape[:2]), ShiftLines(left.table_SN, left.lines)
    if op == "gate_up":
        result = folded_geglu.reference(x.float(), factor, w.float(), shift)
        return [(result * multiplier).clamp(-448, 448) if coded else result]
    *written, heads = rest
    return [folded_rope_write.reference(x.float(), factor, w.float(), shift, *written, heads=heads), *written[1:3]]


def off(got: list[Tensor], want: list[Tensor], coded: bool) -> float:
    """Return by how much more than a rounding a result is off at most."""
    share = 0.13 if coded and len(got) == 1 else 0.01
    apart = [
        ((g.float().view(w.shape) - w.float()).abs() - share * w.float().abs()).max() for g, w in zip(got, want, strict=True)
    ]
    return float(torch.stack(apart).max())


def results(op: str, run: Launch, given: tuple[Any, ...]) -> list[Tensor]:
    q = run(*given)
    return [q, *given[6:8]] if op == "qkv" else [q]


def moved(op: str, cut: Cut, rows: int, coded: bool, sizes: Sizes) -> float:
    """Return the bytes that all thread blocks take in."""
    blocks = sizes.columns(op) // cut.rows * -(-rows // cut.tokens)
    return blocks * (cut.rows + cut.tokens) * sizes.width * (1 if coded else 2)


def measured(op: str, rows: int, coded: bool, cuts: list[Cut], made: dict[Cut, Any], args: Any) -> Iterator[dict[str, Any]]:
    sizes = Sizes(args.small)
    inputs, kind = layers(op, rows, coded, sizes), {"op": op, "tokens": rows, "dtype": "e4m3" if coded else "bf16"}
    want = wanted(op, coded, inputs[0])
    run = today(op, coded)
    row = {"by": "today", "us": round(time_us(run, inputs, sizes.device), 2)}
    # In e4m3 it is a product whose norm is whole already.
    yield {**kind, **row, **({} if coded else {"off": round(off(results(op, run, inputs[0]), want, coded), 4)})}
    for cut in cuts:
        if time.monotonic() > args.until:
            return
        try:
            run = launcher(op, cut, made[cut].result())
            if op == "qkv":
                for t in inputs[0][6:8]:
                    t.zero_()
            got = [t.clone() for t in results(op, run, inputs[0])]
            again = results(op, run, inputs[0])
            apart, same = off(got, want, coded), all(torch.equal(a.float(), b.float()) for a, b in zip(got, again, strict=True))
            us = time_us(run, inputs, sizes.device)
            taken = moved(op, cut, rows, coded, sizes) / MULTIPROCESSORS / (us * CLOCK_MHZ)
            row = {
                "by": list(cut),
                "us": round(us, 2),
                "off": round(apart, 4),
                "same": same,
                "bytes_per_clock": round(taken, 1),
            }
        except (RuntimeError, subprocess.SubprocessError) as e:
            row = {"by": list(cut), "error": f"{type(e).__name__}: {getattr(e, 'stderr', None) or e}"[:400]}
        yield {**kind, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--op", choices=[*OPS, "both"], default="both")
    parser.add_argument("--dtype", choices=("bf16", "e4m3", "both"), default="both")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(GATE_UP))
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="do not begin with another cut after so long")
    args = parser.parse_args()
    args.until = time.monotonic() + args.seconds
    args.libraries.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(2 if args.small else 16) as pool, torch.inference_mode():
        plan = {}
        for op in OPS if args.op == "both" else [args.op]:
            cuts = {n: [Cut(*SMALL[op])] if args.small else [Cut(*c) for c in OPS[op][0][n]] for n in args.tokens}
            every = dict.fromkeys(c for its in cuts.values() for c in its)
            plan[op] = cuts, {c: pool.submit(library, op, c, args.libraries, args.small) for c in every}
        if args.build:
            for _, made in plan.values():
                for cut, its in made.items():
                    if its.exception() is not None:
                        print(cut, getattr(its.exception(), "stderr", its.exception()), flush=True)
            return
        for op, (cuts, made) in plan.items():
            for n in args.tokens:
                for coded in {"bf16": (False,), "e4m3": (True,), "both": (False, True)}[args.dtype]:
                    for row in measured(op, n, coded, cuts[n], made, args):
                        rows.append(row)
                        print(json.dumps(row), flush=True)
                        if args.json is not None:
                            args.json.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main()
