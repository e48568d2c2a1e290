"""`stretto plan`: how many streams fit on a pool, where their stages go, and what each will see."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.sched.profile import Profile
    from stretto.sched.report import Row
    from stretto.sched.scenarios import Scenario


@dataclass(frozen=True)
class Args:
    scenario: str | None = None
    """seed-24gpu, seed-1gpu, seed-2gpu, depth-200, robots, or a TOML or JSON file. Without it, the flags below say all."""
    models: Annotated[str, arg(metavar="NAME,NAME,...")] = ""
    """Models that get the pool one at a time."""
    mix: Annotated[str, arg(metavar="NAME=N,NAME=N,...")] = ""
    """Streams of several models that share the pool."""
    gpus: int | None = None
    gpus_per_node: int | None = None
    device: str | None = None
    """Device kind that the profiles must be of (NVIDIA H200)."""
    interval_ms: float | None = None
    """Promised output interval of a stream (robots: period of requests)."""
    response_ms: float | None = None
    """Promised response latency of a stream (robots: deadline)."""
    steps: int | None = None
    """Denoise steps."""
    chunk: int | None = None
    """Latent frames per chunk."""
    window: int | None = None
    """Latent frames that a query sees."""
    compare: Annotated[str, arg(metavar="METHOD,...")] = "equal,portfolio"
    """Some of equal, bestfit, lds, portfolio, exact."""
    profile: tuple[Path, ...] = ()
    """Profile files to use in place of those that come with the package."""
    costs: Literal["auto", "measured", "computed"] = "auto"
    """`auto`: measured where there is a measured profile of this many latent frames a chunk, else computed."""
    noise: float = 0.0
    """Spread of stage times in the simulation, as a share of them."""
    intervals: int = 30
    """Output intervals to simulate; a third of them to warm up."""
    json: bool = False
    """Print the short result as one JSON object on standard output."""
    out: Path | None = None
    """Write the full result to a JSON file."""
    picture: Path | None = None
    """Draw one steady interval of the last method's plan (PNG)."""
    plans: Path | None = None
    """Write the last method's plans to this folder, a JSON file a model."""
    check: Path | None = None
    """Check a plan file against the route, memory and precedence of the scenario's first model, and simulate it."""


