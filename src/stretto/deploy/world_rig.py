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


@dataclass(frozen=True)
class HandOver:
    """What the host takes to hand a batch over, launches apart."""

    host_s: float
    """Before an idle device starts on a chunk that comes from elsewhere."""
    row_s: float = 0.0
    """More of that for each further chunk of a batch."""


def hand_over(bench: WorldBench, rows: int = 1, turns: int = 6) -> HandOver:
    """Time hand-overs: one batch at a time goes round all devices, so that every launch finds its device idle; medians.

    What its response takes beyond device times, which hold the launches, and copies is shared out over its arrivals. A batch
    of one chunk goes round, and one of `rows` chunks, of a stream each.

    Raises:
        StrettoError: if the engine cannot start.
    """
    bench.case = replace(bench.case, streams=rows)
    name = "by_block" if len(bench.case.devices) > 1 else "serial"
    plan = plan_of(name, bench.profile, bench.case.devices, bench.case.mode)
    plan = replace(plan, in_flight=1, batch_caps={d.name: rows for d in plan.devices})
    stops = sum(a.device != b.device for a, b in itertools.pairwise(plan.placements("default")))
    stage = bench.profile.stages[max(bench.profile.stages, key=lambda s: bench.profile.stages[s].crossing_bytes)]
    copy_s = stops * bench.profile.links["peer"].seconds(stage.crossing_bytes)
    rig = Rig(bench, plan)
    try:
        one, several = _rounds(rig, rows, turns)
    finally:
        rig.close()
    found = statistics.median(s - copy_s for s in one) / (1 + stops)
    more = statistics.median(s - copy_s for s in several) / (1 + stops) - found if rows > 1 else 0.0
    return HandOver(max(0.0, found), max(0.0, more / max(1, rows - 1)))


def _rounds(rig: Rig, rows: int, turns: int) -> tuple[list[float], list[float]]:
    """Send one chunk a few times around, then as many as there are rows; what each round takes beyond device times.

    Nothing of this may outlive the rig: streams hold an engine's memory.
    """
    streams = [rig.engine.open(seed=i) for i in range(rows)]
    for stream in streams:
        rig.prepare(stream)
    index = itertools.count(rig.bench.first_chunk)
    one = _beyond_s(rig, streams[:1], [next(index) for _ in range(turns + 2)])
    several = _beyond_s(rig, streams, [next(index) for _ in range(turns)]) if rows > 1 else []
    for stream in streams:
        stream.close()
    return one[2:], several[2:]


def _beyond_s(rig: Rig, streams: Sequence[Stream], chunks: Sequence[int]) -> list[float]:
    """Return, for each of these chunks of all streams together, what the last of them takes beyond device times."""
    found = []
    for index in chunks:
        begin_s = time.monotonic()
        with rig.engine.together():
            futures = [s.submit(rig.bench.feed(i, index), chunk=index) for i, s in enumerate(streams)]
        done = [future.result() for future in futures]
        took_s = time.monotonic() - begin_s
        found.append(took_s - sum(sum(chunk.device_ms.values()) for chunk in done) / 1e3)
    return found


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
