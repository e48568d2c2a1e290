"""Time the kernels of pi0.5's image tower and prefix, choice by choice, then both stages as shipped and with the fastest ones.

    python benchmarks/prefix_vision.py --out prefix_vision.json --table h200.json [--batch 1,4,32,8] [--prompt 16,200]
        [--seconds 100] [--no-stages] [--small]

Every choice is checked against what the op's own rule runs before it is timed; beside a fused product stands cuBLAS alone,
its floor. The table can be given to STRETTO_KERNEL_TABLE. `--small` tries the script on any device at a toy's shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from stretto.deploy.bench import sized_inputs
from stretto.deploy.models import build_preset
from stretto.deploy.provenance import provenance
from stretto.deploy.tune import Wanted, measured, table_at, time_us
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import attention, linear_geglu, linear_gelu, linear_rope_write, prefix_attention
from stretto.layers.tuning import choices, device_name, tunables
from stretto.models.pi0 import SPECS, tiny
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_fp8 import EXPERT_ROWS
from stretto.runtime.profiler import Bench, stage_segments

CODED = "float8_e4m3fn"
OPS: tuple[FusedOp[Any, Any], ...] = (prefix_attention, linear_geglu, linear_gelu, linear_rope_write, attention)


def shapes(c: Pi0Config, batch: int, prompt: int, dtype: str) -> Iterator[Wanted]:
    """Yield the shapes of one batch size, those with most to win first; the image tower's do not depend on the prompt."""
    yield from vision_shapes(c, batch, dtype)
    yield from prefix_shapes(c, batch, prompt, dtype)
    if batch > 1:  # one robot's suffix has kernels of its own
        yield from expert_shapes(c, batch, dtype)


def vision_shapes(c: Pi0Config, batch: int, dtype: str) -> Iterator[Wanted]:
    vision, patches, images = c.vision, batch * c.image_tokens, batch * c.cameras
    width, mlp, size = vision.width, vision.mlp, vision.width // vision.heads
    yield "fp8_linear_gelu", (patches, width, mlp), CODED
    yield "linear_add_layer_norm", (patches, mlp, width), dtype
    yield "linear_gelu", (patches, width, mlp), dtype
    yield "dense", (patches, width, 3 * width, 1), dtype
    yield "linear_add_layer_norm", (patches, width, width), dtype
    yield "fp8_linear_add", (patches, mlp, width, 1), CODED
    yield "fp8_dense", (patches, width, 3 * width, 1), CODED
    yield "fp8_linear_add", (patches, width, width, 1), CODED
    yield "attention", (images, c.tokens_per_camera, c.tokens_per_camera, vision.heads, vision.heads, size, 0), dtype


def prefix_shapes(c: Pi0Config, batch: int, prompt: int, dtype: str) -> Iterator[Wanted]:
    language, prefix = c.language, c.image_tokens + prompt
    rows, width, mlp = batch * prefix, language.width, language.mlp
    heads, packed = (language.heads, language.kv_heads, language.head_dim), language.heads * language.head_dim
    yield "linear_geglu", (rows, width, mlp), dtype
    yield "linear_add_rms_norm", (rows, mlp, width), dtype
    yield "linear_rope_write", (rows, width, *heads), dtype
    yield "linear_add_rms_norm", (rows, packed, width), dtype
    yield "prefix_attention", (batch, prefix, prefix, *heads, 1), dtype
    yield "coded_prefix_attention", (batch, prefix, language.heads, language.head_dim), CODED
    yield "fp8_linear_geglu", (rows, width, mlp), CODED
    yield "fp8_linear_add", (rows, mlp, width, 0), CODED
    yield "fp8_dense", (rows, width, packed + 2 * language.kv_heads * language.head_dim, 0), CODED
    yield "fp8_linear_add", (rows, packed, width, 0), CODED


def expert_shapes(c: Pi0Config, batch: int, dtype: str) -> Iterator[Wanted]:
    expert, rows = c.expert, batch * c.suffix_tokens
    packed = expert.heads * expert.head_dim
    if rows >= EXPERT_ROWS:
        yield "fp8_linear_geglu", (rows, expert.width, expert.mlp), CODED
    yield "folded_geglu", (rows, expert.width, expert.mlp), dtype
    yield "linear_add_folded_norm", (rows, expert.mlp, expert.width), dtype
    yield "folded_rope_write", (rows, expert.width, expert.heads, expert.kv_heads, expert.head_dim), dtype
    yield "linear_add_folded_norm", (rows, packed, expert.width), dtype
    heads = (expert.heads, expert.head_dim, expert.kv_heads)
    yield "suffix_attention", (batch, c.suffix_tokens, *heads, c.prefix_tokens, c.suffix_tokens), dtype


