"""Puts the simulator's word beside every row of a result of `load.py`, and names it a prediction.

    python benchmarks/load_predict.py benchmarks/results/load_h200.json
    python benchmarks/load_predict.py benchmarks/results/load_h200.json --demand 10:5:100 --demand 2:25:50+3*2:25:500

For each demand: our plan at the costs that the run measured, what the device could feed at all, and servers of one request at a
time that take as long as other runtimes do. The second adds demands that were not run, written as for `load.py`: ours and one
at a time, over twelve sets of phases. The file is written anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fleet import Demand, read_back
from load_demand import read_demand, wanted
from load_sim import HOST_S, MISSES, Case, Line, line, one_at_a_time

PEERS_MS = {
    "LeRobot 0.6.1 compiled, bf16, prompt of 200": (35.1, "measured on an H200"),
    "PhyAI d27fe18, bf16, prompt of 200": (23.6, "measured on an H200"),
    "PhyAI d27fe18, bf16, prompt of 1": (22.5, "measured on an H200"),
    "openpi, pi0 compiled": (29.6, "quoted for an H200, never measured here"),
}
"""Milliseconds of one request, from tensors to tensors: what a server round it adds is left out, in their favour."""
NETWORK = Demand().jitter, Demand().network_ms, Demand().network_jitter_ms
STOCK = "single_flight_stock_torch"
SECONDS, DEADLINES = 6.0, 30
"""A trial lasts so long, and so many deadlines: a short one lets a queue grow that would be late in a longer one."""


def per_visit_ms(costs_ms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the cost of one visit to each stage, from pieces as they were measured.

    Raises:
        ValueError: if a piece runs several stages, so that their shares are not known.
    """
    found = {}
    for piece, ms in costs_ms.items():
        visits = piece.split("+")
        if len(set(visits)) > 1:
            raise ValueError(f"costs_ms: got {piece!r}, expected pieces of one stage each (plan stages or per_visit)")
        found[visits[0]] = [c / len(visits) for c in ms]
    return found


def most_served(plan: Line, demand: Demand, batches: int) -> tuple[int, int]:
    """Return how many robots batches of one size, back to back, serve once a period, and that size.

    It is the best size of which so many batches fit the deadline: with one, what the device feeds at all; with two, what robots
    of any phase can have, as one that comes just after a batch has begun waits for its end and then runs in the next.
    """
    # The tightest deadline counts: a batch that all can wait for is one that it can wait for.
    room_s = min(d.deadline_ms - 2 * d.network_ms - d.network_jitter_ms for d in demand.kinds) / 1e3
    sizes = [n for n in range(1, plan.cap + 1) if batches * plan.seconds(n) <= room_s] or [1]
    best = min(sizes, key=lambda n: plan.seconds(n) / n)
    return int(best / plan.seconds(best) / demand.rate_hz), best


def expected(case: Case) -> int:
    """Return a number of robots near the largest that holds: where to begin to look."""
    rate = case.line.cap / case.line.seconds(case.line.cap)
    return max(1, int(0.8 * rate / case.demand.rate_hz))


