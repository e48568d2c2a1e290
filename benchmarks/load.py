"""How many robots one device keeps on time: deadline-aware batching against one request at a time, in one process.

    python benchmarks/load.py --precision dtype,fp8 --seconds 1.5 --budget 105 --out FILE          # pi0.5 at true shape
    python benchmarks/load.py --model tiny --device cpu --precision dtype,fp8-emulated --seconds 1     # anywhere

A robot asks for a chunk so and so many times a second, and executes so many of its actions. A request is on time if its
actions are back at the robot within the deadline, counted from the observation, both ways of the network included; a request
that is refused, superseded or late is a miss, and so is a beat that passed while a robot waited for the answer to another.
`--demand [N*]CHUNKS_HZ:EXECUTED_STEPS:DEADLINE_MS[:LOOP][:PHASES][+...][@PRECISION][=ROBOTS/...]` may be said more than
once. With + robots of several kinds stand side by side, N of the first, then those of the next, in turn; without @ each
precision is run, all servers always in the same; numbers of robots to begin the search with are those of our server, the
other, stock torch, of which those without a number are left out.
Periods jitter. LOOP is `closed` for robots that wait for an answer before they observe again, or `open` for those that observe
on schedule whatever happened, so that a deadline may exceed the period. PHASES is `any` for robots that start anywhere in their
period, or `together` for one trigger of all cameras.

The largest number of robots is the largest one at which at most 1 % of all beats miss, those of each kind of robot by
themselves, in a longer run at that number. Then each server is given 1.5 and 2 times as many as it can serve, and the others
as many as ours serves. `single_flight` has our kernels and graphs, so that only the order of work differs;
`single_flight_stock_torch` is what a lab has without them: the same network of torch's operators, in a graph (`--stock`).
Inputs differ from request to request; the host's packing, both copies and the whole route are in the time, pixels arrive at
the model's size. FP8 scales are those of random inputs, as the weights are. The file is written after every step; what there
is no time for is a row that says so. `load_predict.py FILE` then puts the simulator's word beside each row, also for servers
of other speeds.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deadline_aware import DeadlineAware
from fcfs_single_flight import Inputs, SingleFlight
from fleet import Demand, Server, read_back
from load_demand import DEMANDS, read_demand, wanted
from load_search import PHASES, RULE, Report, Search, compare, write_traces
from stock_torch import stock_torch

from stretto.core.plan import Mode
from stretto.deploy.calibration import calibrate_at_random
from stretto.deploy.precision import check_precision, use_fp8
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.runtime.engine import Engine

SETS = 16  # different inputs in turn
COMPILE_S = 75.0  # how long stock torch may take to compile, beside the making of our server
STOCK = "single_flight_stock_torch"


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
    room_ms = min(d.deadline_ms - 2 * d.network_ms - d.network_jitter_ms for d in demand.kinds)
    rates = [1e3 * n / cost_ms(n) for n in range(1, cap + 1) if cost_ms(n) <= 0.8 * room_ms]
    return max(1, int(0.9 * max(rates, default=0.0) / demand.rate_hz))


def service_ms(engine: Engine, rows: int) -> float:
    """Return the measured time of the whole route for a batch of so many rows."""
    visits = engine.model.route.visits
    tasks = [tuple(v.stage for v in visits[p.segment.start : p.segment.stop]) for p in engine.plan.placements("default")]
    return 1e3 * sum(engine.costs[stages][rows - 1] for stages in tasks)


@dataclass
class Bench:
    """All servers in each precision; those of one are made when it is first asked for."""

    options: argparse.Namespace
    model: Any
    prompt: int
    report: Report
    inputs: list[Inputs]
    longest_s: float = 0.0
    """What the longest comparison took, without the making of servers."""
    _making_s: float = 0.0
    _servers: dict[str, list[Server]] = field(default_factory=dict)
    _now: str = ""
    """What the model's engines would be made in."""
    _compiling: subprocess.Popen[bytes] | None = None

    @property
    def mode(self) -> Mode:
        return "graph" if self.options.device.startswith("cuda") else "eager"

    def servers(self, precision: str) -> Iterator[Server]:
        """Yield ours, the same engine one at a time, and stock torch one at a time; each is made when it is asked for."""
        made, told = self._servers.setdefault(precision, []), self.report.precisions.setdefault(precision, {})
        stock = (self._stock,) if precision == "dtype" else ()
        for i, make in enumerate((self._ours, self._single, *stock)):
            if i == len(made):
                begin_s = time.perf_counter()
                if self._now != precision:
                    told |= self._use(precision)
                if (server := make(told)) is None:
                    return
                made.append(server)
                self._compiled()
                self._making_s += time.perf_counter() - begin_s
                told[f"{server.name}_ms"] = round(alone_ms(server, self.inputs), 4)
                told[f"{server.name}_ready_s"] = ready_s = round(time.perf_counter() - begin_s, 2)
                self.report.save()
                print(f"{precision}, {server.name}: {told[f'{server.name}_ms']} ms alone, after {ready_s} s", flush=True)
            yield made[i]

    def run(self, demand: Demand, precision: str, guesses: tuple[int, ...] = ()) -> None:
        o = self.options
        print(f"{precision}: {demand}", flush=True)
        servers = self.servers(precision)
        if not guesses:
            made = list(self.servers(precision))
            ours = made[0]
            assert isinstance(ours, DeadlineAware)
            alone = [self.report.precisions[precision][f"{s.name}_ms"] for s in made[1:]]
            guesses = (guess_robots(lambda n: service_ms(ours.engine, n), o.cap, demand),)
            guesses += tuple(guess_robots(lambda n, ms=ms: ms, 1, demand) for ms in alone)
        search = Search(demand, self.inputs, o.seconds, o.confirm or 2 * o.seconds, o.most)
        factors = [float(f) for f in o.overload.split(",")]
        begin_s, made_s = time.perf_counter(), self._making_s
        asked = compare(search, servers, guesses, factors, self.report, {"precision": precision})
        self.longest_s = max(self.longest_s, time.perf_counter() - begin_s - (self._making_s - made_s))
        write_traces(asked, demand, self.model.config.action_horizon, o.traces, f"{precision}_{demand.loop}_")

    def _ours(self, told: dict[str, Any]) -> Server:
        o = self.options
        buckets = tuple(int(b) for b in o.buckets.split(","))
        ours = DeadlineAware(self.model, o.device, self.mode, prompt=self.prompt, plan=o.plan, cap=o.cap, buckets=buckets)
        told["costs_ms"] = {"+".join(s): [round(1e3 * c, 4) for c in costs] for s, costs in ours.engine.costs.items()}
        return ours

    def _single(self, told: dict[str, Any]) -> Server:
        return SingleFlight(self.model, self.options.device, self.mode, prompt=self.prompt)

    def compile_stock(self) -> dict[str, Any]:
        """Make the server of stock torch and ask it once; returns what became of it."""
        told: dict[str, Any] = {}
        if (server := self._stock(told)) is not None:
            told["ms"] = alone_ms(server, self.inputs)
            server.close()
        return told

    def compile_beside(self) -> None:
        """Begin to compile stock torch in a process of its own, into the cache that this one will find."""
        o = self.options
        flags = [f"--{name}={getattr(o, name)}" for name in ("model", "device", "dtype", "prompt", "rtc")]
        self._compiling = subprocess.Popen([sys.executable, __file__, "--only-compile", *flags])

    def _compiled(self) -> None:
        """Wait for that: nothing may run beside a trial."""
        if self._compiling is not None:
            try:
                self._compiling.wait(COMPILE_S)
            except subprocess.TimeoutExpired:
                self._compiling.kill()
            if self._compiling.wait() != 0:
                self.options.stock = "graph"
            self._compiling = None

    def _stock(self, told: dict[str, Any]) -> Server | None:
        """Make the server of stock torch, compiled if that is wanted and can be done; says which in `told`."""
        o = self.options
        for way in {"none": (), "graph": ("graph",), "compiled": ("compiled", "graph")}[o.stock]:
            # The edge of what torch compiles: without it the others still run.
            try:
                with stock_torch(compiled=way == "compiled"):
                    server = SingleFlight(self.model, o.device, self.mode, prompt=self.prompt, name=STOCK)
                told["stock"] = way
                return server
            except Exception as error:
                told[f"stock, {way}"] = f"{type(error).__name__}: {error}"[:600]
        return None

    def close(self) -> None:
        for pair in self._servers.values():
            for server in pair:
                server.close()

    def _use(self, precision: str) -> dict[str, Any]:
        """Bring the model to a precision, for the engines that are made of it next."""
        o = self.options
        self._now = precision
        check_precision(precision, torch.device(o.device), str(self.model.module.dtype).removeprefix("torch."))
        self.model.run_on(self.model.module)
        if precision == "dtype":
            return {"products": str(self.model.module.dtype).removeprefix("torch.")}
        calibration = calibrate_at_random(self.model, o.device)
        return {"products": precision, "coded_bytes": use_fp8(self.model, calibration), "calibration": calibration.describe()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0.5", help="a pi0 preset, or tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--precision", default="dtype", help="dtype, fp8, fp8-emulated; several with commas")
    parser.add_argument("--plan", default="per_visit", choices=("per_visit", "stages", "whole"), help="of our server")
    parser.add_argument(
        "--stock", default="compiled", choices=("none", "graph", "compiled"), help="stock torch beside the others, in `dtype`"
    )
    parser.add_argument(
        "--only-compile", action="store_true", help="make the server of stock torch, for torch's cache, and end"
    )
    parser.add_argument("--cap", type=int, default=16, help="most robots in one batch of ours")
    parser.add_argument("--buckets", default="1,2,3,4,5,6,7,8,10,12,16,20,24,32", help="batch sizes to capture, up to the cap")
    parser.add_argument("--prompt", type=int, default=48, help="prompt tokens")
    parser.add_argument("--rtc", default="identity", help="modes of real-time chunking that rows use; empty for none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one trial of the search")
    parser.add_argument("--confirm", type=float, help="seconds of the run that confirms; twice --seconds by default")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds from the start; what would not fit is left out")
    parser.add_argument("--overload", default="1.5,2")
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--demand", type=read_demand, action="append", help=f"default: {', '.join(DEMANDS)}")
    for name in ("jitter", "network_ms", "network_jitter_ms"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Demand(), name))
    parser.add_argument("--loop", default="closed", choices=("closed", "open"), help="of demands that do not say it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for one trace a server and demand, at its limit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    begin_s = time.perf_counter()
    options = parse(arguments)
    rows = wanted(options)
    rtc = tuple(m for m in options.rtc.split(",") if m)
    model = make_model(options.model, options.device, options.dtype, rtc)
    prompt = min(options.prompt, model.config.tokenizer_max_length)
    fixed = {
        **provenance(torch.device(options.device)),
        **{name: getattr(options, name) for name in ("model", "dtype", "plan", "cap", "buckets", "seconds", "stock")},
        "mode": "graph" if options.device.startswith("cuda") else "eager",
        "denoise_steps": model.config.denoise_steps,
        "prompt_tokens": prompt,
        "rtc": list(rtc),
        "rule": RULE,
        "phases": PHASES,
    }
    report = Report(fixed, options.out)
    bench = Bench(options, model, prompt, report, make_inputs(model, prompt))
    if options.only_compile:
        print(bench.compile_stock())
        return report.to_json()
    if options.stock == "compiled" and any(p == "dtype" and len(g) != 2 for _, p, g in rows) and options.budget > 0:
        bench.compile_beside()
    for demand, precision, guesses in rows:
        left_s = options.budget - (time.perf_counter() - begin_s)
        if left_s < bench.longest_s:
            why = f"no time: {left_s:.0f} s, the longest took {bench.longest_s:.0f}"
            row = {"precision": precision, "demand": asdict(demand), "left": why}
            report.demands.append(row)
            print(row, flush=True)
            continue
        # The edge of the benchmark: what cannot run here is a row of the result.
        try:
            bench.run(demand, precision, guesses)
        except Exception as error:
            failed = {"precision": precision, "demand": asdict(demand), "error": f"{type(error).__name__}: {error}"}
            report.demands.append(failed)
            print(failed, flush=True)
        report.save()
    print_headline(report)
    bench.close()
    report.save()
    return report.to_json()


def print_headline(report: Report) -> None:
    """Print a line a row and server: robots, misses and tails, and what is left under overload."""
    for row in report.demands:
        name = f"{row['precision']}, {row.get('told') or read_back(row['demand'])}"
        print(f"{name}: {row.get('left') or row.get('error') or row['robots_over']}")
        for server in ("deadline_limited", "single_flight", STOCK):
            if server not in row:
                continue
            best, over = row[server]["largest"], row[server]["overload"]
            kept = "; ".join(f"{f}: {o['goodput_chunks_s']} good/s, refused {o['refused']}" for f, o in over.items())
            tail = (
                f"{100 * best['missed']:.2f} % missed, p99 {best.get('latency_ms_p99')} ms, {best['goodput_chunks_s']} good/s"
            )
            print(f"  {server}: {best['robots']} robots, {tail}; overload {kept}")


if __name__ == "__main__":
    main()
