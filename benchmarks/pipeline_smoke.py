"""Do pipelines of processes work on these devices, and what does a hop cost?

    python benchmarks/pipeline_smoke.py [--out results.json]

Equality: a small Wan in a process for each device, under every plan and both transports, against one device. Hops: hidden
states of true size from the first device to the second, one at a time (latency: send to there) and back to back
(interval), through pages in the memory of the consumer (with shared events, and with ends that wait for their device),
through host memory, and over torch.distributed; beside them one plain copy. On a machine without GPUs the same runs between
CPU processes. First of all it tries what two processes can share on this machine. Every hop runs in processes of its own, so
that a transport that does not work is reported, however it ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from stretto.core.errors import StrettoError
from stretto.core.route import TensorSpec
from stretto.deploy.provenance import provenance
from stretto.deploy.world_models import KINDS, WanShare, place
from stretto.deploy.world_verify import STREAMS, Outputs, Script, compare, run_plan
from stretto.models.wan_config import tiny_config
from stretto.parallel.dist import CONSUMER, PRODUCER, DistInbox, DistOutbox, Pair, open_store
from stretto.parallel.order import Mark
from stretto.parallel.pages import PageLayout
from stretto.parallel.peer import PeerInbox, PeerOutbox
from stretto.parallel.probe import try_ways
from stretto.runtime.engine import Engine

HIDDEN_MB = {"wan2.1-1.3b": 14.4, "wan2.2-5b": 16.2, "wan2.1-14b": 47.9}
HOPS = 40
HOP_S = 40


def torch_device(name: str) -> torch.device:
    return torch.device(name if name.startswith("cuda") else "cpu")


def small(dtype: str) -> WanShare:
    """A Wan of four blocks with heads of 64 and windows of three frames."""
    config = replace(tiny_config(), blocks=4, width=256, heads=4, ffn_width=512, window_frames=3, dtype=dtype)
    return WanShare(replace(config, pixel_height=128, pixel_width=192, decoder="light"))


def reference(share: WanShare, device: str) -> list[Outputs]:
    model = share(device=device, only=None)
    engine = Engine(model, place(model, "whole", [device]), streams=STREAMS)
    engine.warm()
    try:
        return Script(engine, share(device="cpu", only=())).run()
    finally:
        engine.close()


def equality(devices: Sequence[str], dtype: str, transports: Sequence[str]) -> list[dict[str, Any]]:
    share = small(dtype)
    want = reference(share, devices[0])
    described = share(device="cpu", only=())
    rows = []
    for transport in transports:
        for kind in KINDS:
            plan = place(described, kind, devices[:1] if kind == "whole" else devices)
            row: dict[str, Any] = {"plan": kind, "workers": len(plan.devices), "transport": transport, "dtype": dtype}
            began_s = time.monotonic()
            try:
                verdict = compare(plan, run_plan(share, plan, transport), want)  # type: ignore[arg-type]
                row |= {"equal": verdict.equal, "chunks": verdict.chunks, "worst": verdict.worst}
            except StrettoError as e:
                row |= {"equal": False, "error": f"{type(e).__name__}: {e}"}
            rows.append(row | {"seconds": round(time.monotonic() - began_s, 1)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


class Consumer:
    """Receives hops and notes when their values were there."""

    def __init__(self, device: torch.device, answers: Any) -> None:
        self.device, self.answers = device, answers

    def receive(self, header: Any, values: dict[str, Tensor], there: Mark) -> None:
        event = there.handle()
        if event is not None:
            event.synchronize()
        self.answers.send((header["i"], time.monotonic(), bool((values["h"][:4] == header["i"] % 100).all())))


def consume(mode: str, name: str, nbytes: int, where: Any, answers: Any) -> None:
    device = torch_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    consumer, layout = Consumer(device, answers), layout_of(nbytes)
    lost = lambda *_: None  # noqa: E731
    inbox: Any
    if mode == "dist":
        pair = Pair(open_store(where), "hop", CONSUMER, device)
        inbox = DistInbox("producer", pair, layout, device, receive=consumer.receive, lost=lost)
    else:
        place_ = torch.device("cpu") if mode == "host" else device
        inbox = PeerInbox(
            "producer", where, layout, place_, pages=2, receive=consumer.receive, lost=lost, events=mode != "waiting_peer"
        )
    inbox.join()


def layout_of(nbytes: int) -> PageLayout:
    return PageLayout.of({"h": TensorSpec((nbytes // 2,), "bfloat16")})


def hop(mode: str, source: str, target: str, nbytes: int) -> dict[str, Any]:
    """Time hops through a real link between two processes."""
    context, device = mp.get_context("spawn"), torch_device(source)
    answers, theirs = context.Pipe()
    store = open_store() if mode == "dist" else None
    ours, end = context.Pipe()
    where = end if store is None else store.port
    process = context.Process(target=consume, args=(mode, target, nbytes, where, theirs))
    process.start()
    theirs.close()
    end.close()
    layout, lost = layout_of(nbytes), lambda *_: None
    link: Any
    if store is not None:
        link = DistOutbox("consumer", Pair(store, "hop", PRODUCER, device), layout, device, lost=lost)
    else:
        link = PeerOutbox("consumer", ours, layout, device, lost=lost)
    h = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
    sent: dict[int, float] = {}

    def send(i: int) -> None:
        row = h.clone()
        row.fill_(i % 100)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        sent[i] = time.monotonic()
        link.send({"i": i}, {"h": row})

    latencies, right = [], True
    for i in range(HOPS):
        send(i)
        at, there_s, same = answers.recv()
        right &= same
        if i >= HOPS // 4:
            latencies.append((there_s - sent[at]) * 1e3)
    for i in range(HOPS):
        link.send({"i": i % 100}, {"h": torch.full_like(h, i % 100)})
    times = [answers.recv()[1] for _ in range(HOPS)]
    link.close()
    process.join(20)
    return {
        "mode": mode, "mb": nbytes / 1e6, "from": source, "to": target, "right": right,
        "latency_ms_p50": round(statistics.median(latencies), 4), "latency_ms_max": round(max(latencies), 4),
        "interval_ms": round((times[-1] - times[HOPS // 4]) / (HOPS - 1 - HOPS // 4) * 1e3, 4),
    }  # fmt: skip


def plain_copy(source: str, target: str, nbytes: int) -> dict[str, Any]:
    """Time one copy within this process, host to host."""
    a, b = torch_device(source), torch_device(target)
    here, there = torch.ones(nbytes, dtype=torch.uint8, device=a), torch.empty(nbytes, dtype=torch.uint8, device=b)
    times = []
    for _ in range(HOPS):
        began_s = time.monotonic()
        there.copy_(here, non_blocking=True)
        for device in (a, b):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        times.append((time.monotonic() - began_s) * 1e3)
    return {
        "mode": "copy",
        "mb": nbytes / 1e6,
        "from": source,
        "to": target,
        "latency_ms_p50": round(statistics.median(times), 4),
    }


def hop_apart(mode: str, source: str, target: str, nbytes: int, answer: Any) -> None:
    """Do one row in this process, which may die of it."""
    faulthandler.enable()
    if source.startswith("cuda"):
        torch.cuda.set_device(source)
    torch.set_num_threads(1)
    try:
        answer.send(plain_copy(source, target, nbytes) if mode == "copy" else hop(mode, source, target, nbytes))
    except (StrettoError, RuntimeError, EOFError) as e:
        answer.send({"error": f"{type(e).__name__}: {e}"})


def tried(mode: str, source: str, target: str, nbytes: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hop_apart, args=(mode, source, target, nbytes, theirs))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv() if ours.poll(HOP_S) else {"error": f"not done after {HOP_S} s"}
    except EOFError:
        process.join(10)
        row = {"error": f"its process ended with {process.exitcode}"}
    if process.is_alive():
        process.join(5)
        process.kill()
    return {"mode": mode, "mb": nbytes / 1e6, **row}


def hops(source: str, target: str, models: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        nbytes = int(HIDDEN_MB[model] * 1e6) // 512 * 512
        for mode in ("copy", "peer", "waiting_peer", "host", "dist"):
            rows.append({"hidden_of": model, **tried(mode, source, target, nbytes)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="*", help="by default all GPUs, or two CPU processes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--skip", nargs="*", default=[], choices=("equality", "hops", "ways"))
    parser.add_argument("--models", nargs="*", default=list(HIDDEN_MB), choices=list(HIDDEN_MB), help="hops of their size")
    parser.add_argument("--transports", nargs="*", default=["peer", "dist"], choices=("peer", "dist"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = torch.cuda.device_count()
    devices = args.devices or [f"cuda:{i}" for i in range(count)] or ["cpu:0", "cpu:1"]
    result: dict[str, Any] = {"devices": devices, **provenance(torch_device(devices[0]))}
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        result["peer_access"] = {f"{a}-{b}": torch.cuda.can_device_access_peer(a, b) for a, b in pairs}

    def keep(part: str, rows: object) -> None:
        result[part] = rows
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    if "ways" not in args.skip and len(devices) > 1:
        keep("ways", ways := [asdict(t) for t in try_ways(devices[0], devices[1])])
        print(json.dumps(ways, indent=1), flush=True)
    if "hops" not in args.skip and len(devices) > 1:
        keep("hops", hops(devices[0], devices[1], args.models))
    if "equality" not in args.skip:
        keep("equality", equality(devices, args.dtype, args.transports))


if __name__ == "__main__":
    main()
