"""What two lanes get out of one GPU when each has a part of its multiprocessors: pi0.5, one request a launch.

    python benchmarks/lane_parts.py --fp8 --out benchmarks/results/lane_parts_h200.json --tables src/stretto/layers/tables
    python benchmarks/lane_parts.py --small                                         # a tiny model on the CPU, to try the script

The first lane runs `vision` and `prefix`, the second the denoise loop; both as graphs, with the device's own events for a
clock, so no host time is in it. For each way to divide the device: either lane alone; two and three requests in flight, each
entering as the loop of the one before begins. Tilings of the loop's kernels are chosen for its part and written as tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8 import calibrate
from host_overhead import quantiles
from nvidia_smi import Chip
from pi05_route import build

from stretto.core.route import Segment
from stretto.deploy.provenance import commit, provenance
from stretto.deploy.tune import named
from stretto.layers.tuning import Config, Entry, Key, Table, choices, device_name, part_name, tunables
from stretto.models.pi0_fp8 import quantised
from stretto.runtime.graphs import Graphs
from stretto.runtime.partition import LaneStreams
from stretto.runtime.profiler import SETS, Bench, stage_segments
from stretto.runtime.program import Program
from stretto.runtime.timing import Stamp

Place = tuple[str, Key, str]
PAIR = ("segments", "block_n", "block_k", "warps", "stages")
SPLIT = ("block_m", "block_n", "block_k", "splits", "warps", "stages")
CUT = ("block_m", "block_n", "splits", "warps", "stages", "described")
TILINGS: Mapping[Place, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    ("norm_geglu", (1, 50, 1024, 4096), "bfloat16"): (PAIR, (
        (1, 32, 128, 4, 4), (1, 32, 64, 4, 3), (1, 32, 64, 4, 4), (1, 64, 64, 4, 4), (1, 64, 64, 4, 3), (1, 64, 64, 4, 2),
        (1, 64, 128, 4, 2), (1, 128, 64, 8, 3), (1, 64, 64, 8, 3),
    )),
    ("norm_qkv", (1, 50, 1024, 8, 1, 256), "bfloat16"): (PAIR, (
        (1, 32, 128, 4, 4), (1, 32, 64, 4, 4), (1, 16, 128, 4, 3), (1, 16, 128, 4, 2), (1, 32, 64, 4, 3), (1, 32, 128, 4, 2),
        (1, 16, 64, 4, 3),
    )),
    ("gated_linear", (50, 1024, 2048), "bfloat16"): (SPLIT, (
        (64, 16, 256, 2, 4, 3), (64, 32, 64, 2, 4, 4), (64, 32, 64, 2, 4, 3), (64, 32, 128, 2, 4, 3), (64, 32, 128, 1, 4, 4),
        (64, 16, 128, 1, 4, 4), (64, 64, 64, 2, 4, 3),
    )),
    ("gated_linear", (50, 1024, 4096), "bfloat16"): (SPLIT, (
        (64, 32, 128, 4, 4, 4), (64, 32, 64, 4, 4, 4), (64, 32, 128, 2, 4, 4), (64, 32, 128, 4, 4, 2), (64, 64, 64, 4, 4, 3),
        (64, 64, 64, 4, 4, 4), (64, 64, 128, 4, 4, 2), (64, 32, 128, 2, 4, 3),
    )),
    ("suffix_attention", (1, 50, 8, 256, 1, 968, 50), "bfloat16"): (CUT, (
        (64, 32, 11, 4, 3, 1), (64, 32, 4, 4, 3, 1), (64, 32, 5, 4, 3, 1), (64, 32, 6, 4, 3, 1), (64, 32, 7, 4, 3, 1),
        (64, 32, 9, 4, 2, 1), (64, 64, 4, 4, 2, 1), (64, 64, 6, 4, 2, 1),
    )),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """How the device is divided: multiprocessors of each lane; 0: all."""

    first: int = 0
    rest: int = 0
    loose: bool = False
    """Kernels of the first lane are made for its part and go wherever there is room."""

    @property
    def name(self) -> str:
        return f"{self.first or 'all'}{' loose' if self.loose else ''} + {self.rest or 'all'}"


WAYS = (Way(), Way(88, 44), Way(96, 36), Way(80, 52), Way(104, 28), Way(100, 32, loose=True))


class Rig:
    """One model with its two segments, captured for ways to divide the device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.gpu = device.type == "cuda"
        self.prompt = model.buckets[0].lengths[-1]
        self.bench = Bench(model, device, "graph" if self.gpu else "eager", 1)
        self.inputs = model.example_inputs(SETS)
        self.inputs["token_count"] = torch.full_like(self.inputs["token_count"], self.prompt)
        denoise, visits = stage_segments(model)["denoise"]
        self.segments = Segment(0, denoise.start), Segment(denoise.start, denoise.start + visits)
        self.samples: dict[Place, list[tuple[Any, ...]]] = {}
        self._kept: dict[tuple[Any, ...], tuple[Callable[[int], None], Any]] = {}
        self._lanes: dict[tuple[int, int], LaneStreams] = {}

    def streams(self, way: Way) -> LaneStreams | None:
        sms = (0 if way.loose else way.first, way.rest)
        if self.gpu and sms not in self._lanes:
            self._lanes[sms] = LaneStreams(self.device, sms)
        return self._lanes.get(sms)

    def lane(self, way: Way, number: int) -> tuple[Callable[[int], None], Any]:
        """Return what launches a lane's segment on a set of inputs, and its stream; captured once for ways alike in it."""
        own = (way.rest,) if number else (way.first, way.loose)
        if (number, own) not in self._kept:
            streams = self.streams(way)
            graphs = stream = None
            if streams is not None:
                stream = streams.part(number) or streams.new(number)
                graphs = Graphs(self.device, stream, way.rest if number else way.first)
            self._kept[number, own] = self._program(self.segments[number], graphs), stream
        return self._kept[number, own]

    def _program(self, segment: Segment, graphs: Graphs | None) -> Callable[[int], None]:
        program = Program(
            self.model, segment, self.bench.arenas, mode=self.bench.mode, batch_buckets=(1,), graphs=graphs,
            shapes={"prompt": (self.prompt,)},
        )  # fmt: skip
        program.capture()

        def run(turn: int) -> None:
            program.launch(self.bench.members(turn, (segment.start,), len(segment)), {"prompt": self.prompt})

        return run

    def load(self) -> None:
        """Start anew: a loop that is run again goes on from its own result."""
        self.bench.load(self.inputs)
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def forget_first(self) -> None:
        """Capture the first lane anew, for another network; the loop stays as it is."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] == 1}

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if stream is not None else nullcontext()


def race(rig: Rig, rest: int, folder: Path | None) -> dict[str, Any]:
    """Choose tilings for the loop's kernels by their times on a part of the device, and let them decide there."""
    stream, said = LaneStreams(rig.device, (132 - rest, rest)).part(1), {}
    name, entries = part_name(device_name(rig.device), rest), []
    for place, (fields, cuts) in TILINGS.items():
        op, key, dtype = place
        times: dict[str, float] = {}
        for cut in cuts:
            config = dict(zip(fields, cut, strict=True))
            try:
                times[named(config)] = one_us(rig, place, config, stream)
            except Exception as error:  # one tiling that does not run must not cost the others
                print(f"{op} {named(config)}: {type(error).__name__}: {error}"[:300], flush=True)
        if times:
            best = min(times, key=lambda words: times[words])
            config = next(c for c in (dict(zip(fields, cut, strict=True)) for cut in cuts) if named(c) == best)
            # The first is the whole device's own choice.
            entries.append(Entry(op, key, dtype, config, times[best], next(iter(times.values())), commit()))
            said[f"{op} {key}"] = {"best": best, "us": times[best], "others": sorted(times.values())}
    if entries:
        layers = (1, 50, 18, 1024, 4096, 8, 1, 256, 968)
        entries.append(Entry("expert_layers", layers, "bfloat16", {"impl": "separate"}, 0.0, 0.0, commit()))
        table = Table(name, torch.__version__, metadata.version("triton"), tuple(entries))
        choices(rig.device, rest).known = {entry.place: entry.config for entry in entries}
        if folder is not None:
            table.save(folder / f"{name.lower().replace(',', '').replace(' ', '-')}.json")
    return said


