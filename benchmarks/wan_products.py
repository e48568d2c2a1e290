"""Time of the products of Wan blocks by the kernels that cuBLASLt lists for them, and a table of the fastest.

    python benchmarks/wan_products.py --out benchmarks/results/wan_products_h200.json --table /tmp/wan_products.json

Weights go round through more memory than the second-level cache holds, as they do in a model. Each kernel is checked against
what torch runs, and timed from a captured graph after a pause, in turn with torch's own. A choice enters the table only where
it gains 1.5 % or more.
"""

from __future__ import annotations

import argparse
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

from stretto.deploy.provenance import provenance
from stretto.layers.tuning import Config, Entry, Table, device_name, dtype_name, load_table, tunables
from stretto.models.wan_config import SPECS

CASES = (
    ("wan2.2-5b", 1, 1), ("wan2.2-5b", 1, 4), ("wan2.1-1.3b", 1, 1), ("wan2.1-14b", 1, 1), ("wan2.1-14b", 1, 2),
    ("wan2.1-1.3b", 3, 1), ("wan2.1-14b", 1, 4), ("wan2.1-14b", 3, 1),
)  # fmt: skip
"""Model, latent frames of a chunk, rows."""
COLD_BYTES, GAIN, PAUSE_S = 140 * 2**20, 0.985, 0.02


def products(name: str, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the products of a block: name -> (op, its key)."""
    config = SPECS[name]
    d, ffn = config.width, config.ffn_width
    return {
        "qkv": ("dense", (tokens, d, 3 * d, 1)),
        "out": ("dense", (tokens, d, d, 1)),
        "up": ("linear_gelu", (tokens, d, ffn)),
        "down": ("dense", (tokens, ffn, d, 1)),
    }


def choices_of(op: str, key: tuple[int, ...]) -> list[Config]:
    """Return the choices to time, torch's own first; for few tokens also the Triton kernel with large tiles."""
    listed = [c for c in tunables()[op].candidates(key) if c["impl"] in ("cublas", "cublas_gelu")]
    listed = sorted(listed, key=lambda c: c["impl"] != "cublas_gelu") if op == "linear_gelu" else listed
    return [*listed, *({"impl": "lt", "algo": i} for i in range(12))]


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return microseconds of one run."""
    if not torch.cuda.is_available():
        begin_s = time.perf_counter()
        run()
        return (time.perf_counter() - begin_s) * 1e6
    spans = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(spans)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    run()
    if not torch.cuda.is_available():
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def rows_of(case: dict[str, Any], op: str, key: tuple[int, ...], device: torch.device) -> Iterator[dict[str, Any]]:
    tunable = tunables()[op]
    weight_bytes = 2 * key[1] * key[2]
    sets = [tunable.inputs(key, torch.bfloat16, device) for _ in range(1 + COLD_BYTES // weight_bytes)]
    want: Tensor | None = None
    gflop = 2 * key[0] * key[1] * key[2] / 1e9
    for choice in choices_of(op, key):
        row: dict[str, Any] = {**case, "op": op, "key": key, "choice": dict(choice)}
        try:
            got = tunable.run(choice, *sets[0])
            want = got if want is None else want
            row["difference"] = round(float((got.float() - want.float()).abs().max() / want.float().abs().max()), 5)

            def run(choice: Config = choice) -> None:
                for inputs in sets:
                    tunable.run(choice, *inputs)

            replay = captured(run)
            time.sleep(PAUSE_S if device.type == "cuda" else 0.0)
            timed(replay, 1)
            row["us"] = round(timed(replay, 5) / len(sets), 2)
            row["tflop_per_s"] = round(gflop / row["us"] * 1e3, 1)
        except Exception as error:  # one kernel must not cost the others their figures
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        yield row


def best(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], float] | None:
    """Return the fastest row and what torch's own takes, if it is worth a place in the table."""
    good = [r for r in rows if "us" in r and r["difference"] < 0.02]
    own = [r["us"] for r in good if r["choice"]["impl"] != "lt"]
    if not good or not own:
        return None
    row = min(good, key=lambda r: r["us"])
    # For a GELU the rule is cuBLAS's epilogue, so that a pass behind the product must be chosen too.
    ruled = next((r["us"] for r in good if r["choice"]["impl"] in ("cublas_gelu", "cublas")), min(own))
    return (row, ruled) if row["us"] < GAIN * ruled else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="entries are added to what is there")
    parser.add_argument("--budget-seconds", type=float, default=40.0)
    parser.add_argument("--small", action="store_true", help="one row of a few tokens, to try the script itself")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about, rows, until = provenance(device), list[dict[str, Any]](), time.monotonic() + args.budget_seconds
    table = Table(device_name(device), torch.__version__, metadata.version("triton"), ())
    if args.table is not None and args.table.is_file():
        table = load_table(args.table)
    for name, frames, count in CASES[2:3] if args.small else CASES:
        tokens = 8 if args.small else count * frames * SPECS[name].tokens_per_frame
        for product, (op, key) in products(name, tokens).items():
            case = {"model": name, "chunk_frames": frames, "rows": count, "product": product}
            if time.monotonic() > until:
                rows.append({**case, "not_run": "out of time"})
                continue
            with torch.inference_mode():
                made = list(rows_of(case, op, key, device))
            rows += made
            for row in made:
                print(json.dumps(row), flush=True)
            found = best(made)
            if found is not None and args.table is not None:
                row, ruled = found
                entry = Entry(op, key, dtype_name(torch.bfloat16), row["choice"], row["us"], ruled, about["commit"])
                table = table.merged(replace(table, entries=(entry,)))
                table.save(args.table)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
