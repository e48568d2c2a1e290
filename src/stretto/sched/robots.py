"""Robots as a class of streams: how many a server can promise to be on time, and how one more is decided.

A robot asks every `period_s` and must have its answer within `deadline_s` (its delay budget, less the network). It is
admitted if the devices are not too busy, if its batch fits behind the longest piece of work that cannot be interrupted,
and if a simulation of everybody's requests says that the stated quantile is on time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.core.errors import ConfigError
from stretto.core.plan import Device, Placement, Plan
from stretto.core.route import Segment
from stretto.sched.outcome import Outcome, quantile
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

UTILISATION_CAP = 0.85
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Robot:
    """One robot's rhythm.

    Raises:
        ConfigError: on construction, if a time is not above zero.
    """

    name: str
    period_s: float
    deadline_s: float

    def __post_init__(self) -> None:
        for what, value in (("period_s", self.period_s), ("deadline_s", self.deadline_s)):
            if not value > 0 or not math.isfinite(value):
                raise ConfigError(what, got=value, expected="a finite time above 0")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a fleet can be served, and what decides it."""

    admitted: bool
    reason: str
    """`ok`, `deadline`, `blocking`, `utilisation` or `late`."""
    text: str
    utilisation: float
    batch: int
    p99_s: float = math.nan
    missed: float = 0.0
    """Share of requests refused or late in the simulation."""


@dataclass(frozen=True)
class Server:
    """Devices that serve one policy, each with a copy of it."""

    profile: Profile
    workers: int = 1
    max_batch: int = 8
    whole: bool = True
    """The route as one segment; else robots join and leave batches between visits."""
    blocking_s: float = 0.0
    """Longest piece of other work on the device that a request may have to wait for."""
    allowed_missed: float = 0.001
    seconds: float = 4.0
    """How long to simulate."""
    jitter: float = 0.02
    weather: Weather = field(default_factory=Weather)

    def batch_s(self, rows: int) -> float:
        p = self.profile
        launches = 1 if self.whole else len(p.visits)
        return p.launch_s * launches + sum(p.stage(v.stage).cost(rows) for v in p.visits)

    def judge(self, fleet: Sequence[Robot]) -> Verdict:
        """Decide whether all these robots can be on time."""
        if not fleet:
            return Verdict(True, "ok", "no robots", 0.0, 1)
        tightest = min(r.deadline_s for r in fleet)
        room = tightest - self.blocking_s
        if self.batch_s(1) > room:
            reason = "deadline" if self.batch_s(1) > tightest else "blocking"
            text = f"one request takes {self.batch_s(1) * 1e3:.1f} ms and may wait {self.blocking_s * 1e3:.1f} ms for other"
            return Verdict(False, reason, f"{text} work, the deadline is {tightest * 1e3:.1f} ms", 0.0, 1)
        batch = max(n for n in range(1, self.max_batch + 1) if self.batch_s(n) <= room)
        use = sum(self.batch_s(batch) / batch / r.period_s for r in fleet) / self.workers
        if use > UTILISATION_CAP:
            text = f"devices would be {use:.0%} busy in batches of {batch}, at most {UTILISATION_CAP:.0%} is promised"
            return Verdict(False, "utilisation", text, use, batch)
        outcome = self.simulate(fleet)
        asked = sum(len(s.submitted) for s in outcome.streams)
        answers = [(s, d) for s in outcome.streams for d in s.done]
        late = sum(out - due > s.promised_response_s for s, (_, due, out) in answers)
        missed = (late + sum(len(s.refused) for s in outcome.streams)) / max(1, asked)
        p99 = quantile([out - due for _, (_, due, out) in answers], 0.99)
        ok = missed <= self.allowed_missed
        text = f"{missed:.2%} of requests late or refused, at most {self.allowed_missed:.2%} allowed"
        return Verdict(ok, "ok" if ok else "late", text, use, batch, p99, missed)

    def simulate(self, fleet: Sequence[Robot]) -> Outcome:
        """Run everybody's requests, robots dealt out over the workers, phases spread evenly."""
        profile = self.profile
        devices = tuple(Device(f"worker:{i}", memory_bytes=profile.memory_bytes) for i in range(self.workers))
        n = len(profile.visits)
        cuts = [Segment(0, n)] if self.whole else [Segment(i, i + 1) for i in range(n)]
        classes = {d.name: tuple(Placement(s, d.name) for s in cuts) for d in devices}
        caps = {d.name: self.max_batch for d in devices}
        plan = Plan("robots", devices, classes, caps, in_flight=2, dispatch="deadline_limited")
        runs = [
            StreamRun(
                r.name, "policy", devices[i % self.workers].name, r.period_s, r.deadline_s, i * _GOLDEN % 1.0 * r.period_s
            )
            for i, r in enumerate(fleet)
        ]
        periods = max(r.period_s for r in fleet)
        weather = self.weather if self.weather.noise else Weather(self.weather.seed, self.jitter)
        if weather.ahead is None:
            weather = replace(weather, ahead=0)  # costs are of whole pieces, and `deadline_limited` decides when one ends
        return Simulation({"policy": Load(plan, profile)}, runs, weather=weather).run(max(self.seconds, 8 * periods))

    def most(self, robot: Robot, limit: int = 512) -> int:
        """Return how many robots of this rhythm can be on time together (by bisection: one more is never easier)."""
        fleet = [Robot(f"{robot.name}.{i}", robot.period_s, robot.deadline_s) for i in range(limit)]
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.judge(fleet[:middle]).admitted:
                low = middle
            else:
                high = middle - 1
        return low


class Fleet:
    """Robots that come and go at one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.robots: dict[str, Robot] = {}

    def arrive(self, robot: Robot) -> Verdict:
        """Admit a robot if everybody, it included, is predicted to be on time."""
        verdict = self.server.judge([*self.robots.values(), robot])
        if verdict.admitted:
            self.robots[robot.name] = robot
        return verdict

    def leave(self, name: str) -> None:
        self.robots.pop(name, None)

    def inference_delay(self, control_hz: Mapping[str, float]) -> dict[str, int]:
        """Return, for each robot with a control rate, the control steps that its p99.9 latency takes: its delay to plan for."""
        outcome = self.server.simulate(list(self.robots.values()))
        return {
            s.name: math.ceil(quantile(s.responses_s(), 0.999) * control_hz[s.name] - 1e-9)
            for s in outcome.streams
            if s.name in control_hz and s.done
        }
