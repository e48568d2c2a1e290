"""Streaming world models under every plan that fits the GPUs at hand: output interval, response latency, idle share.

    python benchmarks/world.py --minutes 8 --out benchmarks/results/world_h200.json

On one GPU: one chunk at a time (`serial`) beside same-block batching of all denoise steps (`batched`). On several: those
two on the first, and every way of spreading one stream over all. On any number: as many streams at the video's own speed as
the planner admits (`portfolio`). Random weights, 4 denoise steps. Rings are filled with random numbers and a stream begins at
the chunk for which they count as full, so that steady state comes at once. What the simulator expects of the costs measured
at the start stands beside every figure. The result is written after every row; what the time did not allow is listed under
`not_run`. `--small` runs a tiny model on four CPU devices, to try the script itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from world_arguments import add_place, place_of

from stretto.deploy.provenance import provenance
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_crowd import crowd
from stretto.deploy.world_plans import ONE, SEVERAL, fitting
from stretto.deploy.worlds import TINY, config_of
from stretto.models.wan_config import SPECS
from stretto.sched.profile import Profile

CROWD = "portfolio"
UNBATCHED = {"serial", "by_step", "by_block", "by_stage", "circular"}
SHOWN = (
    "model", "chunk_frames", "window_frames", "decoder", "precision", "plan", "output_interval_ms", "response_latency_ms",
    "mode", "idle_share", "graphs", "captured_while_measured", "eager_chunks", "predicted", "decode", "spent", "profile_s",
    "skipped", "error", "not_run",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One model to build, some plans to run."""

    model: str
    frames: int
    window: int
    decoder: str
    precision: str
    plans: tuple[str, ...] = ()

    @property
    def heading(self) -> dict[str, Any]:
        shape = {"model": self.model, "chunk_frames": self.frames, "window_frames": self.window, "decoder": self.decoder}
        return shape | {"precision": self.precision}


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """List the shapes, what matters most first: those of `--cases`, or all combinations of the other options."""
    if args.cases:
        return [read_case(text, args) for text in args.cases]
    found = itertools.product(args.windows, args.decoders, args.chunk_frames, args.models)
    plans = tuple(args.plans)
    return [Shape(model, frames, window, decoder, args.precision, plans) for window, decoder, frames, model in found]


def read_case(text: str, args: argparse.Namespace) -> Shape:
    """Read `model/frames/plan,plan[/option...]`; an option is `w9` (window), a decoder or a precision."""
    model, frames, plans, *options = text.split("/")
    windows = [int(option[1:]) for option in options if option[:1] == "w" and option[1:].isdigit()]
    decoders = [option for option in options if option in ("none", "light", "vae")]
    precisions = [option for option in options if option.startswith("fp8")]
    (window,), (decoder,), (precision,) = windows or args.windows[:1], decoders or ["none"], precisions or [args.precision]
    names = tuple(name for name in plans.split(",") if name)
    unknown = sorted({*names} - {*ONE, *SEVERAL, CROWD})
    if unknown or len(windows) + len(decoders) + len(precisions) != len(options):
        raise SystemExit(f"--cases: cannot read {text!r}")
    return Shape(TINY if args.small else model, int(frames), window, decoder, precision, names)