def compile_tilings(rig: Rig) -> None:
    with ThreadPoolExecutor(14) as pool:
        for (op, key, dtype), (fields, cuts) in TILINGS.items():
            sets = rig.samples[op, key, dtype] = [tunables()[op].inputs(key, torch.bfloat16, rig.device) for _ in range(6)]
            for cut in cuts:
                pool.submit(torch.inference_mode()(partial(tunables()[op].run, dict(zip(fields, cut, strict=True)), *sets[0])))


def one_us(rig: Rig, place: Place, config: Config, stream: Any) -> float:
    graphs, run, sets = Graphs(rig.device, stream), tunables()[place[0]].run, rig.samples[place]

    def go_round() -> None:
        for i in range(24):
            run(config, *sets[i % len(sets)])

    with torch.inference_mode():
        graph = graphs.capture_at_rest(go_round)
    times = []
    for _ in range(5):
        begin = Stamp(rig.device)
        graph.replay()
        end = Stamp(rig.device)
        end.wait()
        times.append(end.ms_since(begin) / 24 * 1e3)
    return round(float(np.median(times)), 2)


def alone(rig: Rig, way: Way, number: int, n: int) -> float:
    run, stream = rig.lane(way, number)
    marks = []
    with rig.on(stream):
        for i in range(n + 2):
            begin = Stamp(rig.device)
            run(i)
            marks.append((begin, Stamp(rig.device)))
    marks[-1][1].wait()
    return round(float(np.median([e.ms_since(b) for b, e in marks[2:]])), 3)


