"""What the planner's scenarios come to on real GPUs: `seed-1gpu` and `seed-2gpu`, convoys, and a joint placement of 14B.

    python benchmarks/world_seeds.py --budget 120 --out benchmarks/results/world_seeds_2x_h200.json

Seeds: one stream in a fixed order of one stage in one slot, then with more chunks in flight and one row a launch, then in
batched time slices: the plans of `stretto plan`, with its costs measured here first. Convoys: streams over a ring of two GPUs
with greedy batches, with as many rows as there are chunks for each GPU, and by the planner's order and caps. Joint: streams of
14B over both GPUs at a promised interval, with greedy batches and with capped ones, in the same order. What the simulator
expects stands beside every figure. Plans of a part run on one engine. The result is written after each row; `--small` tries
it on CPU devices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from world_arguments import add_place, place_of, profiled, with_hand_overs

from stretto.core.plan import Device, Plan
from stretto.deploy.provenance import provenance
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_rig import Rig
from stretto.deploy.world_trial import NOISE, START_S, Entry, Script, figures, needed_s
from stretto.deploy.worlds import TINY, config_of
from stretto.sched.batching import worthwhile_cap
from stretto.sched.cluster import ModelView, Placed, StreamSpec
from stretto.sched.dispatch import ring_cap
from stretto.sched.equal import equal_ranks
from stretto.sched.plans import by_block
from stretto.sched.profile import Profile
from stretto.sched.report import single_plans
from stretto.sched.verify import to_plans

PARTS = ("seed-1gpu", "seed-2gpu", "convoy", "joint")
RING_STREAMS, RING_QUANTUM = 8, 6
JOINT_LOAD = 0.95  # share of every device that the promises of the joint placement ask for
Left = Callable[[], float]


@dataclass(frozen=True)
class Trial:
    """One plan, the promised interval of its streams (0: flat out), and how long to look."""

    name: str
    plan: Plan
    classes: Sequence[str]
    settle_s: float
    seconds: float
    interval_s: float = 0.0

    @property
    def script(self) -> Script:
        offsets = [(i * 0.618 % 1.0) * self.interval_s if self.interval_s else 0.011 * i for i in range(len(self.classes))]
        entries = [Entry(c, o, interval_s=self.interval_s) for c, o in zip(self.classes, offsets, strict=True)]
        return Script(entries, self.seconds, ((self.settle_s, self.seconds),))


def settled(profile: Profile, name: str, plan: Plan, streams: int, seconds: float) -> Trial:
    """Make a trial of equal streams that run flat out, looked at once what was queued at first is through.

    It is looked at for so long, or for as long as all that is under way takes four times: it may come out in bursts.
    """
    round_s = profile.work_s * plan.in_flight * streams / len(plan.devices)
    return Trial(name, plan, ["default"] * streams, 1.3 * round_s, 1.3 * round_s + max(seconds, 4.2 * round_s))


def seed(profile: Profile, devices: Sequence[str], seconds: float) -> Iterator[Trial]:
    fixed, *_, deepest = single_plans(profile, [Device(d) for d in devices])
    yield settled(profile, "fixed order, one stage in one slot", fixed, 1, seconds)
    deeper = replace(fixed, in_flight=2 * fixed.in_flight)
    yield settled(profile, f"one row a launch, {deeper.in_flight} chunks in flight", deeper, 1, seconds)
    cap = deepest.batch_cap(devices[0])
    name = f"batched time slices, {deepest.in_flight} chunks in flight, batches of up to {cap}"
    yield settled(profile, name, deepest, 1, seconds)


def convoy(profile: Profile, devices: Sequence[str], seconds: float) -> Iterator[Trial]:
    """Send one chunk a stream around a ring of devices."""
    ring = replace(by_block(profile, [Device(d) for d in devices], quantum=RING_QUANTUM), in_flight=1)
    pays = worthwhile_cap(profile, RING_STREAMS)
    for order, cap in (
        ("sweep", RING_STREAMS),
        ("sweep", ring_cap(RING_STREAMS, len(devices), RING_STREAMS)),
        ("oldest_chunk_first", pays),
    ):
        plan = replace(ring.with_dispatch(order), batch_caps=dict.fromkeys(devices, cap))
        yield settled(profile, f"{order}, batches of up to {cap}", plan, RING_STREAMS, seconds)


def joint(profile: Profile, devices: Sequence[str], streams: int) -> Iterator[Trial]:
    """Spread every stream over all devices with equal ranks, at a promise that asks for nearly all of their time."""
    pool = [Device(d) for d in devices]
    view = ModelView(profile)
    ranks = equal_ranks(view, pool)
    interval_s = streams * max(view.work_sum[r.stop] - view.work_sum[r.start] for r in ranks) / JOINT_LOAD
    specs = [StreamSpec(f"s{i}", profile.model, interval_s, 8.0 * interval_s) for i in range(streams)]
    placed = {s.name: Placed(s, ranks, "spread") for s in specs}
    for order, greedy, ahead in (
        ("sweep", True, 1),
        ("earliest_virtual_deadline_first", False, 1),
        ("oldest_chunk_first", True, 0),
        ("oldest_chunk_first", False, 0),
    ):
        (plan,) = to_plans(pool, {profile.model: profile}, placed, greedy=greedy, dispatch=order).values()
        plan = replace(plan, ahead=ahead, credits={n: min(4, c) for n, c in plan.credits.items()})
        how = "launched ahead" if ahead else "chosen when the device is free"
        name = f"{'greedy' if greedy else 'capped'} batches, {order}, {how}"
        yield Trial(name, plan, list(plan.classes), 2.5 * interval_s, 8.5 * interval_s, interval_s)


class Bed:
    """Runs the trials of a part, on one engine as long as plans put everything in the same places."""

    def __init__(self, bench: WorldBench, part: str, trials: Sequence[Trial]) -> None:
        self.bench, self.part = bench, part
        self.caps = {d.name: max(t.plan.batch_cap(d.name) for t in trials) for d in trials[0].plan.devices}
        self.in_flight = max(t.plan.in_flight for t in trials)
        self.rig: Rig | None = None

    def row(self, trial: Trial, left_s: Left) -> dict[str, Any]:
        bench, plan = self.bench, self.plan_of(trial)
        config, script = bench.config, trial.script
        row: dict[str, Any] = {
            "part": self.part, "model": config.name, "chunk_frames": config.frames_per_chunk,
            "window_frames": config.window_frames, "case": trial.name, "devices": len(plan.devices),
            "streams": len(trial.classes), "mode": plan.mode, "dispatch": plan.dispatch, "ahead": plan.ahead,
            "batch_caps": dict(plan.batch_caps), "in_flight": max(plan.credit(c) for c in trial.classes),
            "span_s": [round(t, 3) for t in script.spans[0]],
        }  # fmt: skip
        if trial.interval_s:
            row["promised_interval_ms"] = round(trial.interval_s * 1e3, 2)
        if short := bench.short_of_memory(plan):
            return row | {"skipped": short}
        if left_s() < (need_s := needed_s(script, 0.0 if self.rig else START_S)):
            return row | {"not_run": f"needs {need_s:.0f} s"}
        if self.rig is None:
            self.rig = Rig(bench, replace(plan, batch_caps=self.caps, in_flight=self.in_flight))
        done = self.rig.run(script, plan)
        (span,) = script.spans
        measured, expected = (figures(tracks, span, trial.interval_s) for tracks in (done.measured, done.expected))
        a, b = measured["chunks_per_s"], expected["chunks_per_s"]
        frames = config.frames_per_chunk * config.time_stride
        return row | {
            **measured,
            "frames_per_s": round(a * frames, 2) if a else None,
            "simulated": expected,
            "rate_error": round(b / a - 1.0, 4) if a and b else None,
            **done.account(),
        }

    def plan_of(self, trial: Trial) -> Plan:
        """Return a trial's plan in the mode of the run, with graphs for the batch sizes of all plans of the part."""
        return replace(trial.plan, mode=self.bench.case.mode, shapes={"batch": tuple(range(1, 1 + max(self.caps.values())))})

    def close(self) -> None:
        if self.rig is not None:
            self.rig.close()
            self.rig = None


