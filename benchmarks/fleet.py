"""Simulated robots that ask a server for action chunks by the wall clock, and what became of their requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np
from fcfs_single_flight import Inputs

from stretto.core.chunk import Chunk
from stretto.core.errors import RefusedError, StrettoError


@dataclass(frozen=True)
class Demand:
    """What every robot asks for."""

    chunks_hz: float = 10.0
    executed_steps: int = 5
    deadline_ms: float = 100.0
    jitter: float = 0.1
    """Share of the period by which an observation may be early or late."""
    network_ms: float = 2.0
    """One way."""
    network_jitter_ms: float = 1.0
    loop: str = "closed"
    phases: str = "any"
    """`any`: robots start anywhere in their period. `together`: one trigger for all, which the jitter then spreads."""
    also: tuple[Demand, ...] = ()
    """What other robots of the same fleet ask for: robots take this demand and these in turn."""

    def of(self, robot: int) -> Demand:
        """Return what one robot of a fleet asks for."""
        kinds = (self, *self.also)
        return kinds[robot % len(kinds)]

    @property
    def kinds(self) -> dict[Demand, float]:
        """Demand -> its share of the robots."""
        each = [replace(d, also=()) for d in (self, *self.also)]
        return {d: each.count(d) / len(each) for d in dict.fromkeys(each)}

    @property
    def rate_hz(self) -> float:
        """Chunks a second that a robot asks for on average."""
        return sum(share * d.chunks_hz for d, share in self.kinds.items())

    @property
    def period_s(self) -> float:
        return 1.0 / self.chunks_hz

    def __str__(self) -> str:
        said = []
        for d, share in self.kinds.items():
            of_all = "" if share == 1 else f"{share:.0%} "
            at_once = " together" if d.phases == "together" else ""
            said.append(f"{of_all}{d.chunks_hz:g}/s of {d.executed_steps} steps in {d.deadline_ms:g} ms {d.loop}{at_once}")
        return ", ".join(said)

    @property
    def first_within_s(self) -> float:
        """Time within which a robot's first observation falls."""
        return 0.0 if self.phases == "together" else self.period_s

    @property
    def control_hz(self) -> float:
        return self.chunks_hz * self.executed_steps


SETTINGS = tuple(f for f in Demand.__dataclass_fields__ if f != "also")
"""What can be said of a demand in one word each."""


def read_back(saved: Mapping[str, Any]) -> Demand:
    """Return a demand from what `asdict` made of it."""
    return Demand(
        **{name: saved[name] for name in SETTINGS if name in saved}, also=tuple(read_back(d) for d in saved.get("also", ()))
    )


def beats_passed(planned_s: float, free_s: float, period_s: float) -> int:
    """Return which beat after a planned one a robot that is free again observes for: the next, or the newest it has missed.

    A robot that waited beyond a beat observes at once and is back on its grid afterwards; beats that passed altogether are
    lost.
    """
    return max(1, int((free_s - planned_s) / period_s + 1e-9))


class Server(Protocol):
    name: str

    def join(self, robot: int) -> None: ...
    def leave_all(self) -> None: ...
    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]: ...
    def close(self) -> None: ...


@dataclass
class Asked:
    """One request, as its robot saw it."""

    robot: int
    observed_s: float
    there_s: float
    """Network, one way each."""
    back_s: float
    arrived_s: float = float("nan")
    status: str = "ok"
    reason: str = ""
    chunk: Chunk | None = None

    @property
    def latency_s(self) -> float:
        return self.arrived_s - self.observed_s


