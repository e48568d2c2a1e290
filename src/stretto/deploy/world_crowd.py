"""As many streams of a world model as the planner admits at the video's own speed: planned, run and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from stretto.core.plan import Device, Plan
from stretto.deploy.world_bench import WorldBench
from stretto.deploy.world_rig import run
from stretto.deploy.world_trial import NOISE, Entry, Script, figures
from stretto.sched.bounds import streams_bound
from stretto.sched.cluster import StreamSpec
from stretto.sched.pack import Packed, pack
from stretto.sched.sim_state import Weather
from stretto.sched.verify import Trial

RESPONSE_S = 4.0
_SPARE_BYTES = 4 * 10**9  # contexts, libraries, and values of chunks
_INTERVALS, _SETTLE = 16, 6


def placed(bench: WorldBench, method: str = "portfolio") -> Packed:
    """Place streams that each play at the video's own speed, within four seconds of response."""
    profile, devices = bench.profile, pool(bench.case.devices)
    interval_s = profile.facts["pixel_frames_per_chunk"] / profile.facts["frame_hz"]
    most = streams_bound(profile, devices, interval_s).streams
    specs = [StreamSpec(f"s{i}", profile.model, interval_s, RESPONSE_S) for i in range(most + 1)]
    return pack(devices, {profile.model: profile}, specs, method, Trial(24, 8, Weather(noise=NOISE)))


def pool(devices: Sequence[str]) -> list[Device]:
    def memory(name: str) -> int:
        return torch.cuda.get_device_properties(name).total_memory - _SPARE_BYTES if name.startswith("cuda") else 0

    return [Device(name, memory_bytes=memory(name)) for name in devices]


def runnable(plan: Plan, bench: WorldBench) -> Plan:
    """Return a planner's plan in the mode of a benchmark. Graphs by rows take batches as they come: none is padded."""
    most = max(plan.batch_cap(d.name) for d in plan.devices)
    return replace(plan, mode=bench.case.mode, shapes={"batch": tuple(range(1, most + 1))})


def crowd(bench: WorldBench, method: str = "portfolio") -> dict[str, Any]:
    """Return a row: how many streams found a place, and what they had of it, measured and simulated."""
    found = placed(bench, method)
    promised_s = bench.profile.facts["pixel_frames_per_chunk"] / bench.profile.facts["frame_hz"]
    bound = streams_bound(bench.profile, pool(bench.case.devices), promised_s)
    row: dict[str, Any] = {
        "plan": method,
        "devices": len(bench.case.devices),
        "streams": len(found.placed),
        "bound": bound.streams,
        "bound_by": bound.binds,
        "promised_interval_ms": round(promised_s * 1e3, 3),
        "promised_response_ms": RESPONSE_S * 1e3,
    }
    if found.verified is None:
        return row | {"skipped": "no stream can be given the video's own speed"}
    (plan,) = found.verified.plans.values()
    plan = runnable(plan, bench)
    short = bench.short_of_memory(plan)
    if short:
        return row | {"skipped": short}
    entries = [Entry(name, (i * 0.618 % 1.0) * promised_s, interval_s=promised_s) for i, name in enumerate(plan.classes)]
    script = Script(entries, _INTERVALS * promised_s, ((_SETTLE * promised_s, _INTERVALS * promised_s),))
    done = run(bench, plan, script)
    (span,) = script.spans
    measured, expected = (figures(tracks, span, promised_s) for tracks in (done.measured, done.expected))
    per_chunk = bench.profile.facts["pixel_frames_per_chunk"]
    frames = (measured["chunks_per_s"] or 0.0) * per_chunk
    rate = {"frames_per_s_all_streams": round(frames, 3), "dispatch": plan.dispatch, "batch_caps": dict(plan.batch_caps)}
    return row | rate | measured | {"predicted": expected} | done.account()
