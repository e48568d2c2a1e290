"""How many robots one device keeps on time: deadline-aware batching against one request at a time, in one process.

    python benchmarks/load.py --out benchmarks/results/load_h200.json                   # pi0.5 at true shape
    python benchmarks/load.py --model tiny --device cpu --seconds 2                      # anywhere

A robot asks for a chunk `--chunks-hz` times a second, that is every `--executed-steps` control steps. A request is on time
if its actions are back at the robot within `--deadline-ms` of the observation, both ways of the network included; a request
that is refused, superseded or late is a miss. Robots start at random phases and their periods jitter. `closed` robots wait
for an answer before they observe again, `open` ones observe on schedule whatever happened.

The largest number of robots is the largest one at which at most 1 % of all requests miss. Then both servers are given 1.5
times as many as they can serve. Inputs differ from request to request; the host's packing, both copies and the whole route
are in the time, pixels arrive at the model's size.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from fcfs_single_flight import Inputs, SingleFlight

from stretto.core.chunk import Chunk
from stretto.core.errors import RefusedError, StrettoError
from stretto.core.plan import Device, Mode, Placement, Plan, per_visit, whole
from stretto.core.route import Route
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.runtime.engine import Engine, Stream

MISSES = 0.01
SETS = 16  # different inputs in turn


@dataclass(frozen=True)
class Demand:
    """What every robot asks for."""

    chunks_hz: float = 10.0
    executed_steps: int = 5
    deadline_ms: float = 100.0
    jitter: float = 0.1
    """Share of the period by which an observation may be early or late."""
    network_ms: float = 2.0
    """One way."""
    network_jitter_ms: float = 1.0
    loop: str = "closed"

    @property
    def period_s(self) -> float:
        return 1.0 / self.chunks_hz

    @property
    def control_hz(self) -> float:
        return self.chunks_hz * self.executed_steps


class Server(Protocol):
    name: str

    def join(self, robot: int) -> None: ...
    def leave_all(self) -> None: ...
    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]: ...
    def close(self) -> None: ...


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


@dataclass
class Asked:
    """One request, as its robot saw it."""

    robot: int
    observed_s: float
    there_s: float
    """Network, one way each."""
    back_s: float
    arrived_s: float = float("nan")
    status: str = "ok"
    reason: str = ""
    chunk: Chunk | None = None

    @property
    def latency_s(self) -> float:
        return self.arrived_s - self.observed_s


@dataclass(order=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class Trial:
    """N robots against one server for some seconds of wall clock, driven from one thread."""

    def __init__(self, server: Server, demand: Demand, robots: int, inputs: Sequence[Inputs], seed: int) -> None:
        self.server, self.demand, self.robots, self.inputs = server, demand, robots, inputs
        self.rng = np.random.default_rng(seed)
        self.asked: list[Asked] = []
        self._events: list[_Event] = []
        self._numbers = 0
        self._wake = threading.Condition()
        self._open = 0

    def run(self, seconds: float) -> list[Asked]:
        """Run, wait for what is still out, and return every request in order of observation."""
        begin_s = time.monotonic() + 0.05
        self._end_s = begin_s + seconds
        for robot in range(self.robots):
            self.server.join(robot)
            self._at(begin_s + float(self.rng.uniform(0, self.demand.period_s)), lambda r=robot: self._observe(r, None))
        while self._step():
            pass
        give_up_s = time.monotonic() + 30.0
        with self._wake:
            while self._open and time.monotonic() < give_up_s:
                self._wake.wait(0.1)
        self.server.leave_all()
        return sorted(self.asked, key=lambda a: a.observed_s)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        with self._wake:
            self._numbers += 1
            heappush(self._events, _Event(at_s, self._numbers, act))
            self._wake.notify()

    def _step(self) -> bool:
        with self._wake:
            now_s = time.monotonic()
            if not self._events:
                if not self._open or now_s > self._end_s:
                    return False
                self._wake.wait(0.02)
                return True
            if self._events[0].at_s > now_s:
                self._wake.wait(self._events[0].at_s - now_s)
                return True
            event = heappop(self._events)
        event.act()
        return True

    def _observe(self, robot: int, planned_s: float | None) -> None:
        now_s = time.monotonic()
        if now_s >= self._end_s:
            return
        planned_s = now_s if planned_s is None else planned_s
        d = self.demand
        ways = (d.network_ms + d.network_jitter_ms * self.rng.uniform(0, 1, 2)) / 1e3
        asked = Asked(robot, now_s, *map(float, ways))
        self.asked.append(asked)
        with self._wake:
            self._open += 1
        self._at(now_s + asked.there_s, lambda: self._send(asked, planned_s))
        if d.loop == "open":
            self._next(robot, planned_s, now_s)

    def _next(self, robot: int, planned_s: float, free_s: float) -> None:
        """Plan the next observation on the robot's own grid; one that waited for an answer skips the beats it missed."""
        period_s = self.demand.period_s
        beats = max(1, int(np.ceil((free_s - planned_s) / period_s - 1e-9)))
        grid_s = planned_s + beats * period_s
        off_s = float(self.rng.uniform(-1, 1)) * self.demand.jitter * period_s
        self._at(max(free_s, grid_s + off_s), lambda: self._observe(robot, grid_s))

    def _send(self, asked: Asked, planned_s: float) -> None:
        d = self.demand
        deadline_s = asked.observed_s + d.deadline_ms / 1e3 - asked.back_s
        inputs = self.inputs[len(self.asked) % len(self.inputs)]
        future = self.server.submit(asked.robot, inputs, deadline_s)
        future.add_done_callback(lambda f: self._answered(asked, planned_s, f))

    def _answered(self, asked: Asked, planned_s: float, future: Future[Chunk]) -> None:
        asked.arrived_s = time.monotonic() + asked.back_s
        error = None if not future.cancelled() else StrettoError("dropped at the end")
        error = error or future.exception()
        if error is not None:
            asked.status = "refused" if isinstance(error, RefusedError) else "failed"
            asked.reason = getattr(error, "reason", "") or type(error).__name__
        else:
            asked.chunk = future.result()
            asked.status = "late" if asked.latency_s * 1e3 > self.demand.deadline_ms else "ok"
        if self.demand.loop == "closed":
            self._next(asked.robot, planned_s, asked.arrived_s)
        with self._wake:
            self._open -= 1
            self._wake.notify()


