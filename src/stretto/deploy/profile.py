"""Measures a model's stages on the device at hand into the profile that plans are made from.

Numbered stages of one kind (`block.0`, `block.1`, ...) are alike, so some stand for all: a segment of one and a segment
of some are timed, the difference is the cost of a stage, and what is left of the first is the cost of a launch.

A device under load is slower than one that rests between launches, so with `sustained_s` stages are timed as streams run
them: a whole denoise step, with as many blocks of their own weights as fit, launched one behind the other, and each kind of
stage alone in turn with it, so that all are timed at the same clock. The stages of a step then add up to what a step takes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from stretto.core.errors import ConfigError
from stretto.core.model import Model
from stretto.core.plan import Mode
from stretto.core.route import Segment, Visit
from stretto.deploy.device import resolve_device, resolve_dtype, resolve_mode
from stretto.deploy.models import build_preset
from stretto.deploy.provenance import commit
from stretto.deploy.worlds import NAMES, RandomWorld, config_of
from stretto.models.wan_config import WanConfig
from stretto.runtime.profiler import SETS, Bench, Times
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import CPU
from stretto.sched.profile import Carry, Profile, Provenance, StageProfile, StateOf

SAMPLE = 4  # blocks that stand for all
_SHARE = 0.4  # of a device's memory
Timing = Callable[[], AbstractContextManager[object]]
Passes = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class ProfileOptions:
    model: str
    batches: tuple[int, ...] = (1, 2, 3, 4)
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "auto"
    warmup: int = 3
    n: int = 30
    sustained_s: float = 0.0
    """World models: time whole denoise steps, launched one behind the other, for so long; 0: one launch at a time."""
    sample: int = 0
    """World models: blocks that stand for all; 0: a few, or with `sustained_s` as many as fit."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the model's configuration, such as `frames_per_chunk`."""


def profile_preset(options: ProfileOptions) -> Profile:
    """Measure a preset with random weights at its true shapes; a world model is measured with full rings.

    Raises:
        ConfigError: if the model or one of its fields is unknown, or the device is not there.
    """
    device = resolve_device(options.device)
    dtype, mode = resolve_dtype(options.dtype, device), resolve_mode(options.mode, device)
    if device.type != "cuda":
        options = replace(options, sustained_s=0.0)  # nothing there slows down under load
    if options.model in NAMES:
        return profile_world(config_of(options.model, dtype=dtype, **dict(options.changes)), device, mode, options)
    if options.changes:
        got = f"{[name for name, _ in options.changes]} for {options.model}"
        raise ConfigError("model", got=got, expected=f"a world model, one of {NAMES}, where chunk shapes are given")
    model = build_preset(options.model, device=str(device), dtype=dtype)
    return measure(model, device, mode, options)


def profile_world(
    config: WanConfig, device: torch.device, mode: Mode, options: ProfileOptions, *, timing: Timing | None = None
) -> Profile:
    """Measure a world model of this configuration on a sample of its blocks; `timing` is entered for what is under load."""
    blocks = options.sample or (_fitting(config, device, max(options.batches)) if options.sustained_s else SAMPLE)
    sample = RandomWorld(replace(config, blocks=min(blocks, config.blocks)))
    return measure(sample.on([str(device)]).first, device, mode, options, blocks=config.blocks, timing=timing)


def _fitting(config: WanConfig, device: torch.device, batch: int) -> int:
    """Return how many blocks, with the rings of a batch, take no more than a part of the device's memory."""
    if device.type != "cuda":
        return SAMPLE
    one = RandomWorld(replace(config, blocks=1))(device="meta", only=())
    each = _weight_bytes(one, "block.0") + batch * sum(one.state[part].nbytes for part in one.stages["block.0"].spec.state)
    return max(SAMPLE, int(_SHARE * _memory_of(device) / each))


def measure(
    model: Model,
    device: torch.device,
    mode: Mode,
    options: ProfileOptions,
    *,
    blocks: int = 0,
    timing: Timing | None = None,
) -> Profile:
    """Measure a model that is on its device.

    Args:
        blocks: how many blocks the profile is for, where the model holds a sample.
        timing: entered while launches under load are timed.
    """
    config = getattr(model, "config", None)
    times: dict[str, list[tuple[int, float]]] = {}
    launches, peak = [], 0
    for batch in options.batches:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        found, own = _stage_times(model, device, mode, batch, options, timing or nullcontext)
        launches.append(found)
        for name, s in found.seconds.items():
            times.setdefault(name, []).append((batch, s))
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device) - own)
    passes = _with_blocks(passes_of(model.route.visits), blocks)
    load = ", under load" if options.sustained_s and _step(model) else ""
    note = f"torch {torch.__version__}, {mode}{load}"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU.name
    return Profile(
        model.name,
        kind,
        passes,
        {name: _stage_profile(model, name, BatchCost(tuple(points))) for name, points in times.items()},
        Provenance("measured", commit(), datetime.now(UTC).strftime("%Y-%m-%d"), note=note),
        carry=_carry(model),
        memory_bytes=_memory_of(device),
        reserved_bytes=peak + _common_bytes(model),
        chunk_bytes=sum(spec.nbytes for spec in model.values.values()),
        launch_s=round(min(some.launch_s for some in launches), 9),
        host_s=round(launches[0].host_s, 9),
        host_stage_s=round(launches[0].host_stage_s, 9),
        max_batch=max(options.batches),
        facts=facts_of(config) if isinstance(config, WanConfig) else {},
    )


