"""Benchmarks of streaming world models: one case is a model, a chunk shape and a plan; one row of the result each."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from stretto.core.plan import Mode, Placement, Plan
from stretto.deploy.drive import Inputs, Measured, drive
from stretto.deploy.profile import ProfileOptions, facts_of
from stretto.deploy.world_plans import SEVERAL, plan_of, predicted
from stretto.deploy.world_profiles import profile_worlds
from stretto.deploy.worlds import AnywhereModel, RandomWorld
from stretto.models.wan import DECODE
from stretto.models.wan_config import WanConfig
from stretto.models.wan_noise import chunk_key
from stretto.runtime.engine import Engine
from stretto.runtime.fleet import Workers
from stretto.runtime.layout import Streams, state_on, state_slots
from stretto.runtime.profiler import Times, hop_ms
from stretto.sched.hardware import CPU
from stretto.sched.profile import Profile

ACTION_HORIZON = 32  # of the action chunks that frames are converted to
_CONTEXT_BYTES = 2 * 10**9
START_S = 3.0  # of an engine: weights, rings, graphs


@dataclass(frozen=True)
class WorldCase:
    """How cases are run."""

    devices: tuple[str, ...]
    mode: Mode
    workers: Literal["threads", "processes"] = "threads"
    streams: int = 1
    seconds: float = 4.0
    """Length of the measured span of each case."""
    profile_n: int = 20
    sustained_s: float = 0.0
    """Profile blocks in launches in a row for so long, on every device; 0: one launch at a time, on the first alone."""
    at_once: bool = True
    """Time all devices at the same time, where they are timed in launches in a row; else one after the other."""
    batches: tuple[int, ...] = ()
    """Batch sizes to profile; none: one, and one for each denoise step."""
    profiles: tuple[Profile, ...] = ()
    """Measured before: one of the same model, device and chunk shape is not measured again."""


class WorldBench:
    """One model at one chunk shape: profiled once, then run under any plans."""

    def __init__(self, config: WanConfig, case: WorldCase) -> None:
        self.config, self.case = config, case
        self.world = RandomWorld(config)
        first = torch.device(case.devices[0] if case.devices[0].startswith("cuda") else "cpu")
        with torch.inference_mode():
            batches = case.batches or (1, len(config.levels))
            options = ProfileOptions(config.name, batches=batches, n=case.profile_n, sustained_s=case.sustained_s)
            known = self._known(first, max(batches))
            # What is timed one launch at a time is not slowed by a neighbour.
            loaded = first.type == "cuda" and case.sustained_s > 0.0
            places = [torch.device(name) for name in case.devices] if loaded else [first]
            turns = [places] if case.at_once else [[place] for place in places]
            found = (
                [p for some in turns for p in profile_worlds(config, some, case.mode, options)] if known is None else [known]
            )
            self.profile, *others = found
            slow = [other.work_s / self.profile.work_s for other in others]
            self.slow = {name: round(times, 4) for name, times in zip(case.devices[1:], slow, strict=False)}
            """Device -> how many times longer it takes than the first, under load and for one row."""
        free()
        self._model: AnywhereModel | None = None
        self._noise = np.random.default_rng(0).standard_normal((4, *config.latent_shape), dtype=np.float32)

    def _known(self, device: torch.device, most: int) -> Profile | None:
        """Return a profile that was measured before, for batches of as many rows as are wanted."""
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU.name
        wanted = (self.config.name, kind, facts_of(self.config))
        found = (p for p in self.case.profiles if (p.model, p.device, dict(p.facts)) == wanted and p.max_batch >= most)
        return next(found, None)

    @cached_property
    def describes(self) -> AnywhereModel:
        """The model without weights."""
        return self.world(device="meta", only=())

    @property
    def first_chunk(self) -> int:
        """The first chunk whose rings are full."""
        return -(-self.config.window_frames // self.config.frames_per_chunk)

    def rows(self, names: Sequence[str], left_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield a row for each plan; one that does not fit or fails says so in `skipped` or `error`.

        One that would take longer than what is left of `left_s` says so in `not_run`.
        """
        until = time.monotonic() + left_s
        for name in names:
            row = self.heading(name)
            try:
                plan = plan_of(name, self.profile, self.case.devices, self.case.mode)
                short = self.short_of_memory(plan)
                if left_s < math.inf and time.monotonic() + (need_s := self.seconds(plan)) > until:
                    yield row | {"not_run": f"out of time: {need_s:.0f} s"}
                    continue
                yield row | ({"skipped": short} if short else self.run(plan))
            except Exception as error:  # one case must not cost the others their figures
                yield row | {"error": f"{type(error).__name__}: {error}"}
            free()

    def heading(self, plan: str) -> dict[str, Any]:
        config, case = self.config, self.case
        return {
            "model": config.name,
            "dtype": config.dtype,
            "pixels": [config.pixel_height, config.pixel_width],
            "chunk_frames": config.frames_per_chunk,
            "window_frames": config.window_frames,
            "denoise_steps": config.denoise_steps,
            "decoder": config.decoder,
            "precision": config.precision,
            "plan": plan,
            "devices": len(case.devices) if plan in SEVERAL else 1,
            "streams": case.streams,
            "workers": case.workers,
        }

    def short_of_memory(self, plan: Plan) -> str:
        """Say what a plan lacks; nothing where all fits."""
        for device in plan.devices:
            if not device.name.startswith("cuda"):
                continue
            limit = torch.cuda.get_device_properties(device.name).total_memory - _CONTEXT_BYTES
            need = sum(self.memory(plan, device.name).values()) + self.profile.reserved_bytes
            if need > limit:
                return f"{device.name} needs {need / 1e9:.1f} GB of {limit / 1e9:.1f} GB"
        return ""

    def memory(self, plan: Plan, device: str) -> dict[str, int]:
        """Return bytes by part on a device. Several devices of one process each hold all weights."""
        describes = self.describes
        used = {
            v.stage for ps in plan.classes.values() for p in ps if p.device == device for v in describes.route.on(p.segment)
        }
        everything = self.case.workers == "threads"
        stages = [s for s in self.profile.order if everything or s in used]
        slots = state_slots(describes, plan, device, self.held(plan))
        state = state_on(describes, plan, device)
        chunks = 2 * plan.batch_cap(device) * max(1, self.case.streams) + plan.in_flight
        weights = sum(self.profile.stage(s).weight_bytes for s in stages)
        blocks = sum(self.profile.stage(s).weight_bytes for s in stages if s.startswith("block."))
        # The profile charges a block with both; codes take half of what they are of.
        coded = {} if self.config.precision == "dtype" else {"coded_weight_bytes": blocks // 3}
        return {
            "weight_bytes": weights - sum(coded.values()),
            **coded,
            "state_bytes": sum(slots[pool] * spec.nbytes for pool, some in state.items() for spec in some.values()),
            "value_bytes": (chunks + 1) * self.profile.chunk_bytes,
        }

    def run(self, plan: Plan) -> dict[str, Any]:
        """Run one plan to steady state and return its figures."""
        used = [d.name for d in plan.devices]
        for name in used:
            if name.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats(name)
        began = time.monotonic()
        engine = self.engine(plan)
        try:
            engine.warm()
            ready = time.monotonic()
            streams = [engine.open(seed=i) for i in range(self.case.streams)]
            spec = engine.model.conditions["context"]
            for stream in streams:
                stream.set_condition("context", torch.randn(spec.shape).to(getattr(torch, spec.dtype)))
            measured = drive(
                engine,
                streams,
                self.feed,
                first_chunk=self.first_chunk,
                in_flight=plan.in_flight,
                warm_chunks=plan.in_flight + 2,
                warm_s=0.5 * self.case.seconds,  # under load clocks fall
                seconds=self.case.seconds,
                burst=plan.in_flight,
            )
            ended = time.monotonic()
        finally:
            engine.close()
        peaks = {n: torch.cuda.max_memory_allocated(n) for n in used if n.startswith("cuda")}
        memory = {n: self.memory(plan, n) | ({"peak_bytes": peaks[n]} if n in peaks else {}) for n in used}
        spent = {"start_s": round(ready - began, 2), "run_s": round(ended - ready, 2)}
        return self.figures(plan, measured) | {
            "memory": memory, "graphs": measured.captures, "carriage": engine.carriage, "spent": spent,
        }  # fmt: skip

    def seconds(self, plan: Plan) -> float:
        """Return about how long `run` takes, by the simulator: start, warming up, and the measured span."""
        interval_s = self.expected(plan)["output_interval_ms"] / 1e3
        warm_s = max(0.5 * self.case.seconds, (plan.in_flight + 2) * interval_s)
        return START_S + warm_s + max(self.case.seconds, 4 * interval_s) + plan.in_flight * interval_s

    def expected(self, plan: Plan) -> dict[str, float]:
        """Return what the simulator says of a plan: steady output interval and median response, in milliseconds."""
        return predicted(self.profile, plan, self.case.streams, self.slow)

    def held(self, plan: Plan) -> Streams:
        """Return the streams that an engine holds: one of each class where a plan has several."""
        return dict.fromkeys(plan.classes, 1) if len(plan.classes) > 1 else self.case.streams

    def slots(self, plan: Plan) -> int:
        """Return the chunks that a device can hold at a time."""
        held = self.held(plan)
        counts = dict.fromkeys(plan.classes, held) if isinstance(held, int) else held
        batches = 2 * max(plan.batch_cap(d.name) for d in plan.devices) * sum(counts.values()) + plan.in_flight
        return min(batches, 1 + sum(n * plan.credit(name) for name, n in counts.items()))

    def engine(self, plan: Plan) -> Engine:
        """Make an engine for a plan. The model's weights are made once for all plans in one process."""
        slots = self.slots(plan)
        if self.case.workers == "processes":
            self._model = None
            free()
            return Engine(self.describes, plan, slots=slots, streams=self.held(plan), workers=Workers(self.world))
        if self._model is None:
            self._model = self.world.on(self.case.devices)
        return Engine(self._model, plan, slots=slots, streams=self.held(plan))

    def release(self) -> None:
        """Give back the weights, which the next engine makes anew."""
        self._model = None
        free()

    def feed(self, stream: int, chunk: int) -> Inputs:
        """Return the inputs of a chunk: noise, and where it is."""
        place = np.asarray([chunk, chunk_key(0, stream, chunk), 0], np.int64)
        return {"x": self._noise[chunk % len(self._noise)], "place": place}

    def figures(self, plan: Plan, measured: Measured) -> dict[str, Any]:
        """Return the row's figures: times in ms, rates per second."""
        config, chunks, interval = self.config, measured.chunks, measured.interval_ms
        intervals, latency = Times(tuple(measured.intervals_ms)), Times(tuple(measured.latencies_ms))
        busy = measured.busy_ms()
        frames = config.frames_per_chunk * config.time_stride * self.case.streams / interval * 1e3
        modes = sorted({chunk.mode for chunk in chunks})
        return {
            "mode": modes[0] if len(modes) == 1 else "mixed",
            "in_flight": plan.in_flight,
            "batch_cap": max((plan.batch_cap(d.name) for d in plan.devices), default=1),
            "largest_batch": max(n for chunk in chunks for n in chunk.batch_sizes.values()),
            "stage_ms": {s: round(p.cost(1) * 1e3, 4) for s, p in self.profile.stages.items()},
            "output_interval_ms": round(interval, 3),
            "output_interval_ms_p50": round(intervals.p50, 3),
            "output_interval_ms_p99": round(intervals.p99, 3),
            "response_latency_ms": round(latency.p50, 3),
            "response_latency_ms_p99": round(latency.p99, 3),
            "predicted": self.expected(plan),
            "eager_chunks": sum(chunk.mode == "eager" for chunk in chunks),
            "captured_while_measured": measured.captures - measured.captures_before,
            "chunks": len(chunks),
            "warm_chunks": measured.warm_chunks,
            "busy_ms": {d: round(ms, 3) for d, ms in busy.items()},
            "idle_share": {d: round(max(0.0, 1.0 - ms / interval), 4) for d, ms in busy.items()},
            **self._decode(plan),
            "transfer": self._transfer(plan, interval - max(busy.values(), default=0.0)),
            "frames_per_s": round(frames, 3),
            "conversions": {
                "what": f"one control step a pixel frame; an action chunk is {ACTION_HORIZON} control steps",
                "control_steps_per_s": round(frames, 3),
                "action_chunks_per_s": round(frames / ACTION_HORIZON, 4),
            },
        }

    def _decode(self, plan: Plan) -> dict[str, Any]:
        """Return what the decoder takes, its share of a chunk's whole work, and where the plan puts it; nothing without one."""
        if DECODE not in self.profile.order:
            return {}
        seconds = self.profile.stage(DECODE).cost(1)
        last = plan.classes["default"][-1]
        share = round(seconds / self.profile.work_s, 4)
        return {"decode": {"ms": round(seconds * 1e3, 3), "share_of_work": share, "device": last.device}}

    def _transfer(self, plan: Plan, not_busy_ms: float) -> dict[str, Any]:
        """Return the hops of one chunk, their time when measured alone, and the share of it that the interval hides."""
        placements = plan.classes["default"]
        hops = [(a, b) for a, b in itertools.pairwise(placements) if a.device != b.device]
        total = sum(self._hop_ms(a, b.device) for a, b in hops)
        hidden = 1.0 - min(1.0, max(0.0, not_busy_ms) / total) if total > 0 else None
        return {"hops": len(hops), "alone_ms": round(total, 4), "not_busy_ms": round(not_busy_ms, 3), "hidden_share": hidden}

    def _hop_ms(self, placement: Placement, to: str) -> float:
        if not (placement.device.startswith("cuda") and to.startswith("cuda")):
            return 0.0
        stage = self.describes.route.visits[placement.segment.stop - 1].stage
        return hop_ms(placement.device, to, self.profile.stage(stage).crossing_bytes)


def free() -> None:
    """Give back the device memory of engines that are no more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