def piped(rig: Rig, way: Way, n: int, in_flight: int) -> dict[str, Any]:
    """Run requests through both lanes, so many in flight."""
    rig.load()
    (first, one), (second, two) = rig.lane(way, 0), rig.lane(way, 1)
    begun, between, taken, done = [], [], [], []
    for i in range(n):
        with rig.on(one):
            if i >= in_flight:
                done[i - in_flight].hold()  # no more than there are sets of inputs, so its slot is free too
            begun.append(Stamp(rig.device))
            first(i)
            between.append(Stamp(rig.device))
        with rig.on(two):
            between[i].hold()
            taken.append(Stamp(rig.device))
            second(i)
            done.append(Stamp(rig.device))
    done[-1].wait()
    kept = range(n // 5, n)
    span = done[-1].ms_since(done[kept[0]])
    return {
        "requests_per_s": round(1e3 * (len(kept) - 1) / span, 1) if span > 0 else 0.0,
        "latency_ms": quantiles([done[i].ms_since(begun[i]) for i in kept]),
        "first_ms": round(float(np.median([between[i].ms_since(begun[i]) for i in kept])), 3),
        "loop_ms": round(float(np.median([done[i].ms_since(taken[i]) for i in kept])), 3),
    }


def outputs(rig: Rig, way: Way) -> torch.Tensor:
    lanes = [rig.lane(way, number) for number in (0, 1)]
    rig.load()
    for run, stream in lanes:
        with rig.on(stream):
            for i in range(SETS):
                run(i)
            Stamp(rig.device).wait()
    return torch.cat([rig.bench.arenas[name][1:].flatten().double().cpu() for name in rig.model.route.outputs])


def measure(rig: Rig, way: Way, want: torch.Tensor | None, n: int) -> tuple[dict[str, Any], torch.Tensor]:
    got = outputs(rig, way)
    row: dict[str, Any] = {"first_alone_ms": alone(rig, way, 0, 8), "loop_alone_ms": alone(rig, way, 1, 8)}
    if want is not None:
        row |= {"bit_equal": bool(torch.equal(got, want)), "max_abs": float((got - want).abs().max())}
    return row | {f"{k} in flight": piped(rig, way, n, k) for k in (2, 3)}, got


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--fp8", action="store_true", help="FP8 too")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds")
    parser.add_argument("--tables", type=Path, help="folder for tables of the loop's tilings")
    parser.add_argument("--n", type=int, default=30, help="requests of one measurement")
    return parser.parse_args()


def main() -> None:
    args = parse()
    begun = time.monotonic()
    args.small |= args.device == "cpu"
    device = torch.device(args.device)
    chip, model = Chip(), build(device, args.small)
    result: dict[str, Any] = {**provenance(device), "small": args.small, "rows": {}}

    def said(name: str, row: dict[str, Any]) -> None:
        result["rows"][name] = row
        print(f"{time.monotonic() - begun:6.1f} s  {name}  {json.dumps(row)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    scales = calibrate(model, args.device) if args.fp8 and device.type == "cuda" else {}
    rig = Rig(model, device)
    n = args.n if device.type == "cuda" else 6
    if rig.gpu:
        compile_tilings(rig)
    wants: dict[bool, torch.Tensor] = {}
    kinds = (True, False) if scales else (False,)
    cases = [(fp8, way) for ways in (WAYS[:4], WAYS[4:]) for fp8 in kinds for way in ways]
    now_fp8 = None
    for fp8, way in cases:
        name = f"{'FP8' if fp8 else 'bf16'}: {way.name}"
        begin = time.monotonic()
        if begin - begun > args.budget - 3:
            said(name, {"skipped": "no time left"})
            continue
        try:
            if way.first and rig.gpu and not choices(device, way.rest).known:
                said(f"tilings on {way.rest}", race(rig, way.rest, args.tables))
            if fp8 != now_fp8:
                now_fp8 = fp8
                model.run_on(quantised(model.module, scales) if fp8 else model.module)
                rig.forget_first()
            with torch.inference_mode():
                row, got = measure(rig, way, wants.get(fp8), n)
            wants.setdefault(fp8, got)
            said(name, row | chip.between(begin, time.monotonic()))
        except Exception as error:  # one way that fails must not lose the others
            said(name, {"error": f"{type(error).__name__}: {error}"[:400]})
    chip.close()


if __name__ == "__main__":
    main()
