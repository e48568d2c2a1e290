"""Eight robots on one server: requests per second and latency, against the same server limited to a batch of one.

    python benchmarks/server_clients.py --out benchmarks/results/server_clients_h200.json

pi0.5 at true shape with random weights behind the real server; every client is a process of its own that sends its next
observation as soon as it has its actions. The variants run one after the other in one call, on one model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.deploy.checkpoint import Loaded
from stretto.deploy.policy import Policy, PolicyOptions
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.processors.policy import PolicyProcessor
from stretto.runtime.weights import LoadReport
from stretto.serve.run import ServerThread

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "lerobot"
VARIANTS: dict[str, dict[str, Any]] = {
    "batch of one": {"max_batch": 1, "plan": "whole"},
    "whole route, batches of eight": {"max_batch": 8, "plan": "whole"},
    "between denoise steps, oldest first": {"max_batch": 8, "plan": "per_visit", "dispatch": "earliest_deadline_first"},
    "between denoise steps, fill first": {"max_batch": 8, "plan": "per_visit", "dispatch": "fill_first"},
}


def observation(rng: np.random.Generator, schema: dict[str, Any]) -> dict[str, Any]:
    """Make one random observation that the schema allows; pictures have the model's size."""
    made: dict[str, Any] = {}
    for key, field in schema.items():
        if field["kind"] == "image":
            made[key] = rng.integers(0, 256, field["shape"], dtype=np.uint8)
        elif field["kind"] == "state":
            made[key] = rng.uniform(-0.3, 0.3, field["shape"]).astype(np.float32)
        else:
            made[key] = "pick up the red block and put it on the plate" if rng.random() < 0.5 else "open the top drawer"
    return made


def drive(url: str, seed: int, seconds: float, start: Any, out: Any) -> None:
    """One robot: wait for the others, then ask until the time is over."""
    from stretto_client.policy import PolicyClient

    rng = np.random.default_rng(seed)
    client = PolicyClient(url, None)
    schema = client.metadata["stretto"]["observation"]
    ready = [observation(rng, schema) for _ in range(8)]
    # A robot that fails leaves the barrier broken, so that no other waits for it.
    try:
        client.infer(ready[0])
        start.wait(120)
    except BaseException:
        start.abort()
        raise
    latencies, batches = [], []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        begin = time.perf_counter()
        reply = client.infer(ready[len(latencies) % len(ready)])
        latencies.append((time.perf_counter() - begin) * 1e3)
        batches.append(reply["rt"]["batch_size"])
    client.close()
    out.put((latencies, batches))


def measure(loaded: Loaded, device: str, mode: str, variant: dict[str, Any], clients: int, seconds: float) -> dict[str, Any]:
    policy = Policy(loaded, replace(PolicyOptions(device=device, mode=mode, threads=4), **variant))
    context = multiprocessing.get_context("spawn")
    began = time.perf_counter()
    with ServerThread(policy, warm_timeout_s=300) as server:
        warm_s = time.perf_counter() - began
        start, out = context.Barrier(clients), context.Queue()
        robots = [context.Process(target=drive, args=(server.url, i, seconds, start, out)) for i in range(clients)]
        for robot in robots:
            robot.start()
        results = [out.get(timeout=seconds + 120) for _ in robots]
        for robot in robots:
            robot.join()
    captures = policy.engine.captures
    policy.close()
    latencies = np.concatenate([r[0] for r in results])
    return {
        "requests_per_s": len(latencies) / seconds,
        "latency_ms": {"p50": float(np.median(latencies)), "p99": float(np.quantile(latencies, 0.99))},
        "mean_batch": float(np.mean(np.concatenate([r[1] for r in results]))),
        "requests": len(latencies),
        "warm_s": warm_s,
        "graphs": captures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--small", action="store_true", help="the tiny golden policy on the CPU, to try the script")
    args = parser.parse_args()
    if args.small:
        args.device = "cpu"
    folder = GOLDEN / ("pi05_tiny" if args.small else "processors/pi05_quantiles")
    processor = PolicyProcessor.from_lerobot(folder, tokenizer=GOLDEN / "tokenizer", degenerate="hold")
    config = pi0.SPECS["pi05"]
    if not args.small:
        processor = replace(processor, spec=replace(processor.spec, action_horizon=config.action_horizon))
    if args.small:
        raw = json.loads((folder / "config.json").read_text()) | {"stretto": json.loads((folder / "sizes.json").read_text())}
        config = type(config).from_lerobot(raw)
    dtype, mode = ("float32", "eager") if args.device == "cpu" else ("bfloat16", "graph")
    model = pi0.build(config, device=args.device, dtype=dtype, pixels="float32")
    model.randomize(seed=0)
    loaded = Loaded(model, processor, LoadReport((), 0, 0, {}, ()), folder, "lerobot")
    rows = {}
    for name, variant in VARIANTS.items():
        rows[name] = measure(loaded, args.device, mode, variant, args.clients, args.seconds)
        print(name, json.dumps(rows[name]), flush=True)
    result = {**provenance(torch.device(args.device)), "clients": args.clients, "seconds": args.seconds, "variants": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
