"""How many robots one device keeps on time: deadline-aware batching against one request at a time, in one process.

    python benchmarks/load.py --out benchmarks/results/load_h200.json                   # pi0.5 at true shape
    python benchmarks/load.py --model tiny --device cpu --seconds 1                      # anywhere

A robot asks for a chunk so and so many times a second, and executes so many of its actions. A request is on time if its
actions are back at the robot within the deadline, counted from the observation, both ways of the network included; a request
that is refused, superseded or late is a miss. `--demand CHUNKS_HZ:EXECUTED_STEPS:DEADLINE_MS` may be said more than once.
Robots start at random phases and their periods jitter. `closed` robots wait for an answer before they observe again, `open`
ones observe on schedule whatever happened.

The largest number of robots is the largest one at which at most 1 % of all requests miss, in a longer run at that number.
Then each server is given 1.5 and 2 times as many as it can serve, and the other server's own largest number. Inputs differ
from request to request; the host's packing, both copies and the whole route are in the time, pixels arrive at the model's
size. The file is written after every step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fcfs_single_flight import Inputs, SingleFlight
from fleet import Asked, Demand, Server, Trial, summary, trace_lines

from stretto.core.chunk import Chunk
from stretto.core.plan import Device, Mode, Placement, Plan, per_visit, whole
from stretto.core.route import Route
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.runtime.engine import Engine, Stream

MISSES = 0.01
SETS = 16  # different inputs in turn


def cut(route: Route, kind: str, device: str, cap: int, mode: Mode) -> Plan:
    """Return a plan by name: `whole`, `per_visit`, or `stages` (vision | prefix | all denoise steps)."""
    if kind == "whole":
        return whole(route, device, batch_cap=cap, mode=mode)
    if kind == "per_visit":
        return per_visit(route, device, batch_cap=cap, mode=mode)
    first = [i for i, v in enumerate(route.visits) if i and v.stage != route.visits[i - 1].stage]
    placements = tuple(Placement(s, device) for s in route.cut(first))
    return Plan("stages", (Device(device),), {"default": placements}, {device: cap}, mode=mode)


class DeadlineAware:
    """Our engine: deadlines, batches that are on time, refusals with a reason."""

    name = "deadline_limited"

    def __init__(
        self, model: Any, device: str, mode: Mode, *, prompt: int, plan: str, cap: int, buckets: tuple[int, ...]
    ) -> None:
        shapes = {"prompt": (prompt,), "batch": (*[b for b in buckets if b < cap], cap)}
        made = cut(model.route, plan, device, cap, mode).with_shapes(shapes).with_dispatch("deadline_limited")
        self.engine = Engine(model, made, streams=512)
        self.engine.warm()
        self._lengths = {"prompt": prompt}
        self._streams: dict[int, Stream] = {}

    def join(self, robot: int) -> None:
        self._streams[robot] = self.engine.open()

    def leave_all(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]:
        return self._streams[robot].submit(inputs, lengths=self._lengths, deadline_s=deadline_s)

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Search:
    """Finds the largest number of robots that a server keeps on time."""

    demand: Demand
    inputs: Sequence[Inputs]
    seconds: float
    most: int = 256

    def trial(self, server: Server, robots: int, seconds: float | None = None) -> tuple[dict[str, Any], list[Asked]]:
        seconds = seconds or self.seconds
        asked = Trial(server, self.demand, robots, self.inputs, seed=robots).run(seconds)
        found = summary(asked, robots, self.demand, min(1.0, seconds / 5), seconds)
        told = f"{100 * found['missed']:.2f} % missed, p99 {found['latency_ms_p99']:.1f} ms, {found['goodput_chunks_s']} good/s"
        print(f"  {server.name}: {robots} robots, {told}, refused {found['refused']}", flush=True)
        return found, asked

    def largest(self, server: Server, guess: int = 1) -> tuple[dict[str, Any], list[dict[str, Any]], list[Asked]]:
        """Walk from a guess to where it fails, bisect, and confirm in a run twice as long.

        Returns the confirmed run (zero robots if none holds), all short ones, and what was asked in the confirmed one.
        """
        tried: list[dict[str, Any]] = []

        def holds(robots: int) -> bool:
            tried.append(self.trial(server, robots)[0])
            return bool(tried[-1]["missed"] <= MISSES)

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
        for robots in range(low, 0, -1):
            found, asked = self.trial(server, robots, 2 * self.seconds)
            if found["missed"] <= MISSES:
                return found, tried, asked
        return {"robots": 0, "missed": 0.0, "goodput_chunks_s": 0.0}, tried, []


def make_model(name: str, device: str, dtype: str, rtc: tuple[str, ...]) -> Any:
    if name != "tiny":
        return pi0.presets()[name](device=device, dtype=dtype, rtc=rtc)
    config = pi0.tiny()[0].config
    model = pi0.build(config, device=device, dtype="float32" if device == "cpu" else dtype, rtc=rtc)
    model.randomize(seed=0)
    return model


def make_inputs(model: Any, prompt: int) -> list[Inputs]:
    """Random observations; robots that chunk in real time bring a prefix of half a chunk each."""
    batch = model.example_inputs(SETS, seed=1)
    batch["token_count"] = torch.full_like(batch["token_count"], prompt)
    return [{name: value[i].numpy() for name, value in batch.items()} for i in range(SETS)]


def alone_ms(server: Server, inputs: Sequence[Inputs], times: int = 20) -> float:
    """Return the median time of a request that has the server for itself."""
    server.join(0)
    took = []
    for i in range(times):
        begin_s = time.perf_counter()
        server.submit(0, inputs[i % len(inputs)], float("inf")).result()
        took.append((time.perf_counter() - begin_s) * 1e3)
    server.leave_all()
    return float(np.median(took))


def guess_robots(cost_ms: Callable[[int], float], cap: int, demand: Demand) -> int:
    """Return how many robots the best batch that fits the deadline could feed: where a search begins."""
    room_ms = demand.deadline_ms - 2 * demand.network_ms - demand.network_jitter_ms
    rates = [1e3 * n / cost_ms(n) for n in range(1, cap + 1) if cost_ms(n) <= 0.8 * room_ms]
    return max(1, int(0.9 * max(rates, default=0.0) / demand.chunks_hz))


def service_ms(engine: Engine, rows: int) -> float:
    """Return the measured time of the whole route for a batch of so many rows."""
    visits = engine.model.route.visits
    tasks = [tuple(v.stage for v in visits[p.segment.start : p.segment.stop]) for p in engine.plan.placements("default")]
    return 1e3 * sum(engine.costs[stages][rows - 1] for stages in tasks)


@dataclass
class Report:
    """What is known so far; written down after every step."""

    fixed: Mapping[str, Any]
    out: Path | None
    demands: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> str:
        text = json.dumps({**self.fixed, "demands": self.demands}, indent=1)
        if self.out is not None:
            self.out.write_text(text + "\n")
        return text


def compare(
    search: Search, servers: Sequence[Server], guesses: Sequence[int], factors: Sequence[float], report: Report
) -> dict[str, list[Asked]]:
    """Find each server's limit, then overload it; returns what was asked at the limits."""
    demand = search.demand
    row: dict[str, Any] = {"demand": asdict(demand) | {"control_hz": demand.control_hz, "period_ms": 1e3 * demand.period_s}}
    report.demands.append(row)
    at_limit: dict[str, list[Asked]] = {}
    for server, guess in zip(servers, guesses, strict=True):
        best, tried, at_limit[server.name] = search.largest(server, guess)
        row[server.name] = {"largest": best, "trials": tried, "overload": {}}
        report.save()
    ours, theirs = (row[s.name]["largest"]["robots"] for s in servers)
    row["robots_ratio"] = round(ours / theirs, 3) if theirs else None
    for server in servers:
        capacity = row[server.name]["largest"]["goodput_chunks_s"]
        others = max(ours, theirs)
        fleets = {f"{f:g}": max(1, round(f * row[server.name]["largest"]["robots"])) for f in factors}
        if others not in fleets.values() and others != row[server.name]["largest"]["robots"]:
            fleets["other"] = others
        for name, robots in fleets.items():
            found, _ = search.trial(server, robots, 1.5 * search.seconds)
            found["goodput_kept"] = round(found["goodput_chunks_s"] / capacity, 4) if capacity else None
            row[server.name]["overload"][name] = found
            report.save()
    return at_limit


