"""Plans of world models by the names that `bench` takes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stretto.core.errors import ConfigError
from stretto.core.plan import Device, Mode, Placement, Plan
from stretto.core.route import Segment
from stretto.sched import plans
from stretto.sched.batching import worthwhile_cap
from stretto.sched.columns import Columns
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

ONE = ("serial", "whole", "batched")
SEVERAL = ("by_step", "by_block", "by_block_batched", "by_stage", "circular")
# Chunks admitted beyond those that compute, since a completion reaches the host late: one covers the way back, and a
# batch needs another, because the next launch is put together before the last is seen to be done.
_AHEAD, _AHEAD_BATCHED = 1, 2


def fitting(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the plans that make sense on these devices, the ones on one device first."""
    return ONE if len(devices) == 1 else (*ONE, *SEVERAL)


def plan_of(name: str, profile: Profile, devices: Sequence[str], mode: Mode) -> Plan:
    """Make a plan by name.

    `serial`, `whole` and `batched` use the first device: one chunk at a time; as many as batches pay for by the profile and
    one more; or one chunk a denoise step with all of them in one batch. The others use all devices; `by_block_batched` is
    `by_block` with the steps of different chunks in one batch.

    Raises:
        ConfigError: if the name is unknown.
        PlanError: if the plan does not fit these devices.
    """
    places = [Device(d) for d in devices]
    columns, steps = len(Columns.of(profile)), profile.steps
    if name == "serial":
        plan = plans.whole(profile, places[0], quantum=columns)
        plan = replace(plan, in_flight=1)
    elif name == "whole":
        cap = worthwhile_cap(profile, min(steps, profile.max_batch))
        plan = plans.whole(profile, places[0], quantum=columns, batch_cap=cap)
        plan = replace(plan, in_flight=cap + (_AHEAD if cap == 1 else _AHEAD_BATCHED))
    elif name == "batched":
        plan = plans.by_block(profile, places[:1], quantum=columns, batch_cap=steps)
        plan = replace(plan, in_flight=steps + _AHEAD_BATCHED)
    elif name == "by_step":
        plan = plans.by_step(profile, places)
    elif name == "by_block":
        plan = replace(plans.by_block(profile, places, quantum=columns), in_flight=len(places))
    elif name == "by_block_batched":
        plan = plans.by_block(profile, places, quantum=columns, batch_cap=steps)
        plan = replace(plan, in_flight=plan.in_flight + _AHEAD_BATCHED)
    elif name == "by_stage":
        plan = merged(plans.by_stage(profile, places))
    elif name == "circular":
        plan = plans.circular(profile, places, quantum=columns)
    else:
        raise ConfigError("plan", got=repr(name), expected=f"one of {(*ONE, *SEVERAL)}")
    if name in ("by_step", "by_block", "by_stage"):
        plan = replace(plan, in_flight=plan.in_flight + _AHEAD)
    # Captures by rows are made for the very rows that come, so no batch is padded.
    sizes = range(1, max((plan.batch_cap(d) for d in devices), default=1) + 1)
    return replace(plan, mode=mode, shapes={"batch": tuple(sizes)})


def merged(plan: Plan) -> Plan:
    """Join neighbouring segments of one device: the same work in fewer launches."""
    classes = {}
    for name, placements in plan.classes.items():
        runs = [list(run) for _, run in itertools.groupby(placements, key=lambda p: p.device)]
        classes[name] = tuple(Placement(Segment(run[0].segment.start, run[-1].segment.stop), run[0].device) for run in runs)
    return replace(plan, classes=classes)


def predicted(profile: Profile, plan: Plan, streams: int, slow: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Return what the simulator says of a plan: steady output interval and median response, in milliseconds.

    `slow`: device -> its times over those of the profile.
    """
    load, weather = Load(plan, profile), Weather(slow=slow)
    chunks = max(240, 24 * plan.in_flight)
    runs = [StreamRun(f"stream {i}", profile.model, chunks=chunks) for i in range(streams)]
    outcome = Simulation({profile.model: load}, runs, weather=weather).run(2.0 * profile.work_s * chunks * streams)
    # Neither the start nor the end, where the last chunks have the devices to themselves.
    steady = [stream.done[chunks // 3 : -plan.in_flight] for stream in outcome.streams]
    # Chunks can come out in bursts of as many as are in flight: whole bursts count.
    steady = [done[: (len(done) - 1) // plan.in_flight * plan.in_flight + 1] for done in steady]
    intervals = [(done[-1][2] - done[0][2]) / (len(done) - 1) for done in steady]
    responses = [out - due for done in steady for _, due, out in done]
    return {
        "output_interval_ms": round(statistics.mean(intervals) * 1e3, 3),
        "response_latency_ms": round(statistics.median(responses) * 1e3, 3),
    }
