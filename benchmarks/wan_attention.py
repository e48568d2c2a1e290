"""Time of every way to attend over a Wan ring, at the true shapes of the three models, and a table of the fastest.

    python benchmarks/wan_attention.py --out benchmarks/results/wan_attention_h200.json --table /tmp/h200.json

Each way is checked against fp32 attention of some queries of the first and the last head, run twice for equal bits, and timed
from a captured graph. Keys and values of one row are larger than the second-level cache. Beside the ways that the runtime
chooses among stand FlashAttention 2, FlexAttention, and cuDNN over splits with its queries copied. The prompt's keys (512)
and the products with a GELU behind them are measured too. Rows end up in `--out` as they are measured; with `--table`,
the fastest of each shape in a table that the runtime reads (STRETTO_KERNEL_TABLE).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stretto.deploy.provenance import provenance
from stretto.layers.kernels import chunk_attention as chosen
from stretto.layers.kernels import level_norm
from stretto.layers.kernels.language import block_of
from stretto.layers.kernels.ring_attention import RingTiling, join_splits, ring_attention
from stretto.layers.tuning import Config, Entry, Table, device_name, dtype_name, tunables, tuned
from stretto.models.wan_config import SPECS

WINDOW = 21
ORDER = ("wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b")
CASES = [(1, 1), (3, 1), (1, 4), (1, 2), (3, 4), (3, 2)]
"""Latent frames of a chunk, rows of a batch."""


QUICK = ((1, 1, 21), (4, 1, 21), (1, 3, 21), (1, 1, 9), (2, 1, 21), (4, 3, 21))
"""Rows, frames of a chunk, frames of the window."""


def quick_shapes(small: bool, first: int) -> Iterator[tuple[str, chosen.Shape]]:
    """Yield the shapes of rings that are timed with `--quick`."""
    if small:
        yield from shapes(small)
        return
    for (rows, frames, window), name in list(itertools.product(QUICK, ORDER))[:first]:
        if rows * frames > 4 and name != "wan2.1-1.3b":
            continue
        config = SPECS[name]
        tokens = config.tokens_per_frame
        ring = chosen.Shape(rows, frames * tokens, window * tokens, config.heads, config.head_dim)
        yield f"{name}, {frames} frames, {rows} rows, window {window}, ring", ring


def shapes(small: bool) -> Iterator[tuple[str, chosen.Shape]]:
    """Yield the shapes with the case that they are of, the most wanted first."""
    if small:
        yield "small, ring", chosen.Shape(2, 40, 2048, 2, 32)
        return
    for (frames, rows), name in itertools.product(CASES, ORDER):
        config = SPECS[name]
        tokens = frames * config.tokens_per_frame
        ring = chosen.Shape(rows, tokens, WINDOW * config.tokens_per_frame, config.heads, config.head_dim)
        yield f"{name}, {frames} frames, {rows} rows, ring", ring
        yield f"{name}, {frames} frames, {rows} rows, prompt", ring._replace(keys=config.text_tokens)


def seconds_of(run: Callable[[], object], budget_s: float = 0.04) -> float:
    """Return the median time of one run, from a graph where there is one."""
    for _ in range(2):
        run()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    spans: list[float] = []
    while (sum(spans) < budget_s and len(spans) < 200) or len(spans) < 5:
        begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        spans.append(begin_event.elapsed_time(end_event) / 1e3)
    return statistics.median(spans)


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the largest error, over the size of the largest value, of some queries against fp32 attention."""
    last, errors = q.shape[2] - 1, []
    for row, head, at in ((0, 0, slice(0, 24)), (len(q) - 1, last, slice(-24, None))):
        scores = q[row, at, head].float() @ k[row + 1, :, head].float().T * q.shape[-1] ** -0.5
        want = scores.softmax(-1) @ v[row + 1, :, head].float()
        errors.append(float((out[row, at, head].float() - want).abs().max() / want.abs().max()))
    return max(errors)


