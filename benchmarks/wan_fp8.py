"""Wan blocks in FP8 beside bf16: time of a block, relative error of what a block adds, and of a chunk after all its steps.

    python benchmarks/wan_fp8.py --out benchmarks/results/wan_fp8_h200.json

Weights and full rings are random, so the errors say how the two runs of one network differ, and nothing of pictures. A chunk
goes through all blocks and denoise steps; its error is that of x0 against bf16's, and beside it stands that of bf16 against
itself with the attention kernel of torch's own choice, which is what rounding alone does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from wan_block import LocalRows, bind, captured, timed

from stretto.deploy.provenance import provenance
from stretto.layers.kernels import chunk_attention as chosen
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig, tiny_config

WINDOW, VISITS = 21, 5


class StepRows(LocalRows):
    """One chunk of one stream; `enter` says at which denoise step it is. Values go on from stage to stage."""

    def __init__(self, model: WanModel, chunk: int) -> None:
        super().__init__(model, model.config.denoise_steps, chunk)
        self.all = (list(self.host), self.steps_B, self.state_slots_B)
        self.values = {name: value[:1] for name, value in self.values.items()}
        self.slots_B = self.slots_B[:1]

    def enter(self, step: int) -> None:
        rows, steps_B, slots_B = self.all
        self.host, self.steps_B, self.state_slots_B = [rows[step]], steps_B[step : step + 1], slots_B[step : step + 1]

    def put(self, name: str, value: Tensor) -> None:
        self.values[name] = value


def relative(got: Tensor, want: Tensor) -> float:
    return round(float((got.float() - want.float()).norm() / want.float().norm()), 5)


def added(model: WanModel, chunk: int) -> Tensor:
    """Return what the first block adds to random hidden tokens."""
    rows = StepRows(model, chunk)
    rows.enter(0)
    h = rows.get("h").clone()
    model.stages["block.0"].run(rows)  # type: ignore[arg-type]
    return rows.get("h").float() - h.float()


def chunk_of(model: WanModel, chunk: int) -> Tensor:
    """Return a chunk's clean latent."""
    rows = StepRows(model, chunk)
    for step in range(model.config.denoise_steps):
        rows.enter(step)
        for stage in ("embed", *(f"block.{i}" for i in range(model.config.blocks)), "head"):
            model.stages[stage].run(rows)  # type: ignore[arg-type]
    return rows.get("x")


def errors(config: WanConfig, device: torch.device, run: Callable[[WanModel, int], Tensor]) -> dict[str, float]:
    chunk = 3 * WINDOW

    def result(precision: str) -> Tensor:
        model = build(replace(config, precision=precision), device=device)
        model.randomize(seed=0)
        return run(model, chunk)

    want = result("dtype")
    made = {"fp8": relative(result("fp8" if device.type == "cuda" else "fp8-emulated"), want)}
    rule, chosen.choose = chosen.choose, lambda shape, q: chosen.SDPA  # the other way to attend
    try:
        made["bf16, other attention"] = relative(result("dtype"), want)
    finally:
        chosen.choose = rule
    return made


def times(config: WanConfig, device: torch.device, rows_count: int, repeats: int) -> Iterator[dict[str, Any]]:
    for precision in ("dtype", "fp8" if device.type == "cuda" else "fp8-emulated"):
        model = build(replace(config, blocks=1, precision=precision), device=device)
        model.randomize(seed=0)
        rows = LocalRows(model, rows_count, 3 * WINDOW)
        run = bind(model, "block.0", rows, VISITS)
        row = {"model": config.name, "chunk_frames": config.frames_per_chunk, "rows": rows_count, "precision": precision}
        try:
            for mode in ("eager", "graph") if device.type == "cuda" else ("eager",):
                replay, graph = (run, None) if mode == "eager" else captured(run)
                row[mode] = {name: round(ms / VISITS, 4) for name, ms in timed(replay, device, repeats).items()}
                del graph
        except Exception as error:  # one case must not cost the others their figures
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    configs = [replace(tiny_config(), dtype="bfloat16")] if args.small else [SPECS[name] for name in args.models]
    sized = [replace(config, frames_per_chunk=1, window_frames=WINDOW) for config in configs]
    for rows in (1, 4):
        for config in sized:
            yield from times(config, device, rows, args.repeats)
    for config in sized:
        one = replace(config, blocks=1)
        yield {"model": config.name, "relative_error_of": "what a block adds", **errors(one, device, added)}
    # Rings of every step and block must fit beside the weights.
    config = sized[0]
    yield {"model": config.name, "relative_error_of": "a chunk", "blocks": config.blocks, **errors(config, device, chunk_of)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=["wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget-seconds", type=float, default=40.0)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself on any device")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about, rows, until = provenance(device), list[dict[str, Any]](), time.monotonic() + args.budget_seconds
    made = cases(args, device)
    with torch.inference_mode():
        while time.monotonic() < until and (row := next(made, None)) is not None:
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({**about, "window_frames": WINDOW, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
