"""Prints results of `world.py`, `world_fidelity.py` and `world_seeds.py` as the tables of docs/world-models.md.

python benchmarks/world_tables.py benchmarks/results/world_2x_chunk3_h200.json ...
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHORT = {"wan2.1-1.3b": "1.3B", "wan2.1-14b": "14B", "wan2.2-5b": "5B"}
Cells = list[object]


def table(head: Cells, rows: Iterable[Cells]) -> Iterator[str]:
    yield "| " + " | ".join(str(c) for c in head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join("-" if c is None else str(c) for c in row) + " |"


def percent(error: float | None) -> str | None:
    return None if error is None or math.isnan(error) else f"{100 * error:+.1f} %"


def worlds(result: dict[str, Any]) -> Iterator[str]:
    """One row a plan; the last column is the rate over that of the better plan on one GPU at the same shape."""
    measured = [r for r in result["rows"] if "output_interval_ms" in r]
    best: dict[tuple[object, ...], float] = {}
    for r in measured:
        if r["devices"] == 1:
            best[_shape(r)] = max(best.get(_shape(r), 0.0), r["frames_per_s"])
    head: Cells = [
        "model",
        "frames a chunk",
        "window",
        "decoder",
        "precision",
        "plan",
        "GPUs",
        "mode",
        "interval, ms",
        "simulator",
        "error",
        "latency, ms",
        "simulator",
        "idle",
        "frames/s",
        "of one GPU",
    ]

    def cells(r: dict[str, Any]) -> Cells:
        said = r["predicted"]
        one = best.get(_shape(r))
        return [
            SHORT.get(r["model"], r["model"]),
            r["chunk_frames"],
            r["window_frames"],
            r["decoder"],
            r.get("precision", "dtype"),
            r["plan"],
            r["devices"],
            r["mode"],
            f"{r['output_interval_ms']:.1f}",
            f"{said['output_interval_ms']:.1f}",
            percent(said["output_interval_ms"] / r["output_interval_ms"] - 1.0),
            f"{r['response_latency_ms']:.0f}",
            f"{said['response_latency_ms']:.0f}",
            ", ".join(f"{100 * v:.0f} %" for v in r["idle_share"].values()),
            f"{r['frames_per_s']:.1f}",
            f"{r['frames_per_s'] / one:.2f}" if one else None,
        ]

    yield from table(head, (cells(r) for r in measured))
    for r in result["rows"]:
        if "late_streams" in r:
            model = SHORT.get(r["model"], r["model"])
            yield (
                f"- {model}, {r['chunk_frames']} frames a chunk, {r['devices']} GPUs: there is room for "
                f"{r['streams']} streams of a bound of {r['bound']} ({r['bound_by']}) at {r['promised_interval_ms']:.0f} ms; "
                f"{r['late_streams']} fell behind, {r['predicted']['late_streams']} in the simulator; response p99 "
                f"{r['response_ms_p99']} ms, simulator {r['predicted']['response_ms_p99']} ms."
            )
        elif "output_interval_ms" not in r:
            why = next((r[k] for k in ("skipped", "error", "not_run") if k in r), "nothing measured")
            yield f"- not measured: {r.get('model')}, {r.get('chunk_frames')}, {r.get('plan', 'all plans')}: {why}"


def _shape(row: dict[str, Any]) -> tuple[object, ...]:
    return *(row[k] for k in ("model", "chunk_frames", "window_frames", "decoder")), row.get("precision", "dtype")


def fidelity(result: dict[str, Any]) -> Iterator[str]:
    """One row a case, with every stream's error in every span."""
    head: Cells = ["model", "case", "GPUs", "intervals, ms", "simulator", "errors", "rate, all streams", "eager chunks"]

    def cells(case: dict[str, Any]) -> Cells:
        rows = case["rows"]
        errors = [100 * r["error"] for r in rows]
        return [
            SHORT.get(case["model"], case["model"]),
            case["case"],
            case["devices"],
            ", ".join(f"{r['measured_ms']:.0f}" for r in rows),
            ", ".join(f"{r['simulated_ms']:.0f}" for r in rows),
            f"{min(errors):+.1f} to {max(errors):+.1f} %" if errors else None,
            ", ".join(f"{100 * r['error']:+.1f} %" for r in case["chunks_per_s"]),
            f"{case['eager_chunks']} of {case['all_chunks']}",
        ]

    yield from table(head, (cells(c) for c in result["cases"] if "rows" in c))
    yield f"\n{json.dumps(result.get('summary'))}"
    for case in result["cases"]:
        if "rows" not in case:
            why = next((case[k] for k in ("skipped", "error", "not_run") if k in case), "")
            yield f"- not measured: {case['model']}, {case['case']}: {why}"


def seeds(result: dict[str, Any]) -> Iterator[str]:
    head: Cells = [
        "part",
        "model",
        "case",
        "streams",
        "chunks/s",
        "simulator",
        "error",
        "response p50, p99, ms",
        "late",
        "frames/s",
    ]

    def cells(r: dict[str, Any]) -> Cells:
        late = f"{r['late_streams']} ({r['simulated']['late_streams']})" if "late_streams" in r else None
        return [
            r["part"],
            SHORT.get(r["model"], r["model"]),
            r["case"],
            r["streams"],
            r["chunks_per_s"],
            r["simulated"]["chunks_per_s"],
            percent(r["rate_error"]),
            f"{r['response_ms_p50']}, {r['response_ms_p99']}",
            late,
            r["frames_per_s"],
        ]

    yield from table(head, (cells(r) for r in result["rows"] if "chunks_per_s" in r))
    for r in result["rows"]:
        if "chunks_per_s" not in r:
            yield f"- not measured: {r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        result = json.loads(path.read_text())
        print(f"\n`{path.name}`: {result['device']}, commit {result['commit']}\n")
        lines = fidelity if "cases" in result else seeds if any("part" in r for r in result["rows"]) else worlds
        print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
