"""Pictures of a plan: one steady interval as a Gantt chart, and which stream is on which device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.core.errors import ConfigError
from stretto.core.plan import Device
from stretto.sched.cluster import Placed, StreamSpec
from stretto.sched.columns import Columns
from stretto.sched.outcome import Launch
from stretto.sched.profile import Profile
from stretto.sched.report import Row, depth_plan
from stretto.sched.sim_state import Load, StreamRun
from stretto.sched.simulator import Simulation
from stretto.sched.verify import Trial, simulate


def draw(rows: Sequence[Row], method: str, path: Path) -> None:
    """Draw the plans of a method, a pair of pictures a model.

    Raises:
        ConfigError: if matplotlib is missing, or the method placed nothing.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise ConfigError("picture", got="no matplotlib", expected="the `plot` extra: pip install 'stretto[plot]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    deep = [r for r in rows if "depth" in r.extra]
    shown = _distinct([r for r in rows if method in r.packed and r.packed[method].verified is not None], method)
    if not shown:
        raise ConfigError("picture", got=f"no stream placed by {method}", expected="a plan to draw")
    devices = max(len(_devices(r, method)) for r in shown)
    height = min(14.0, max(2.2, 0.24 * devices + 1.0))
    count = len(shown) + len(deep)
    figure, axes = plt.subplots(count, 2, figsize=(15, height * count), squeeze=False, width_ratios=(3, 2))
    profiles = {r.model: r.profile for r in rows}
    for row, (left, right) in zip(deep, axes, strict=False):
        _staircase(left, right, row)
    for row, (left, right) in zip(shown, axes[len(deep) :], strict=True):
        _gantt(left, row, method, profiles)
        _places(right, row, method, profiles)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _distinct(rows: Sequence[Row], method: str) -> list[Row]:
    """Keep one row of a mix: its models share one plan."""
    return list({id(r.packed[method]): r for r in rows}.values())


def _devices(row: Row, method: str) -> list[str]:
    used = {r.device for p in row.packed[method].placed.values() for r in p.ranks}
    return sorted(used, key=lambda name: (len(name), name))


def _colour(index: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](index % 20)


def _gantt(axes: Any, row: Row, method: str, profiles: Mapping[str, Profile]) -> None:
    packed = row.packed[method]
    verified = packed.verified
    assert verified is not None
    specs: list[StreamSpec] = [p.spec for p in packed.placed.values()]
    number = {s.name: i for i, s in enumerate(specs)}
    run = simulate(verified.plans, profiles, specs, Trial(14, 10, Trial().weather), trace=True)
    interval = max(s.interval_s for s in specs)
    begin = 12 * interval
    lanes = {name: i for i, name in enumerate(_devices(row, method))}
    trace: list[Launch] = [t for t in run.outcome.trace or () if t.end_s > begin and t.begin_s < begin + interval]
    for launch in trace:
        first = number[launch.chunks[0][0]]
        span = (launch.begin_s - begin, launch.end_s - launch.begin_s)
        axes.broken_barh(
            [span], (lanes[launch.device] - 0.42, 0.84), facecolors=_colour(first), edgecolor="white", linewidth=0.3
        )
        if len(launch.chunks) > 1:
            middle = span[0] + span[1] / 2
            axes.text(middle, lanes[launch.device], str(len(launch.chunks)), ha="center", va="center", fontsize=6)
    axes.set_xlim(0, interval)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    _name(axes, list(lanes))
    axes.set_xlabel("seconds of one steady interval; a colour is a stream, a number is a batch")
    use = row.utilisation.get(method, 0.0)
    mixed = len(verified.plans) > 1
    what = "a mix" if mixed else row.model
    bound = "" if mixed else f" (bound {row.bound})"
    axes.set_title(f"{what}, {method}: {len(specs)} streams{bound}, {use:.0%} busy", fontsize=10)


def _name(axes: Any, devices: Sequence[str]) -> None:
    """Label as many devices as can be read."""
    every = -(-len(devices) // 40)
    axes.set_yticks(range(0, len(devices), every), devices[::every], fontsize=7)


def _staircase(left: Any, right: Any, row: Row) -> None:
    """Show chunks of one stream on their way over a (step, block) a device, and what each device takes of an interval."""
    profile, count = row.profile, int(row.extra["depth"]["devices"])
    devices = [Device(f"gpu:{i}", f"node{i // 8}") for i in range(count)]
    plan = depth_plan(profile, devices)
    runs = [StreamRun("one", profile.model, chunks=4 * count)]
    outcome = Simulation({profile.model: Load(plan, profile)}, runs, trace=True).run(math.inf)
    begin = outcome.streams[0].done[count][2]
    span = 1.2 * float(row.extra["depth"]["response_ms_p50"]) / 1e3
    bins, lanes = 1200, {d.name: i for i, d in enumerate(devices)}
    grid = [[math.nan] * bins for _ in devices]
    busy = [0.0] * count
    for launch in outcome.trace or ():
        a, b = (round((t - begin) / span * bins) for t in (launch.begin_s, launch.end_s))
        if launch.chunks[0][1] == count:
            busy[lanes[launch.device]] += launch.end_s - launch.begin_s
        for i in range(max(0, a), min(bins, b)):
            grid[lanes[launch.device]][i] = launch.chunks[0][1] // 12 % 20
    left.imshow(
        grid, aspect="auto", cmap="tab20", vmin=0, vmax=19, interpolation="nearest", extent=(0, span, count - 0.5, -0.5)
    )
    _name(left, list(lanes))
    left.set_xlabel("seconds; a colour is twelve chunks, white is idle")
    made = row.extra["depth"]
    left.set_title(f"{row.model}, one stream, a (step, block) a device: a chunk each {made['interval_ms']} ms", fontsize=10)
    right.barh(range(count), [s * 1e3 for s in busy], height=1.0)
    right.axvline(float(made["interval_ms"]), color="black", linewidth=0.8)
    right.set_ylim(count - 0.5, -0.5)
    _name(right, list(lanes))
    right.set_xlabel("ms of a chunk on its device; the line is the output interval")
    right.set_title(f"response {made['response_ms_p50']} ms, {made['chunks_in_flight']} chunks in flight", fontsize=10)


def _places(axes: Any, row: Row, method: str, profiles: Mapping[str, Profile]) -> None:
    """Show streams against devices; the shade is the share of the device's time."""
    placed: list[Placed] = list(row.packed[method].placed.values())
    lanes = {name: i for i, name in enumerate(_devices(row, method))}
    columns = {model: Columns.of(profile) for model, profile in profiles.items()}
    grid = [[0.0] * len(placed) for _ in lanes]
    for i, p in enumerate(placed):
        for r in p.ranks:
            grid[lanes[r.device]][i] = columns[p.spec.model].work_s_of(r.start, r.stop) / p.spec.interval_s
    image = axes.imshow(grid, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    _name(axes, list(lanes))
    if len(placed) <= 24:
        axes.set_xticks(range(len(placed)), [p.spec.name for p in placed], rotation=60, ha="right", fontsize=6)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("streams")
    axes.set_title("share of a device's time", fontsize=10)
    axes.figure.colorbar(image, ax=axes, fraction=0.05)