def write_traces(at_limit: Mapping[str, Sequence[Asked]], demand: Demand, horizon: int, folder: Path | None) -> None:
    """Write one trace a server."""
    for name, asked in at_limit.items() if folder is not None else ():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"load_{name}_{demand.chunks_hz:g}hz_{demand.deadline_ms:g}ms_trace.jsonl"
        path.write_text("\n".join(trace_lines(asked, demand, horizon)) + "\n")


def read_demand(text: str) -> tuple[float, int, float]:
    """Read `chunks_hz:executed_steps:deadline_ms`."""
    parts = text.split(":")
    try:
        hz, steps, deadline_ms = float(parts[0]), int(parts[1]), float(parts[2])
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected for instance 10:5:100") from None
    if len(parts) != 3 or not (0 < hz < math.inf and steps > 0 and 0 < deadline_ms < math.inf):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected three numbers above 0, for instance 10:5:100")
    return hz, steps, deadline_ms


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0.5", help="a pi0 preset, or tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plan", default="per_visit", choices=("per_visit", "stages", "whole"), help="of our server")
    parser.add_argument("--cap", type=int, default=12, help="most robots in one batch of ours")
    parser.add_argument("--buckets", default="1,2,3,4,5,6,7,8,10,12,16,20,24,32", help="batch sizes to capture, up to the cap")
    parser.add_argument("--prompt", type=int, default=48, help="prompt tokens")
    parser.add_argument("--rtc", default="identity", help="modes of real-time chunking that rows use; empty for none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one trial of the search; confirming takes twice that")
    parser.add_argument("--overload", default="1.5,2")
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--demand", type=read_demand, action="append", help="default: 10:5:100 and 5:10:200")
    for name in ("jitter", "network_ms", "network_jitter_ms"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Demand(), name))
    parser.add_argument("--loop", default="closed", choices=("closed", "open"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for one trace a server and demand, at its limit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    said = {name: getattr(options, name) for name in ("jitter", "network_ms", "network_jitter_ms", "loop")}
    wanted = options.demand or [(10.0, 5, 100.0), (5.0, 10, 200.0)]
    demands = [Demand(chunks_hz=hz, executed_steps=steps, deadline_ms=ms, **said) for hz, steps, ms in wanted]
    rtc = tuple(m for m in options.rtc.split(",") if m)
    model = make_model(options.model, options.device, options.dtype, rtc)
    prompt = min(options.prompt, model.config.tokenizer_max_length)
    mode: Mode = "graph" if options.device.startswith("cuda") else "eager"
    buckets = tuple(int(b) for b in options.buckets.split(","))
    ours = DeadlineAware(model, options.device, mode, prompt=prompt, plan=options.plan, cap=options.cap, buckets=buckets)
    theirs = SingleFlight(model, options.device, mode, prompt=prompt)
    inputs = make_inputs(model, prompt)
    single_ms = alone_ms(theirs, inputs)
    fixed = {
        **provenance(torch.device(options.device)),
        **{name: getattr(options, name) for name in ("model", "dtype", "plan", "cap", "seconds")},
        "mode": mode,
        "prompt_tokens": prompt,
        "rtc": list(rtc),
        "rule": f"at most {100 * MISSES:g} % of requests late, refused or superseded",
        "costs_ms": {"+".join(s): [round(1e3 * c, 4) for c in costs] for s, costs in ours.engine.costs.items()},
        "single_flight_ms": round(single_ms, 4),
    }
    report = Report(fixed, options.out)
    factors = [float(f) for f in options.overload.split(",")]
    for demand in demands:
        print(f"{demand.chunks_hz:g} chunks/s a robot, {demand.executed_steps} steps executed, {demand.deadline_ms:g} ms")
        guesses = (
            guess_robots(lambda n: service_ms(ours.engine, n), options.cap, demand),
            guess_robots(lambda n: single_ms, 1, demand),
        )
        search = Search(demand, inputs, options.seconds, options.most)
        asked = compare(search, (ours, theirs), guesses, factors, report)
        write_traces(asked, demand, model.config.action_horizon, options.traces)
    ours.close()
    theirs.close()
    print(report.save())
    return {**fixed, "demands": report.demands}


if __name__ == "__main__":
    main()
