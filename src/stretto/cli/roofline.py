"""`stretto roofline TRACE...`: what limits each robot, and what a faster model would buy it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.control.roofline import Point


@dataclass(frozen=True)
class Args:
    traces: Positional[tuple[Path, ...]]
    """JSONL files, one request a line, as robots and the load generator write them. One point each."""
    figure: tuple[Path, ...] = ()
    """Also draw the points: files that end in .png, .svg or .pdf."""
    json: bool = False
    """Print `{"points": [...]}` on standard output."""


def run(args: Args) -> int:
    from stretto.control.roofline import locate_files
    from stretto.core.errors import ConfigError

    if not args.traces:
        raise ConfigError("traces", got="none", expected="at least one file")
    absent = [str(path) for path in args.traces if not path.is_file()]
    if absent:
        raise ConfigError("traces", got=f"no file {', '.join(absent)}", expected="files that exist")
    points = locate_files(args.traces)
    for path in args.figure:
        from stretto.control.plots import draw_control_roofline

        draw_control_roofline(points, path)
    if args.json:
        print(json.dumps({"points": [point.to_json() for point in points]}, indent=1))
    else:
        _print(points)
    return 0


def _print(points: Sequence[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("trace", "mode", "X", "seq%", "lap%", "p50", "p99", "margin", "miss%", "limit"):
        table.add_column(name, no_wrap=name != "trace", overflow="fold")
    for p in points:
        p50, p99 = p.forms["critical_p50"].latency_ms, p.forms["critical_p99"].latency_ms
        rates = (f"{p.x:.2f}", f"{100 * p.y_sequential:.0f}", f"{100 * p.y_overlap:.0f}")
        times = (f"{p50:.0f}", f"{p99:.0f}", f"{p.margin_ms_p99:+.0f}", f"{100 * p.miss_rate:.1f}")
        table.add_row(p.name, p.mode, *rates, *times, p.limited_by)
    console = Console()
    console.print(table)
    console.print("seq, lap: rate one after the other, and overlapped; path and margin to the deadline at p99 in ms\n")
    for p in points:
        console.print(p.sentence, highlight=False)
        if p.fleet is not None:
            f = p.fleet
            said = f"  {f.robots} robots in batches of {f.batch:.1f}: at most {f.chunks_per_s:.1f} chunks a second, "
            enough = f"limited by {f.limited_by}; enough for {f.most_robots} robots."
            console.print(said + enough, highlight=False)
        if p.rtc is not None:
            lasts = "lasts" if p.rtc.feasible else "does not last"
            console.print(
                f"  Real-time chunking: the rest of a chunk, {p.rtc.window_ms:.0f} ms, {lasts} until the next one comes (p99).",
                highlight=False,
            )