@dataclass(order=True)
class _Event:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class Trial:
    """N robots against one server for some seconds of wall clock, driven from one thread."""

    def __init__(self, server: Server, demand: Demand, robots: int, inputs: Sequence[Inputs], seed: int) -> None:
        self.server, self.demand, self.robots, self.inputs = server, demand, robots, inputs
        self.rng = np.random.default_rng(seed)
        self.asked: list[Asked] = []
        self.skipped: list[tuple[int, float]] = []
        """Robot and time of each beat at which it was still waiting and for which it never observed."""
        self._events: list[_Event] = []
        self._numbers = 0
        self._wake = threading.Condition()
        self._open = 0

    def run(self, seconds: float) -> list[Asked]:
        """Run, wait for what is still out, and return every request in order of observation."""
        begin_s = time.monotonic() + 0.05
        self._end_s = begin_s + seconds
        for robot in range(self.robots):
            self.server.join(robot)
            phase_s = float(self.rng.uniform(0, self.demand.of(robot).first_within_s))
            self._at(begin_s + phase_s, lambda r=robot: self._observe(r, None))
        while self._step():
            pass
        give_up_s = time.monotonic() + 30.0
        with self._wake:
            while self._open and time.monotonic() < give_up_s:
                self._wake.wait(0.1)
        self.server.leave_all()
        return sorted(self.asked, key=lambda a: a.observed_s)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        with self._wake:
            self._numbers += 1
            heappush(self._events, _Event(at_s, self._numbers, act))
            self._wake.notify()

    def _step(self) -> bool:
        with self._wake:
            now_s = time.monotonic()
            if not self._events:
                if not self._open or now_s > self._end_s:
                    return False
                self._wake.wait(0.02)
                return True
            if self._events[0].at_s > now_s:
                self._wake.wait(self._events[0].at_s - now_s)
                return True
            event = heappop(self._events)
        event.act()
        return True

    def _observe(self, robot: int, planned_s: float | None) -> None:
        now_s = time.monotonic()
        if now_s >= self._end_s:
            return
        planned_s = now_s if planned_s is None else planned_s
        d = self.demand.of(robot)
        ways = (d.network_ms + d.network_jitter_ms * self.rng.uniform(0, 1, 2)) / 1e3
        asked = Asked(robot, now_s, *map(float, ways))
        self.asked.append(asked)
        with self._wake:
            self._open += 1
        self._at(now_s + asked.there_s, lambda: self._send(asked, planned_s))
        if d.loop == "open":
            self._next(robot, planned_s, now_s)

    def _next(self, robot: int, planned_s: float, free_s: float) -> None:
        """Plan the next observation on the robot's own grid; one that waited beyond its beat observes as soon as it can."""
        d = self.demand.of(robot)
        period_s = d.period_s
        beats = beats_passed(planned_s, free_s, period_s)
        self.skipped += [(robot, planned_s + i * period_s) for i in range(1, beats)]
        grid_s = planned_s + beats * period_s
        off_s = float(self.rng.uniform(-1, 1)) * d.jitter * period_s
        self._at(max(free_s, grid_s + off_s), lambda: self._observe(robot, grid_s))

    def _send(self, asked: Asked, planned_s: float) -> None:
        d = self.demand.of(asked.robot)
        deadline_s = asked.observed_s + d.deadline_ms / 1e3 - asked.back_s
        inputs = self.inputs[len(self.asked) % len(self.inputs)]
        future = self.server.submit(asked.robot, inputs, deadline_s)
        future.add_done_callback(lambda f: self._answered(asked, planned_s, f))

    def _answered(self, asked: Asked, planned_s: float, future: Future[Chunk]) -> None:
        asked.arrived_s = time.monotonic() + asked.back_s
        d = self.demand.of(asked.robot)
        error = None if not future.cancelled() else StrettoError("dropped at the end")
        error = error or future.exception()
        if error is not None:
            asked.status = "refused" if isinstance(error, RefusedError) else "failed"
            asked.reason = getattr(error, "reason", "") or type(error).__name__
        else:
            asked.chunk = future.result()
            asked.status = "late" if asked.latency_s * 1e3 > d.deadline_ms else "ok"
        if d.loop == "closed":
            self._next(asked.robot, planned_s, asked.arrived_s)
        with self._wake:
            self._open -= 1
            self._wake.notify()


