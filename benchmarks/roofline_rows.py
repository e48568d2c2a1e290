"""What was asked of pi0.5 and Wan on an H200 and what it took, as one table: rows, ratios and why a row misses.

    python benchmarks/roofline_rows.py benchmarks/results/roofline_table_h200.json            # as tables in Markdown
    python benchmarks/roofline_rows.py benchmarks/results/roofline_table_h200.json --write    # work the table out anew

The results are those of `roofline_table.py`'s parts. A ratio is another's time over ours on the same row, in the same call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pi05_misses import missed_by, named
from pi05_table import ROWS

Result = dict[str, Any]
Parts = Mapping[str, Result]
WAN = {"1.3B": ("wan2.1-1.3b", 0.80, 0.72), "5B 704x1280": ("wan2.2-5b", 0.78, 0.70), "14B": ("wan2.1-14b", 2.95, 2.8)}
INTERVALS = {"FP8": ("fp8", 88.0, 80.0), "bf16": ("dtype", 88.0, 80.0)}
TINY = "wan-tiny"
RATIOS = ("stock torch", "LeRobot", "PhyAI")
PER_S_LATENCY_MS = 18.0
NAMED, LANES_NAMED = 4, 3


def table_of(parts: Parts) -> list[Result]:
    """Return the rows of the table, each as far as the parts that have run tell it."""
    return [*_pi05(parts), _wall(parts), *_overlap(parts), *_blocks(parts), *_intervals(parts)]


def _row(name: str, unit: str, must: float, stretch: float, took: float | None, *, more: bool = False, **about: Any) -> Result:
    """`more`: that more is better."""
    row: Result = {"row": name, "unit": unit, "must": must, "stretch": stretch, "took": took}
    if took is not None:
        sign = -1.0 if more else 1.0
        row |= {"met": sign * took <= sign * must, "stretch_met": sign * took <= sign * stretch}
    return row | {key: value for key, value in about.items() if value not in (None, {}, "")}


def _rows(parts: Parts, part: str) -> Result:
    found: Any = parts.get(part, {}).get("rows", {})
    return found if isinstance(found, dict) else {}


def _ratio(others: Mapping[str, float | None], took: float | None) -> Result:
    """Return times of others, and how many times ours they are."""
    known = {name: ms for name, ms in others.items() if ms is not None}
    return {name: {"ms": round(ms, 3), "times_ours": round(ms / took, 2)} for name, ms in known.items()} if took else {}


def _pi05(parts: Parts) -> list[Result]:
    """Rows of one to 32 robots."""
    made = []
    for target in ROWS:
        name, row = target.name, _rows(parts, "pi05").get(target.name, {})
        plain = name.rsplit(", ", 1)[0]
        took = row.get("p50_ms")
        stock = [_rows(parts, "stock").get(f"{plain}{how}", {}).get("p50_ms") for how in ("", ", compiled")]
        others = {
            "stock torch": min((ms for ms in stock if ms is not None), default=None),
            "LeRobot": _rows(parts, "lerobot").get(plain, {}).get("p50_ms"),
            "PhyAI": _rows(parts, "phyai").get(plain, {}).get("p50_ms"),
        }
        why = row.get("missed_by")
        floor = round(sum(target.floors), 2)
        about = {"floor": floor, "ratios": _ratio(others, took), "why": _of_calls(why) if why else row.get("error")}
        about |= {"measured": row.get("measured"), **{way: row.get(way, {}).get("p50_ms") for way in ("rested", "sustained")}}
        if "p99_met" in row:
            about |= {"p99_over_p50_ms": row["p99_over_p50_ms"], "p99_met": row["p99_met"]}
        made.append(_row(f"pi0.5 {name}", "ms", target.must, target.stretch, took, **about))
    return made


def _of_calls(why: Result) -> str:
    stages = ", ".join(f"{s['stage']} {s['above_at_clock_ms']:.1f}" for s in why["stages"])
    calls = "; ".join(named(call) for call in why["calls"][:NAMED])
    clock = f"{why['of_clock_ms']:.1f} of the clock ({why['sm_mhz']:.0f} MHz), {why['of_kernels_ms']:.1f} of kernels ({stages})"
    return f"above the floor: {clock}; furthest above theirs, ms (times the floor at that clock): {calls}"


def _wall(parts: Parts) -> Result:
    row = next((r for n, r in _rows(parts, "pi05").items() if n.startswith("wall over")), {})
    over = row.get("over_device_ms", {})
    about = {"p99": over.get("p99"), "why": row.get("error")}
    return _row("wall over GPU time, one request in process", "ms", 0.4, 0.2, over.get("p50"), **about)


def _overlap(parts: Parts) -> list[Result]:
    """Requests per second of two robots: the best of what was tried, in each precision."""
    made = []
    for precision in ("FP8", "bf16"):
        head = f"two robots, {precision}: "
        tried = {n.removeprefix(head): r for n, r in _rows(parts, "pi05").items() if n.startswith(head)}
        able = {n: r for n, r in tried.items() if "requests_per_s_at_p99" in r}
        best = max(able, key=lambda n: able[n]["requests_per_s_at_p99"], default=None)
        took = None if best is None else able[best]["requests_per_s_at_p99"]
        why = "; ".join(_of_lanes(n, r) for n, r in able.items())
        name = f"two overlapped requests, {precision}, at p99 <= {PER_S_LATENCY_MS:g} ms"
        errors = "; ".join(r["error"] for r in tried.values() if "error" in r)
        made.append(_row(name, "requests/s", 115.0, 130.0, took, more=True, by=best, why=why or errors))
    return made


def _of_lanes(name: str, row: Result) -> str:
    """Say what each lane takes, what that allows, and where the p99 was lost."""
    lanes, closed = row["stage_ms"], row["closed"]
    slowest = max(lanes.values())
    together = 2.0 if row["in_batches_of_one"] == 0 else 1.0
    parts = " and ".join(f"{stage} {ms:.2f}" for stage, ms in lanes.items())
    loads = [f"{r['rate']:g}/s: {r['latency_ms']['p99']:.1f}" for r in row["open"][-LANES_NAMED:]]
    held = f"held {row['requests_per_s_at_p99']:.1f}/s"
    both = f"two in a closed loop {closed['requests_per_s']:.1f}/s at {closed['latency_ms']['p99']:.1f} ms"
    offered = f"; p99, ms, at {', '.join(loads)}" if loads else ""
    return f"{name}: {held}, {parts} ms, which allow {together * 1e3 / slowest:.1f}/s; {both}{offered}"


def _blocks(parts: Parts) -> list[Result]:
    made, rows = [], parts.get("wan", {}).get("rows", [])
    for size, (model, must, stretch) in WAN.items():
        mine = [r for r in rows if r.get("model") in (model, TINY) and r.get("chunk_frames", 1) == 1]
        row = next((r for r in mine if r.get("stage") == "block" and r.get("rows") == 1), {})
        listed = next((r for r in mine if r.get("stage") == "block, kernels"), None)
        took, stock = row.get("rested_ms"), row.get("stock", {}).get("rested", {}).get("ms", {}).get("p50")
        made.append(
            _row(
                f"Wan {size} block, one-frame chunk, bf16", "ms", must, stretch, took, floor=row.get("floor_ms"),
                ratios=_ratio({"stock torch": stock}, took), under_load=row.get("p50_ms"), realistic=row.get("realistic_ms"),
                why=_of_kernels(row, listed) if took and listed and took > stretch else row.get("error"),
            )
        )  # fmt: skip
    return made


def _of_kernels(row: Result, listed: Result) -> str:
    worst = "; ".join(f"{k['kernel'].split('_sm90')[0].strip('_')} {k['us']:.0f} us" for k in listed["kernels"][:NAMED])
    return f"{row['rested_ms'] / row['floor_ms']:.2f} times the floor; {worst}"


def _intervals(parts: Parts) -> list[Result]:
    made, rows = [], parts.get("world", {}).get("rows", [])
    for name, (precision, must, stretch) in INTERVALS.items():
        mine = [r for r in rows if r.get("precision", "").startswith(precision) and r.get("plan") == "batched"]
        row = next((r for r in mine if r.get("model") in ("wan2.2-5b", TINY)), {})
        block, steps, took = row.get("stage_ms", {}).get("block.*"), row.get("denoise_steps", 4), row.get("output_interval_ms")
        why = (
            f"{steps} steps of 30 blocks at {block:.3f} ms under load are {steps * 30 * block:.1f}"
            if block
            else row.get("error")
        )
        made.append(
            _row(
                f"Wan2.2 5B output interval, 4 steps, batched, {name}",
                "ms",
                must,
                stretch,
                took,
                p99=row.get("output_interval_ms_p99"),
                why=why,
            )
        )
    return made


def markdown(table: list[Result]) -> str:
    """Return the table with ratios, and below it why rows miss what must be shown or the stretch."""
    lines = [
        f"| | must | stretch | took | floor | {' | '.join(RATIOS)} | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    why = []
    for row in table:
        took = "not measured" if row["took"] is None else f"{row['took']:.4g}"
        p99 = f", p99 {row['p99_over_p50_ms']:.2f} above" if "p99_over_p50_ms" in row else ""
        other = {"rested": "sustained", "sustained": "rested"}.get(row.get("measured", ""), "")
        if other in row:
            p99 += f" ({row[other]:.4g} {other})"
        ratios = [_shown(row.get("ratios", {}).get(name)) for name in RATIOS]
        said = "" if row["took"] is None else "stretch met" if row["stretch_met"] else "met" if row["met"] else "**missed**"
        if not row.get("p99_met", True):
            said += ", **p99 missed**"
        name = f"{row['row']}{' (' + row['by'] + ')' if 'by' in row else ''}, {row['unit']}"
        bounds = f"{row['must']:g} | {row['stretch']:g}"
        lines.append(f"| {name} | {bounds} | {took}{p99} | {row.get('floor', '')} | {' | '.join(ratios)} | {said} |")
        if row.get("why") and not row.get("met", False):
            why.append(f"- {row['row']}: {row['why']}.")
    return "\n".join([*lines, "", *why])


def _shown(ratio: Result | None) -> str:
    return "" if ratio is None else f"{ratio['ms']:.4g} ({ratio['times_ours']:.2f} x)"


def explain(pi05: Result) -> None:
    """Work out anew, from the profiles, why rows of pi0.5 miss."""
    for row in pi05.get("rows", {}).values():
        stages = row.get("stages", {}).values()
        if row.get("met") is False and stages and all("profile_of_one_visit" in s for s in stages):
            row["missed_by"] = missed_by(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of roofline_table.py, or of pi05_table.py alone")
    parser.add_argument("--write", action="store_true", help="in the file too")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    whole = "parts" in result
    parts: Parts = result["parts"] if whole else {"pi05": result}
    explain(parts.get("pi05", {}))
    table = table_of(parts)
    if args.write:
        args.result.write_text(json.dumps({**result, "table": table} if whole else result, indent=1) + "\n")
    print(markdown([row for row in table if whole or row["took"] is not None]))


if __name__ == "__main__":
    main()
