"""What the host adds to one request: time of each step of its path, and wall time over device time.

    python benchmarks/host_overhead.py --out benchmarks/results/host_overhead_h200.json     # pi0.5 at B=1
    python benchmarks/host_overhead.py --small                                              # a tiny model on the CPU

One robot asks again as soon as it has its chunk. The steps are timed at the borders of the runtime's own functions:

    submit     the caller's call begins
    pack       it packs its inputs into one row of pinned memory
    hand in    the caller hands the chunk over; the device's thread wakes up and chooses
    load       slot, copy of the row to the device, control rows
    launch     one copy of control rows and one graph launch (on a CPU: the computation itself)
    leave      outputs are queued for the host; hidden behind the device where it is one
    finish     the device is done; times, outputs and the chunk are put together
    hand back  the caller wakes up with its chunk

`over_device_ms` is wall time less what events on the device say of the route: what the host adds. The first event is recorded
before the launch, so a launch that is slower than the device is counted as the device's; `over_gpu_ms` is wall time less the
median of launches that were queued while the device was busy, which leaves nothing out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from host_pieces import cold_copies, launches, pieces, quantiles, to_device

from stretto.core.plan import Mode, Plan, per_visit, whole
from stretto.deploy.checkpoint import Loaded
from stretto.deploy.policy import Policy, PolicyOptions
from stretto.deploy.policy_options import plan_for
from stretto.deploy.provenance import provenance
from stretto.models import pi0
from stretto.models.pi0_config import Pi0Config
from stretto.processors.policy import PolicyProcessor
from stretto.runtime.engine import Engine
from stretto.runtime.program import Program
from stretto.runtime.weights import LoadReport

GOLDEN = Path(__file__).resolve().parents[1] / "tests/golden/lerobot"
SETS = 16  # different inputs in turn


class Marks:
    """Host times at the borders of the steps of one request."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.at[name] = time.perf_counter()

    def around(self, owner: Any, name: str, begin: str, end: str, *, first: bool = False) -> Any:
        """Return a patch that marks the first call of a function and its last return, or its first one."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            self.at.setdefault(begin, time.perf_counter())
            result = inner(*args, **named)
            if not first or end not in self.at:
                self.mark(end)
            return result

        return patch.object(owner, name, timed)

    def steps_us(self) -> dict[str, float]:
        a = self.at
        borders = {
            "submit": ("asked", "pack"),
            "pack": ("pack", "packed"),
            "hand in": ("packed", "chosen"),
            "load": ("chosen", "launch"),
            "launch": ("launch", "launched"),
            "leave": ("launched", "left"),
            "finish": ("done", "passed"),
            "hand back": ("passed", "got"),
        }
        return {name: (a[end] - a[begin]) * 1e6 for name, (begin, end) in borders.items() if {begin, end} <= set(a)}


@contextmanager
def watched(engine: Engine, marks: Marks) -> Any:
    """Mark the steps of an engine of one device."""
    (executor,) = engine.executors.values()
    with ExitStack() as stack:
        stack.enter_context(marks.around(executor, "pack", "pack", "packed"))
        stack.enter_context(marks.around(executor._desk, "_batch", "choose", "chosen", first=True))
        stack.enter_context(marks.around(Program, "launch", "launch", "launched"))
        stack.enter_context(marks.around(executor._launcher, "_depart", "leave", "left"))
        stack.enter_context(marks.around(engine, "_heard", "done", "passed"))
        yield


def run(engine: Engine, feed: Sequence[dict[str, np.ndarray]], prompt: int, n: int, how: str) -> dict[str, Any]:
    """Ask `n` times. `how`: `plain`; `steps`, which also times the steps of the path and so costs some microseconds itself;
    `frozen`, without what was made so far in the sight of the garbage collector; `patient`, with a time limit, so that the
    engine's own threads wait for the device.
    """
    if how == "frozen":
        gc.collect()
        gc.freeze()
    try:
        return _run(engine, feed, prompt, n, steps=how == "steps", timeout=60.0 if how == "patient" else None)
    finally:
        gc.unfreeze()


def _run(
    engine: Engine,
    feed: Sequence[dict[str, np.ndarray]],
    prompt: int,
    n: int,
    *,
    steps: bool,
    timeout: float | None,
) -> dict[str, Any]:
    stream = engine.open()
    marks = Marks()
    wall, over, device, queue, found = [], [], [], [], []
    with ExitStack() as stack:
        if steps:
            stack.enter_context(watched(engine, marks))
        for i in range(n + n // 5):
            marks.at.clear()
            marks.mark("asked")
            chunk = stream.submit(feed[i % len(feed)], lengths={"prompt": prompt}).result(timeout)
            marks.mark("got")
            if i < n // 5:
                continue
            wall.append((marks.at["got"] - marks.at["asked"]) * 1e3)
            device.append(sum(chunk.stage_ms.values()))
            over.append(wall[-1] - device[-1])
            queue.append(chunk.queue_ms)
            found.append(marks.steps_us())
    stream.close()
    row: dict[str, Any] = {
        "requests": n,
        "mode": chunk.mode,
        "wall_ms": quantiles(wall),
        "device_ms": quantiles(device),
        "over_device_ms": quantiles(over),
        "until_launch_ms": quantiles(queue),
        "device_ms_p99_over_p50": round(quantiles(device)["p99"] - quantiles(device)["p50"], 4),
    }
    if steps:
        names = [name for name in found[0] if all(name in f for f in found)]
        row["steps_us"] = {name: quantiles([f[name] for f in found]) for name in names}
    return row


def make(small: bool, device: str) -> Any:
    if small:
        folder = GOLDEN / "pi05_tiny"
        raw = json.loads((folder / "config.json").read_text()) | {"stretto": json.loads((folder / "sizes.json").read_text())}
        model = pi0.build(Pi0Config.from_lerobot(raw), device=device, dtype="float32" if device == "cpu" else "bfloat16")
    else:
        model = pi0.build(pi0.SPECS["pi05"], device=device, dtype="bfloat16")
    model.randomize(seed=0)
    return model


def feed_of(model: Any, prompt: int) -> list[dict[str, np.ndarray]]:
    batch = model.example_inputs(SETS, seed=1)
    batch["token_count"] = torch.full_like(batch["token_count"], prompt)
    return [{name: value[i].numpy() for name, value in batch.items()} for i in range(SETS)]


def queued_ms(engine: Engine, feed: Sequence[dict[str, np.ndarray]], prompt: int, n: int = 24) -> float:
    """Return the device's time of one request that was handed over while the device was busy; on a CPU, of any request."""
    stream, times = engine.open(), []
    (executor,) = engine.executors.values()
    for i in range(n):
        if executor.device.type == "cuda":  # type: ignore[attr-defined]
            torch.cuda._sleep(6_000_000)  # three milliseconds
        chunk = stream.submit(feed[i % len(feed)], lengths={"prompt": prompt}).result()
        times.append(sum(chunk.stage_ms.values()))
    stream.close()
    return float(np.median(times))