def summary(
    asked: Sequence[Asked],
    robots: int,
    demand: Demand,
    warmup_s: float,
    seconds: float,
    skipped: Sequence[tuple[int, float]] = (),
) -> dict[str, Any]:
    """Return what one trial found; the first `warmup_s` do not count. `skipped` are a trial's beats without a request.

    Where robots ask for different things, `kinds` says what became of each, and `missed_worst_kind` is that of the worst.
    """
    first_s = min(a.observed_s for a in asked)
    begin_s = first_s + warmup_s
    counted = [a for a in asked if a.observed_s >= begin_s]
    lost = [robot for robot, beat_s in skipped if begin_s <= beat_s < first_s + seconds]
    answered = [a for a in counted if a.chunk is not None]
    by_robot = [[a for a in counted if a.robot == r] for r in range(robots)]
    beats = [len(mine) + lost.count(robot) for robot, mine in enumerate(by_robot)]
    missed = [1 - sum(a.status == "ok" for a in mine) / n for mine, n in zip(by_robot, beats, strict=True) if n]
    reasons = sorted({a.reason for a in counted if a.reason})
    latencies = [a.latency_s * 1e3 for a in answered] or [float("nan")]
    batches = [max(a.chunk.batch_sizes.values()) for a in answered if a.chunk] or [0]
    on_time = sum(a.status == "ok" for a in counted)
    kinds = [_of_kind(kind, demand, counted, lost) for kind in demand.kinds]
    return {
        "robots": robots,
        "requests": len(counted),
        "demand_chunks_s": round(sum(demand.of(r).chunks_hz for r in range(robots)), 3),
        "goodput_chunks_s": round(on_time / (seconds - warmup_s), 3),
        "missed": round(1 - on_time / sum(beats), 5) if counted else 1.0,
        "missed_worst_kind": max(k["missed"] for k in kinds) if counted else 1.0,
        "missed_worst_robot": round(max(missed), 5) if missed else 1.0,
        "late": sum(a.status == "late" for a in counted),
        "skipped": len(lost),
        "refused": {reason: sum(a.reason == reason for a in counted) for reason in reasons},
        "latency_ms_p50": round(float(np.quantile(latencies, 0.5)), 3),
        "latency_ms_p99": round(float(np.quantile(latencies, 0.99)), 3),
        "batch_mean": round(float(np.mean(batches)), 3),
        "batch_max": int(max(batches)),
        **({"kinds": kinds} if len(kinds) > 1 else {}),
    }


def _of_kind(kind: Demand, demand: Demand, counted: Sequence[Asked], lost: Sequence[int]) -> dict[str, Any]:
    mine = [a for a in counted if replace(demand.of(a.robot), also=()) == kind]
    beats = len(mine) + sum(replace(demand.of(robot), also=()) == kind for robot in lost)
    latencies = [a.latency_s * 1e3 for a in mine if a.chunk is not None]
    return {
        "demand": str(kind),
        "requests": len(mine),
        "missed": round(1 - sum(a.status == "ok" for a in mine) / beats, 5) if beats else 0.0,
        "latency_ms_p99": round(float(np.quantile(latencies, 0.99)), 3) if latencies else None,
    }


def trace_lines(asked: Sequence[Asked], demand: Demand, horizon: int) -> list[str]:
    """Return the requests in the form that `stretto roofline` reads."""
    lines = []
    for a in asked:
        d = demand.of(a.robot)
        fixed = {
            "executed_steps": d.executed_steps,
            "control_hz": d.control_hz,
            "horizon": horizon,
            "deadline_s": d.deadline_ms / 1e3,
            "mode": "naive",
        }
        line: dict[str, Any] = {**fixed, "robot": str(a.robot), "t_s": a.observed_s, "status": a.status}
        if a.reason:
            line["reason"] = a.reason
        if a.chunk is not None:
            queue_s = a.chunk.queue_ms / 1e3
            network_s = a.there_s + a.back_s
            inference_s = max(0.0, a.latency_s - network_s - queue_s)
            stages = {name: ms / 1e3 for name, ms in a.chunk.stage_ms.items()}
            parts = {"observe_s": 0.0, "transfer_s": network_s, "queue_s": queue_s, "inference_s": inference_s}
            line |= {**parts, "actuate_s": 0.0, "batch": max(a.chunk.batch_sizes.values()), "stage_s": stages}
        lines.append(json.dumps(line))
    return lines
