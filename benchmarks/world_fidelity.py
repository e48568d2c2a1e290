"""The simulator against the real executor, with world models on the GPUs at hand: one or two, in one process or in several.

    python benchmarks/world_fidelity.py --budget 150 --out benchmarks/results/world_fidelity_2x_h200.json

Every model is profiled first, on the devices and in the mode of the run, under load. Then scripts of one to four streams,
some of which arrive late or are cancelled on their way, run on the engine and in the simulator: the same plan, the same
dispatch functions. All graphs are captured first, and a script runs once in short before it is measured, so that devices are
under load. Rows have the output interval of every stream in every span between arrivals and cancels. The result is written
after each case; `--small` tries it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from world_arguments import add_place, place_of, profiled, with_hand_overs

from stretto.core.plan import Device, Plan
from stretto.deploy.profile import ProfileOptions, profile_world
from stretto.deploy.provenance import provenance
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_plans import plan_of
from stretto.deploy.world_rig import run
from stretto.deploy.world_trial import NOISE, Entry, Script, comparison, needed_s, pooled, simulated
from stretto.deploy.worlds import TINY, config_of
from stretto.models.wan_config import SPECS
from stretto.sched.cluster import StreamSpec
from stretto.sched.columns import Columns, Rank
from stretto.sched.pack import pack
from stretto.sched.plans import of_ranks
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Weather
from stretto.sched.verify import Trial

STREAMS = 4
LEAST_S = 1.3
"""Length of a span, at least."""
SHOWN = (
    "model", "case", "worst_error", "idle_share", "graphs", "captured_while_measured", "eager_chunks", "took_s",
    "skipped", "not_run", "error", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plan, and the classes of the streams that run under it, in phases between which streams arrive or are cancelled."""

    name: str
    plan: Plan
    classes: Sequence[str]
    arrives: Sequence[int] = ()
    """The phase in which each stream begins; none: all in the first."""
    cancelled: int | None = None
    """The stream that ends before one more phase, with chunks under way."""
    interval_s: float = 0.0
    """What every stream is promised and asked for; 0: they run flat out."""

    @property
    def phases(self) -> list[list[int]]:
        """Which streams are there in each phase."""
        arrives = self.arrives or [0] * len(self.classes)
        found = [[i for i, phase in enumerate(arrives) if phase <= now] for now in range(max(arrives) + 1)]
        return found if self.cancelled is None else [*found, [i for i in found[-1] if i != self.cancelled]]

    def script(self, profile: Profile, weather: Weather, chunks: int) -> Script:
        """Make a script in which every stream makes about `chunks` chunks in every phase, after the phase has settled."""
        least_s = LEAST_S * (1.0 if profile.work_s > 0.05 else 0.2)
        begins_s, spans = [0.0], []
        for there in self.phases:
            classes = [self.classes[i] for i in there]
            pace_s = self.interval_s or self._pace_s(classes, profile, weather)
            # What an arrival or a cancel stirs up is through after the chunks that were under way.
            settle_s = (2.0 if self.interval_s else 1.2 * max(self.plan.credit(c) for c in classes)) * pace_s
            # What is promised comes evenly; of what runs flat out, more chunks are needed for a mean.
            ends_s = begins_s[-1] + settle_s + max(chunks * pace_s * (0.8 if self.interval_s else 1.0), least_s)
            spans.append((begins_s[-1] + settle_s, ends_s))
            begins_s.append(ends_s)
        entries = self._entries(self.classes)
        for i, phase in enumerate(self.arrives):
            if phase:
                entries[i] = replace(entries[i], start_s=begins_s[phase])
        if self.cancelled is not None:
            entries[self.cancelled] = replace(entries[self.cancelled], stop_s=begins_s[-2])
        return Script(entries, begins_s[-1], spans)

    def _pace_s(self, classes: Sequence[str], profile: Profile, weather: Weather) -> float:
        span = (200.0 * profile.work_s, 600.0 * profile.work_s)
        script = Script(self._entries(classes), span[1], (span,))
        return max(t.interval_s(span) for t in simulated(profile, self.plan, script, weather))

    def _entries(self, classes: Sequence[str]) -> list[Entry]:
        # Streams that begin at the very same time would leave their first batches to chance.
        apart_s = self.interval_s / len(self.classes) or 0.011
        return [Entry(c, start_s=apart_s * i, interval_s=self.interval_s) for i, c in enumerate(classes)]


def tuned(plan: Plan, flying: int, cap: int | None = None) -> Plan:
    caps = plan.batch_caps if cap is None else {d.name: cap for d in plan.devices}
    return replace(plan, in_flight=flying, batch_caps=caps)