def trials(part: str, bench: WorldBench, devices: Sequence[str], args: argparse.Namespace) -> Iterator[Trial]:
    profile = bench.profile
    if part == "convoy":
        yield from convoy(profile, devices, args.seconds)
    elif part == "joint":
        yield from joint(profile, devices, args.streams)
    else:
        yield from seed(profile, devices, args.seconds)


def bench_of(
    part: str, devices: Sequence[str], mode: Any, dtype: str, args: argparse.Namespace, last: WorldBench | None
) -> WorldBench:
    """Build and profile the model of a part, unless the last part had the same."""
    models = {"seed-1gpu": ("wan2.2-5b", 1, 21), "joint": ("wan2.1-14b", 1, 9)}
    model, frames, window = models.get(part, ("wan2.1-1.3b", 1, 21))
    changes: dict[str, Any] = {}
    if args.small:
        model, window, changes = TINY, 6, {"blocks": 8, "width": 128, "heads": 2}
    streams = {"convoy": RING_STREAMS, "joint": args.streams}.get(part, 1)
    config = config_of(model, frames_per_chunk=frames, window_frames=window, decoder="none", dtype=dtype, **changes)
    sustained_s = args.sustained if devices[0].startswith("cuda") else 0.0
    case = WorldCase(tuple(devices), mode, args.workers, streams, profile_n=10, batches=(1, 4), sustained_s=sustained_s)
    same = last is not None and last.config == config and last.case.devices == case.devices
    bench = last if same and last is not None else profiled(config, replace(case, streams=1))
    if mode == "graph" and bench is not last:
        bench.profile = with_hand_overs(bench, max(case.batches) if len(devices) > 1 else 1)
    bench.case = case
    # Greedy means: whatever waits.
    bench.profile = replace(bench.profile, max_batch=4 if part.startswith("seed") else 16)
    return bench


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; no row begins that would go beyond")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--seconds", type=float, default=3.0, help="what is looked at of each row that runs flat out")
    parser.add_argument("--streams", type=int, default=4, help="streams of the joint placement")
    add_place(parser)
    return parser.parse_args()


