"""What robots that share a server came to: their runs, the summary of all rounds, and the picture of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MOST = 2.0
"""Robots go on to this many times the steps needed, so that the result can be read for any takt."""


@dataclass
class Run:
    """What one robot did; one entry of `speeds` a control step."""

    robot: str
    task: str
    limit: int
    """Control steps until the world stops."""
    round: int = 0
    needed: int = 0
    success: bool = False
    steps: int = 0
    still: int = 0
    """Control steps without a command of a chunk."""
    longest_stop: int = 0
    chunks: int = 0
    late_chunks: int = 0
    """Thrown away."""
    failures: int = 0
    """Requests refused or lost."""
    others: float | None = None
    """Share of the machine that other processes took meanwhile, where that was looked at."""
    speeds: list[float] = field(default_factory=list)
    """Size of each command's motion; 0 where the arm stood still."""

    def within(self, takt: float) -> bool:
        """Whether the job was done in `takt` times the steps needed."""
        return self.success and self.steps <= takt * self.needed


def summary(runs: Sequence[Run], takt: float) -> dict[str, Any]:
    """Return what all rounds of one kind come to."""
    rounds = sorted({run.round for run in runs})
    done = [sum(run.within(takt) for run in runs if run.round == number) for number in rounds]
    robots = len(runs) // max(1, len(rounds))
    return {
        "rounds": len(rounds),
        "robots_done_by_round": done,
        "rounds_with_all_done": sum(n == robots for n in done),
        "robots_done": sum(done),
        "robots": len(runs),
        "robots_done_by_takt": {str(t): sum(run.within(t) for run in runs) for t in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)},
        "steps_over_needed_median": round(float(np.median([run.steps / run.needed for run in runs])), 3),
        "still_share": round(sum(run.still for run in runs) / sum(run.steps for run in runs), 4),
        "longest_stop": max(run.longest_stop for run in runs),
    }


def typical_round(found: Mapping[str, Sequence[Run]], takt: float) -> int:
    """Return the round that is nearest to the median of all kinds, by how many robots were done; the first of equals."""
    done = np.array([summary(runs, takt)["robots_done_by_round"] for runs in found.values()])
    away = np.abs(done - np.median(done, axis=1, keepdims=True)).sum(axis=0)
    return sorted({run.round for runs in found.values() for run in runs})[int(np.argmin(away))]


def draw(found: Mapping[str, Sequence[Run]], control_hz: float, takt: float, paths: Sequence[Path]) -> None:
    """Draw each robot's motion in a typical round, where gaps are stops; below, all rounds: who is done by when."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from stretto.control.plots import COLOURS

    titles = {
        "one_at_a_time": "one request at a time, robots that wait",
        "one_at_a_time_async": "one request at a time, robots that jump",
        "ours": "batches under deadlines, chunks that continue",
    }
    number = typical_round(found, takt)
    shown = {kind: [run for run in runs if run.round == number] for kind, runs in found.items()}
    count = max(len(runs) for runs in shown.values())
    figure = Figure(figsize=(4.6 * len(found), 1.25 * count + 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1, height_ratios=(1.25 * count + 0.4, 2.8))
    grid = above.subplots(count, len(found), sharex=True, sharey=True, squeeze=False)
    for column, (kind, runs) in enumerate(shown.items()):
        for line, run in enumerate(runs):
            axes, done = grid[line, column], run.within(takt)
            t_s = np.arange(len(run.speeds) + 1) / control_hz
            colour = "#009e73" if done else "#d55e00"
            axes.fill_between(t_s, [*run.speeds, 0.0], step="post", color=colour, alpha=0.75, lw=0)
            late = "" if done else ", too late"
            end = f"done in {run.steps / control_hz:.1f} s{late}" if run.success else "not done"
            still = f"still for {run.still} of {run.steps} steps"
            axes.set_title(f"{run.task}: {end}; {still}", fontsize=8, color=colour)
            axes.axvline(takt * run.needed / control_hz, color="0.4", lw=0.9, ls=":")
            axes.spines[["top", "right"]].set_visible(False)
        grid[0, column].annotate(
            titles.get(kind, kind), (0.5, 1.3), xycoords="axes fraction", ha="center", weight="bold", fontsize=9
        )
        grid[-1, column].set_xlabel(f"seconds (round {number}; dotted: the time allowed)", fontsize=8)
    grid[count // 2, 0].set_ylabel("commanded motion")
    axes = below.subplots()
    for i, (kind, runs) in enumerate(found.items()):
        ends = sorted(run.steps / run.needed for run in runs if run.success)
        share = [100 * (k + 1) / len(runs) for k in range(len(ends))]
        axes.step(
            [0.7, *ends, MOST],
            [0, *share, share[-1] if share else 0],
            where="post",
            color=COLOURS[i],
            label=titles.get(kind, kind),
        )
    axes.axvline(takt, color="0.4", lw=0.9, ls=":")
    axes.set(xlim=(0.7, MOST), ylim=(0, 103), ylabel="robots done, %")
    axes.set_xlabel("control steps used / steps needed when the world waits (all rounds)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