def cases(profile: Profile, devices: Sequence[str], bench: WorldBench) -> Iterator[Case]:
    """Yield the cases for these devices, what matters most first.

    Where the profile says that batches gain nothing, every plan but those named so takes one row a launch.
    """
    make = partial(plan_of, profile=profile, devices=devices, mode=bench.case.mode)
    alone, several = ["default"], ["default"] * STREAMS
    one_by_one = {"arrives": range(STREAMS), "cancelled": 1}
    if len(devices) == 1:
        whole = make("whole")
        yield Case("whole, 1 to 4 streams, one after another, one is cancelled", tuned(whole, 2), several, **one_by_one)
        yield from placed(profile, devices, bench)
        yield Case("batched over steps, 1 stream", make("batched"), alone)
        yield Case("whole, 1 stream", whole, alone)
        return
    # In order of arrival streams take turns, where by age a stream can gain a chunk in one round and lose it in the next.
    ring = tuned(make("by_block"), 2).with_dispatch("first_come_first_served")
    yield Case("by_block, 1 to 4 streams, one after another, one is cancelled", ring, several, **one_by_one)
    yield from placed(profile, devices, bench)
    yield Case("by_step, 1 stream", make("by_step"), alone)
    yield Case("by_stage, 1 stream", make("by_stage"), alone)
    yield Case("by_block, 1 stream", make("by_block"), alone)
    yield Case("by_step, 2 streams", tuned(make("by_step"), 2), alone * 2)
    yield other_cuts(profile, devices, bench)
    yield Case("by_block_batched, 1 stream", make("by_block_batched"), alone)
    yield Case("by_block, 1 stream, nothing launched ahead", replace(make("by_block"), ahead=0), alone)


def placed(profile: Profile, devices: Sequence[str], bench: WorldBench) -> Iterator[Case]:
    """Yield as many streams as fit, where the planner puts them, for a promise that leaves it a tenth of every device."""
    count = STREAMS if len(devices) > 1 else STREAMS - 1
    memory = memory_of(devices[0])
    pool = [Device(name, memory_bytes=memory) for name in devices]
    spec = StreamSpec("", profile.model, profile.work_s * count / len(devices) / 0.9, 20.0 * profile.work_s)
    specs = [replace(spec, name=f"s{i}") for i in range(count)]
    found = pack(pool, {profile.model: profile}, specs, "portfolio", Trial(16, 6, Weather(noise=NOISE)))
    if found.verified is None:
        return
    (plan,) = found.verified.plans.values()
    plan = exact(replace(plan, mode=bench.case.mode, credits={name: min(4, plan.credit(name)) for name in plan.classes}))
    here = len(found.placed)
    name = f"portfolio, {here} of {count} streams at their promise"
    changes = {"arrives": [0, 1, *[0] * (here - 2)], "cancelled": here - 1} if here > 2 else {}
    yield Case(
        name + (", one arrives, one is cancelled" if changes else ""),
        plan,
        list(plan.classes),
        **changes,
        interval_s=spec.interval_s,
    )