def summary(asked: Sequence[Asked], robots: int, demand: Demand, warmup_s: float, seconds: float) -> dict[str, Any]:
    """Return what one trial found; the first `warmup_s` do not count."""
    begin_s = min(a.observed_s for a in asked) + warmup_s
    counted = [a for a in asked if a.observed_s >= begin_s]
    answered = [a for a in counted if a.chunk is not None]
    by_robot = [[a for a in counted if a.robot == r] for r in range(robots)]
    missed = [sum(a.status != "ok" for a in mine) / len(mine) for mine in by_robot if mine]
    reasons = sorted({a.reason for a in counted if a.reason})
    latencies = [a.latency_s * 1e3 for a in answered] or [float("nan")]
    batches = [max(a.chunk.batch_sizes.values()) for a in answered if a.chunk] or [0]
    on_time = sum(a.status == "ok" for a in counted)
    return {
        "robots": robots,
        "requests": len(counted),
        "demand_chunks_s": round(robots * demand.chunks_hz, 3),
        "goodput_chunks_s": round(on_time / (seconds - warmup_s), 3),
        "missed": round(1 - on_time / len(counted), 5) if counted else 1.0,
        "missed_worst_robot": round(max(missed), 5) if missed else 1.0,
        "late": sum(a.status == "late" for a in counted),
        "refused": {reason: sum(a.reason == reason for a in counted) for reason in reasons},
        "latency_ms_p50": round(float(np.quantile(latencies, 0.5)), 3),
        "latency_ms_p99": round(float(np.quantile(latencies, 0.99)), 3),
        "batch_mean": round(float(np.mean(batches)), 3),
        "batch_max": int(max(batches)),
    }


