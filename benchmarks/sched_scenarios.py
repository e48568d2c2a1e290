"""The planner's scenarios: streams by method, the bound, convoys, the exact answer on small pools, the simulator's speed.

    python benchmarks/sched_scenarios.py --out benchmarks/results/sched_scenarios.json

CPU only. Costs are the measured profiles of the package where one has the chunk shape, else computed ones; rows say which.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import random
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.core.plan import Device, Plan
from stretto.sched.bounds import streams_bound
from stretto.sched.cluster import StreamSpec
from stretto.sched.exact import optimum
from stretto.sched.hardware import H200
from stretto.sched.measured import describe, for_shape
from stretto.sched.pack import place_all
from stretto.sched.plans import by_block
from stretto.sched.profile import Profile
from stretto.sched.report import rows
from stretto.sched.scenarios import BUILT_IN, Scenario
from stretto.sched.shapes import WORLDS, computed
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation
from stretto.sched.verify import Trial, simulate, to_plans

SEED_TABLE = {
    "wan2.1-1.3b": (12, 39),
    "wan2.2-5b": (24, 46),
    "wan2.1-14b": (24, 18),
    "ltx-2.5-22b": (8, 18),
    "minimax-h3-33b": (6, 10),
}
"""Streams under equal partition and placed jointly, as reported for PhysisServe on 24 unnamed GPUs: compare gains only."""


ONE_FRAME = Scenario(
    "seed-24gpu, one latent frame a chunk",
    24,
    ("wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b"),
    interval_ms=320.0,
    response_ms=4000.0,
    shape={"frames_per_chunk": 1},
)
"""The three models that were measured, each at the rate that `seed-24gpu` asks of the 5B model: a latent frame in 320 ms."""


def costs(model: str, shape: Mapping[str, float]) -> Profile:
    """Return the measured profile of a model at this chunk shape, or the computed one."""
    return for_shape(model, H200.name, shape) or computed(model, H200, **shape)


def scenario(chosen: Scenario, methods: tuple[str, ...], noise: float) -> dict[str, Any]:
    name = chosen.name
    profiles = {m: costs(m, chosen.shape) for m in chosen.wanted}
    found = rows(chosen, profiles, methods, Trial(40, 12, Weather(noise=noise)))
    out = [row.full() for row in found]
    for row in out:
        joint, equal = row["streams"].get("portfolio", 0), row["streams"].get("equal", 0)
        row["gain"] = round(joint / equal, 3) if equal else None
        if name == "seed-24gpu":
            a, b = SEED_TABLE[row["model"]]
            row["reported_gain"] = round(b / a, 3)
    return {
        "scenario": name,
        "gpus": chosen.gpus,
        "interval_ms": chosen.interval_ms,
        "response_ms": chosen.response_ms,
        "rows": out,
    }


def joint_with_greedy(model: str = "wan2.1-14b") -> list[dict[str, Any]]:
    """Spread every stream over eight devices with equal ranks, and batch greedily or with the cap of the ring.

    Greedy means: whatever waits, when the device is free or, as on a GPU, one launch ahead of that.
    """
    profile = costs(model, {})
    devices = [Device(f"gpu:{i}", f"node{i // 8}", profile.memory_bytes) for i in range(24)]
    out = []
    streams = 21
    for share in (0.8, 0.9, 0.95):
        # Heaviest ranks ask for this share of their device.
        interval_s = 1.02 * streams * profile.work_s / len(devices) / share
        specs = [StreamSpec(f"s{i}", model, interval_s, 8.0 * interval_s) for i in range(streams)]
        placed = spread(profile, devices, specs)
        for name, ahead, options in (
            ("greedy batches, first come first served", 0, {"greedy": True, "dispatch": "first_come_first_served"}),
            ("greedy batches, first come first served", 1, {"greedy": True, "dispatch": "first_come_first_served"}),
            ("greedy batches, virtual deadlines", 0, {"greedy": True, "dispatch": "earliest_virtual_deadline_first"}),
            ("greedy batches, virtual deadlines", 1, {"greedy": True, "dispatch": "earliest_virtual_deadline_first"}),
            ("greedy batches, sweep", 1, {"greedy": True, "dispatch": "sweep"}),
            ("capped, virtual deadlines", 1, {"dispatch": "earliest_virtual_deadline_first"}),
            ("no batches, virtual deadlines", 1, {"batching": False, "dispatch": "earliest_virtual_deadline_first"}),
        ):
            plans = to_plans(devices, {model: profile}, placed, **options)  # type: ignore[arg-type]
            plans = {m: replace(plan, ahead=ahead) for m, plan in plans.items()}
            found = simulate(plans, {model: profile}, specs, Trial(40, 15, Weather(noise=0.03)))
            caps = sorted(set(plans[model].batch_caps.values()))
            broken = len(found.broken)
            out.append(
                {
                    "streams": streams,
                    "load": share,
                    "interval_ms": round(interval_s * 1e3, 1),
                    "dispatch": name,
                    "ahead": ahead,
                    "caps": caps,
                    "broken": broken,
                    "response_ms_p99": found.response_ms(0.99),
                    "profile": describe(profile),
                }
            )
    return out


def spread(profile: Any, devices: list[Device], specs: list[StreamSpec]) -> dict[str, Any]:
    from stretto.sched.cluster import ModelView, Placed
    from stretto.sched.equal import equal_ranks

    view = ModelView(profile)
    nodes = [devices[i : i + 8] for i in range(0, len(devices), 8)]
    return {s.name: Placed(s, equal_ranks(view, nodes[i % len(nodes)]), "spread") for i, s in enumerate(specs)}


def convoys() -> list[dict[str, Any]]:
    """Sixteen chunks in flight on a ring of four, launches made as dear as the work: chunks/s by batch cap and order."""
    from stretto.sched.costs import BatchCost

    base = computed("wan2.2-5b", H200)
    block = replace(base.stage("block.0"), cost=BatchCost.line(0.83e-3, 0.61e-3))
    profile = replace(base, stages={**base.stages, "block.*": block}, max_batch=16)
    devices = [Device(f"gpu:{i}") for i in range(4)]
    out = []
    orders = ("first_come_first_served", "oldest_chunk_first", "sweep")
    for order, ahead in itertools.product(orders, (0, 1)):
        for cap in (1, 2, 4, 8, 16):
            plan = by_block(profile, devices, batch_cap=cap, quantum=5).with_dispatch(order)
            rates = [_rate(profile, replace(plan, in_flight=4, ahead=ahead), seed) for seed in range(8)]
            mean, least = sum(rates) / len(rates), min(rates)
            row = {
                "order": order,
                "ahead": ahead,
                "batch_cap": cap,
                "chunks_per_s_per_gpu": round(mean, 2),
                "worst_of_8_seeds": round(least, 2),
            }
            out.append(row)
    return out


def _rate(profile: Profile, plan: Plan, seed: int) -> float:
    starts = random.Random(seed)
    runs = [StreamRun(f"s{i}", "m", chunks=120, start_s=starts.uniform(0.0, 0.4)) for i in range(4)]
    sim = Simulation({"m": Load(plan, profile)}, runs, weather=Weather(seed, noise=0.03))
    ends = sorted(d[2] for s in sim.run(math.inf).streams for d in s.done)
    a, b = len(ends) // 4, 3 * len(ends) // 4
    return (b - a) / (ends[b] - ends[a]) / len(plan.devices)


def exact(instances: int, seed: int) -> dict[str, Any]:
    """Compare the portfolio with the exact answer on small pools of one or two models."""
    rng = random.Random(seed)
    ratios: list[tuple[float, str]] = []
    proven_all = 0
    for _ in range(instances):
        models = rng.sample(list(WORLDS), rng.choice([1, 1, 2]))
        interval = rng.choice([0.8, 1.6, 2.4, 3.2])
        gpus = rng.choice([2, 3, 4])
        profiles = {m: computed(m, H200) for m in models}
        devices = [Device(f"gpu:{i}", memory_bytes=H200.usable_bytes) for i in range(gpus)]
        most = max(streams_bound(p, devices, interval).streams for p in profiles.values())
        specs = [StreamSpec(f"s{i}", models[i % len(models)], interval) for i in range(min(9, most + 1))]
        # Under the same promise: whatever equal partition takes is taken.
        keep = place_all(devices, profiles, specs, "equal") if len(models) > 1 else ()
        best, proven = optimum(devices, profiles, specs, limit_s=20.0, keep=keep)
        found = place_all(devices, profiles, specs, "portfolio")
        if not proven or not best:
            continue
        proven_all += 1
        what = f"{gpus} GPUs, {interval * 1e3:.0f} ms, {'+'.join(models)}: {len(found)} of {len(best)}"
        ratios.append((len(found) / len(best), what))
    worst = min(ratios)
    mean = sum(r for r, _ in ratios) / len(ratios)
    return {
        "instances": instances,
        "proven": proven_all,
        "mean": round(mean, 4),
        "worst": round(worst[0], 4),
        "worst_instance": worst[1],
    }


def speed() -> dict[str, Any]:
    """Time the simulator alone on a plan of 200 devices."""
    profile = computed("minimax-h3-33b", H200)
    devices = [Device(f"gpu:{i}", f"node{i // 8}", H200.usable_bytes) for i in range(200)]
    specs = [StreamSpec(f"s{i}", profile.model, 1.6, 8.0) for i in range(130)]
    placed = place_all(devices, {profile.model: profile}, specs, "lds")
    plans = to_plans(devices, {profile.model: profile}, placed, batching=False)
    runs = [StreamRun(n, profile.model, n, 1.6, 8.0, start_s=i * 0.01) for i, n in enumerate(placed)]
    sim = Simulation({profile.model: Load(plans[profile.model], profile)}, runs)
    begin = time.process_time()
    sim.run(1.6 * 150)
    seconds = time.process_time() - begin
    return {"tasks": sim.tasks, "cpu_seconds": round(seconds, 2), "tasks_per_s": round(sim.tasks / seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--instances", type=int, default=40)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    methods = ("equal", "bestfit", "lds", "portfolio")
    report: dict[str, Any] = {
        "what": "planner scenarios",
        "device": f"CPU ({platform.machine()}), one Python thread; profiles of {H200.name}, rows say which",
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "noise": args.noise,
        "scenarios": [],
    }
    for chosen in (*(BUILT_IN[n] for n in ("seed-24gpu", "seed-1gpu", "seed-2gpu", "depth-200", "robots")), ONE_FRAME):
        report["scenarios"].append(scenario(chosen, methods, args.noise))
        for row in report["scenarios"][-1]["rows"]:
            print(
                chosen.name,
                row["model"],
                row["streams"],
                "bound",
                row["bound"],
                "gain",
                row["gain"],
                row.get("reported_gain"),
                row["provenance"],
                flush=True,
            )
    for key, value in (
        ("convoys", convoys()),
        ("spread_14b", joint_with_greedy()),
        ("exact", exact(args.instances, seed=0)),
        ("simulator", speed()),
    ):
        report[key] = value
        print(key, json.dumps(value), flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
