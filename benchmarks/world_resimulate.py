"""Simulates scripts that ran on two GPUs once more, with what a host takes to launch on an idle GPU taken from another run.

    python benchmarks/world_resimulate.py --out benchmarks/results/world_resimulated_2x_h200.json

The runs of `world_fidelity_2x_h200.json` were predicted without that time. Here it is the one with which the simulator gives
the interval of the fixed-order seed of `world_seeds_2x_h200.json`, a run of the same call, and nothing else is changed. CPU
only, no measurement.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import world_seeds

from stretto.deploy.world_plans import plan_of
from stretto.deploy.world_trial import NOISE, Entry, Script, figures, simulated
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Weather

RESULTS = Path(__file__).parent / "results"
DEVICES = ("cuda:0", "cuda:1")
SECONDS = 1.8  # as in the run of the seeds


def host_s(seeds: dict[str, Any]) -> float:
    """Return the host's time with which the simulated seed takes what the real one took, by bisection."""
    row = next(r for r in seeds["rows"] if r["part"] == "seed-2gpu" and r["case"].startswith("fixed order"))
    which = next(i for i, p in enumerate(seeds["profiles"]) if p["model"] == row["model"])
    profile = replace(Profile.from_json(json.dumps(seeds["profiles"][which])), max_batch=4)
    weather = Weather(noise=NOISE, slow=seeds["slow"][which])
    low, high = 0.0, 3e-3
    for _ in range(14):
        middle = (low + high) / 2.0
        slower = replace(profile, host_s=middle)
        trial = next(iter(world_seeds.seed(slower, DEVICES, SECONDS)))
        found = figures(simulated(slower, trial.plan, trial.script, weather), trial.script.spans[0])
        low, high = (middle, high) if found["interval_ms"][0] < row["interval_ms"][0] else (low, middle)
    return (low + high) / 2.0


def again(fidelity: dict[str, Any], host: float) -> list[dict[str, Any]]:
    """Simulate the scripts of streams that arrive one after another."""
    rows = []
    for raw, slow in zip(fidelity["profiles"], fidelity["slow"], strict=True):
        profile = replace(Profile.from_json(json.dumps(raw)), host_s=host)
        for case in fidelity["cases"]:
            if case["model"] != raw["model"] or not case["case"].startswith("by_block, 1 to 4") or "rows" not in case:
                continue
            plan = replace(plan_of("by_block", profile, DEVICES, "graph"), in_flight=2).with_dispatch(case["dispatch"])
            entries = [Entry(c, a, b if b < case["seconds"] - 0.01 else math.inf) for c, a, b in case["script"]]
            spans = sorted({tuple(r["span_s"]) for r in case["rows"]})
            tracks = simulated(profile, plan, Script(entries, case["seconds"], spans), Weather(noise=NOISE, slow=slow))
            for r in case["rows"]:
                found = tracks[r["stream"]].interval_s(tuple(r["span_s"])) * 1e3
                same = {k: r[k] for k in ("stream", "span_s", "measured_ms")}
                first = {"predicted_ms": r["simulated_ms"], "predicted_error": r["error"]}
                error = round(found / r["measured_ms"] - 1.0, 4)
                rows.append({"model": case["model"], **same, **first, "again_ms": round(found, 3), "error": error})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    seeds, fidelity = (json.loads((RESULTS / f"world_{n}_2x_h200.json").read_text()) for n in ("seeds", "fidelity"))
    host = host_s(seeds)
    rows = again(fidelity, host)
    worst = max(abs(r["error"]) for r in rows)
    what = "simulated once more after the run, with the host's time from another run of the same call; no measurement"
    report = {"what": what, "commit": fidelity["commit"], "host_ms": round(host * 1e3, 3), "worst_error": worst, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"host {host * 1e3:.3f} ms, {len(rows)} intervals, worst {worst:.1%}")


if __name__ == "__main__":
    main()
