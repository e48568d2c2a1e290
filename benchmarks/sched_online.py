"""Arrivals and departures on a large pool: decision time, acceptance against equal partition and the bound, broken promises.

    python benchmarks/sched_online.py --out benchmarks/results/sched_online.json

Streams of the five world models come and go (Poisson arrivals, exponential stays, seeded). Every decision is timed. At
checkpoints the plan of the moment runs in the simulator, with noise, and every promise that does not hold is counted.
CPU only; costs are measured profiles where there are some at the usual chunk shape, else computed ones.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import platform
import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.core.plan import Device
from stretto.sched.admission import Admission, Refused
from stretto.sched.cluster import Cluster, StreamSpec
from stretto.sched.equal import EqualPartition
from stretto.sched.hardware import H200
from stretto.sched.measured import describe, for_shape
from stretto.sched.outcome import quantile
from stretto.sched.profile import Profile
from stretto.sched.shapes import WORLDS, computed
from stretto.sched.sim_state import Weather
from stretto.sched.verify import Trial, simulate, to_plans

INTERVAL_S, RESPONSE_S = 1.6, 8.0


def events(count: int, rate_s: float, stay_s: float, seed: int) -> list[tuple[str, StreamSpec]]:
    """Return mixed arrivals and departures in order of time."""
    rng = random.Random(seed)
    queue: list[tuple[float, int, str, StreamSpec]] = []
    now, n = 0.0, 0
    out: list[tuple[str, StreamSpec]] = []
    while len(out) < count:
        now += rng.expovariate(rate_s)
        while queue and queue[0][0] <= now and len(out) < count:
            out.append(("leave", heapq.heappop(queue)[3]))
        if len(out) < count:
            spec = StreamSpec(f"s{n}", rng.choice(list(WORLDS)), INTERVAL_S, RESPONSE_S)
            out.append(("arrive", spec))
            heapq.heappush(queue, (now + rng.expovariate(1 / stay_s), n, "leave", spec))
            n += 1
    return out


class Offered:
    """The streams that are here, admitted or not: what a planner without limits of form could at most hold."""

    def __init__(self, gpus: int, profiles: Mapping[str, Profile]) -> None:
        self.gpus, self.profiles = gpus, profiles
        self.load: dict[str, float] = {}

    def most_work(self) -> float:
        """Return the device time that could be in use: all that is offered, or the whole pool."""
        return min(float(self.gpus), sum(self.load.values()))


def run(gpus: int, count: int, load: float, seed: int, checkpoints: int, explain: bool) -> dict[str, Any]:
    profiles = {m: for_shape(m, H200.name, {}) or computed(m, H200) for m in WORLDS}
    work = {m: p.best_work_s / INTERVAL_S for m, p in profiles.items()}
    mean = sum(work.values()) / len(work)
    stay_s = 1.0
    rate = load * gpus / mean / stay_s
    devices = [Device(f"gpu:{i}", f"node{i // 8}", H200.usable_bytes) for i in range(gpus)]
    expected = [StreamSpec("any", m, INTERVAL_S, RESPONSE_S) for m in profiles]
    admission = Admission(devices, profiles, expected=expected)
    equal = EqualPartition(devices, Cluster(devices, profiles).views)
    offered = Offered(gpus, profiles)
    sequence = events(count, rate, stay_s, seed)
    every = max(1, count // checkpoints)
    times: list[float] = []
    on_cpu: list[float] = []
    explained: list[float] = []
    taken = taken_equal = asked = refused_though_equal_took = 0
    hosted: list[tuple[float, float, float]] = []
    broken: list[str] = []
    checked = 0
    joint_load, equal_load = {}, {}
    for i, (what, spec) in enumerate(sequence):
        begin, cpu = time.perf_counter(), time.thread_time()
        if what == "arrive":
            answer = admission.arrive(spec, explain=False)
        else:
            admission.leave(spec.name)
        times.append(time.perf_counter() - begin)
        on_cpu.append(time.thread_time() - cpu)
        if what == "arrive":
            asked += 1
            offered.load[spec.name] = work[spec.model]
            by_equal = equal.place(spec) is not None
            if not isinstance(answer, Refused):
                taken += 1
                joint_load[spec.name] = work[spec.model]
            elif explain:
                begin = time.perf_counter()
                admission._lack(spec)
                list(admission._alternatives(spec))
                explained.append(time.perf_counter() - begin)
            if by_equal:
                taken_equal += 1
                equal_load[spec.name] = work[spec.model]
                refused_though_equal_took += isinstance(answer, Refused)
        else:
            equal.leave(spec.name)
            for table in (offered.load, joint_load, equal_load):
                table.pop(spec.name, None)
        if i > count // 4:
            hosted.append((sum(equal_load.values()), sum(joint_load.values()), offered.most_work()))
        if i % every == every - 1 and admission.planner.placed:
            checked += len(admission.planner.placed)
            broken += check(devices, profiles, admission, seed=i)
    means = [sum(h[k] for h in hosted) / len(hosted) for k in range(3)]
    return {
        "gpus": gpus,
        "events": count,
        "offered_load": load,
        "seed": seed,
        "decision_ms": in_ms(times),
        "decision_cpu_ms": in_ms(on_cpu),
        "explanation_ms_p99": round(quantile(explained, 0.99) * 1e3, 1) if explained else None,
        "arrivals": asked,
        "accepted": {"equal": taken_equal, "portfolio": taken},
        "refused_though_equal_took": refused_though_equal_took,
        "devices_of_work_hosted": {k: round(m, 2) for k, m in zip(("equal", "portfolio", "bound"), means, strict=True)},
        "streams_checked": checked,
        "promises_broken": len(broken),
        "broken": broken[:10],
    }


def in_ms(seconds: list[float]) -> dict[str, float]:
    return {q: round(quantile(seconds, v) * 1e3, 3) for q, v in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def check(devices: list[Device], profiles: Mapping[str, Profile], admission: Admission, seed: int) -> list[str]:
    """Run the plan of the moment, with noise, with one row a launch and with capped batches; name what does not hold."""
    placed = dict(admission.planner.placed)
    broken = []
    # Everybody starts at once here; the queues of a device that is nearly full take twenty intervals to settle.
    trial = Trial(60, 24, Weather(seed=seed, noise=0.03))
    for batching in (False, True):
        plans = to_plans(devices, profiles, placed, batching=batching)
        found = simulate(plans, profiles, [p.spec for p in placed.values()], trial)
        broken += [f"{name}: {what}{', in batches' if batching else ''}" for name, what in found.broken.items()]
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="24,200")
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--loads", default="0.8,1.1,1.5")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--checkpoints", type=int, default=5)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    rows = []
    for gpus in map(int, args.gpus.split(",")):
        for load in map(float, args.loads.split(",")):
            for seed in range(args.seeds):
                rows.append(run(gpus, args.events, load, seed, args.checkpoints, explain=True))
                print(json.dumps(rows[-1]), flush=True)
    report = {
        "what": "online admission: decision time, acceptance, promises",
        "device": f"CPU ({platform.machine()}), one Python thread; profiles of {H200.name}",
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "interval_ms": INTERVAL_S * 1e3,
        "response_ms": RESPONSE_S * 1e3,
        "noise": 0.03,
        "profiles": {m: describe(for_shape(m, H200.name, {}) or computed(m, H200)) for m in WORLDS},
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(r["promises_broken"] for r in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