def ways(shape: chosen.Shape, extras: bool, with_flex: bool) -> Iterator[tuple[str, Config | None, Callable[..., Tensor]]]:
    """Yield a name, the choice it stands for (None: not one of the runtime's), and what runs it on (q, k, v, places)."""
    more = [chosen.Choice("cudnn", z)._asdict() for z in range(2, chosen.MAX_SPLITS + 1) if extras and shape.keys % z == 0]
    listed = chosen.candidates(shape)
    for choice in [*listed, *(choice for choice in more if choice not in listed)]:
        name = " ".join(str(part) for part in chosen.Choice(**choice))  # type: ignore[arg-type]
        yield name, choice, lambda q, k, v, places, c=choice: chosen.chunk_attention(q, k, v, places, chosen.Choice(**c))
    if not extras:
        return

    def flash(q: Tensor, k: Tensor, v: Tensor, places: chosen.Places) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k[1:], v[1:]))).transpose(1, 2)

    def copied(q: Tensor, k: Tensor, v: Tensor, places: chosen.Places) -> Tensor:
        splits, batch = 5 if shape.keys % 5 == 0 else 4, len(q)
        shares = [x[1:].unflatten(1, (splits, -1)).flatten(0, 1).transpose(1, 2) for x in (k, v)]
        copy = q[:, None].expand(-1, splits, -1, -1, -1).contiguous().flatten(0, 1).transpose(1, 2)
        part, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(copy, *shares, None, True)
        return join_splits(part.unflatten(0, (batch, splits)).transpose(2, 3), lse.view(batch, splits, shape.heads, -1))

    if shape.heads != 12:
        return
    yield "flash", None, flash
    yield "cudnn, queries copied", None, copied
    for tiling in (RingTiling(1, 64, 128, 4, 2), RingTiling(1, 128, 64, 8, 4), RingTiling(1, 128, 64, 4, 3)):
        yield f"triton {tuple(tiling)}", None, lambda q, k, v, places, t=tiling: ring_attention.kernel(q, k, v, *places[2:], t)
    if with_flex:
        yield "flex", None, flex


