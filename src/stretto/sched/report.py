"""What a scenario comes to: rows of admitted streams by method, intervals, latencies, utilisation, and the bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.core.errors import ConfigError
from stretto.core.plan import Device, Plan
from stretto.sched.admission import Admission
from stretto.sched.bounds import chunks_under_way, plan_bound, streams_bound
from stretto.sched.cluster import StreamSpec
from stretto.sched.dispatch import ring_cap
from stretto.sched.exact import TooLargeError
from stretto.sched.measured import describe
from stretto.sched.outcome import quantile
from stretto.sched.pack import METHODS, Packed, pack
from stretto.sched.plans import by_block, by_stage, whole
from stretto.sched.profile import Profile
from stretto.sched.robots import Robot, Server
from stretto.sched.scenarios import Scenario
from stretto.sched.sim_state import Load, StreamRun
from stretto.sched.simulator import Simulation
from stretto.sched.variants import other_chunks
from stretto.sched.verify import TRIAL, Trial


@dataclass
class Row:
    """One model of a scenario."""

    model: str
    profile: Profile
    bound: int
    bound_by: str
    streams: dict[str, int] = field(default_factory=dict)
    interval_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Method -> p50 and p99 of the output intervals."""
    mean_interval_ms: dict[str, float] = field(default_factory=dict)
    """The rate that streams have; quantiles of intervals lie on both sides of it."""
    response_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    utilisation: dict[str, float] = field(default_factory=dict)
    dispatch: dict[str, str] = field(default_factory=dict)
    packed: dict[str, Packed] = field(default_factory=dict)
    refusal: str = ""
    """Why the first stream that found no place was refused, by the portfolio."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Method -> why it gave no answer; the exact one, where an instance is too large for it."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def behind(self) -> list[str]:
        """Return the methods whose streams come further apart than promised, on average over the time that was simulated."""
        promised = {m: next(iter(p.placed.values())).spec.interval_s * 1e3 for m, p in self.packed.items() if p.placed}
        return [m for m, mean in self.mean_interval_ms.items() if m in promised and mean > 1.005 * promised[m]]

    def short(self) -> dict[str, Any]:
        p99 = {m: _rounded(v[1]) for m, v in self.interval_ms.items()}
        return {
            "model": self.model,
            "profile": describe(self.profile),
            "streams": self.streams,
            "bound": self.bound,
            "interval_ms_p99": p99,
            **({"skipped": self.skipped} if self.skipped else {}),
        }

    def full(self) -> dict[str, Any]:
        return {
            **self.short(),
            "bound_by": self.bound_by,
            "work_ms": _rounded(self.profile.work_s * 1e3),
            "provenance": self.profile.provenance.source,
            "facts": dict(self.profile.facts),
            "interval_ms": _quantiles(self.interval_ms),
            "interval_ms_mean": {m: _rounded(v) for m, v in self.mean_interval_ms.items()},
            "response_ms": _quantiles(self.response_ms),
            "utilisation": {m: _rounded(u) for m, u in self.utilisation.items()},
            "dispatch": self.dispatch,
            "refusal": self.refusal,
            **self.extra,
        }


def _quantiles(table: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    return {m: {"p50": _rounded(a), "p99": _rounded(b)} for m, (a, b) in table.items()}


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def rows(scenario: Scenario, profiles: Mapping[str, Profile], methods: Sequence[str], trial: Trial = TRIAL) -> list[Row]:
    """Plan a scenario by every method.

    Raises:
        ConfigError: if a method or model is unknown, a profile is of another device, or a promise cannot be kept at all.
    """
    unknown = [m for m in methods if m not in METHODS]
    if unknown or not methods:
        raise ConfigError("compare", got=unknown or "nothing", expected=f"some of {','.join(METHODS)}")
    for model in scenario.wanted:
        if model not in profiles:
            raise ConfigError("model", got=repr(model), expected=f"one of {sorted(profiles)}")
        profiles[model].check_device(scenario.device)
    if scenario.mix:
        return _mixed(scenario, profiles, methods, trial)
    return [_row(scenario, profiles[m], m, methods, trial) for m in scenario.models]


def _specs(scenario: Scenario, model: str, count: int) -> list[StreamSpec]:
    return [StreamSpec(f"{model}/{i}", model, scenario.interval_ms / 1e3, scenario.response_ms / 1e3) for i in range(count)]


def _row(scenario: Scenario, profile: Profile, model: str, methods: Sequence[str], trial: Trial) -> Row:
    if profile.carry == "none":
        return _robots(scenario, profile, model, methods)
    devices = scenario.pool(profile.memory_bytes or None)
    bound = streams_bound(profile, devices, scenario.interval_ms / 1e3)
    row = Row(model, profile, bound.streams, bound.binds)
    specs = _specs(scenario, model, bound.streams + 1)
    row.refusal = _first_refusal(devices, profile, specs, scenario.shape)
    for method in methods:
        packed = _packed(devices, {model: profile}, specs, method, trial, [row], among=methods)
        if packed is not None:
            _enter(row, method, packed)
    if not any(row.streams.values()):
        response = "not enough response" in row.refusal
        name, got = ("response_ms", scenario.response_ms) if response else ("interval_ms", scenario.interval_ms)
        raise ConfigError(name, got=got, expected="a promise that one stream can be given", hint=row.refusal)
    if scenario.single:
        row.extra["single_stream"] = single_stream(profile, devices)
    if scenario.depth:
        row.extra["depth"] = depth(profile, devices)
    return row


def _packed(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    specs: Sequence[StreamSpec],
    method: str,
    trial: Trial,
    rows: Sequence[Row],
    *,
    among: Sequence[str],
) -> Packed | None:
    """Place streams; None, and the rows say why, where an instance is too large for the exact method and there are others."""
    try:
        return pack(devices, profiles, specs, method, trial)
    except TooLargeError as e:
        if len(among) == 1:
            raise
        for row in rows:
            row.skipped[method] = str(e)
        return None


def _enter(row: Row, method: str, packed: Packed, model: str = "") -> None:
    names = [n for n, p in packed.placed.items() if not model or p.spec.model == model]
    row.streams[method] = len(names)
    row.packed[method] = packed
    v = packed.verified
    if v is None or not names:
        return
    streams = [s for s in v.outcome.streams if s.name in set(names)]
    gaps = [x * 1e3 for s in streams for x in s.intervals_s(v.warm_s)]
    waits = [x * 1e3 for s in streams for x in s.responses_s(v.warm_s)]
    row.interval_ms[method] = (quantile(gaps, 0.5), quantile(gaps, 0.99))
    row.mean_interval_ms[method] = sum(gaps) / max(1, len(gaps))
    row.response_ms[method] = (quantile(waits, 0.5), quantile(waits, 0.99))
    use = v.outcome.utilisation()
    row.utilisation[method] = sum(use.values()) / max(1, len(use))
    row.dispatch[method] = v.dispatch


def _first_refusal(devices: Sequence[Device], profile: Profile, specs: Sequence[StreamSpec], shape: Mapping[str, float]) -> str:
    others, offered = other_chunks(profile, shape)
    variants = {profile.model: offered}
    admission = Admission(devices, {profile.model: profile, **others}, expected=specs[:1], variants=variants)
    for spec in specs:
        answer = admission.arrive(spec)
        if hasattr(answer, "text"):
            return str(answer.text)
    return ""


def _mixed(scenario: Scenario, profiles: Mapping[str, Profile], methods: Sequence[str], trial: Trial) -> list[Row]:
    """Place all streams of a mix together, models in turn."""
    mine = {m: profiles[m] for m in scenario.mix}
    robots = [m for m, p in mine.items() if p.carry == "none"]
    if robots:
        raise ConfigError("mix", got=robots, expected="world models", hint="plan robots on devices of their own, with `models`")
    devices = scenario.pool(min((p.memory_bytes for p in mine.values() if p.memory_bytes), default=0) or None)
    lists = [_specs(scenario, m, n) for m, n in scenario.mix.items()]
    specs = [s for turn in itertools.zip_longest(*lists) for s in turn if s is not None]
    out = []
    for model, count in scenario.mix.items():
        bound = streams_bound(mine[model], devices, scenario.interval_ms / 1e3)
        out.append(Row(model, mine[model], min(count, bound.streams), "asked" if count <= bound.streams else bound.binds))
    for method in methods:
        packed = _packed(devices, mine, specs, method, trial, out, among=methods)
        if packed is not None:
            for row in out:
                _enter(row, method, packed, row.model)
    return out


def _robots(scenario: Scenario, profile: Profile, model: str, methods: Sequence[str]) -> Row:
    """Count the robots that can be on time: one request at a time for `equal`, batches limited by deadlines otherwise."""
    period, deadline = scenario.interval_ms / 1e3, scenario.response_ms / 1e3
    bound = math.floor(scenario.gpus * period / profile.best_work_s)
    row = Row(model, profile, bound, "time")
    robot = Robot("robot", period, deadline)
    for method in methods:
        server = Server(profile, scenario.gpus, max_batch=1 if method == "equal" else profile.max_batch)
        count = server.most(robot, limit=min(512, max(1, bound)))
        verdict = server.judge([replace(robot, name=f"r{i}") for i in range(count)])
        row.streams[method] = count
        row.interval_ms[method] = (period * 1e3, period * 1e3)
        row.response_ms[method] = (math.nan, verdict.p99_s * 1e3)
        row.utilisation[method] = verdict.utilisation
        row.dispatch[method] = "deadline_limited"
    return row


def single_stream(profile: Profile, devices: Sequence[Device]) -> dict[str, Any]:
    """Compare one stream in a fixed order, one stage in one slot, with batched time slices at growing depth."""

    def run(plan: Plan) -> dict[str, Any]:
        outcome = Simulation({"m": Load(plan, profile)}, [StreamRun("one", "m", chunks=60)]).run(math.inf)
        stream = outcome.streams[0]
        warm = stream.done[len(stream.done) // 3][2]
        return {
            "chunks_in_flight": plan.in_flight,
            "batch_cap": plan.batch_cap(devices[0].name),
            "interval_ms": _rounded(stream.interval_s(warm) * 1e3),
            "response_ms_p99": _rounded(quantile(stream.responses_s(warm), 0.99) * 1e3),
        }

    fixed, *batched = single_plans(profile, devices)
    return {"fixed_order": run(fixed), "batched": [run(plan) for plan in batched]}


def single_plans(profile: Profile, devices: Sequence[Device]) -> list[Plan]:
    """Return the plans of one stream: a fixed order of one stage in one slot, then batched time slices at growing depth."""
    g = len(devices)
    plan = whole(profile, devices[0]) if g == 1 else by_block(profile, devices)

    def at(cap: int, flying: int) -> Plan:
        return replace(plan, batch_caps={d.name: cap for d in devices}, in_flight=flying, dispatch="oldest_chunk_first")

    depths = [n * g for n in (1, 2, profile.steps)]
    return [at(1, g), *(at(ring_cap(n, g, profile.max_batch), n) for n in depths)]


def depth_plan(profile: Profile, devices: Sequence[Device]) -> Plan:
    """Return the plan of one stream with a (step, block) a device, deep enough that credits never set the pace."""
    plan = by_stage(profile, devices)
    return replace(plan, in_flight=chunks_under_way(profile, plan))


def depth(profile: Profile, devices: Sequence[Device]) -> dict[str, Any]:
    """Report one stream with a (step, block) a device: its interval, and what the depth costs in latency and state."""
    plan = depth_plan(profile, devices)
    bound = plan_bound(profile, plan)
    outcome = Simulation({"m": Load(plan, profile)}, [StreamRun("one", "m", chunks=3 * len(devices))]).run(math.inf)
    stream = outcome.streams[0]
    warm = stream.done[len(devices)][2]
    interval = stream.interval_s(warm)
    frames = float(profile.facts.get("pixel_frames_per_chunk", 0))
    hz = float(profile.facts.get("frame_hz", 0)) or math.nan
    return {
        "devices": len(devices),
        "visits": len(profile.visits),
        "interval_ms": _rounded(interval * 1e3),
        "interval_bound_ms": _rounded(bound.interval_s * 1e3),
        "bound_by": bound.binds,
        "response_ms_p50": _rounded(quantile(stream.responses_s(warm), 0.5) * 1e3),
        "response_bound_ms": _rounded(bound.response_s * 1e3),
        "state_bytes": sum(profile.stage(s).state_bytes * profile.state_slots(s) for s in profile.order),
        "weight_bytes_all_devices": sum(profile.stage(v.stage).weight_bytes for v in profile.visits),
        "chunks_in_flight": _rounded(quantile(stream.responses_s(warm), 0.5) / interval),
        "utilisation": _rounded(sum(outcome.busy_s.values()) / len(stream.done) / len(devices) / interval),
        "converted_frames_per_s": _rounded(frames / interval),
        "converted_times_real_time": _rounded(frames / interval / hz),
        "converted_control_steps_per_s": _rounded(1.0 / interval),
        "conversions": "frames/s = pixel frames of a chunk / interval; a control step is one chunk",
    }


def plan_of(row: Row, method: str) -> Mapping[str, Plan]:
    """Return the plans that a method's figures are of; empty if it placed nothing."""
    packed = row.packed.get(method)
    return packed.verified.plans if packed is not None and packed.verified is not None else {}
