"""What robots under delay came to: who was done on time, how modes compare scene by scene, table and picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.evals.results import wilson

TAKTS = (1.0, 1.1, 1.25, 1.5, 2.0)
Scenes = dict[tuple[str, int], int]


def beside(rows: Sequence[dict[str, Any]], row: Mapping[str, Any], delay: int, *modes: str) -> dict[str, Any] | None:
    """Return the first row of these modes at a delay, of the same device where there is one."""
    found = [r for r in rows if r["delay"] == delay and r["mode"] in modes]
    return next((r for r in found if r.get("device") == row.get("device")), found[0] if found else None)


def needed(plain: Mapping[str, Any] | None) -> Scenes:
    """Return the control steps that each solved scene needs without delay; `sync` and `naive` are then the same."""
    return {} if plain is None else {(task, seed): steps for task, seed, success, steps in plain["runs"] if success}


def on_time(row: Mapping[str, Any], scenes: Scenes, takt: float) -> dict[tuple[str, int], bool]:
    """Return, for each scene that counts, whether it was done in `takt` times the steps needed."""
    runs = ((task, seed, success, steps) for task, seed, success, steps in row["runs"] if (task, seed) in scenes)
    return {(task, seed): success and steps <= takt * scenes[task, seed] for task, seed, success, steps in runs}


def judge(rows: Sequence[dict[str, Any]], takt: float) -> None:
    """Add to each row who was on time, and how that compares with `naive` in the same scenes."""
    for r in rows:
        if not (scenes := needed(beside(rows, r, 0, "sync", "naive"))):
            continue
        done = on_time(r, scenes, takt)
        r["on_time"] = round(sum(done.values()) / max(1, len(done)), 4)
        r["on_time_interval"] = [round(x, 4) for x in wilson(sum(done.values()), len(done))]
        r["on_time_by_takt"] = {str(t): sum(on_time(r, scenes, t).values()) for t in TAKTS}
        ratios = [steps / scenes[task, seed] for task, seed, _, steps in r["runs"] if (task, seed) in scenes]
        r["steps_over_needed_median"] = round(float(np.median(ratios)), 4)
        if (other := beside(rows, r, r["delay"], "naive")) is not None and r["mode"] != "naive":
            r["against_naive"] = {
                "on_time": split(done, on_time(other, scenes, takt)),
                "in_the_end": split(*({(t, s): ok for t, s, ok, _ in row["runs"]} for row in (r, other))),
            }


def split(mine: Mapping[Any, bool], theirs: Mapping[Any, bool]) -> dict[str, float]:
    """Return in how many scenes only one of two was good, and how likely a split like this is by chance."""
    pairs = [(mine[scene], theirs[scene]) for scene in mine.keys() & theirs.keys()]
    wins, losses = pairs.count((True, False)), pairs.count((False, True))
    return {"scenes": len(pairs), "only_this": wins, "only_naive": losses, "p": round(sign_test(wins, losses), 6)}


def sign_test(wins: int, losses: int) -> float:
    """Return how likely a split at least as uneven is if both are as good (two-sided, exact)."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table, one line a delay: on time (or success), largest step and mean step at seams of every mode."""
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    lines = ["| delay | " + " | ".join(modes) + " |", "|---" * (len(modes) + 1) + "|"]
    for delay in sorted({r["delay"] for r in rows}):
        cells = []
        for mode in modes:
            r = next((r for r in rows if (r["mode"], r["delay"]) == (mode, delay)), None)
            if r is None:
                cells.append("")
                continue
            done = 100 * r.get("on_time", r["success_rate"])
            cells.append(f"{done:.0f} %, {r['largest_step_mean']:.2f}, {r['seam_step_mean'] or 0:.2f}")
        lines.append(f"| {delay} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> None:
    """Draw success and the largest step over delay; of two rows of one mode and delay the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from stretto.control.plots import COLOURS

    figure = Figure(figsize=(9, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    (success, timely), (largest, seams) = figure.subplots(2, 2)
    for i, mode in enumerate(dict.fromkeys(r["mode"] for r in rows)):
        first = {r["delay"]: r for r in reversed(rows) if r["mode"] == mode}
        mine = [first[delay] for delay in sorted(first)]
        delays, line = [r["delay"] for r in mine], {"color": COLOURS[i], "label": mode, "marker": "osD^v"[i % 5], "ms": 4}
        success.plot(delays, [100 * r["success_rate"] for r in mine], **line)
        bounds = [[100 * r["interval"][k] for r in mine] for k in (0, 1)]
        success.fill_between(delays, *bounds, color=COLOURS[i], alpha=0.1, lw=0)
        if all("on_time" in r for r in mine):
            timely.plot(delays, [100 * r["on_time"] for r in mine], **line)
            bounds = [[100 * r["on_time_interval"][k] for r in mine] for k in (0, 1)]
            timely.fill_between(delays, *bounds, color=COLOURS[i], alpha=0.1, lw=0)
        largest.plot(delays, [r["largest_step_mean"] for r in mine], **line)
        seams.plot(delays, [r["seam_step_mean"] or 0.0 for r in mine], **line)
    success.set(ylabel="success in the end, %", ylim=(-2, 102))
    timely.set(ylabel="success on time, %", ylim=(-2, 102))
    largest.set(ylabel="largest step between commands", ylim=(0, 1.1 * largest.get_ylim()[1]))
    seams.set(ylabel="step where chunks meet, mean", ylim=(0, 1.1 * seams.get_ylim()[1]))
    for axes in (success, timely, largest, seams):
        axes.set_xlabel("delay, control steps")
        axes.grid(color="0.92", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    success.legend(frameon=False, fontsize=8)
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