def main() -> None:
    args, began_s = parse(), time.monotonic()
    names, mode, dtype = place_of(args, on_cpu=2)
    result: dict[str, Any] = {**provenance(torch.device(names[0].split(":")[0])), "devices": len(names), "mode": mode}
    result |= {"workers": args.workers, "noise": NOISE, "rows": [], "profiles": [], "slow": []}

    def left_s() -> float:
        return args.budget - (time.monotonic() - began_s)

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("window_frames", "dispatch", "chunk_frames")}), flush=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    bench: WorldBench | None = None
    for part in args.parts:
        needs = 1 if part == "seed-1gpu" else 2
        if len(names) < needs or left_s() < 15.0:
            keep({"part": part, "not_run": f"needs {needs} devices" if len(names) < needs else "out of time"})
            continue
        try:
            devices = names[:needs]
            known, bench = bench, None
            bench = bench_of(part, devices, mode, dtype, args, known)
            if bench is not known:
                result["profiles"].append(json.loads(bench.profile.to_json()))
                result["slow"].append(bench.slow)
            known = None
            some = list(trials(part, bench, devices, args))
            bed = Bed(bench, part, some)
            for trial in some:
                try:
                    keep(bed.row(trial, left_s))
                except Exception as error:  # one row must not cost the others their figures
                    keep({"part": part, "case": trial.name, "error": f"{type(error).__name__}: {error}"})
            bed.close()
        except Exception as error:
            keep({"part": part, "error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
