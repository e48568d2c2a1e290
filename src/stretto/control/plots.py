"""Figures of the two rooflines. Needs the `plot` extra; nothing is imported from it before a figure is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.control.device import DeviceRoof, StagePoint
from stretto.control.roofline import Point, overlapped_rate, sequential_rate
from stretto.core.errors import ConfigError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that stay apart for readers who see fewer of them."""


def draw_control_roofline(points: Sequence[Point], path: Path) -> None:
    """Draw traces on the Control-Time Roofline: PNG, SVG or PDF by the file's ending.

    A filled mark is the whole critical path at its median, with a line to its p99; an open mark is the model alone.

    Raises:
        ConfigError: if matplotlib is not installed, or there is nothing to draw.
    """
    if not points:
        raise ConfigError("points", got="none", expected="at least one trace")
    figure, axes = _figure()
    seen = [form.x for p in points for form in p.forms.values()]
    low, high = min(0.2, min(seen) / 1.6), max(5.0, max(seen) * 1.6)
    x = np.geomspace(low, high, 400)
    axes.plot(x, np.minimum(x, 1.0), color="0.25", lw=1.6, label="overlapped, at best: min(X, 1)")
    axes.plot(x, x / (1 + x), color="0.25", lw=1.2, ls="--", label="one after the other: X / (1 + X)")
    axes.axvline(1.0, color="0.7", lw=0.8)
    axes.axvspan(low, 1.0, color="#d55e00", alpha=0.05, lw=0)
    axes.axvspan(1.0, high, color="#009e73", alpha=0.05, lw=0)
    for side, place, text in (("right", 0.96, "the request limits "), ("left", 1.04, " the world limits")):
        axes.text(place, 1.1, text, ha=side, va="center", color="0.35", fontsize=9)
    for i, p in enumerate(points):
        _draw_point(axes, p, COLOURS[i % len(COLOURS)], "osD^vP*X"[i % 8])
    axes.set(xscale="log", xlim=(low, high), ylim=(0, 1.18))
    axes.set_xlabel("X = time of the world for the executed actions / time of the request")
    axes.set_ylabel("control rate / rate without latency")
    axes.set_title("Control-Time Roofline", loc="left")
    _decades(axes, low, high)
    title = "filled: from observation to command, with a band to p99; open: the model alone"
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8, title=title, title_fontsize=8)
    _save(figure, path)


def draw_device_roofline(stages: Sequence[StagePoint], device: DeviceRoof, path: Path) -> None:
    """Draw stages on the compute and bandwidth roofline of a device; the area of a mark grows with the stage's time.

    Raises:
        ConfigError: if matplotlib is not installed, or there is nothing to draw.
    """
    if not stages:
        raise ConfigError("stages", got="none", expected="at least one stage")
    figure, axes = _figure()
    intensities = [s.intensity for s in stages]
    low, high = min(*intensities, device.ridge) / 4, max(*intensities, device.ridge) * 4
    x = np.geomspace(low, high, 400)
    roof = f"{device.name}: {device.peak_flops / 1e12:.3g} TFLOP/s, {device.bandwidth_bytes_s / 1e12:.3g} TB/s"
    axes.plot(x, np.minimum(device.peak_flops, device.bandwidth_bytes_s * x) / 1e12, color="0.25", lw=1.6, label=roof)
    axes.axvline(device.ridge, color="0.7", lw=0.8)
    longest = max(s.seconds for s in stages)
    for i, s in enumerate(stages):
        colour, y = COLOURS[i % len(COLOURS)], s.reached_flops / 1e12
        label = f"{s.name}: {s.seconds * 1e3:.3g} ms, {100 * s.share_of_roof:.0f} % of its {s.bound} roof"
        axes.vlines(s.intensity, y, s.allowed_flops / 1e12, color=colour, lw=0.8, ls=":")
        axes.scatter([s.intensity], [y], s=30 + 170 * s.seconds / longest, color=colour, label=label, zorder=3)
        # Neighbours are named above and below in turn, so that names do not meet.
        away = 12 if sorted(intensities).index(s.intensity) % 2 else -12
        axes.annotate(
            s.name, (s.intensity, y), xytext=(0, away), textcoords="offset points", ha="center", va="center", fontsize=8
        )
    lowest = min(min(s.reached_flops for s in stages), device.bandwidth_bytes_s * low)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest / 2e12, device.peak_flops * 2.5 / 1e12))
    axes.set_xlabel("intensity, FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Stages on the device roofline", loc="left")
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8)
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([36])
    _save(figure, path)


def _draw_point(axes: Any, point: Point, colour: str, marker: str) -> None:
    rate = sequential_rate if point.mode == "sync" else overlapped_rate
    median, tail, model = (point.forms[name] for name in ("critical_p50", "critical_p99", "inference_p50"))
    between = np.geomspace(tail.x, median.x, 50)
    axes.plot(between, [rate(x) for x in between], color=colour, lw=3.5, alpha=0.45, solid_capstyle="round")
    short = f"p99 margin {point.margin_ms_p99:+.0f} ms"
    label = f"{point.name} ({point.mode}): limited by the {point.limited_by}, {short}"
    axes.plot([model.x], [rate(model.x)], marker, mfc="white", mec=colour, ms=7, zorder=3)
    axes.plot([median.x], [rate(median.x)], marker, color=colour, ms=8, label=label, zorder=4)


def _decades(axes: Any, low: float, high: float) -> None:
    ticks = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    if len(ticks) > 10:
        ticks = [t for t in ticks if f"{t:e}".startswith("1")]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError("plot", got="no matplotlib", expected="the plot extra", hint="pip install 'stretto[plot]'") from e
    # A figure of its own, not pyplot's: no global state and no window.
    figure = Figure(figsize=(7.2, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="0.92", lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError("path", got=path.name, expected="a name that ends in .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