def trace_lines(asked: Sequence[Asked], demand: Demand, horizon: int) -> list[str]:
    """Return the requests in the form that `stretto roofline` reads."""
    fixed = {
        "executed_steps": demand.executed_steps,
        "control_hz": demand.control_hz,
        "horizon": horizon,
        "deadline_s": demand.deadline_ms / 1e3,
        "mode": "naive",
    }
    lines = []
    for a in asked:
        line: dict[str, Any] = {**fixed, "robot": str(a.robot), "t_s": a.observed_s, "status": a.status}
        if a.reason:
            line["reason"] = a.reason
        if a.chunk is not None:
            queue_s = a.chunk.queue_ms / 1e3
            network_s = a.there_s + a.back_s
            inference_s = max(0.0, a.latency_s - network_s - queue_s)
            stages = {name: ms / 1e3 for name, ms in a.chunk.stage_ms.items()}
            parts = {"observe_s": 0.0, "transfer_s": network_s, "queue_s": queue_s, "inference_s": inference_s}
            line |= {**parts, "actuate_s": 0.0, "batch": max(a.chunk.batch_sizes.values()), "stage_s": stages}
        lines.append(json.dumps(line))
    return lines


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
        print(f"  {server.name}: {robots} robots, {100 * found['missed']:.2f} % missed, p99 {found['latency_ms_p99']:.1f} ms")
        return found, asked

    def largest(self, server: Server) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Double until it fails, then bisect; returns the best trial (zero robots if none) and all of them."""
        tried: list[dict[str, Any]] = []

        def holds(robots: int) -> bool:
            tried.append(self.trial(server, robots)[0])
            return bool(tried[-1]["missed"] <= MISSES)

        low, high = 0, 1
        while high <= self.most and holds(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if holds(middle):
                low = middle
            else:
                high = middle
        good = [t for t in tried if t["robots"] == low]
        return (good[-1] if good else {"robots": 0, "missed": 0.0, "goodput_chunks_s": 0.0}), tried


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


def compare(search: Search, servers: Sequence[Server], factor: float, traces: Path | None, horizon: int) -> dict[str, Any]:
    """Find each server's limit, then give all of them `factor` times the robots that ours can serve, and their own."""
    found: dict[str, Any] = {}
    for server in servers:
        best, tried = search.largest(server)
        longer, asked = search.trial(server, max(1, best["robots"]), 2 * search.seconds)
        found[server.name] = {"largest": best, "confirmed": longer, "trials": tried}
        if traces is not None:
            traces.mkdir(parents=True, exist_ok=True)
            path = traces / f"load_{server.name}_trace.jsonl"
            path.write_text("\n".join(trace_lines(asked, search.demand, horizon)) + "\n")
    for server in servers:
        own = found[server.name]
        robots = max(1, round(factor * own["largest"]["robots"]))
        own["overload"], _ = search.trial(server, robots, 2 * search.seconds)
        capacity = own["confirmed"]["goodput_chunks_s"]
        own["goodput_kept_under_overload"] = round(own["overload"]["goodput_chunks_s"] / capacity, 4) if capacity else 0.0
    ours, theirs = (found[s.name]["largest"]["robots"] for s in servers)
    found["robots_ratio"] = round(ours / theirs, 3) if theirs else None
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0.5", help="a pi0 preset, or tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plan", default="per_visit", choices=("per_visit", "stages", "whole"), help="of our server")
    parser.add_argument("--cap", type=int, default=16, help="most robots in one batch of ours")
    parser.add_argument("--buckets", default="1,2,3,4,6,8,10,12,16,20,24,32", help="batch sizes to capture, up to the cap")
    parser.add_argument("--prompt", type=int, default=48, help="prompt tokens")
    parser.add_argument("--rtc", default="identity", help="modes of real-time chunking that rows use; empty for none")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one trial of the search")
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--most", type=int, default=256)
    for name, value in asdict(Demand()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for one trace a server, at its limit")
    return parser.parse_args()


def main() -> None:
    options = parse()
    demand = Demand(**{name: getattr(options, name) for name in asdict(Demand())})
    rtc = tuple(m for m in options.rtc.split(",") if m)
    model = make_model(options.model, options.device, options.dtype, rtc)
    prompt = min(options.prompt, model.config.tokenizer_max_length)
    mode: Mode = "graph" if options.device.startswith("cuda") else "eager"
    buckets = tuple(int(b) for b in options.buckets.split(","))
    ours = DeadlineAware(model, options.device, mode, prompt=prompt, plan=options.plan, cap=options.cap, buckets=buckets)
    theirs = SingleFlight(model, options.device, mode, prompt=prompt)
    search = Search(demand, make_inputs(model, prompt), options.seconds, options.most)
    found = compare(search, (ours, theirs), options.overload, options.traces, model.config.action_horizon)
    result = {
        **provenance(torch.device(options.device)),
        "model": options.model,
        "dtype": options.dtype,
        "mode": mode,
        "plan": options.plan,
        "cap": options.cap,
        "prompt_tokens": prompt,
        "rtc": list(rtc),
        "demand": asdict(demand) | {"control_hz": demand.control_hz, "period_ms": 1e3 * demand.period_s},
        "rule": f"at most {100 * MISSES:g} % of requests late, refused or superseded",
        "costs_ms": {"+".join(s): [round(1e3 * c, 4) for c in costs] for s, costs in ours.engine.costs.items()},
        **found,
    }
    ours.close()
    theirs.close()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
