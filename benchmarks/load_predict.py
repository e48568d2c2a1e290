"""Puts the simulator's word beside every row of a result of `load.py`, and names it a prediction.

    python benchmarks/load_predict.py benchmarks/results/load_h200.json

For each demand: our plan at the costs that the run measured, what the device could feed at all, and servers of one
request at a time that take as long as other runtimes do. The file is written anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet import Demand, read_back
from load_sim import HOST_S, Case, Line, line, one_at_a_time

PEERS_MS = {
    "LeRobot 0.6.1 compiled, bf16, prompt of 200": (35.1, "measured on an H200"),
    "PhyAI d27fe18, bf16, prompt of 200": (23.6, "measured on an H200"),
    "PhyAI d27fe18, bf16, prompt of 1": (22.5, "measured on an H200"),
    "openpi, pi0 compiled": (29.6, "quoted for an H200, never measured here"),
}
"""Milliseconds of one request, from tensors to tensors: what a server round it adds is left out, in their favour."""
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
    options = parser.parse_args(arguments)
    result: dict[str, Any] = json.loads(options.result.read_text())
    for row in result["demands"]:
        if row["precision"] not in result["precisions"]:
            continue
        row["predicted"] = predict(row, result)
        options.result.write_text(json.dumps(result, indent=1) + "\n")
        print(told(row), flush=True)
    return result


if __name__ == "__main__":
    main()
