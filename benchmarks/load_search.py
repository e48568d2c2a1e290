"""Finds how many robots a server keeps on time, and what becomes of more; used by `load.py` and `load_socket.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fcfs_single_flight import Inputs
from fleet import Asked, Demand, Server, Trial, summary, trace_lines

MISSES = 0.01
RULE = (
    f"at most {100 * MISSES:g} % of all beats without an answer on time: late, refused, superseded or skipped; "
    "where robots ask for different things, of those of each kind"
)
PHASES = "random unless the demand says together, the same for all servers at the same number of robots"


@dataclass(frozen=True)
class Search:
    """Finds the largest number of robots that a server keeps on time."""

    demand: Demand
    inputs: Sequence[Inputs]
    seconds: float
    """Of one trial."""
    confirm_s: float
    """Of the run at the number that is found."""
    most: int = 256

    def trial(self, server: Server, robots: int, seconds: float | None = None) -> tuple[dict[str, Any], list[Asked]]:
        seconds = seconds or self.seconds
        trial = Trial(server, self.demand, robots, self.inputs, seed=robots)
        asked = trial.run(seconds)
        found = summary(asked, robots, self.demand, min(1.0, seconds / 5), seconds, trial.skipped)
        worst = f" ({100 * found['missed_worst_kind']:.2f} % of the worst kind)" if self.demand.also else ""
        told = f"{100 * found['missed']:.2f} % missed{worst}, p99 {found['latency_ms_p99']:.1f} ms"
        told += f", {found['goodput_chunks_s']} good/s"
        print(f"  {server.name}: {robots} robots, {told}, skipped {found['skipped']}, refused {found['refused']}", flush=True)
        return found, asked

    def largest(self, server: Server, guess: int = 1) -> tuple[dict[str, Any], list[dict[str, Any]], list[Asked]]:
        """Walk from a guess to where it fails, bisect, and confirm that number and one more in longer runs.

        Returns the confirmed run (zero robots if none holds), all short ones, and what was asked in the confirmed one.
        """
        tried: list[dict[str, Any]] = []

        def holds(robots: int) -> bool:
            tried.append(self.trial(server, robots)[0])
            return bool(tried[-1]["missed_worst_kind"] <= MISSES)

        guess = min(max(1, guess), self.most)
        low, high, step = 0, self.most + 1, max(1, guess // 8)
        if holds(guess):
            low = guess
            while low + step <= self.most and holds(low + step):
                low, step = low + step, 2 * step
            high = min(high, low + step)
        else:
            high = guess
            while high - step > 0 and not holds(high - step):
                high, step = high - step, 2 * step
            low = max(0, high - step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        best, asked = self._confirmed(server, max(1, low))
        return best, tried, asked

    def _confirmed(self, server: Server, robots: int) -> tuple[dict[str, Any], list[Asked]]:
        """Walk by ones in longer runs to the largest number that holds; `one_more` is what became of that."""
        best: dict[str, Any] | None = None
        above: dict[str, Any] | None = None
        its: list[Asked] = []
        while 1 <= robots <= self.most and (best is None or above is None):
            found, asked = self.trial(server, robots, self.confirm_s)
            if found["missed_worst_kind"] <= MISSES:
                best, its, robots = found, asked, robots + 1
            else:
                above, robots = found, robots - 1
        best = best or {"robots": 0, "missed": 0.0, "goodput_chunks_s": 0.0}
        return best | {"one_more": above}, its


@dataclass
class Report:
    """What is known so far; written down after every step."""

    fixed: Mapping[str, Any]
    out: Path | None
    demands: list[dict[str, Any]] = field(default_factory=list)
    precisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was measured of each, before any robot came."""

    def to_json(self) -> dict[str, Any]:
        return {**self.fixed, "precisions": self.precisions, "demands": self.demands}

    def save(self) -> str:
        text = json.dumps(self.to_json(), indent=1)
        if self.out is not None:
            self.out.write_text(text + "\n")
        return text


def compare(
    search: Search,
    servers: Iterable[Server],
    guesses: Sequence[int],
    factors: Sequence[float],
    report: Report,
    more: Mapping[str, Any] | None = None,
) -> dict[str, list[Asked]]:
    """Find each server's limit, then overload it, one server after the other; returns what was asked at the limits.

    The first server is ours; the others also get as many robots as ours can serve. There are as many as guesses of where to
    begin, each taken when its turn comes. `more` joins the row.
    """
    demand = search.demand
    row: dict[str, Any] = {"told": f"{demand}", **(more or {}), "robots_over": {}}
    row["demand"] = asdict(demand) | {"control_hz": demand.control_hz, "period_ms": 1e3 * demand.period_s}
    report.demands.append(row)
    at_limit: dict[str, list[Asked]] = {}
    ours = 0
    for guess, server in zip(guesses, servers, strict=False):
        best, tried, at_limit[server.name] = search.largest(server, guess)
        row[server.name] = {"largest": best, "trials": tried, "overload": {}}
        robots = best["robots"]
        fleets = {f"{f:g}": max(1, round(f * robots)) for f in factors}
        if len(at_limit) == 1:
            ours = robots
        else:
            row["robots_over"][server.name] = round(ours / robots, 3) if robots else None
            if ours and ours not in (*fleets.values(), robots):
                fleets["as many as ours"] = ours
        report.save()
        for name, robots in fleets.items():
            found, _ = search.trial(server, robots)
            capacity = best["goodput_chunks_s"]
            found["goodput_kept"] = round(found["goodput_chunks_s"] / capacity, 4) if capacity else None
            row[server.name]["overload"][name] = found
            report.save()
    return at_limit


def write_traces(
    at_limit: Mapping[str, Sequence[Asked]], demand: Demand, horizon: int, folder: Path | None, label: str = ""
) -> None:
    """Write one trace a server."""
    for name, asked in at_limit.items() if folder is not None else ():
        folder.mkdir(parents=True, exist_ok=True)
        fleet = "_".join(f"{d.chunks_hz:g}hz_{d.deadline_ms:g}ms" for d in demand.kinds)
        path = folder / f"load_{name}_{label}{fleet}_trace.jsonl"
        path.write_text("\n".join(trace_lines(asked, demand, horizon)) + "\n")
