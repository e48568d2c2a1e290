"""What the simulator says of 1, 2, 4, 8, 24 and 200 H200s, from the measured profiles that ship with the package.

    python benchmarks/world_predict.py --out benchmarks/results/world_predict_h200.json

For each model, chunk shape and number of GPUs: every plan for one stream, its output interval, response latency and
frames/s, and the best of them beside N times one GPU's rate. Then how many streams at the video's own speed the portfolio
places. A prediction, not a measurement: it takes every device to run by itself, as with captured graphs or a process a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.core.errors import PlanError
from stretto.core.plan import Device, Plan
from stretto.deploy.provenance import provenance
from stretto.deploy.world_plans import ONE, SEVERAL, plan_of, predicted
from stretto.sched.bounds import chunks_under_way, plan_bound, streams_bound
from stretto.sched.cluster import StreamSpec
from stretto.sched.columns import Columns
from stretto.sched.measured import describe, find
from stretto.sched.pack import pack
from stretto.sched.plans import check_memory
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Weather
from stretto.sched.verify import Trial

DEVICE = "NVIDIA H200"
SHAPES = (("wan2.1-1.3b", 1), ("wan2.1-1.3b", 3), ("wan2.1-14b", 1), ("wan2.1-14b", 3), ("wan2.2-5b", 1))
PUBLISHED = {
    "what": "Wave Forcing on eight H200s: bf16, its own window of 8 pages, its own kernels; not the same model state as here",
    "frames_per_s": {"wan2.1-1.3b": 84.9, "wan2.1-14b": 18.2},
}
_NODE = 8


def most_devices(name: str, profile: Profile) -> int:
    """Return how many devices a plan can use for one stream."""
    columns = len(Columns.of(profile))
    most = {"by_step": profile.steps, "by_stage": profile.steps * columns}
    return 1 if name in ONE else most.get(name, columns)


def plan_on(name: str, profile: Profile, gpus: int) -> Plan:
    """Make a plan on nodes of eight devices, deep enough that hand-overs between nodes do not set the pace.

    Raises:
        PlanError: if a device has too little memory for its share.
    """
    plan = plan_of(name, profile, [f"gpu:{i}" for i in range(gpus)], "eager")
    devices = tuple(replace(d, node=f"node{int(d.name[4:]) // _NODE}", memory_bytes=profile.memory_bytes) for d in plan.devices)
    plan = replace(plan, devices=devices)
    check_memory(profile, plan, {"default": 1})
    if name in ("by_step", "by_block", "by_stage"):
        plan = replace(plan, in_flight=max(plan.in_flight, chunks_under_way(profile, plan)))
    return plan


def one_stream(profile: Profile, gpus: int) -> list[dict[str, Any]]:
    """Predict every plan of one stream; with more devices than a plan can use, on as many as it can."""
    rows = []
    for name in ONE if gpus == 1 else SEVERAL:
        used = min(gpus, most_devices(name, profile))
        try:
            plan = plan_on(name, profile, used)
        except PlanError as error:
            rows.append({"plan": name, "devices": used, "skipped": str(error)})
            continue
        said = predicted(profile, plan, 1)
        bound = plan_bound(profile, plan)
        # What was queued at the start can drain faster than the pace that lasts; no pace below the bound does.
        said["output_interval_ms"] = max(said["output_interval_ms"], round(bound.interval_s * 1e3, 3))
        frames = profile.facts["pixel_frames_per_chunk"] / said["output_interval_ms"] * 1e3
        rows.append(
            {
                "plan": name,
                "devices": used,
                "in_flight": plan.in_flight,
                **said,
                "interval_bound_ms": round(bound.interval_s * 1e3, 3),
                "bound_by": bound.binds,
                "frames_per_s": round(frames, 3),
                "times_real_time": round(frames / profile.facts["frame_hz"], 3),
            }
        )
    return rows


def streams_at_speed(profile: Profile, gpus: int) -> dict[str, Any]:
    """Place streams that each play at the video's own speed, within four seconds of response."""
    interval_s = profile.facts["pixel_frames_per_chunk"] / profile.facts["frame_hz"]
    pool = [Device(f"gpu:{i}", f"node{i // _NODE}", profile.memory_bytes) for i in range(gpus)]
    bound = streams_bound(profile, pool, interval_s)
    specs = [StreamSpec(f"s{i}", profile.model, interval_s, 4.0) for i in range(bound.streams + 1)]
    out: dict[str, Any] = {"interval_ms": interval_s * 1e3, "response_ms": 4000.0, "bound": bound.streams}
    for method in ("equal", "portfolio"):
        packed = pack(pool, {profile.model: profile}, specs, method, Trial(20, 8, Weather(noise=0.03)))
        out[method] = len(packed.placed)
    out["frames_per_s_all_streams"] = round(out["portfolio"] * profile.facts["frame_hz"], 1)
    return out


def row_of(profile: Profile, gpus: int, one_gpu: float, crowds: Sequence[int]) -> dict[str, Any]:
    """Predict one model at one chunk shape on a number of GPUs; `one_gpu` is the best rate of a single one."""
    plans = one_stream(profile, gpus)
    fastest = max((p.get("frames_per_s", 0.0) for p in plans), default=0.0)
    # Of plans that are as fast, to half a per cent, the one that answers soonest.
    fast = [p for p in plans if p.get("frames_per_s", 0.0) >= 0.995 * fastest > 0.0]
    best = min(fast, key=lambda p: p["response_latency_ms"], default=None)
    row: dict[str, Any] = {
        "model": profile.model,
        "chunk_frames": profile.facts["frames_per_chunk"],
        "decoder": profile.facts["decoder"],
        "gpus": gpus,
        "best": best,
        "plans": plans,
    }
    if best is not None and one_gpu:
        row["times_one_gpu"] = round(best["frames_per_s"] / one_gpu, 3)
        row["share_of_n_times_one_gpu"] = round(best["frames_per_s"] / one_gpu / gpus, 3)
    if gpus in crowds:
        row["streams_at_video_speed"] = streams_at_speed(profile, gpus)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", nargs="*", type=int, default=[1, 2, 4, 8, 24, 200])
    parser.add_argument("--crowds", nargs="*", type=int, default=[4, 8, 24, 200], help="pools on which streams are placed too")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    profiles: dict[str, str] = {}
    for (model, frames), decoder in itertools.product(SHAPES, ("none", "vae")):
        profile = find(model, DEVICE, {"frames_per_chunk": frames, "decoder": decoder})
        if profile is None:
            rows.append({"model": model, "chunk_frames": frames, "decoder": decoder, "not_predicted": "never measured"})
            continue
        profiles[f"{model}, chunk {frames}, decoder {decoder}"] = describe(profile)
        one_gpu = max((p.get("frames_per_s", 0.0) for p in one_stream(profile, 1)), default=0.0)
        for gpus in args.gpus:
            rows.append(row_of(profile, gpus, one_gpu, args.crowds if decoder == "none" else ()))
            shown = {k: v for k, v in rows[-1].items() if k not in ("plans",)}
            print(json.dumps(shown), flush=True)
    made = {k: v for k, v in provenance(torch.device("cpu")).items() if k != "device"}
    report = {
        "what": "predictions of the simulator, no measurement",
        "device": f"{DEVICE} (simulated, nodes of {_NODE}); computed on CPU",
        **made,
        "published": PUBLISHED,
        "profiles": profiles,
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