def other_cuts(profile: Profile, devices: Sequence[str], bench: WorldBench) -> Case:
    """One stream on each of two devices, and one that is spread over both and arrives later."""
    n, (a, b) = len(Columns.of(profile)), devices[:2]
    ranks = {"first": [Rank(0, n, a)], "both": [Rank(0, n // 2, a), Rank(n // 2, n, b)], "second": [Rank(0, n, b)]}
    pool = [Device(a), Device(b)]
    plan = of_ranks(profile, pool, ranks, quantum=-(-n // 2), credits=dict.fromkeys(ranks, 2), dispatch="oldest_chunk_first")
    plan = replace(plan, mode=bench.case.mode)
    return Case("other cuts, 3 streams, one arrives, one is cancelled", plan, list(ranks), arrives=[0, 1, 0], cancelled=2)


def exact(plan: Plan) -> Plan:
    """Graphs by rows are captured for the batches that come: no batch is padded."""
    return replace(plan, shapes={"batch": tuple(range(1, max(plan.batch_cap(d.name) for d in plan.devices) + 1))})


def memory_of(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory * 0.95) if device.startswith("cuda") else 0


def row_of(bench: WorldBench, case: Case, chunks: int, left_s: Callable[[], float]) -> dict[str, Any]:
    """Run one case; a case that cannot be run says why."""
    config, plan = bench.config, case.plan
    bench.case = replace(bench.case, streams=len(case.classes))  # an engine that holds no more has fewer graphs to capture
    row: dict[str, Any] = {
        "model": config.name,
        "chunk_frames": config.frames_per_chunk,
        "case": case.name,
        "plan": plan.kind,
        "dispatch": plan.dispatch,
        "devices": len(plan.devices),
        "streams": len(case.classes),
        "promised_interval_ms": round(case.interval_s * 1e3, 3) or None,
        "ahead": plan.ahead,
        "batch_caps": dict(plan.batch_caps),
        "credits": {name: plan.credit(name) for name in plan.classes},
    }
    weather = Weather(noise=NOISE, slow=bench.slow)
    script = case.script(bench.profile, weather, chunks)
    row["seconds"] = round(script.seconds, 2)
    row["script"] = [[e.stream_class, round(e.start_s, 4), round(min(e.stop_s, script.seconds), 4)] for e in script.entries]
    short = bench.short_of_memory(plan)
    if short or left_s() < needed_s(script):
        return row | ({"skipped": short} if short else {"not_run": f"needs {needed_s(script):.0f} s"})
    began_s = time.monotonic()
    done = run(bench, plan, script)
    rows = comparison(done.measured, done.expected, script.spans)
    return row | {
        "rows": rows,
        "worst_error": max((abs(r["error"]) for r in rows), default=None),
        "chunks_per_s": pooled(done.measured, done.expected, script.spans),
        **done.account(),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(r["error"]) for case in rows for r in case.get("rows", ())]
    if not errors:
        return {}
    within = sum(e <= 0.05 for e in errors)
    rates = [abs(r["error"]) for case in rows for r in case.get("chunks_per_s", ())]
    return {
        "intervals": len(errors),
        "within_5_percent": within,
        "error_mean": round(statistics.mean(errors), 4),
        "error_worst": round(max(errors), 4),
        "rate_error_worst": round(max(rates, default=math.nan), 4),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds; no case begins that would go beyond")
    parser.add_argument("--first-share", type=float, default=0.5, help="of the budget, for the first model")
    parser.add_argument("--models", nargs="*", default=["wan2.1-1.3b", "wan2.2-5b"], choices=[*SPECS, TINY])
    parser.add_argument("--chunk-frames", type=int, default=1)
    parser.add_argument("--window", type=int, default=21)
    parser.add_argument("--chunks", type=int, default=12, help="chunks of a stream in a span")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4], help="batch sizes to profile")
    parser.add_argument(
        "--also", nargs="*", type=int, default=[], help="profile again at the end, on so many blocks (0: all that fit)"
    )
    parser.add_argument("--only", nargs="*", default=[""], help="cases with one of these in `MODEL: NAME`")
    add_place(parser)
    return parser.parse_args()


def main() -> None:
    args, began_s = parse(), time.monotonic()
    devices, mode, dtype = place_of(args, on_cpu=1)
    models, window = ([TINY], 6) if args.small else (args.models, args.window)
    result: dict[str, Any] = {**provenance(torch.device(devices[0].split(":")[0])), "devices": len(devices)}
    result |= {"mode": mode, "workers": args.workers, "noise": NOISE, "host": {"cores": os.cpu_count()}, "cases": []}
    result |= {"profiles": [], "slow": [], "profiles_after": []}

    def save() -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    for i, model in enumerate(models):
        # What a model leaves of its share is the next one's.
        until_s = began_s + args.budget * (1.0 if i + 1 == len(models) else args.first_share + i / len(models))
        changes = {"blocks": 8, "width": 128, "heads": 2} if model == TINY else {}
        config = config_of(
            model, frames_per_chunk=args.chunk_frames, window_frames=window, decoder="none", dtype=dtype, **changes
        )
        sustained_s = args.sustained if devices[0].startswith("cuda") else 0.0
        case = WorldCase(devices, mode, args.workers, profile_n=12, batches=tuple(args.batches), sustained_s=sustained_s)
        bench = profiled(config, case)
        if mode == "graph":
            bench.profile = with_hand_overs(bench)
        result["profiles"].append(json.loads(bench.profile.to_json()))
        result["slow"].append(bench.slow)
        print(f"# {model}: profiled after {time.monotonic() - began_s:.1f} s", flush=True)
        for some in cases(bench.profile, devices, bench):
            if not any(part in f"{model}: {some.name}" for part in args.only):
                continue
            try:
                row = row_of(bench, some, args.chunks, lambda until_s=until_s: until_s - time.monotonic())
            except Exception as error:  # one case must not cost the others their figures
                row = {"model": model, "case": some.name, "error": f"{type(error).__name__}: {error}"}
            result["cases"].append(row)
            result["summary"] = summary(result["cases"])
            line = {k: row[k] for k in SHOWN if k in row}
            line["intervals"] = [(r["measured_ms"], r["simulated_ms"], r["error"]) for r in row.get("rows", ())]
            print(json.dumps(line), flush=True)
            save()
        bench.release()
        for sample in args.also:
            options = ProfileOptions(model, (1,), sustained_s=sustained_s, sample=sample)
            again = profile_world(config, torch.device(devices[0]), mode, options)
            result["profiles_after"].append({"sample": sample, **json.loads(again.to_json())})
            print(
                f"# again, {sample} blocks: {again.work_s * 1e3:.2f} ms of work, {bench.profile.work_s * 1e3:.2f} before",
                flush=True,
            )
        save()
        del bench
    print(json.dumps(result.get("summary")))


if __name__ == "__main__":
    main()