def predict(row: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the simulator says of one row of a result."""
    costs = result["precisions"][row["precision"]]
    demand = read_back(row["demand"])
    plan = line(per_visit_ms(costs["costs_ms"]), result["plan"], result["cap"], result["denoise_steps"])
    ours = Case(plan, demand)
    own_ms = costs["single_flight_ms"]
    cases = {"deadline_limited": ours, "single_flight": Case(one_at_a_time(own_ms - 1e3 * HOST_S), demand, single=True)}
    if (stock_ms := costs.get(f"{STOCK}_ms")) is not None:
        cases[STOCK] = Case(one_at_a_time(stock_ms - 1e3 * HOST_S), demand, single=True)
    for name, (ms, _) in PEERS_MS.items():
        cases[name] = Case(one_at_a_time(ms), demand, single=True)
    seconds = max(SECONDS, DEADLINES * min(d.deadline_ms for d in demand.kinds) / 1e3)
    found: dict[str, Any] = {n: c.predict(seconds, (1.5, 2.0), expected(c)) for n, c in cases.items()}
    most, spread = most_served(plan, demand, 1), most_served(plan, demand, 2)
    found["deadline_limited"] |= {"device_feeds": most[0], "of_any_phase": spread[0], "in_batches_of": spread[1]}
    robots = row.get("deadline_limited", {}).get("largest", {}).get("robots")
    for name, (ms, source) in PEERS_MS.items():
        theirs = found[name]["largest"]["robots"]
        found[name] |= {"request_ms": ms, "source": source, "ours_measured_over_this": robots and round(robots / theirs, 2)}
    return {"what": "simulated, not measured", **found}


def holds(case: Case, robots: int, seeds: int = 12, seconds: float = 8.0) -> bool:
    """Tell whether each kind of robot is on time, all phases together."""
    beats: dict[Demand, list[bool]] = {}
    for seed in range(seeds):
        shop = case.shop(robots, robots * 31 + seed)
        asked = shop.run(seconds)
        found = [(r.robot, r.status == "ok") for r in asked if r.observed_s >= 1.0]
        found += [(robot, False) for robot, beat_s in shop.skipped if 1.0 <= beat_s < seconds]
        for robot, ok in found:
            beats.setdefault(replace(case.demand.of(robot), also=()), []).append(ok)
    return all(oks.count(False) <= MISSES * len(oks) for oks in beats.values())


def most_on_time(case: Case, high: int) -> int:
    """Return how many robots are on time: by bisection, and the next few are tried, since one more is not always harder."""
    low, most = 0, high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(case, middle) else (low, middle - 1)
    return max((n for n in range(low + 1, min(low + 3, most) + 1) if holds(case, n)), default=low)


def predict_demand(demand: Demand, precision: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many robots of a demand are on time at the costs of a result, by ours and one at a time."""
    costs = result["precisions"][precision]
    plan = line(per_visit_ms(costs["costs_ms"]), result["plan"], result["cap"], result["denoise_steps"])
    feeds = int(plan.cap / plan.seconds(plan.cap) / demand.rate_hz) + 1
    found = {"deadline_limited": most_on_time(Case(plan, demand), feeds)}
    for name in ("single_flight", STOCK):
        if (ms := costs.get(f"{name}_ms")) is not None:
            case = Case(one_at_a_time(ms - 1e3 * HOST_S), demand, single=True)
            found[name] = most_on_time(case, int(1e3 / ms / demand.rate_hz) + 1)
    return {"told": str(demand), "precision": precision, "demand": asdict(demand), "robots": found}


def told(row: Mapping[str, Any]) -> str:
    """Return the row as a line: measured numbers of robots, then predicted ones."""
    p = row["predicted"]
    servers = ("deadline_limited", "single_flight", STOCK)
    measured = {n: row[n]["largest"]["robots"] for n in servers if n in row}
    robots = {n: v["largest"]["robots"] for n, v in p.items() if isinstance(v, dict)}
    ours = p["deadline_limited"]
    bound = f"the device feeds {ours['device_feeds']}, of any phase {ours['of_any_phase']}"
    return f"{row['precision']}, {read_back(row['demand'])}: measured {measured}; predicted {robots}; {bound}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--demand", type=read_demand, action="append", default=[])
    parser.add_argument("--precision", default="dtype", help="of these demands")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = json.loads(options.result.read_text())
    options.loop, options.jitter, options.network_ms, options.network_jitter_ms = "closed", *NETWORK
    for demand, precision, _ in wanted(options) if options.demand else ():
        row = predict_demand(demand, precision, result)
        others = [r for r in result.get("predicted_demands", []) if read_back(r["demand"]) != demand]
        result["predicted_demands"] = [*others, row]
        options.result.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{row['told']}: predicted {row['robots']}", flush=True)
    for row in result["demands"] if not options.demand else ():
        if row["precision"] not in result["precisions"]:
            continue
        row["predicted"] = predict(row, result)
        options.result.write_text(json.dumps(result, indent=1) + "\n")
        print(told(row), flush=True)
    return result


if __name__ == "__main__":
    main()
