"""Wan blocks in FP8 beside bf16: relative error of what a block adds, and of a chunk after all its steps; time of a block.

    python benchmarks/wan_fp8.py --out benchmarks/results/wan_fp8_h200.json

Weights and full rings are random, so the errors say how the two runs of one network differ, and nothing of pictures. A chunk
goes through all blocks and denoise steps; its error is that of x0 against bf16's, and beside it stands that of bf16 against
itself with the attention kernel of torch's own choice, which is what rounding alone does. Both precisions run on one set of
weights. Errors come first, then times: rested and sustained as in `wan_block.py`, both precisions in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from wan_block import TINY, Timing, relative, use_table
from wan_clock import PAUSE_S, Sensors, per_visit, rested, sustained
from wan_rows import VISITS, WINDOW, LocalRows, bind
from wan_stock import CHUNK, sized

from stretto.deploy.provenance import provenance
from stretto.layers.kernels import chunk_attention as chosen
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig, tiny_config
from stretto.models.wan_products import PlainProducts, Products
from stretto.models.wan_stages import BlockStage

SHORT_WINDOW = 9  # where rings of every step and block at the full window would not fit beside the weights
LARGE = ("wan2.1-14b",)


class StepRows(LocalRows):
    """One chunk of one stream; `enter` says at which denoise step it is. Values go on from stage to stage."""

    def __init__(self, model: WanModel, chunk: int) -> None:
        super().__init__(model, model.config.denoise_steps, chunk)
        self.all = (list(self.host), self.steps_B, self.state_slots_B)
        self.begin = {name: value[:1].clone() for name, value in self.values.items()}
        self.slots_B = self.slots_B[:1]
        self.restart()

    def restart(self) -> None:
        self.values = {name: value.clone() for name, value in self.begin.items()}

    def enter(self, step: int) -> None:
        rows, steps_B, slots_B = self.all
        self.host, self.steps_B, self.state_slots_B = [rows[step]], steps_B[step : step + 1], slots_B[step : step + 1]

    def put(self, name: str, value: Tensor) -> None:
        self.values[name] = value


class TwoWays:
    """One model whose blocks run in FP8 or in the network's own precision, on the same weights."""

    def __init__(self, config: WanConfig, device: torch.device) -> None:
        precision = "fp8" if device.type == "cuda" else "fp8-emulated"
        self.model = build(replace(config, precision=precision), device=device)
        self.model.randomize(seed=0)
        self._stages = [stage for stage in self.model.stages.values() if isinstance(stage, BlockStage)]
        plain: list[Products] = [PlainProducts(stage.block) for stage in self._stages]
        self._products = {"fp8": [stage.products for stage in self._stages], "dtype": plain}

    def use(self, precision: str) -> WanModel:
        for stage, products in zip(self._stages, self._products[precision], strict=True):
            stage.products = products
        return self.model


def added(model: WanModel, rows: StepRows) -> Tensor:
    """Return what the first block adds to random hidden tokens."""
    rows.restart()
    rows.enter(0)
    model.stages["block.0"].run(rows)  # type: ignore[arg-type]
    return rows.get("h").float() - rows.begin["h"].float()


def chunk_of(model: WanModel, rows: StepRows) -> Tensor:
    """Return a chunk's clean latent."""
    rows.restart()
    for step in range(model.config.denoise_steps):
        rows.enter(step)
        for stage in ("embed", *(f"block.{i}" for i in range(model.config.blocks)), "head"):
            model.stages[stage].run(rows)  # type: ignore[arg-type]
    return rows.get("x")


def errors(config: WanConfig, device: torch.device, run: Callable[[WanModel, StepRows], Tensor]) -> dict[str, Any]:
    ways = TwoWays(config, device)
    rows = StepRows(ways.use("dtype"), CHUNK)
    want = run(ways.use("dtype"), rows)
    made: dict[str, Any] = {"fp8": relative(run(ways.use("fp8"), rows), want)}
    made["bf16 again"] = relative(run(ways.use("dtype"), rows), want)
    rule, chosen.choose = chosen.choose, lambda shape, q: chosen.SDPA  # the other way to attend
    try:
        made["bf16, other attention"] = relative(run(ways.use("dtype"), rows), want)
    finally:
        chosen.choose = rule
    return made | {"blocks": config.blocks, "window_frames": config.window_frames}


def times(config: WanConfig, timing: Timing, rows_count: int) -> dict[str, Any]:
    ways = TwoWays(config, timing.device)
    rows = LocalRows(ways.model, rows_count, CHUNK)
    runs = {name: timing.graph(bind(ways.use(name), "block.0", rows, VISITS)) for name in ("dtype", "fp8")}
    row: dict[str, Any] = {}
    for name, found in rested(runs, timing.device, timing.sensors, timing.samples).items():
        row[name] = {"rested": per_visit(found, VISITS)}
    for name, run in runs.items():
        row[name]["sustained"] = per_visit(sustained(run, timing.device, timing.sensors, timing.sustained_s), VISITS)
    for state in ("rested", "sustained"):
        row[f"gain_{state}"] = round(row["dtype"][state]["ms"]["p50"] / row["fp8"][state]["ms"]["p50"], 3)
    return row


def cases(names: Sequence[str], timing: Timing) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield what makes each row, the most wanted first."""
    device = timing.device

    def whole(name: str) -> WanConfig:
        config = replace(tiny_config(), dtype="bfloat16", sink_frames=0) if name == TINY else SPECS[name]
        return replace(config, frames_per_chunk=1, window_frames=SHORT_WINDOW if name in LARGE else WINDOW)

    def one(name: str) -> WanConfig:
        return replace(sized(name, 1), dtype="bfloat16")

    def heading(name: str, **more: Any) -> dict[str, Any]:
        return {"model": name, "chunk_frames": 1, **more}

    for name in names:
        yield lambda n=name: heading(n, relative_error_of="what a block adds", **errors(one(n), device, added))  # type: ignore[misc]
    for name in names:
        if name not in LARGE:
            yield lambda n=name: heading(n, relative_error_of="a chunk", **errors(whole(n), device, chunk_of))  # type: ignore[misc]
    for name in names:
        yield lambda n=name: heading(n, rows=1, **times(one(n), timing, 1))  # type: ignore[misc]
    for name in names:
        if name in LARGE:
            yield lambda n=name: heading(n, relative_error_of="a chunk", **errors(whole(n), device, chunk_of))  # type: ignore[misc]
    for name in names:
        yield lambda n=name: heading(n, rows=4, **times(one(n), timing, 4))  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=["wan2.2-5b", "wan2.1-1.3b", "wan2.1-14b"])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--sustained", type=float, default=0.9)
    parser.add_argument("--budget-seconds", type=float, default=60.0)
    parser.add_argument("--table", type=Path, help="a table of kernels, if it is there (STRETTO_KERNEL_TABLE)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself on any device")
    args = parser.parse_args()
    use_table(args.table)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {**provenance(device), "pause_s": PAUSE_S, "sustained_s": args.sustained}
    rows, until = list[dict[str, Any]](), time.monotonic() + args.budget_seconds
    timing = Timing(device, Sensors(device), args.samples, args.sustained)
    with torch.inference_mode():
        for case in cases([TINY] if args.small else args.models, timing):
            if time.monotonic() >= until:
                rows.append({"not_run": "out of time"})
                break
            try:
                rows.append(case())
            except Exception as error:  # one case must not cost the others their figures
                rows.append({"error": f"{type(error).__name__}: {error}"[:400]})
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({**about, "window_frames": WINDOW, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
