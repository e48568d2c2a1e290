"""What measured costs predict for `load.py`: the same robots and the server's own dispatch functions, on a simulated clock.

    python benchmarks/load_sim.py --costs benchmarks/results/load_h200.json
    python benchmarks/load_sim.py --costs ... --plans per_visit,joined,stages,whole --caps 4,8,16 --every-size
    python benchmarks/load_sim.py --costs ... --single-ms 29.6      # a server of that speed, one request at a time

The costs are those that a run of `load.py` wrote. A simulated device runs batches one after the other, the host hands one
batch over while another runs, and costs vary by a share of themselves. It shows what a policy makes of the costs: the largest
number of robots of which at most 1 % of requests miss, and what becomes of 1.5 and 2 times as many.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from fleet import SETTINGS, Demand, beats_passed

from stretto.sched.dispatch import ANSWER_S, Decision, DispatchPolicy, Limits, Waiting, policy
from stretto.sched.patience import Patience

DENOISE_STEPS = 10
HOST_S = 0.0008  # from the end of a batch on the device to the answer on its way
DECIDE_S = 0.0002  # one decision and launch on the host
HALF_LIFE_S = 2.0
MISSES = 0.01

Table = tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """A plan as the simulation needs it: what a chunk visits, and the seconds of a batch of 1, 2, ... at each."""

    kinds: tuple[int, ...]
    costs: Mapping[int, Table]
    cap: int

    def seconds(self, rows: int) -> float:
        """Return the time of the whole route in batches of so many rows."""
        return sum(self.costs[kind][rows - 1] for kind in self.kinds)


def one_at_a_time(ms: float) -> Line:
    """Return the plan of a server whose every request takes so long alone."""
    return Line((0,), {0: (ms / 1e3,)}, 1)


def line(costs_ms: Mapping[str, Sequence[float]], plan: str, cap: int, steps: int = DENOISE_STEPS) -> Line:
    """Cut measured costs as `load.cut` cuts the route; `joined` runs vision and prefix as one piece."""
    vision, prefix, denoise = (tuple(c / 1e3 for c in costs_ms[s]) for s in ("vision", "prefix", "denoise"))
    start = tuple(a + b for a, b in zip(vision, prefix, strict=True))
    rest = tuple(steps * c for c in denoise)
    whole = tuple(a + b for a, b in zip(start, rest, strict=True))
    made: dict[str, tuple[tuple[int, ...], tuple[Table, ...]]] = {
        "per_visit": ((0, 1, *[2] * steps), (vision, prefix, denoise)),
        "joined": ((0, *[1] * steps), (start, denoise)),
        "stages": ((0, 1, 2), (vision, prefix, rest)),
        "whole": ((0,), (whole,)),
    }
    kinds, tables = made[plan]
    return Line(kinds, dict(enumerate(tables)), cap)


def every_size(table: Sequence[float]) -> list[float]:
    """Return the costs if every batch size had a graph of its own: straight lines between the sizes that have one."""
    ends = [i for i in range(len(table)) if i + 1 == len(table) or table[i + 1] != table[i]]
    made, last = list(table), (-1, 0.0)
    for end in ends:
        begin, low = last
        if begin >= 0:
            for i in range(begin + 1, end):
                made[i] = low + (table[end] - low) * (i - begin) / (end - begin)
        last = (end, table[end])
    return made


@dataclass
class Request:
    robot: int
    observed_s: float
    planned_s: float
    back_s: float
    arrived_s: float = 0.0
    key: int = 0
    at: int = 0
    status: str = ""
    latency_s: float = float("nan")


@dataclass
class Shop:
    """One trial: N robots, one device. Two runs with the same arguments are equal."""

    line: Line
    policy: DispatchPolicy
    demand: Demand
    robots: int
    seed: int = 0
    noise: float = 0.02
    margin: float = 0.05
    knows_backlog: bool = True
    """Whether decisions wait until one batch at most is ahead, and are told when the device will be free."""
    single: bool = False
    """One request at a time, in order of arrival, deadlines not looked at."""
    asked: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.limits = Limits(self.line.cap, costs=self.line.costs, margin=self.margin, answer_s=ANSWER_S)
        self.events: list[tuple[float, int, str, Any]] = []
        self.count = self.arrived = 0
        self.waiting: list[Request] = []
        self.outstanding: deque[tuple[float, float]] = deque()
        self.free_s = 0.0
        self.believed_s = 0.0
        self.host_s = 0.0
        self.thinking = False
        self.served: dict[int, tuple[float, float]] = {}
        self.batches: list[int] = []
        self.skipped: list[tuple[int, float]] = []
        self.patience = Patience()

    def run(self, seconds: float) -> list[Request]:
        self.end_s = seconds
        for robot in range(self.robots):
            at = self.random.uniform(0, self.demand.of(robot).first_within_s)
            self.push(at, "observe", (robot, at))
        while self.events:
            at, _, what, that = heappop(self.events)
            getattr(self, what)(at, that)
        return self.asked

    def push(self, at: float, what: str, that: Any) -> None:
        self.count += 1
        heappush(self.events, (at, self.count, what, that))

    def network(self, robot: int) -> float:
        d = self.demand.of(robot)
        return (d.network_ms + self.random.uniform(0, 1) * d.network_jitter_ms) / 1e3

    def observe(self, now: float, that: tuple[int, float]) -> None:
        if now >= self.end_s:
            return
        robot, planned_s = that
        request = Request(robot, now, planned_s, self.network(robot))
        self.asked.append(request)
        self.push(now + self.network(robot), "arrive", request)
        if self.demand.of(robot).loop == "open":
            self.next(robot, planned_s, now)

    def next(self, robot: int, planned_s: float, free_s: float) -> None:
        period_s = self.demand.of(robot).period_s
        beats = beats_passed(planned_s, free_s, period_s)
        self.skipped += [(robot, planned_s + i * period_s) for i in range(1, beats)]
        grid_s = planned_s + beats * period_s
        off_s = self.random.uniform(-1, 1) * self.demand.of(robot).jitter * period_s
        self.push(max(free_s, grid_s + off_s), "observe", (robot, grid_s))

    def arrive(self, now: float, request: Request) -> None:
        request.arrived_s = now
        self.arrived += 1
        request.key = self.arrived
        alone_s = sum(self.limits.seconds(kind, 1) for kind in self.line.kinds)
        patience_s = self.patience.note(request.robot, self.deadline_s(request) - now - alone_s, now)
        if patience_s != self.limits.patience_s:
            self.limits = replace(self.limits, patience_s=patience_s)
        self.waiting.append(request)
        self.wake(now)

    def answer(self, now: float, request: Request, status: str) -> None:
        there = now + request.back_s
        request.latency_s = there - request.observed_s
        demand = self.demand.of(request.robot)
        if status == "ok" and request.latency_s * 1e3 > demand.deadline_ms:
            status = "late"
        request.status = status
        if demand.loop == "closed":
            self.next(request.robot, request.planned_s, there)

    def wake(self, now: float) -> None:
        if not self.thinking:
            self.thinking = True
            self.push(max(now, self.host_s), "decide", None)

    def reap(self, now: float) -> None:
        while self.outstanding and self.outstanding[0][0] <= now:
            end_s, _ = self.outstanding.popleft()
            self.believed_s = end_s + sum(c for _, c in self.outstanding)

    def decide(self, now: float, _: Any) -> None:
        """What the executor does in a step: wait for room, choose, launch; or choose and wait, as it used to."""
        self.reap(now)
        if self.knows_backlog and len(self.outstanding) >= 2:
            self.push(self.outstanding[0][0], "decide", None)
            return
        self.thinking = False
        if not self.waiting:
            return
        if self.single:
            if self.outstanding:
                self.thinking = True
                self.push(self.outstanding[0][0] + HOST_S, "decide", None)
                return
            decision = Decision((min(self.waiting, key=lambda r: r.key).key,))
        else:
            at = max(now, self.believed_s) if self.knows_backlog else now
            decision = self.policy(at, [self.seen(r, now) for r in self.waiting], self.limits)
        by_key = {r.key: r for r in self.waiting}
        for refusal in decision.refuse:
            self.waiting.remove(by_key[refusal.key])
            self.answer(now, by_key[refusal.key], refusal.reason)
        batch = [by_key[k] for k in decision.run]
        if not batch:
            return
        self.thinking = True
        for request in batch:
            self.waiting.remove(request)
        if len(self.outstanding) >= 2:
            self.push(self.outstanding[0][0], "launch", batch)
        else:
            self.launch(now, batch)

    def launch(self, now: float, batch: list[Request]) -> None:
        self.reap(now)
        now += DECIDE_S
        kind, n = self.line.kinds[batch[0].at], len(batch)
        cost = self.line.costs[kind][n - 1]
        self.free_s = max(now, self.free_s) + cost * max(0.2, 1.0 + self.random.gauss(0.0, self.noise))
        self.believed_s = max(now, self.believed_s) + cost
        self.outstanding.append((self.free_s, cost))
        self.batches.append(n)
        for request in batch:
            self.served[request.robot] = (self.had(request.robot, now) + cost / n, now)
            request.at += 1
            if request.at == len(self.line.kinds):
                self.push(self.free_s + HOST_S, "finish", request)
            else:
                self.waiting.append(request)
        self.host_s = now
        self.push(now, "decide", None)

    def finish(self, now: float, request: Request) -> None:
        self.answer(now, request, "ok")

    def had(self, robot: int, now: float) -> float:
        seconds, at = self.served.get(robot, (0.0, now))
        return seconds * 0.5 ** ((now - at) / HALF_LIFE_S)

    def deadline_s(self, r: Request) -> float:
        return r.observed_s + self.demand.of(r.robot).deadline_ms / 1e3 - r.back_s

    def seen(self, r: Request, now: float) -> Waiting:
        kinds, limits = self.line.kinds, self.limits
        total = sum(limits.seconds(k, 1) for k in kinds)
        ahead = kinds[r.at + 1 :]
        left = sum(limits.seconds(k, 1) for k in ahead)
        return Waiting(
            r.key, kinds[r.at], r.arrived_s, r.arrived_s, self.deadline_s(r), r.robot, r.key, 1 - left / total, left, r.at > 0,
            self.had(r.robot, now), ahead,
        )  # fmt: skip


def measure(shop: Shop, seconds: float) -> dict[str, Any]:
    """Run a trial and count; the first second does not count."""
    asked = [r for r in shop.run(seconds) if r.observed_s >= 1.0]
    skipped = [robot for robot, beat_s in shop.skipped if 1.0 <= beat_s < seconds]
    good = sum(r.status == "ok" for r in asked)
    by_robot = [[r for r in asked if r.robot == n] for n in range(shop.robots)]
    shares = [sum(r.status == "ok" for r in mine) / len(mine) for mine in by_robot if mine]
    answered = sorted(r.latency_s for r in asked if r.status in ("ok", "late"))
    reasons = sorted({r.status for r in asked} - {"ok", "late"})
    by_kind: dict[Demand, list[bool]] = {}
    for robot, ok in [*((r.robot, r.status == "ok") for r in asked), *((robot, False) for robot in skipped)]:
        by_kind.setdefault(replace(shop.demand.of(robot), also=()), []).append(ok)
    return {
        "robots": shop.robots,
        "goodput_chunks_s": round(good / (seconds - 1.0), 2),
        "goodput_worst_robot": round(min(sum(r.status == "ok" for r in mine) for mine in by_robot) / (seconds - 1.0), 2),
        "missed": round(1 - good / max(1, len(asked) + len(skipped)), 4),
        "missed_worst_kind": round(max((1 - sum(oks) / len(oks) for oks in by_kind.values()), default=1.0), 4),
        "missed_worst_robot": round(1 - min(shares), 4) if shares else 1.0,
        "late": sum(r.status == "late" for r in asked),
        "skipped": len(skipped),
        "refused": {reason: sum(r.status == reason for r in asked) for reason in reasons},
        "latency_ms_p99": round(answered[int(0.99 * (len(answered) - 1))] * 1e3, 2) if answered else None,
        "batch_mean": round(sum(shop.batches) / max(1, len(shop.batches)), 2),
    }


@dataclass(frozen=True)
class Case:
    """One server to predict."""

    line: Line
    demand: Demand
    single: bool = False
    noise: float = 0.02

    def shop(self, robots: int, seed: int) -> Shop:
        return Shop(self.line, policy("deadline_limited"), self.demand, robots, seed, self.noise, single=self.single)

    def trial(self, robots: int, seconds: float) -> dict[str, Any]:
        return measure(self.shop(robots, robots), seconds)

    def predict(self, seconds: float, factors: Sequence[float] = (1.5, 2.0), guess: int = 1) -> dict[str, Any]:
        """Return the largest fleet that holds, looked for from a guess on, and fleets larger by these factors."""
        best, robots = self.trial(guess, seconds), guess
        while robots > 1 and best["missed_worst_kind"] > MISSES:
            best, robots = self.trial(robots - 1, seconds), robots - 1
        while (more := self.trial(robots + 1, seconds))["missed_worst_kind"] <= MISSES:
            best, robots = more, robots + 1
        overload = {str(f): self.trial(round(f * robots), seconds) for f in factors}
        return {"largest": best, "next": more, "overload": overload}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="JSON that load.py wrote")
    parser.add_argument("--precision", default="dtype", help="which of those in the file")
    parser.add_argument("--plans", default="per_visit,stages,whole")
    parser.add_argument("--caps", default="8,16")
    parser.add_argument("--every-size", action="store_true", help="as if each batch size had a graph of its own")
    parser.add_argument(
        "--single-ms", type=float, nargs="*", default=[], help="also servers of one request at a time that take this long"
    )
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--noise", type=float, default=0.02, help="share by which costs vary")
    parser.add_argument("--out", type=Path)
    for name in SETTINGS:
        value = getattr(Demand(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    options = parse()
    demand = Demand(**{name: getattr(options, name) for name in SETTINGS})
    saved = json.loads(options.costs.read_text())
    saved = saved.get("precisions", {}).get(options.precision, saved)
    costs_ms = saved["costs_ms"]
    own_ms = saved.get("single_flight_ms")
    alone = one_at_a_time(own_ms - 1e3 * HOST_S) if own_ms else line(costs_ms, "whole", 1)
    cases = {"single_flight": Case(alone, demand, single=True, noise=options.noise)}
    for ms in options.single_ms:
        cases[f"single_flight of {ms:g} ms"] = Case(one_at_a_time(ms), demand, single=True, noise=options.noise)
    if options.every_size:
        costs_ms = {stage: every_size(table) for stage, table in costs_ms.items()}
    for plan in options.plans.split(","):
        for cap in (int(c) for c in options.caps.split(",")):
            cases[f"{plan}, at most {cap}"] = Case(line(costs_ms, plan, cap), demand, noise=options.noise)
    found = {}
    for name, case in cases.items():
        found[name] = case.predict(options.seconds)
        best, over = found[name]["largest"], found[name]["overload"]
        kept = ", ".join(f"{f}x {trial['goodput_chunks_s']:.1f}/s" for f, trial in over.items())
        print(f"{name}: {best['robots']} robots on time, {best['goodput_chunks_s']:.1f} chunks/s; overload {kept}")
    if options.out is not None:
        result = {"costs": options.costs.name, "every_size": options.every_size, "demand": asdict(demand), "predicted": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