def floor_us(wanted: Wanted, device: torch.device) -> float | None:
    """Time the bare product of a fused one; inputs of such an op begin with x and the weight."""
    op, key, dtype = wanted
    if not op.startswith("linear_") or dtype == CODED:
        return None
    make = tunables()[op].inputs
    sets = [make(key, getattr(torch, dtype), device) for _ in range(4 if key[0] < 10_000 else 2)]
    return time_us(lambda x, weight, *_: linear(x, weight), sets, device)


def stages(model: Any, batch: int, prompt: int, device: torch.device, n: int) -> dict[str, float]:
    """Return p50 of the vision and the prefix stage in ms."""
    bench = Bench(model, device, "graph" if device.type == "cuda" else "eager", batch)
    bench.load(sized_inputs(model, batch, prompt))
    lengths = {"prompt": prompt}
    found = {}
    for name, (segment, _) in stage_segments(model).items():
        if name in ("vision", "prefix"):
            found[name] = round(bench.segment(segment, lengths, warmup=3, n=n).p50, 4)
    return found


class Report:
    """Rows, printed and written as they come."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.content = path, {**provenance(device), "rows": []}

    def add(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        self.content["rows"].append(row)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def attempt(self, head: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        """Add a row with the outcome of `work`, or with the text of its error."""
        try:
            self.add(head | work())
        except Exception as e:  # one failing case must not hide the others
            self.add(head | {"error": f"{type(e).__name__}: {e}"[:1000]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--table", type=Path, required=True, help="table of choices to write, or to go on with")
    parser.add_argument("--batch", default="1,4,32,8", help="batch sizes, with commas, in the order of their turn")
    parser.add_argument("--prompt", help="prompt tokens, with commas; the longest by default")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no new case after this long")
    parser.add_argument(
        "--cells", help="batch:prompt or batch:prompt:bf16, with commas; in place of every batch with every prompt"
    )
    parser.add_argument("--new", nargs="*", default=(), help="of these ops leave out shapes that a shipped table knows")
    parser.add_argument("--only", nargs="+", default=("",), help="tune only ops whose name contains one of these")
    parser.add_argument("--without", nargs="*", default=(), help="ops to leave out")
    parser.add_argument("--no-stages", action="store_true", help="only tune; no model is built")
    parser.add_argument("--no-tune", action="store_true", help="only the stages")
    parser.add_argument("--small", action="store_true", help="a toy model, on any device")
    args = parser.parse_args()
    begin = time.monotonic()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = "float32" if args.small and device.type == "cpu" else "bfloat16"
    report = Report(args.out, device)
    report.content["triton_ops"] = {op.name: op.implementation(device) for op in OPS}
    model: Any = None
    if not args.no_stages:
        model = tiny()[0] if args.small else build_preset("pi0.5", device=str(device), dtype=dtype)
        report.add({"case": "model built", "s": round(time.monotonic() - begin, 1)})
    config = tiny()[0].config if args.small else SPECS["pi05"]
    prompts = [int(n) for n in (args.prompt or str(config.tokenizer_max_length)).split(",")]
    batches = [int(b) for b in args.batch.split(",")]

    table = table_at(args.table, device_name(device))
    cells = [(batch, prompt) for batch in batches for prompt in prompts]
    coded = set(cells)
    if args.cells:
        named = [cell.split(":") for cell in args.cells.split(",")]
        cells = [(int(batch), int(prompt)) for batch, prompt, *_ in named]
        coded = {(int(batch), int(prompt)) for batch, prompt, *more in named if not more}
    order = [
        w
        for cell in cells
        for w in shapes(config, *cell, dtype)
        if any(part in w[0] for part in args.only) and w[0] not in args.without and (w[2] != CODED or cell in coded)
    ]
    known = choices(device).known
    order = [w for w in dict.fromkeys(order) if w not in known or w[0] not in args.new]
    for wanted in [] if args.no_tune else order:
        # A quarter of the time is for the stages, if they are timed.
        for row, entry in measured([wanted], device, begin + (1.0 if args.no_stages else 0.75) * args.seconds):
            if entry is not None:
                table = table.merged(replace(table, entries=(entry,)))
                table.save(args.table)
            us = None if "left" in row else floor_us(wanted, device)
            report.add(row if us is None else row | {"floor_us": round(us, 2)})
    table_env = {"STRETTO_KERNEL_TABLE": str(args.table)} if args.table.is_file() else {}
    cases: list[tuple[str, dict[str, str]]] = [("as shipped", {}), ("table", table_env)]
    for (batch, prompt), (name, env) in [] if args.no_stages else itertools.product(cells, cases):
        os.environ.pop("STRETTO_KERNEL_TABLE", None)
        os.environ.update(env)
        choices.cache_clear()
        if time.monotonic() - begin < args.seconds:
            work = partial(stages, model, batch, prompt, device, 30 if batch < 8 else 8)
            report.attempt({"case": "stages", "batch": batch, "prompt": prompt, "choices": name}, work)
    report.content["kernels"] = choices(device).report()
    report.add({"case": "end", "s": round(time.monotonic() - begin, 1)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