def run(args: Args) -> int:
    from stretto.sched.report import plan_of, rows
    from stretto.sched.sim_state import Weather
    from stretto.sched.verify import Trial

    _usable(args)
    scenario = _scenario(args)
    profiles = _profiles(args, scenario)
    if args.check is not None:
        return _check(args.check, scenario, profiles)
    methods = tuple(part.strip() for part in args.compare.split(",") if part.strip())
    trial = Trial(args.intervals, max(1, args.intervals // 3), Weather(noise=args.noise))
    found = rows(scenario, profiles, methods, trial)
    head = {"scenario": scenario.name, "profile": _label(scenario, found)}
    if args.out is not None:
        args.out.write_text(json.dumps({**head, "rows": [r.full() for r in found]}, indent=1) + "\n")
    if args.plans is not None:
        args.plans.mkdir(parents=True, exist_ok=True)
        for row in found:
            for model, plan in plan_of(row, methods[-1]).items():
                (args.plans / f"{model}.json").write_text(plan.to_json() + "\n")
    if args.picture is not None:
        from stretto.cli.plan_picture import draw

        draw(found, methods[-1], args.picture)
    if args.json:
        print(json.dumps({**head, "rows": [r.short() for r in found]}, indent=1))
    else:
        _table(head, found, methods)
    return 0


def _usable(args: Args) -> None:
    """Refuse what would only show after the planning."""
    from stretto.cli.files import writable
    from stretto.core.errors import ConfigError

    if args.intervals < 4:
        raise ConfigError("intervals", got=args.intervals, expected="4 or more: a third of them are to warm up")
    if not 0.0 <= args.noise < 1.0:
        raise ConfigError("noise", got=args.noise, expected="a share of stage times, from 0 to below 1")
    for path in (p for p in (*args.profile, args.check) if p is not None):
        if not path.is_file():
            raise ConfigError("profile" if path in args.profile else "check", got=str(path), expected="a JSON file")
    writable("out", args.out)
    writable("picture", args.picture)
    if args.plans is not None and args.plans.exists() and not args.plans.is_dir():
        raise ConfigError("plans", got=str(args.plans), expected="a folder")


def _scenario(args: Args) -> Scenario:
    from dataclasses import replace

    from stretto.core.errors import ConfigError
    from stretto.sched.scenarios import BUILT_IN, scenario_from

    changes: dict[str, Any] = {
        name: value
        for name in ("gpus", "gpus_per_node", "device", "interval_ms", "response_ms")
        if (value := getattr(args, name)) is not None
    }
    if args.models:
        changes |= {"models": tuple(args.models.split(",")), "mix": {}}
    if args.mix:
        changes |= {"mix": _mix(args.mix), "models": ()}
    asked = {"steps": args.steps, "frames_per_chunk": args.chunk, "window_frames": args.window}
    shape: dict[str, float] = {name: value for name, value in asked.items() if value is not None}
    if args.scenario is None:
        if "gpus" not in changes or not (args.models or args.mix):
            raise ConfigError(
                "scenario", got="nothing", expected=f"one of {sorted(BUILT_IN)}, a file, or --gpus with --models or --mix"
            )
        return scenario_from({**changes, "shape": shape}, "flags")
    if args.scenario in BUILT_IN:
        base = BUILT_IN[args.scenario]
    elif Path(args.scenario).is_file():
        base = scenario_from(_read(Path(args.scenario)), Path(args.scenario).stem)
    else:
        raise ConfigError("scenario", got=repr(args.scenario), expected=f"one of {sorted(BUILT_IN)}, or a TOML or JSON file")
    return replace(base, **changes, shape={**base.shape, **shape})


def _mix(text: str) -> dict[str, int]:
    from stretto.core.errors import ConfigError

    try:
        return {name: int(count) for name, count in (part.split("=") for part in text.split(","))}
    except ValueError as e:
        raise ConfigError("mix", got=repr(text), expected="models and counts, such as wan2.1-1.3b=8,wan2.2-5b=4") from e


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    from stretto.core.errors import ConfigError

    try:
        raw = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ConfigError("scenario", got=f"{path} ({e})", expected="a TOML or JSON file") from e
    if not isinstance(raw, dict):
        raise ConfigError("scenario", got=type(raw).__name__, expected="a table of keys")
    return raw


def _profiles(args: Args, scenario: Scenario) -> dict[str, Profile]:
    """Find a profile for every model: a file given, a measured one that comes with the package, or a computed one."""
    from stretto.core.errors import ConfigError
    from stretto.sched.hardware import hardware
    from stretto.sched.measured import for_shape, shapes_of
    from stretto.sched.profile import Profile
    from stretto.sched.shapes import computed

    given = {p.model: p for p in (Profile.from_json(path.read_text()) for path in args.profile)}
    found: dict[str, Profile] = {}
    for model in scenario.wanted:
        if model in given:
            found[model] = _stepped(given[model], scenario)
            continue
        measured = None if args.costs == "computed" else for_shape(model, scenario.device, scenario.shape)
        if measured is not None:
            found[model] = measured
        elif args.costs == "measured":
            known = "; ".join(shapes_of(model, scenario.device)) or "none of this model"
            got = f"measured, {model} with {dict(scenario.shape) or 'its usual shape'}"
            raise ConfigError(
                "costs", got=got, expected=f"a chunk shape measured on {scenario.device}", hint=f"there are: {known}"
            )
        else:
            found[model] = computed(model, hardware(scenario.device), **scenario.shape)
    return found


def _stepped(profile: Profile, scenario: Scenario) -> Profile:
    return profile.with_steps(int(scenario.shape["steps"])) if "steps" in scenario.shape else profile


def _check(path: Path, scenario: Scenario, profiles: Mapping[str, Profile]) -> int:
    """Check a plan file that was edited by hand, and say what it would give."""
    from stretto.core.plan import Plan
    from stretto.sched.check import check_plan, saturated

    model = scenario.wanted[0]
    plan = Plan.from_json(path.read_text())
    need = check_plan(profiles[model], plan)
    for device, nbytes in need.items():
        print(f"{device}: {nbytes / 1e9:.1f} GB")
    for name, (interval, response) in saturated(profiles[model], plan).items():
        print(f"{name}: output interval {interval * 1e3:.1f} ms, response latency p99 {response * 1e3:.1f} ms, flat out")
    return 0


def _label(scenario: Scenario, found: list[Row]) -> str:
    sources = {r.profile.provenance.source for r in found}
    if len(sources) == 1:
        return f"{scenario.device}, {sources.pop()}"
    return f"{scenario.device}, " + ", ".join(f"{r.model} {r.profile.provenance.source}" for r in found)


def _table(head: dict[str, Any], found: list[Row], methods: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from stretto.sched.measured import describe

    columns = ("model", "method", "streams", "bound", "interval", "response", "busy")
    title = f"{head['scenario']} ({head['profile']}); milliseconds, mean (p50/p99) and p50/p99"
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0))
    for row in found:
        for method in methods:
            first = method == methods[0]
            bound = f"{row.bound} ({row.bound_by})" if first else ""
            pairs = [_pair(t.get(method)) for t in (row.interval_ms, row.response_ms)]
            busy = f"{row.utilisation[method]:.0%}" if method in row.utilisation else "-"
            if method in row.mean_interval_ms:
                pairs[0] = f"{row.mean_interval_ms[method]:.0f} ({pairs[0]})"
            table.add_row(row.model if first else "", method, str(row.streams.get(method, "-")), bound, *pairs, busy)
    console = Console()
    console.print(table)
    for row in found:
        console.print(f"{row.model}: {describe(row.profile)}", soft_wrap=True, style="dim")
    for row in found:
        for why in row.skipped.values():
            console.print(f"{row.model}: {why}", soft_wrap=True)
        if row.behind:
            note = f"{row.model}: intervals are still above the promise by {', '.join(row.behind)}, while queues fill"
            console.print(f"{note}; no player with one chunk in hand has waited; look longer with --intervals", soft_wrap=True)
        if row.refusal:
            console.print(f"one by one, the first to be refused: {row.refusal}", soft_wrap=True)
        for name, value in row.extra.items():
            console.print(f"{row.model} {name.replace('_', ' ')}: {json.dumps(value, indent=1)}", soft_wrap=True)


def _pair(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    return "/".join("-" if math.isnan(v) else f"{v:.0f}" for v in values)
