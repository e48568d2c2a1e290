"""A script of streams on the real engine, beside what the simulator expects of it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.core.plan import Plan
from stretto.deploy.world_bench import WorldBench, free
from stretto.deploy.world_plans import plan_of
from stretto.deploy.world_trial import NOISE, Script, Track, play, share_of, simulated
from stretto.runtime.engine import Stream
from stretto.sched.sim_state import Weather

_REHEARSALS = 4


@dataclass(frozen=True)
class Run:
    """A script as it went on the engine, and as the simulator expects it."""

    script: Script
    measured: Sequence[Track]
    expected: Sequence[Track]
    graphs: int
    captured: int
    """Graphs that were captured while it was measured."""
    carriage: str
    """How chunks crossed between devices."""

    def idle_share(self) -> dict[str, float]:
        """Return, for each device, the share of the spans in which no chunk that came out in them was computed."""
        busy: dict[str, float] = {}
        for track in self.measured:
            for (_, done), times in zip(track.out, track.busy_ms, strict=True):
                if any(a <= done <= b for a, b in self.script.spans):
                    for device, ms in times.items():
                        busy[device] = busy.get(device, 0.0) + ms
        seconds = sum(b - a for a, b in self.script.spans)
        return {d: round(max(0.0, 1.0 - ms / 1e3 / seconds), 4) for d, ms in busy.items()}

    def busy_ms(self) -> dict[str, float]:
        """Return, for each device, the mean device time of the chunks that came out in the spans."""
        counted = [
            times
            for track in self.measured
            for (_, done), times in zip(track.out, track.busy_ms, strict=True)
            if any(a <= done <= b for a, b in self.script.spans)
        ]
        devices = sorted({device for times in counted for device in times})
        return {d: round(statistics.mean(times.get(d, 0.0) for times in counted), 3) for d in devices}

    def account(self) -> dict[str, Any]:
        """Return what must be known beside the figures: idle time, graphs, failures."""
        out: dict[str, Any] = {
            "idle_share": self.idle_share(),
            "busy_ms_a_chunk": self.busy_ms(),
            "carriage": self.carriage,
            "graphs": self.graphs,
            "captured_while_measured": self.captured,
            "eager_chunks": sum(t.eager for t in self.measured),
            "all_chunks": sum(len(t.out) for t in self.measured),
        }
        failed = [t.failed for t in self.measured if t.failed]
        return out | ({"failed": failed} if failed else {})


class Rig:
    """One engine on which scripts run one after another, under plans that put everything in the same places.

    The plan that it is made for has the largest batches of all.
    """

    def __init__(self, bench: WorldBench, plan: Plan) -> None:
        """Make one; captures all graphs.

        Raises:
            StrettoError: if the engine cannot start.
        """
        self.bench = bench
        self.engine = bench.engine(plan)
        try:
            self.engine.warm()
        except BaseException:
            self.close()
            raise
        self._slots = bench.slots(plan)
        self._warm = False

    def run(self, script: Script, plan: Plan | None = None) -> Run:
        """Run a script, the first one after rehearsals until they need no new graphs, and simulate it. A plan takes over first.

        Raises:
            PlanError: if the plan puts something elsewhere, or has larger batches.
        """
        engine, bench = self.engine, self.bench
        if plan is not None and plan != engine.plan:
            engine.retune(plan)
        # At least once: devices are measured under load, which lowers their clocks.
        for _ in range(0 if self._warm else _REHEARSALS):
            before = engine.captures
            play(engine, script, bench.feed, bench.first_chunk, self.prepare, share=share_of(script))
            if engine.captures == before:
                break
        self._warm = True
        before = engine.captures
        tracks = play(engine, script, bench.feed, bench.first_chunk, self.prepare)
        weather = Weather(noise=NOISE, slow=bench.slow)
        expected = simulated(bench.profile, engine.plan, script, weather, slots=self._slots)
        return Run(script, tracks, expected, engine.captures, engine.captures - before, engine.carriage)

    def prepare(self, stream: Stream) -> None:
        spec = self.engine.model.conditions["context"]
        stream.set_condition("context", torch.randn(spec.shape).to(getattr(torch, spec.dtype)))

    def close(self) -> None:
        self.engine.close()
        del self.engine
        free()


def host_s(bench: WorldBench, chunks: int = 6) -> float:
    """Return what the host takes, launches apart, before an idle device starts on a chunk that comes from elsewhere; median.

    One chunk at a time goes round all devices, so that every launch finds its device idle. What its response takes beyond
    device times, which hold the launches, and copies is shared out over its arrivals.

    Raises:
        StrettoError: if the engine cannot start.
    """
    name = "by_block" if len(bench.case.devices) > 1 else "serial"
    plan = replace(plan_of(name, bench.profile, bench.case.devices, bench.case.mode), in_flight=1)
    stops = [a.device != b.device for a, b in itertools.pairwise(plan.placements("default"))]
    stage = bench.profile.stages[max(bench.profile.stages, key=lambda s: bench.profile.stages[s].crossing_bytes)]
    copies_s = sum(stops) * bench.profile.links["peer"].seconds(stage.crossing_bytes)
    rig = Rig(bench, plan)
    found = []
    try:
        stream = rig.engine.open()
        rig.prepare(stream)
        for turn in range(chunks + 2):
            index = bench.first_chunk + turn
            begin_s = time.monotonic()
            chunk = stream.submit(bench.feed(0, index), chunk=index).result()
            took_s = time.monotonic() - begin_s
            found.append((took_s - sum(chunk.device_ms.values()) / 1e3 - copies_s) / (1 + sum(stops)))
        stream.close()
    finally:
        rig.close()
    return max(0.0, statistics.median(found[2:]))


def run(bench: WorldBench, plan: Plan, script: Script) -> Run:
    """Run a script on an engine of its own.

    Raises:
        StrettoError: if the engine cannot start.
    """
    rig = Rig(bench, plan)
    try:
        return rig.run(script)
    finally:
        rig.close()