@dataclass(frozen=True)
class _Found:
    """Seconds of every stage or group, of a launch, and of the host that launches, for each launch and each stage in it."""

    seconds: dict[str, float]
    launch_s: float = 0.0
    host_s: float = 0.0
    host_stage_s: float = 0.0


def _stage_times(
    model: Model, device: torch.device, mode: Mode, batch: int, options: ProfileOptions, timing: Timing
) -> tuple[_Found, int]:
    """Return what was found at a batch size, and the bytes of the bench's own storage."""
    config, built = getattr(model, "config", None), model
    chunk = -(-config.window_frames // config.frames_per_chunk) if isinstance(config, WanConfig) else 0
    bench = Bench(model, device, mode, batch, chunk=chunk)
    example: Any = built
    bench.load(example.example_inputs(SETS * batch))
    bench.fill(seed=batch)
    own = bench.arenas.nbytes + sum(p.nbytes for p in model.module.parameters())
    step = _step(model) if options.sustained_s else ()
    loaded = _under_load(bench, step, options.sustained_s, timing) if step else _Found({})
    order = tuple(dict.fromkeys(v.stage for v in model.route.visits))
    alone = {name: members for name, members in _groups(order).items() if name not in loaded.seconds}
    found = _alone(bench, alone, options)
    if step:
        return replace(loaded, seconds=loaded.seconds | found.seconds), own
    return found, own


def _step(model: Model) -> tuple[str, ...]:
    """Return the stages of one denoise step that has numbered stages; none where the model has none."""
    return next((stages for stages, _ in passes_of(model.route.visits) if any(s[-1].isdigit() for s in stages)), ())


def _under_load(bench: Bench, step: Sequence[str], seconds: float, timing: Timing) -> _Found:
    """Time a whole step and each kind of its stages in turn; what they take alone beyond the step is their launches."""
    groups = _groups(step)
    whole = _segments(bench.model, tuple(step))
    turns = [pair for members in groups.values() for pair in (whole, _segments(bench.model, members[:1]))]
    times = bench.in_turn(turns, _lengths(bench.model), seconds=seconds, timing=timing)
    together = Times(tuple(ms for some in times[::2] for ms in some.device.ms)).mean / 1e3
    each = {name: some.device.p50 / 1e3 for name, some in zip(groups, times[1::2], strict=True)}
    over = sum(each[name] * len(members) for name, members in groups.items()) - together
    launch = max(0.0, over / max(1, len(step) - 1))
    found = {name: max(s - launch, 0.1 * s) for name, s in each.items()}
    # Whatever launches hide or cost, the stages add up to the step.
    numbered = max(groups, key=lambda name: len(groups[name]))
    others = sum(s for name, s in found.items() if name != numbered)
    found[numbered] = max(0.1 * each[numbered], (together - launch - others) / len(groups[numbered]))
    one, all_ = (some.host.p50 / 1e3 for some in (times[2 * list(groups).index(numbered) + 1], times[0]))
    host_stage = max(0.0, (all_ - one) / max(1, len(step) - 1)) if bench.device.type == "cuda" else 0.0
    host = max(0.0, one - host_stage) if bench.device.type == "cuda" else 0.0
    return _Found(found, launch, host, host_stage)


def _alone(bench: Bench, groups: Mapping[str, tuple[str, ...]], options: ProfileOptions) -> _Found:
    """Time stages one launch at a time."""

    def time(stages: tuple[str, ...]) -> float:
        segment, starts = _segments(bench.model, stages)
        n = max(4, options.n // bench.batch)
        return bench.segment(segment, _lengths(bench.model), warmup=options.warmup, n=n, starts=starts).p50 / 1e3

    launch, seconds = 0.0, {}
    for name, members in groups.items():
        one = time(members[:1])
        if len(members) > 1:
            some = time(members)
            # Where noise makes one stage slower than several, the launch cannot be told from the stages.
            seconds[name] = (some - one) / (len(members) - 1) if some > one else some / len(members)
            launch = max(0.0, one - seconds[name]) if some > one else 0.0
        else:
            seconds[name] = one
    for name, members in groups.items():
        if len(members) == 1:
            seconds[name] = max(seconds[name] - launch, 0.1 * seconds[name])
    return _Found(seconds, launch)


def _segments(model: Model, stages: tuple[str, ...]) -> tuple[Segment, Sequence[int]]:
    """Return the first run of these stages on the route, and the visits at which all of them begin."""
    starts = [i for i in range(len(model.route)) if model.route.signature(Segment(i, i + len(stages))) == stages]
    return Segment(starts[0], starts[0] + len(stages)), starts


def _lengths(model: Model) -> dict[str, int]:
    return {b.axis: b.lengths[-1] for b in model.buckets}


def _groups(order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return `block.*` -> the numbered stages, and every other stage by its own name."""
    groups: dict[str, tuple[str, ...]] = {}
    for stage in order:
        kind, _, index = stage.rpartition(".")
        name = f"{kind}.*" if kind and index.isdigit() else stage
        groups[name] = (*groups.get(name, ()), stage)
    return groups


def passes_of(visits: Sequence[Visit]) -> Passes:
    """Return a route as passes: runs of stages that are visited for the same steps."""
    counts = Counter(v.stage for v in visits)
    runs = [
        (tuple(v.stage for v in run), step)
        for (step, _), run in itertools.groupby(visits, key=lambda v: (v.step, counts[v.stage] == 1))
    ]
    return tuple((stages, tuple(step for _, step in some)) for stages, some in itertools.groupby(runs, key=lambda run: run[0]))


def _with_blocks(passes: Passes, blocks: int) -> Passes:
    if not blocks:
        return passes
    out = []
    for stages, steps in passes:
        first = next((i for i, s in enumerate(stages) if s.startswith("block.")), None)
        if first is not None:
            after = tuple(s for s in stages[first:] if not s.startswith("block."))
            stages = (*stages[:first], *(f"block.{i}" for i in range(blocks)), *after)
        out.append((stages, steps))
    return tuple(out)


def _stage_profile(model: Model, group: str, cost: BatchCost) -> StageProfile:
    name = group.replace(".*", ".0")
    stage, route = model.stages[name], model.route
    keys = {model.state_key(v) for v in route.visits if v.stage == name}
    after = [i + 1 for i, v in enumerate(route.visits) if v.stage == name]
    handed_on = max(sum(model.values[v].nbytes for v in route.crossing(cut)) for cut in after)
    carried_alike = all(model.carry(v) == v for v in route.visits if v.stage == name)
    state_of: StateOf = "stream" if stage.spec.state and len(keys) == 1 and carried_alike else "visit"
    rounded = BatchCost(tuple((n, round(s, 9)) for n, s in cost.points))
    state = sum(model.state[part].nbytes for part in stage.spec.state)
    return StageProfile(rounded, _weight_bytes(model, name), state, state_of, handed_on)


def _weight_bytes(model: Model, name: str) -> int:
    """Return the bytes of a stage's weights, with the codes that stand beside them in FP8.

    Where the model does not say whose they are, its first stage has them all.
    """
    stage = model.stages[name]
    modules = getattr(stage, "modules", None)
    if modules is None:
        modules = (model.module,) if name == model.route.visits[0].stage else ()
    codes: int = getattr(getattr(stage, "products", None), "nbytes", 0)
    return codes + sum(p.nbytes for module in modules for p in module.parameters())


def _common_bytes(model: Model) -> int:
    """Return the bytes of weights that belong to no stage and that every device needs."""
    split = [modules for s in model.stages.values() if (modules := getattr(s, "modules", None)) is not None]
    if not split:
        return 0
    own = {id(p) for modules in split for module in modules for p in module.parameters()}
    return sum(p.nbytes for p in model.module.parameters() if id(p) not in own)


def _carry(model: Model) -> Carry:
    carried = [(v, c) for v in model.route.visits if (c := model.carry(v)) is not None]
    if not carried:
        return "none"
    return "same_step" if all(v == c for v, c in carried) else "last_pass"


def _memory_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory * 0.95) if device.type == "cuda" else 0


def facts_of(config: WanConfig) -> dict[str, Any]:
    """Return what a profile of a world model says of its chunk shape; the precision where it is not that of the dtype."""
    other = {} if config.precision == "dtype" else {"precision": config.precision}
    return other | {
        "tokens": config.frames_per_chunk * config.tokens_per_frame,
        "window_tokens": config.window_frames * config.tokens_per_frame,
        "frames_per_chunk": config.frames_per_chunk,
        "window_frames": config.window_frames,
        "pixel_frames_per_chunk": config.frames_per_chunk * config.time_stride,
        "frame_hz": config.frame_hz,
        "pixels": [config.pixel_height, config.pixel_width],
        "dtype": config.dtype,
        "decoder": config.decoder,
    }
