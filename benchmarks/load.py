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
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    parser.add_argument("--cap", type=int, default=8, help="most robots in one batch of ours")
    parser.add_argument("--buckets", default="1,2,3,4,5,6,7,8,10,12,16,20,24,32", help="batch sizes to capture, up to the cap")
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