def policy_rows(model: Any, device: str, mode: Mode, n: int) -> dict[str, Any]:
    """Time whole requests of a policy in this process, from pictures, state and prompt to actions, and its own steps."""
    folder = GOLDEN / "pi05_tiny"
    processor = PolicyProcessor.from_lerobot(folder, tokenizer=GOLDEN / "tokenizer", degenerate="hold")
    config = model.config
    limit = replace(processor.spec.prompt, token_limit=config.tokenizer_max_length)
    sizes: dict[str, Any] = {
        "action_horizon": config.action_horizon,
        "resolution": (config.image_size,) * 2,
        "resizer": "pil",
        "prompt": limit,
    }
    processor = replace(processor, spec=replace(processor.spec, **sizes))
    loaded = Loaded(model, processor, LoadReport((), 0, 0, {}, ()), folder, "lerobot")
    shapes = {"batch": (1,), "prompt": (1, 112)}
    with patch("stretto.deploy.policy.plan_for", lambda *given: plan_for(*given).with_shapes(shapes)):
        policy = Policy(loaded, PolicyOptions(device=device, mode=mode, max_batch=1, threads=1))
    policy.warm()
    rng = np.random.default_rng(0)
    schema = processor.observation_schema()
    feed = [
        {
            name: rng.integers(0, 256, field["shape"], np.uint8)
            if field["kind"] == "image"
            else "put the red cup on the blue plate and close the drawer"
            if field["kind"] == "prompt"
            else rng.uniform(-1, 1, field["shape"]).astype(np.float32)
            for name, field in schema.items()
        }
        for _ in range(SETS)
    ]
    wall, over, before, after = [], [], [], []
    for i in range(n + n // 5):
        at = time.perf_counter()
        reply = policy.infer(feed[i % SETS])
        wall.append((time.perf_counter() - at) * 1e3)
        stages = dict(reply["stage_ms"])
        before.append(stages.pop("preprocess") * 1e3)
        after.append(stages.pop("postprocess") * 1e3)
        over.append(wall[-1] - sum(stages.values()))
    policy.close()
    kept = slice(n // 5, None)
    return {
        "cameras": len(processor.spec.slots),
        "wall_ms": quantiles(wall[kept]),
        "over_device_ms": quantiles(over[kept]),
        "preprocess_us": quantiles(before[kept]),
        "postprocess_us": quantiles(after[kept]),
    }


def attempted(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return ask()
    except Exception as error:  # a piece that fails must not lose the whole
        return {"error": f"{type(error).__name__}: {error}"}


def policy(result: dict[str, Any], model: Any, args: argparse.Namespace) -> None:
    mode: Mode = "eager" if args.device == "cpu" else "graph"
    row = attempted(lambda: policy_rows(model, args.device, mode, args.n))
    result["rows"]["policy"] = row
    print("policy", json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--n", type=int, default=120)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--cases", type=int, help="only the first so many plans")
    args = parser.parse_args()
    if args.device == "cpu":
        args.small = True
        torch.set_num_threads(1)
    model, device = make(args.small, args.device), torch.device(args.device)
    prompt = min(args.prompt, model.config.tokenizer_max_length)
    feed = feed_of(model, prompt)
    mode: Mode = "eager" if args.device == "cpu" else "graph"
    result: dict[str, Any] = {**provenance(torch.device(args.device)), "small": args.small, "prompt": prompt, "rows": {}}
    asked: dict[str, Callable[[], Any]] = {"threads and copies": pieces, "cold_copy_450_kB_us": cold_copies}
    if args.device != "cpu":
        asked |= {"to_device": lambda: to_device(device), "launches": lambda: launches(model, device, prompt)}
    result["machine"] = {name: attempted(ask) for name, ask in asked.items()}
    print("machine", json.dumps(result["machine"]), flush=True)
    plain = whole(model.route, args.device, mode=mode)
    urgent = plain.with_dispatch("deadline_limited")
    between = per_visit(model.route, args.device, mode=mode, dispatch="deadline_limited")
    cases: dict[str, tuple[Plan, bool, tuple[str, ...]]] = {
        "whole": (plain, True, ("plain", "steps", "frozen", "patient")),
        "whole, launched by the engine's thread": (plain, False, ("plain", "patient")),
        "whole, deadlines": (urgent, True, ("plain", "steps")),
        "per visit, deadlines": (between, True, ("plain", "steps")),
    }
    for name, (plan, callers_launch, ways) in list(cases.items())[: args.cases]:
        rows: dict[str, Any] = {}
        try:
            shapes = {"batch": (1,), "prompt": (prompt,)}
            engine = Engine(model, plan.with_shapes(shapes), callers_launch=callers_launch)
            engine.warm()
            rows["queued_ms"] = round(queued_ms(engine, feed, prompt), 4)
            for how in ways:
                n = args.n if how in ("plain", "frozen") and callers_launch else args.n // 2
                rows[how] = run(engine, feed, prompt, n, how)
                rows[how]["over_gpu_ms"] = round(rows[how]["wall_ms"]["p50"] - rows["queued_ms"], 4)
                print(f"{name} / {how}", json.dumps(rows[how]), flush=True)
            engine.close()
        except Exception as error:  # one plan that fails must not lose the others
            rows["error"] = f"{type(error).__name__}: {error}"
            print(name, rows["error"], flush=True)
        result["rows"][name] = rows
        if name == "whole":
            policy(result, model, args)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
