"""Benchmarks of streaming world models: one case is a model, a chunk shape and a plan; one row of the result each."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from stretto.core.errors import ConfigError
from stretto.core.plan import Device, Mode, Placement, Plan
from stretto.core.route import Segment
from stretto.deploy.drive import Inputs, Measured, drive
from stretto.deploy.profile import ProfileOptions, profile_world
from stretto.deploy.worlds import AnywhereModel, RandomWorld
from stretto.models.wan_config import WanConfig
from stretto.models.wan_noise import chunk_key
from stretto.runtime.engine import Engine
from stretto.runtime.fleet import Workers
from stretto.runtime.layout import state_slots
from stretto.runtime.profiler import Times
from stretto.sched import plans
from stretto.sched.columns import Columns
from stretto.sched.profile import Profile

ONE = ("serial", "batched")
SEVERAL = ("by_step", "by_block", "by_block_batched", "by_stage", "circular")
ACTION_HORIZON = 32  # of the action chunks that frames are converted to
_CONTEXT_BYTES = 2 * 10**9
_AHEAD = 2  # chunks admitted beyond those that compute: a completion reaches the host after the next launch


@dataclass(frozen=True)
class WorldCase:
    """How cases are run."""

    devices: tuple[str, ...]
    mode: Mode
    workers: Literal["threads", "processes"] = "threads"
    streams: int = 1
    seconds: float = 4.0
    """Length of the measured span of each case."""
    profile_n: int = 10


def plan_of(name: str, profile: Profile, devices: Sequence[str], mode: Mode) -> Plan:
    """Make a plan by name.

    `serial` and `batched` use the first device: one chunk at a time, or one chunk a denoise step with all of them in one
    batch. The others use all devices; `by_block_batched` is `by_block` with the steps of different chunks in one batch.

    Raises:
        ConfigError: if the name is unknown.
        PlanError: if the plan does not fit these devices.
    """
    places = [Device(d) for d in devices]
    columns, steps = len(Columns.of(profile)), profile.steps
    if name == "serial":
        plan = plans.whole(profile, places[0], quantum=columns)
        plan = replace(plan, in_flight=1)
    elif name == "batched":
        plan = plans.by_block(profile, places[:1], quantum=columns, batch_cap=steps)
        plan = replace(plan, in_flight=steps + _AHEAD)
    elif name == "by_step":
        plan = plans.by_step(profile, places)
    elif name == "by_block":
        plan = replace(plans.by_block(profile, places, quantum=columns), in_flight=len(places))
    elif name == "by_block_batched":
        plan = plans.by_block(profile, places, quantum=columns, batch_cap=steps)
    elif name == "by_stage":
        plan = merged(plans.by_stage(profile, places))
    elif name == "circular":
        plan = plans.circular(profile, places, quantum=columns)
    else:
        raise ConfigError("plan", got=repr(name), expected=f"one of {(*ONE, *SEVERAL)}")
    if name in SEVERAL and name != "circular":
        plan = replace(plan, in_flight=plan.in_flight + _AHEAD)
    return replace(plan, mode=mode)


def merged(plan: Plan) -> Plan:
    """Join neighbouring segments of one device: the same work in fewer launches."""
    classes = {}
    for name, placements in plan.classes.items():
        runs = [list(run) for _, run in itertools.groupby(placements, key=lambda p: p.device)]
        classes[name] = tuple(Placement(Segment(run[0].segment.start, run[-1].segment.stop), run[0].device) for run in runs)
    return replace(plan, classes=classes)


class WorldBench:
    """One model at one chunk shape: profiled once, then run under any plans."""

    def __init__(self, config: WanConfig, case: WorldCase) -> None:
        self.config, self.case = config, case
        self.world = RandomWorld(config)
        first = torch.device(case.devices[0] if case.devices[0].startswith("cuda") else "cpu")
        with torch.inference_mode():
            options = ProfileOptions(config.name, batches=(1, len(config.levels)), n=case.profile_n)
            self.profile = profile_world(config, first, case.mode, options)
        _free()
        self._model: AnywhereModel | None = None
        self._noise = np.random.default_rng(0).standard_normal((4, *config.latent_shape), dtype=np.float32)

    @property
    def first_chunk(self) -> int:
        """The first chunk whose rings are full."""
        return -(-self.config.window_frames // self.config.frames_per_chunk)

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield a row for each plan; one that does not fit or fails says so in `skipped` or `error`."""
        for name in names:
            row = self.heading(name)
            try:
                plan = plan_of(name, self.profile, self.case.devices, self.case.mode)
                short = self.short_of_memory(plan)
                yield row | ({"skipped": short} if short else self.run(plan))
            except Exception as error:  # one case must not cost the others their figures
                yield row | {"error": f"{type(error).__name__}: {error}"}
            _free()

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
        describes = self.world(device="meta", only=())
        used = {
            v.stage for ps in plan.classes.values() for p in ps if p.device == device for v in describes.route.on(p.segment)
        }
        everything = self.case.workers == "threads"
        stages = [s for s in self.profile.order if everything or s in used]
        slots = state_slots(describes, plan, device, self.case.streams)
        state = 0
        for stage in used:
            key = next((k for v in describes.route.visits if v.stage == stage and (k := describes.state_key(v))), None)
            if key is not None:
                per_slot = sum(describes.state[n].nbytes for n in describes.route.stages[stage].state)
                state += per_slot * slots[key.pool]
        chunks = 2 * plan.batch_cap(device) * max(1, self.case.streams) + plan.in_flight
        return {
            "weight_bytes": sum(self.profile.stage(s).weight_bytes for s in stages),
            "state_bytes": state,
            "value_bytes": (chunks + 1) * self.profile.chunk_bytes,
        }

    def run(self, plan: Plan) -> dict[str, Any]:
        """Run one plan to steady state and return its figures."""
        used = [d.name for d in plan.devices]
        for name in used:
            if name.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats(name)
        engine = self._engine(plan)
        try:
            engine.warm()
            streams = [engine.open(seed=i) for i in range(self.case.streams)]
            spec = engine.model.conditions["context"]
            for stream in streams:
                stream.set_condition("context", torch.randn(spec.shape).to(getattr(torch, spec.dtype)))
            measured = drive(
                engine,
                streams,
                self._feed,
                first_chunk=self.first_chunk,
                in_flight=plan.in_flight,
                warm_chunks=2 * plan.in_flight + 2,
                seconds=self.case.seconds,
            )
        finally:
            engine.close()
        peaks = {n: torch.cuda.max_memory_allocated(n) for n in used if n.startswith("cuda")}
        memory = {n: self.memory(plan, n) | ({"peak_bytes": peaks[n]} if n in peaks else {}) for n in used}
        return self.figures(plan, measured) | {"memory": memory, "graphs": measured.captures}

    def _engine(self, plan: Plan) -> Engine:
        slots = 2 * max(plan.batch_cap(d.name) for d in plan.devices) * self.case.streams + plan.in_flight
        if self.case.workers == "processes":
            self._model = None
            _free()
            describes = self.world(device="meta", only=())
            return Engine(describes, plan, slots=slots, streams=self.case.streams, workers=Workers(self.world))
        if self._model is None:
            self._model = self.world.on(self.case.devices)
        return Engine(self._model, plan, slots=slots, streams=self.case.streams)

    def _feed(self, stream: int, chunk: int) -> Inputs:
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
            "chunks": len(chunks),
            "warm_chunks": measured.warm_chunks,
            "busy_ms": {d: round(ms, 3) for d, ms in busy.items()},
            "idle_share": {d: round(max(0.0, 1.0 - ms / interval), 4) for d, ms in busy.items()},
            "transfer": self._transfer(plan, interval - max(busy.values(), default=0.0)),
            "frames_per_s": round(frames, 3),
            "conversions": {
                "what": f"one control step a pixel frame; an action chunk is {ACTION_HORIZON} control steps",
                "control_steps_per_s": round(frames, 3),
                "action_chunks_per_s": round(frames / ACTION_HORIZON, 4),
            },
        }

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
        stage = self.world(device="meta", only=()).route.visits[placement.segment.stop - 1].stage
        return hop_ms(placement.device, to, self.profile.stage(stage).crossing_bytes)


def hop_ms(source: str, target: str, nbytes: int) -> float:
    """Time one copy between two CUDA devices, alone; median of 10. Synchronises both."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=target)
    here = torch.ones(nbytes, dtype=torch.uint8, device=source)
    times = []
    for _ in range(12):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        with torch.cuda.device(target):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            there.copy_(here, non_blocking=True)
            end.record()
            end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times[2:])[5]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fitting(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the plans that make sense on these devices, the ones on one device first."""
    return ONE if len(devices) == 1 else (*ONE, *SEVERAL)
