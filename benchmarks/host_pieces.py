"""What the way of one request through the host is made of, each piece by itself; for host_overhead.py."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stretto.core.route import Segment
from stretto.runtime.graphs import Graphs
from stretto.runtime.profiler import SETS, Bench
from stretto.runtime.program import Program
from stretto.runtime.timing import Stamp


def quantiles(ms: Sequence[float]) -> dict[str, float]:
    """Return the quantiles that count, in the unit given."""
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(float(np.quantile(ms, q)), 4) for name, q in at.items()}


def pieces(n: int = 200) -> dict[str, Any]:
    """Time what the path is made of on this machine: a hand-over between threads, a copy of one observation's pictures."""
    there: queue.SimpleQueue[object] = queue.SimpleQueue()
    back: queue.SimpleQueue[object] = queue.SimpleQueue()

    def echo() -> None:
        while (item := there.get()) is not None:
            back.put(item)

    thread = threading.Thread(target=echo)
    thread.start()
    hops = []
    for _ in range(n):
        begin = time.perf_counter()
        there.put(1)
        back.get()
        hops.append((time.perf_counter() - begin) * 1e6 / 2)
    there.put(None)
    thread.join()
    source, target = np.ones(3 * 224 * 224 * 3, np.uint8), np.zeros(3 * 224 * 224 * 3, np.uint8)
    copies = []
    for _ in range(n):
        begin = time.perf_counter()
        target[:] = source
        copies.append((time.perf_counter() - begin) * 1e6)
    return {"thread_hop_us": quantiles(hops), "copy_450_kB_us": quantiles(copies)}


@torch.inference_mode()
def launches(model: Any, device: torch.device, prompt: int) -> dict[str, Any]:
    """Time the launch of graphs on an idle device: what the host takes, and the device from the call to the end.

    Every stage by itself, and the route in one, two and three launches; a launch of several stages is two graphs.
    """
    bench = Bench(model, device, "graph", 1)
    inputs = model.example_inputs(SETS)
    inputs["token_count"] = torch.full_like(inputs["token_count"], prompt)
    bench.load(inputs)
    graphs = Graphs(device)
    visits = len(model.route)
    wanted = {"vision": ((0, 1),), "prefix": ((1, 2),), "loop": ((2, visits),), "route": ((0, visits),)}
    wanted |= {"vision, rest": ((0, 1), (1, visits)), "vision, prefix, loop": ((0, 1), (1, 2), (2, visits))}
    rows: dict[str, Any] = {}
    captured = {
        cut: _captured(bench, Segment(*cut), graphs, prompt)
        for cut in dict.fromkeys(c for cuts in wanted.values() for c in cuts)
    }
    for name, cuts in wanted.items():
        programs = [captured[cut] for cut in cuts]
        host, device_us, end_us = [], [], []
        for i in range(14):
            torch.cuda.synchronize(device)
            time.sleep(0.002)
            begin = Stamp(device)
            at = time.perf_counter()
            for program, cut in zip(programs, cuts, strict=True):
                program.launch(bench.members(i, cut[:1], cut[1] - cut[0]), {"prompt": prompt})
            host.append((time.perf_counter() - at) * 1e6)
            end = Stamp(device)
            end.wait()
            end_us.append((time.perf_counter() - at) * 1e6)
            device_us.append(end.ms_since(begin) * 1e3)
        row = {"host_us": host, "device_us": device_us, "until_end_us": end_us}
        rows[name] = {key: round(float(np.median(found[4:])), 1) for key, found in row.items()}
    return rows


def _captured(bench: Bench, segment: Segment, graphs: Graphs, prompt: int) -> Program:
    shapes = {"prompt": (prompt,)}
    program = Program(bench.model, segment, bench.arenas, mode="graph", batch_buckets=(1,), graphs=graphs, shapes=shapes)
    program.capture()
    return program


def to_device(device: torch.device) -> dict[str, Any]:
    """Time the copy of one observation's pictures to the device, from pinned and from other memory: host and device."""
    rows = {}
    for name, pin in (("pinned", True), ("pageable", False)):
        host_us, device_us = [], []
        sources = [torch.ones(3 * 224 * 224 * 3, dtype=torch.uint8, pin_memory=pin) for _ in range(8)]
        target = torch.zeros(3 * 224 * 224 * 3, dtype=torch.uint8, device=device)
        for i in range(60):
            torch.cuda.synchronize(device)
            begin = Stamp(device)
            at = time.perf_counter()
            target.copy_(sources[i % 8], non_blocking=True)
            host_us.append((time.perf_counter() - at) * 1e6)
            end = Stamp(device)
            end.wait()
            device_us.append(end.ms_since(begin) * 1e3)
        rows[name] = {"host_us": quantiles(host_us), "device_us": quantiles(device_us)}
    return rows


def cold_copies(n: int = 60) -> dict[str, Any]:
    """Time a copy of one observation's pictures that no cache holds, by numpy and by torch's threads."""
    size, other = 3 * 224 * 224 * 3, np.zeros(2**27, np.uint8)
    sources, target = [np.ones(size, np.uint8) for _ in range(64)], np.zeros(size, np.uint8)
    ways: dict[str, Callable[[np.ndarray], object]] = {
        "numpy": lambda source: np.copyto(target, source),
        "torch": lambda source: torch.from_numpy(target).copy_(torch.from_numpy(source)),
    }
    rows = {}
    for name, copy in ways.items():
        times = []
        for i in range(n):
            other[i % 64 :: 64] += 1
            at = time.perf_counter()
            copy(sources[i % len(sources)])
            times.append((time.perf_counter() - at) * 1e6)
        rows[name] = quantiles(times)
    return rows
