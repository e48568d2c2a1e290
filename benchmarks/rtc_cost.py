"""What real-time chunking costs inside the denoise graph, and that a row which does not ask for it changes in no bit.

    python benchmarks/rtc_cost.py --out benchmarks/results/rtc_cost_h200.json

The same weights are built with different modes on offer. Each is timed on the whole route; then rows without guidance must
equal the policy that offers nothing bit for bit, and rows of every mode in one batch must equal the same rows alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from load import make_model

from stretto.control.rtc import paper_weights
from stretto.core.plan import Mode, whole
from stretto.deploy.provenance import provenance
from stretto.runtime.engine import Engine
from stretto.runtime.profiler import SETS, Bench, stage_segments

OFFERS: tuple[tuple[str, ...], ...] = (
    (),
    ("identity",),
    ("vjp",),
    ("hard",),
    ("identity", "hard"),
    ("identity", "hard", "vjp"),
)
ROWS = 8


def inputs_for(model: Any, rows: int, prompt: int, guided: bool) -> dict[str, torch.Tensor]:
    """Random observations; with `guided`, every row asks for another of the modes on offer, else none does."""
    inputs: dict[str, torch.Tensor] = model.example_inputs(rows, seed=3)
    inputs["token_count"] = torch.full_like(inputs["token_count"], prompt)
    horizon = model.config.action_horizon
    for name in ("rtc_weights", "rtc_delay", "rtc_vjp"):
        if name in inputs:
            inputs[name] = torch.zeros_like(inputs[name])
    if "rtc_cap" in inputs:
        inputs["rtc_cap"] = torch.full_like(inputs["rtc_cap"], 5.0)
    for row in range(rows if guided and model.rtc_modes else 0):
        mode, delay = model.rtc_modes[row % len(model.rtc_modes)], 1 + row % max(1, horizon // 2)
        if mode == "hard":
            inputs["rtc_delay"][row] = delay
        else:
            weights = paper_weights("exp", delay=delay, executed=horizon // 2 - 1, horizon=horizon)
            inputs["rtc_weights"][row] = torch.from_numpy(weights).float()
        if mode == "vjp":
            inputs["rtc_vjp"][row] = True
    return inputs


def answers(model: Any, device: str, mode: Mode, inputs: dict[str, torch.Tensor], prompt: int, batch: int) -> np.ndarray:
    """Return the actions of all rows, `batch` at a time."""
    plan = whole(model.route, device, batch_cap=batch, mode=mode).with_shapes({"batch": (batch,), "prompt": (prompt,)})
    engine = Engine(model, plan)
    engine.warm()
    rows = [{name: value[i].numpy() for name, value in inputs.items()} for i in range(len(inputs["x"]))]
    found = []
    for at in range(0, len(rows), batch):
        streams = [engine.open() for _ in rows[at : at + batch]]
        pairs = zip(streams, rows[at : at + batch], strict=True)
        with engine.together():  # batches of other sizes may round differently
            asked = [s.submit(row, lengths={"prompt": prompt}) for s, row in pairs]
        found += [f.result().outputs["x"] for f in asked]
        for stream in streams:
            stream.close()
    engine.close()
    return np.stack(found)


def times(model: Any, device: str, mode: Mode, prompt: int, batch: int, n: int) -> dict[str, float]:
    bench = Bench(model, torch.device(device), mode, batch)
    bench.load(inputs_for(model, SETS * batch, prompt, guided=True))
    lengths = {"prompt": prompt}
    route = bench.segment(model.route.whole, lengths, warmup=max(3, n // 5), n=n)
    segment, visits = stage_segments(model)["denoise"]
    denoise = bench.segment(segment, lengths, warmup=3, n=max(5, n // 5))
    return {
        "route_ms_p50": round(route.p50, 4),
        "route_ms_p99": round(route.p99, 4),
        "denoise_ms": round(denoise.p50 * visits, 4),
    }


def compare(
    offer: tuple[str, ...], options: argparse.Namespace, plain: np.ndarray | None
) -> tuple[dict[str, Any], np.ndarray, int]:
    """Build the policy with an offer; returns its row, the actions of rows without guidance, and the prompt's length."""
    mode: Mode = "graph" if options.device.startswith("cuda") else "eager"
    model = make_model(options.model, options.device, options.dtype, offer)
    prompt = min(options.prompt, model.config.tokenizer_max_length)
    row: dict[str, Any] = {"offers": list(offer)}
    for batch in map(int, options.batches.split(",")):
        row[f"batch_{batch}"] = times(model, options.device, mode, prompt, batch, options.n)
    args = (model, options.device, mode)
    unguided = answers(*args, inputs_for(model, ROWS, prompt, guided=False), prompt, ROWS)
    plain = unguided if plain is None else plain
    row["unguided_rows_equal_plain_bit_for_bit"] = bool(unguided.tobytes() == plain.tobytes())
    row["unguided_rows_largest_difference"] = float(np.abs(unguided - plain).max())
    if offer:
        mixed = inputs_for(model, ROWS, prompt, guided=True)
        together, alone = answers(*args, mixed, prompt, ROWS), answers(*args, mixed, prompt, 1)
        row["mixed_batch_against_row_by_row"] = float(np.abs(together - alone).max())
        row["guidance_moves_actions_by"] = float(np.abs(together - plain).max())
    return row, plain, prompt


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0.5", help="a pi0 preset, or tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no further offer is begun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    begin_s = time.perf_counter()
    settings = {name: getattr(options, name) for name in ("model", "dtype", "n")}
    result: dict[str, Any] = {**provenance(torch.device(options.device)), **settings, "rows": []}
    result["mode"] = "graph" if options.device.startswith("cuda") else "eager"
    plain: np.ndarray | None = None
    for offer in OFFERS:
        if time.perf_counter() - begin_s > options.budget:
            row: dict[str, Any] = {"offers": list(offer), "left": "no time"}
        else:
            row, plain, result["prompt_tokens"] = compare(offer, options, plain)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    main()