def quick_rows(
    label: str, shape: chosen.Shape, device: torch.device, pause_s: float = 0.12
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Time what the table has and the kernel for Hopper in its variants, each after a pause."""
    rows_choice = tuned("chunk_attention", shape, torch.bfloat16, device)
    now = chosen.Choice(**(rows_choice or chosen.by_rule(shape, chosen.H200_PROCESSORS)._asdict()))  # type: ignore[arg-type]
    splits = chosen.by_blocks(shape)
    listed = [now, *(chosen.Choice("hopper", z, 128, 128, 4, 2) for z in splits[:2])]
    if now.method == "hopper":
        listed = [chosen.by_rule(shape, chosen.H200_PROCESSORS), now, now._replace(stages=3)]
    case, tensors, places = inputs_of(label, shape, device)
    for choice in listed:
        name = " ".join(str(part) for part in choice)
        if device.type == "cuda":
            time.sleep(pause_s)
        run = functools.partial(chosen.chunk_attention, *tensors, places, choice)
        yield measure(name, run, case, tensors), choice._asdict()


def flex(q: Tensor, k: Tensor, v: Tensor, places: chosen.Places) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    out: Tensor = compiled(*(x.transpose(1, 2) for x in (q, k[1:], v[1:])))
    return out.transpose(1, 2)


def measure(name: str, run: Callable[[], Tensor], case: dict[str, Any], tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    row = {**case, "way": name}
    try:
        out = run()
        row["error"] = round(error_of(out, *tensors), 5)
        row["equal_bits"] = bool(torch.equal(out, run()))
        del out
        row["us"] = round(seconds_of(run) * 1e6, 1)
        row["tflop_per_s"] = round(row["gflop"] / row["us"] * 1e3, 1)
    except Exception as error:  # one way must not cost the others their figures
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    return row


def inputs_of(
    label: str, shape: chosen.Shape, device: torch.device
) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor], chosen.Places]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator(device=device).manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    q = random(shape.rows, shape.queries, shape.heads, shape.head_dim)
    k, v = (random(shape.rows + 1, shape.keys, shape.heads, shape.head_dim) for _ in range(2))
    slots_B = torch.arange(1, shape.rows + 1, device=device)
    places = chosen.Places(tuple(slots_B.tolist()), (shape.keys,) * shape.rows, slots_B, torch.full_like(slots_B, shape.keys))
    gflop = 4 * shape.rows * shape.queries * shape.keys * shape.heads * shape.head_dim / 1e9
    return {"case": label, **shape._asdict(), "gflop": round(gflop, 2)}, (q, k, v), places


def attention_rows(
    label: str, shape: chosen.Shape, device: torch.device, extras: bool, with_flex: bool
) -> Iterator[tuple[dict[str, Any], Any]]:
    case, (q, k, v), places = inputs_of(label, shape, device)
    for name, choice, way in ways(shape, extras, with_flex):
        yield measure(name, lambda way=way: way(q, k, v, places), case, (q, k, v)), choice


def gelu_rows(name: str, frames: int, rows: int, device: torch.device) -> Iterator[tuple[dict[str, Any], Any]]:
    config, tunable = SPECS[name], tunables()["linear_gelu"]
    key = (rows * frames * config.tokens_per_frame, config.width, config.ffn_width)
    inputs = tunable.inputs(key, torch.bfloat16, device)
    gflop = 2 * key[0] * key[1] * key[2] / 1e9
    listed = tunable.candidates(key)
    large = [choice for choice in listed if (choice.get("block_m"), choice.get("block_n")) in ((128, 256), (256, 128))]
    for choice in [*listed[:2], *large[:1]]:
        row: dict[str, Any] = {"case": f"{name}, {frames} frames, {rows} rows, gelu", "key": key, "way": str(dict(choice))}
        try:
            row["us"] = round(seconds_of(lambda choice=choice: tunable.run(choice, *inputs)) * 1e6, 1)
            row["tflop_per_s"] = round(gflop / row["us"] * 1e3, 1)
        except Exception as error:  # as in `measure`
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row, choice


def norm_rows(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time the passes between products by block and warps a token."""
    config = SPECS[name]
    tokens, width = config.tokens_per_frame, config.width
    table = torch.randn(6, 6, width, device=device)
    levels, weight = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.randn(width, device=device).bfloat16()
    sets = [
        [torch.randn(1, tokens, width, device=device).bfloat16() for _ in range(4)]
        for _ in range(1 + 96 * 2**20 // (tokens * width * 8))
    ]
    kinds = {
        "norm": lambda x, y, out, total, cut: level_norm._launch(
            x, None, out, None, table, levels, None, 1e-6, shift=0, scale=1, cut=cut
        ),
        "gated add, norm": lambda x, y, out, total, cut: level_norm._launch(
            x, y, out, total, table, levels, (weight, weight), 1e-6, gate=2, cut=cut
        ),
        "gated add": lambda x, y, out, total, cut: level_norm._launch(
            x, y, None, total, table, levels, None, 1e-6, gate=2, cut=cut
        ),
    }
    cuts = [(512, 2), (512, 1), (1024, 4), (1024, 2), (block_of(width), 16), (block_of(width), 8)]
    cuts = [cut for cut in cuts if width % cut[0] == 0 or cut[0] > width]
    for (kind, launch), cut in itertools.product(kinds.items(), cuts):
        row: dict[str, Any] = {"case": f"{name}, {kind}", "way": f"blocks of {cut[0]}, {cut[1]} warps"}

        def run(launch: Any = launch, cut: tuple[int, int] = cut) -> None:
            for tensors in sets:
                launch(*tensors, cut)

        try:
            row["us"] = round(seconds_of(run, 0.01) * 1e6 / len(sets), 2)
        except Exception as error:  # as in `measure`
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row


class Kept:
    """Rows on disk as they come, and the fastest choice of each shape."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.about = args, provenance(device)
        self.rows: list[dict[str, Any]] = []
        self.table = Table(device_name(device), torch.__version__, metadata.version("triton"), ())

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1))

    def choose(self, op: str, key: tuple[int, ...], timed: list[tuple[dict[str, Any], Any]], rule: Config) -> None:
        good = [
            (row["us"], choice) for row, choice in timed if choice is not None and "us" in row and row.get("error", 0) < 0.05
        ]
        if not good or self.args.table is None:
            return
        us, choice = min(good, key=lambda pair: pair[0])
        dtype = dtype_name(torch.bfloat16)
        by_rule = next((us for us, choice in good if choice == rule), us)
        entry = Entry(op, tuple(key), dtype, choice, us, by_rule, self.about["commit"])
        self.table = self.table.merged(replace(self.table, entries=(entry,)))
        self.table.save(self.args.table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--budget-seconds", type=float, default=60.0)
    parser.add_argument("--flex", action="store_true", help="also FlexAttention at the first shape; it is compiled first")
    parser.add_argument("--first", type=int, default=99, help="with --quick: only so many shapes, the usual ones first")
    parser.add_argument("--quick", action="store_true", help="over rings only what the table has and the kernel for Hopper")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script itself on any device")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept, until = Kept(args, device), time.monotonic() + args.budget_seconds
    with torch.inference_mode():
        chosen.prefer_fastest_attention()
        for at, (label, shape) in enumerate(quick_shapes(args.small, args.first) if args.quick else shapes(args.small)):
            if time.monotonic() > until:
                kept.add({"case": label, "not_run": "out of time"})
                continue
            if args.quick:
                timed = []
                for row, choice in quick_rows(label, shape, device):
                    kept.add(row)
                    timed.append((row, choice))
                kept.choose("chunk_attention", shape, timed, chosen.by_rule(shape, chosen.H200_PROCESSORS)._asdict())
                continue
            timed = []
            for row, choice in attention_rows(label, shape, device, at < 6 and at % 2 == 0 and not args.small, args.flex):
                kept.add(row)
                timed.append((row, choice))
                if time.monotonic() > until:
                    break
            kept.choose("chunk_attention", shape, timed, chosen.by_rule(shape, chosen.H200_PROCESSORS)._asdict())
            if shape.keys == 512:
                name, frames = label.split(",")[0], int(label.split()[1])
                timed = list(gelu_rows(name, frames, shape.rows, device))
                for row, _ in timed:
                    kept.add(row)
                kept.choose("linear_gelu", timed[0][0]["key"], timed, {"impl": "cublas_gelu"})
                for row in norm_rows(name, device) if at < 6 else ():
                    kept.add(row)


if __name__ == "__main__":
    main()
