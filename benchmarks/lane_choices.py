"""Which of cuBLAS's kernels the first of two lanes runs best on its part of the multiprocessors: pi0.5 in FP8, one request.

    python benchmarks/lane_choices.py --multiprocessors 80 88 --tables src/stretto/layers/tables --out lane_choices.json
    python benchmarks/lane_choices.py --small                                  # a tiny model on the CPU, to try the script

cuBLASLt lists its kernels by what it expects of them on so many multiprocessors, so the table of the whole device names others
on a part. Every product that `vision` and `prefix` ask a choice for is timed on the part with each entry of that list, inputs
colder than the second-level cache; what gains 1.5 % over today's choice is written as a table of the part, and the whole lane
is timed with it and without.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8 import calibrate
from lane_parts import Rig, Way, alone
from pi05_route import build

from stretto.core.route import Segment
from stretto.deploy.provenance import commit, provenance
from stretto.deploy.tune import named
from stretto.layers.part import on_part
from stretto.layers.tuning import Choices, Config, Entry, Table, choices, device_name, part_name, tunables, tuned
from stretto.models.pi0_fp8 import quantised
from stretto.runtime.graphs import Graphs
from stretto.runtime.partition import LaneStreams
from stretto.runtime.timing import Stamp

LISTED = ("cublas", "lt", "lt_sum")
GAIN = 1.015
SETS, LAUNCHES, REPLAYS = 6, 12, 5
Place = tuple[str, tuple[int, ...], str]


def one_us(device: torch.device, place: Place, config: Config | None, sets: list[Any], stream: Any, count: int) -> float:
    """Time one choice on a part."""
    run = tunables()[place[0]].run

    def go_round() -> None:
        for i in range(LAUNCHES):
            run(config, *sets[i % len(sets)])

    with torch.inference_mode():
        graph = Graphs(device, stream, count).capture_at_rest(go_round)
        times = []
        with torch.cuda.stream(stream):
            for _ in range(REPLAYS):
                begin = Stamp(device)
                graph.replay()
                end = Stamp(device)
                end.wait()
                times.append(end.ms_since(begin) / LAUNCHES * 1e3)
    return round(float(np.median(times)), 2)


def race(device: torch.device, place: Place, stream: Any, count: int) -> dict[str, Any] | None:
    """Time what cuBLAS lists for one product on a part beside today's choice; None where it lists nothing for the op."""
    op, key, dtype = place
    tunable, kind = tunables()[op], getattr(torch, dtype)
    with on_part(count):
        today = tuned(op, key, kind, device)
    configs = [c for c in tunable.candidates(key) if c.get("impl") in LISTED]
    if not configs:
        return None
    with torch.inference_mode():
        sets = [tunable.inputs(key, kind, device) for _ in range(SETS)]
    times: dict[str, float] = {}
    first = "the rule's" if today is None else named(today)
    known: dict[str, Config | None] = {first: today} | {named(c): c for c in configs}
    for words, config in known.items():
        try:
            times[words] = one_us(device, place, config, sets, stream, count)
        except Exception as error:  # one kernel that does not run must not cost the others
            times[words] = float("inf")
            print(f"{op} {words}: {type(error).__name__}: {error}"[:200], flush=True)
    best = min(times, key=lambda words: times[words])
    return {
        "today": named(today),
        "today_us": times[named(today)],
        "best": best,
        "us": times[best],
        "config": dict(known[best]),
    }


def asked_of(rig: Rig, way: Way) -> list[Place]:
    """Return what the first lane asks of the part's table."""
    table = choices(rig.device, way.first)
    table.asked.clear()
    rig.forget_first()
    rig.lane(way, 0)
    return sorted(table.asked)


def on(rig: Rig, count: int, folder: Path | None) -> dict[str, Any]:
    """Choose for one part, and time the whole lane before and after in turn."""
    way, device = Way(count, 132 - count), rig.device
    places, table = asked_of(rig, way), choices(device, count)
    stream = LaneStreams(device, (count, 132 - count)).part(0)
    row: dict[str, Any] = {"choices": {}}
    entries = []
    for place in places:
        found = race(device, place, stream, count)
        if found is None:
            continue
        row["choices"][f"{place[0]} {list(place[1])}"] = found
        print(json.dumps({"multiprocessors": count, "op": place[0], "key": place[1], **found}), flush=True)
        if found["us"] * GAIN < found["today_us"]:
            entries.append(Entry(*place, found["config"], found["us"], found["today_us"], commit()))
    before, after = dict(table.known), dict(table.known) | {e.place: e.config for e in entries}
    row["lane_ms"] = [[whole_ms(rig, way, table, known) for known in (before, after)] for _ in range(2)]
    if folder is not None and entries:
        name = part_name(device_name(device), count)
        path = folder / f"{name.lower().replace(',', '').replace(' ', '-')}.json"
        Table(name, torch.__version__, metadata.version("triton"), tuple(entries)).save(path)
    return row


def whole_ms(rig: Rig, way: Way, table: Choices, known: dict[Place, Config]) -> float:
    table.known = known
    table.asked.clear()
    rig.forget_first()
    return alone(rig, way, 0, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", type=Path, help="write tables into this folder")
    parser.add_argument("--multiprocessors", nargs="+", type=int, default=[80, 88])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds; no part is begun after them")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    begun = time.monotonic()
    device = torch.device("cpu" if args.small or not torch.cuda.is_available() else "cuda:0")
    result: dict[str, Any] = {**provenance(device), "parts": {}}
    model = build(device, device.type == "cpu")
    if device.type == "cpu":
        print(f"{len(tunables())} ops can be chosen; none is on a CPU: {Segment(0, 2)} of {len(model.route)} visits")
        return
    model.run_on(quantised(model.module, calibrate(model, str(device))))
    with torch.inference_mode():
        rig = Rig(model, device)
    for count in args.multiprocessors:
        if time.monotonic() - begun > args.budget:
            break
        with torch.inference_mode():
            result["parts"][str(count)] = row = on(rig, count, args.tables)
        print(f"{time.monotonic() - begun:6.1f} s  {count}  {json.dumps(row['lane_ms'])}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
