"""Requests per second of one GPU at a bounded p99: one lane, batches between visits, and two lanes side by side.

    python benchmarks/overlap.py --out benchmarks/results/overlap_h200.json      # pi0.5 at B=1
    python benchmarks/overlap.py --precisions fp8 --out benchmarks/results/overlap_fp8_h200.json
    python benchmarks/overlap.py --small                                         # a tiny model on the CPU, to try the script

`closed`: robots that each ask again as soon as they have their chunk. `open`: requests that come evenly spaced, with a tenth
of the gap as jitter, whatever became of the earlier ones. Every plan's chunks are held against those of a lone request, bit
by bit where no batch is larger than one. A request's time is from its hand-over, packing included, to its actions.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_overhead import feed_of, make, quantiles
from overlap_plans import CHAIN, TOGETHER, loop_by_chain, plans

from stretto.core.chunk import Chunk
from stretto.core.plan import Mode, Plan, overlapped, whole
from stretto.deploy.provenance import provenance
from stretto.models.pi0_fp8 import observed, quantised
from stretto.runtime.engine import Engine

Inputs = dict[str, np.ndarray]


class Load:
    """Robots against one engine."""

    def __init__(self, engine: Engine, feed: Sequence[Inputs], prompt: int, robots: int) -> None:
        self.engine, self.feed, self.lengths = engine, feed, {"prompt": prompt}
        classes = list(engine.plan.classes)
        self.streams = [engine.open(stream_class=classes[i % len(classes)]) for i in range(robots)]

    def closed(self, seconds: float) -> dict[str, Any]:
        """Let every robot ask again as soon as it has its chunk."""
        done: list[tuple[float, float, int, Chunk]] = []
        start = threading.Barrier(len(self.streams))
        stop_s = time.perf_counter() + seconds

        def robot(number: int) -> None:
            start.wait()
            turn = number
            while (begin := time.perf_counter()) < stop_s:
                chunk = self.streams[number].submit(self.feed[turn % len(self.feed)], lengths=self.lengths).result()
                done.append((begin, time.perf_counter(), turn % len(self.feed), chunk))
                turn += 3

        threads = [threading.Thread(target=robot, args=(i,)) for i in range(len(self.streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.last = done
        return summary([(b, e) for b, e, _, _ in done]) | {"slowest": slowest(done)}

    def together(self, seconds: float) -> dict[str, Any]:
        """Let all robots ask at the same moment, so that they share batches, and again when all have their chunks."""
        done: list[tuple[float, float, int, Chunk]] = []
        turn, stop_s = 0, time.perf_counter() + seconds
        while time.perf_counter() < stop_s:
            asked: list[tuple[float, int, Future[Chunk]]] = []
            with self.engine.together():
                for stream in self.streams:
                    inputs = self.feed[turn % len(self.feed)]
                    asked.append((time.perf_counter(), turn, stream.submit(inputs, lengths=self.lengths)))
                    turn += 1
            for begin, number, future in asked:
                chunk = future.result(60)
                done.append((begin, time.perf_counter(), number % len(self.feed), chunk))
        self.last = done
        return summary([(b, e) for b, e, _, _ in done]) | {"slowest": slowest(done)}

    def open(self, rate: float, seconds: float, seed: int) -> dict[str, Any]:
        """Send requests at a rate; the robots take turns."""
        rng = np.random.default_rng(seed)
        done: list[tuple[float, float]] = []
        futures: list[Future[Chunk]] = []
        begin_s = time.perf_counter() + 0.01
        times = begin_s + (np.arange(int(rate * seconds)) + rng.uniform(-0.1, 0.1, int(rate * seconds))) / rate
        for i, at_s in enumerate(times):
            while (left := at_s - time.perf_counter()) > 0:
                time.sleep(left)
            asked = time.perf_counter()
            future = self.streams[i % len(self.streams)].submit(self.feed[i % len(self.feed)], lengths=self.lengths)
            future.add_done_callback(lambda _, asked=asked: done.append((asked, time.perf_counter())))
            futures.append(future)
            if time.perf_counter() - at_s > 1.0:  # far behind: the rate cannot be served
                break
        for future in futures:
            future.result(60)
        return {"rate": rate, "asked": len(futures), **summary(done)}

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def summary(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return rate and latency of requests, without the first tenth of them."""
    kept = sorted(times, key=lambda t: t[1])[len(times) // 10 :]
    span = kept[-1][1] - kept[0][1]
    return {
        "requests": len(kept),
        "requests_per_s": round((len(kept) - 1) / span, 2) if span else 0.0,
        "latency_ms": quantiles([(e - b) * 1e3 for b, e in kept]),
    }


def slowest(done: Sequence[tuple[float, float, int, Chunk]]) -> list[dict[str, Any]]:
    """Say of the slowest requests where their time went, and of those right before the slowest."""
    ordered = sorted(done, key=lambda d: d[1])[len(done) // 10 :]
    by_time = sorted(range(len(ordered)), key=lambda i: ordered[i][0] - ordered[i][1])
    first = by_time[0]
    return [_account(*ordered[i], done[0][0]) for i in sorted({*range(max(0, first - 3), first), *by_time[:6]})]


def _account(begin: float, end: float, _: int, chunk: Chunk, zero: float) -> dict[str, Any]:
    whole = {"robot": chunk.stream, "at_ms": (begin - zero) * 1e3, "ms": (end - begin) * 1e3}
    times = {**whole, "queue_ms": chunk.queue_ms, "run_ms": chunk.run_ms, **chunk.stage_ms}
    return {name: round(value, 2) for name, value in times.items()}


def alone(model: Any, device: str, mode: Mode, feed: Sequence[Inputs], prompt: int) -> list[np.ndarray]:
    """Return what a lone request gets for each input."""
    engine = Engine(model, whole(model.route, device, mode=mode).with_shapes({"batch": (1,), "prompt": (prompt,)}))
    engine.warm()
    stream = engine.open()
    found = [stream.submit(x, lengths={"prompt": prompt}).result().outputs["x"] for x in feed]
    engine.close()
    return found


def use_fp8(model: Any, device: str, feed: Sequence[Inputs], prompt: int) -> None:
    """Let the model's products run in FP8, calibrated on these inputs."""
    view, noted = observed(model.module)
    model.run_on(view)
    alone(model, device, "eager", feed, prompt)
    model.run_on(quantised(model.module, {name: float(layer.largest) for name, layer in noted.items()}))


def compared(done: Sequence[tuple[float, float, int, Chunk]], want: Sequence[np.ndarray]) -> dict[str, Any]:
    """Hold chunks against those of a lone request."""
    ones = [(c, want[turn]) for _, _, turn, c in done if max(c.batch_sizes.values()) == 1]
    return {
        "in_batches_of_one": len(ones),
        "of_them_bit_equal": sum(np.array_equal(c.outputs["x"], w) for c, w in ones),
        "max_abs_of_all": float(max(np.abs(c.outputs["x"] - want[turn]).max() for _, _, turn, c in done)),
    }


def measure(
    engine: Engine, feed: Sequence[Inputs], want: Sequence[np.ndarray], args: argparse.Namespace, together: bool = False
) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # as a server does once it is ready
    load = Load(engine, feed, args.prompt, args.robots)
    ask = load.together if together else load.closed
    ask(args.seconds / 4)
    row: dict[str, Any] = {"closed": ask(args.seconds)}
    row |= compared(load.last, want)
    row["device_ms"] = quantiles([sum(c.stage_ms.values()) for _, _, _, c in load.last])
    row["stage_ms"] = {
        name: round(float(np.median([c.stage_ms[name] for *_, c in load.last])), 3) for name in load.last[0][3].stage_ms
    }
    row["open"] = []
    low, high = 0.0, 0.0
    for rate in () if together else args.rates:
        if not holds(load, row["open"], rate, args):
            high = rate
            break
        low = rate
    for _ in range(args.closer if low and high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(load, row["open"], middle, args) else (low, middle)
    held = [r["requests_per_s"] for r in (row["closed"], *row["open"]) if r["latency_ms"]["p99"] <= args.p99_ms]
    row["requests_per_s_at_p99"] = max(held, default=0.0)
    load.close()
    gc.unfreeze()
    return row


def holds(load: Load, rows: list[dict[str, Any]], rate: float, args: argparse.Namespace) -> bool:
    """Tell whether the p99 holds at a rate; adds the row."""
    rows.append(load.open(rate, args.seconds / 2, len(rows)))
    return bool(rows[-1]["latency_ms"]["p99"] <= args.p99_ms)


def slowed(model: Any, device: str, mode: Mode, prompt: int) -> dict[str, Any]:
    """Return how much longer each lane's work takes while the other is busy, as the engine measures it before it starts."""
    plan = overlapped(model.route, device, mode=mode, dispatch="deadline_limited")
    engine = Engine(model, plan.with_shapes({"batch": (1,), "prompt": (prompt,)}))
    engine.warm()
    found = {"+".join(dict.fromkeys(stages)): round(factor, 4) for stages, factor in engine.slowed.items()}
    costs = {"+".join(dict.fromkeys(s)): round(1e3 * seconds[0], 4) for s, seconds in engine.costs.items()}
    engine.close()
    return {"times_longer": found, "ms_beside_the_other": costs}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--precisions", nargs="+", default=["bf16"], choices=("bf16", "fp8"), help="fp8: calibrated on the inputs"
    )
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; no plan is begun after them")
    parser.add_argument("--robots", type=int, default=2)
    parser.add_argument("--cap", type=int, default=2, help="most robots in one batch")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.2, help="of one closed loop; an open loop lasts half of it")
    parser.add_argument("--p99-ms", type=float, default=18.0)
    parser.add_argument("--closer", type=int, default=2, help="rates between the last that held and the first that did not")
    parser.add_argument("--plans", nargs="+", help="only these, in this order")
    parser.add_argument("--rates", default="50,60,70,80,90,100,110,120", type=lambda text: [float(r) for r in text.split(",")])
    return parser.parse_args()


def main() -> None:
    args, begun = parse(), time.monotonic()
    if args.device == "cpu":
        args.small = True
        torch.set_num_threads(1)
    mode: Mode = "eager" if args.device == "cpu" else "graph"
    model = make(args.small, args.device)
    args.prompt = min(args.prompt, model.config.tokenizer_max_length)
    feed = feed_of(model, args.prompt)
    facts = {name: getattr(args, name) for name in ("small", "robots", "cap", "prompt", "p99_ms")}
    result: dict[str, Any] = {**provenance(torch.device(args.device)), **facts, "plans": {}}
    for precision in args.precisions:
        model.run_on(model.module)
        if precision == "fp8":
            use_fp8(model, args.device, feed, args.prompt)
        for name, row in compare(model, mode, feed, args, begun):
            result["plans"][f"{precision}: {name}"] = row
            print(f"{time.monotonic() - begun:6.1f} s  {precision}: {name}  {json.dumps(row)}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(
    model: Any, mode: Mode, feed: Sequence[Inputs], args: argparse.Namespace, begun: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each plan."""
    want = alone(model, args.device, mode, feed, args.prompt)
    known = plans(model.route, args.device, mode, args.cap)
    tasks: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda plan=known[name], name=name: tried(
            model, plan, feed, want, args, chain=name.endswith(CHAIN), together=name == TOGETHER
        )
        for name in args.plans or known
    }
    if not args.plans:
        tasks["what a lane costs the other"] = lambda: slowed(model, args.device, mode, args.prompt)
    for name, task in tasks.items():
        if time.monotonic() - begun > args.budget:
            yield name, {"skipped": "no time left"}
            continue
        try:
            row = task()
        except Exception as error:  # one that fails must not lose the others
            row = {"error": f"{type(error).__name__}: {error}"}
        yield name, row


def tried(
    model: Any,
    plan: Plan,
    feed: Sequence[Inputs],
    want: Sequence[np.ndarray],
    args: argparse.Namespace,
    *,
    chain: bool = False,
    together: bool = False,
) -> dict[str, Any]:
    begin = time.perf_counter()
    cap = max(plan.batch_caps.values())
    engine = Engine(model, replace(plan, shapes={"batch": tuple(range(1, cap + 1)), "prompt": (args.prompt,)}))
    with loop_by_chain(plan) if chain else nullcontext():
        engine.warm()
    warm_s = round(time.perf_counter() - begin, 2)
    try:
        return {"warm_s": warm_s, **measure(engine, feed, want, args, together)}
    finally:
        engine.close()


if __name__ == "__main__":
    main()