def plans_of(shape: Shape, devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the plans of a shape; with a decoder, those that bracket what it changes."""
    known = (*fitting(devices), CROWD)
    wanted = shape.plans or (known if shape.decoder == "none" else ("whole", "batched", "by_step", "by_block_batched", CROWD))
    return tuple(name for name in wanted if name in known)


def rows_of(args: argparse.Namespace, devices: tuple[str, ...], shape: Shape, until: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of a shape; a row that cannot be run says so."""
    names, model, heading = list(plans_of(shape, devices)), shape.model, shape.heading
    sustained_s = args.sustained if devices[0].startswith("cuda") else 0.0
    # Where no plan makes batches, what they would cost is not measured.
    batches = (1,) if set(names) <= UNBATCHED else ()
    case = WorldCase(
        devices,
        args.mode,
        args.workers,
        args.streams,
        args.seconds,
        sustained_s=sustained_s,
        batches=batches,
        profiles=args.profiles,
    )
    began = time.monotonic()
    try:
        blocks = 8 if model == TINY else None
        config = config_of(
            model, blocks=blocks, frames_per_chunk=shape.frames, window_frames=shape.window, decoder=shape.decoder,
            precision=shape.precision, dtype=args.dtype if shape.precision == "dtype" else "bfloat16",
        )  # fmt: skip
        bench = WorldBench(config, case)
    except Exception as error:  # one shape must not cost the others their figures
        yield heading | {"error": f"{type(error).__name__}: {error}"}
        return
    profiled = json.loads(bench.profile.to_json())
    profile_s = round(time.monotonic() - began, 2)
    while names and time.monotonic() < until:
        name, left_s = names.pop(0), until - time.monotonic()
        for row in (crowded(bench, heading),) if name == CROWD else bench.rows((name,), left_s):
            yield row | {"profile": profiled, "slow": bench.slow, "profile_s": profile_s}
    for name in names:
        yield heading | {"plan": name, "not_run": "out of time"}


def crowded(bench: WorldBench, heading: dict[str, Any]) -> dict[str, Any]:
    try:
        return heading | crowd(bench)
    except Exception as error:  # as above
        return heading | {"plan": CROWD, "error": f"{type(error).__name__}: {error}"}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each shape, the rate of every plan over that of the better plan on one GPU."""
    measured = [row for row in rows if "frames_per_s" in row]
    keys = ("model", "chunk_frames", "window_frames", "decoder", "precision")
    out = []
    for key, some in itertools.groupby(measured, key=lambda row: tuple(row[k] for k in keys)):
        group = list(some)
        one = max((row["frames_per_s"] for row in group if row["plan"] in ONE), default=None)
        rates = {row["plan"]: row["frames_per_s"] for row in group}
        ratios = {plan: round(rate / one, 3) for plan, rate in rates.items()} if one else {}
        out.append({**dict(zip(keys, key, strict=True)), "frames_per_s": rates, "times_one_gpu": ratios})
    return out


def profiles_of(path: Path) -> list[Profile]:
    """Return the profiles of an earlier result."""
    return [Profile.from_json(json.dumps(raw)) for raw in json.loads(path.read_text())["profiles"]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="no row begins after this")
    parser.add_argument("--models", nargs="*", default=["wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b"], choices=list(SPECS))
    parser.add_argument("--chunk-frames", nargs="*", type=int, default=[1, 3])
    parser.add_argument("--windows", nargs="*", type=int, default=[21, 9])
    parser.add_argument("--decoders", nargs="*", default=["none", "vae"], choices=["none", "light", "vae"])
    parser.add_argument(
        "--cases", nargs="*", default=[], help="model/frames/plan,plan[/w9][/vae][/fp8], in this order; in place of the rest"
    )
    parser.add_argument(
        "--precision", default="dtype", choices=["dtype", "fp8", "fp8-emulated"], help="of the blocks' products"
    )
    parser.add_argument(
        "--profiles", nargs="*", type=Path, default=[], help="earlier results of this script, whose profiles are not made again"
    )
    parser.add_argument("--plans", nargs="*", default=[], choices=[*ONE, *SEVERAL, CROWD], help="all that fit by default")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured span of each row")
    add_place(parser)
    args = parser.parse_args()
    args.profiles = tuple(profile for path in args.profiles for profile in profiles_of(path))
    if args.small:
        args.models, args.windows = [TINY], [6]
    return args


def main() -> None:
    args = parse()
    until = time.monotonic() + 60.0 * args.minutes
    devices, args.mode, args.dtype = place_of(args, on_cpu=4 if args.small else 1)
    result: dict[str, Any] = {**provenance(torch.device(devices[0].split(":")[0])), "devices": len(devices), "rows": []}
    result["host"] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    result["rings"] = "filled with normal random numbers; streams begin at the first chunk whose rings count as full"
    profiles = result["profiles"] = []
    for shape in shapes_of(args):
        for row in rows_of(args, devices, shape, until):
            profile = row.pop("profile", None)
            if profile is not None and profile not in profiles:
                profiles.append(profile)
            result["rows"].append(row)
            result["summary"] = summary(result["rows"])
            brief = {k: row[k] for k in SHOWN if k in row}
            print(json.dumps(brief), flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
