"""Admission of robots by what the policy at hand was measured to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from observations import observation

from stretto.core.errors import CapacityError, ConfigError
from stretto.core.plan import per_visit, whole
from stretto.deploy.admission import Gate, profile_of
from stretto.deploy.policy import PolicyOptions, load_policy
from stretto.models import pi0
from stretto.sched.profile import Profile

OPTIONS = PolicyOptions(device="cpu", max_batch=4, degenerate="hold", threads=1, denoise_steps=2)


def profile(kind: str, ms: tuple[float, ...], beside_ms: float = 0.0) -> Profile:
    """A policy whose whole route takes `ms` for a batch of 1, 2, ..."""
    route = pi0.tiny()[0].route
    plan = whole(route, "cpu", batch_cap=4) if kind == "whole" else per_visit(route, "cpu", batch_cap=4)
    pieces = {route.signature(p.segment) for p in plan.classes["default"]}
    visits = 1 if kind == "whole" else len(route)
    return profile_of("pi05", route, plan, {signature: [t / 1e3 / visits for t in ms] for signature in pieces}, beside_ms / 1e3)


def refusal(gate: Gate, robot: int) -> str:
    """Return why a robot was not admitted; empty if it was."""
    try:
        gate.enter(robot)
    except CapacityError as error:
        return error.reason
    return ""


@pytest.mark.parametrize("kind", ["whole", "per_visit", "overlapped"])
def test_robots_are_admitted_while_all_of_them_are_on_time(kind: str) -> None:
    gate = Gate(period_ms=100.0, deadline_ms=80.0)
    gate.open(profile(kind, (20.0, 22.0, 24.0, 26.0)))
    reasons = [refusal(gate, robot) for robot in range(20)]
    admitted = reasons.index(reasons[-1])
    # One at a time, at most five could be served; batches of four serve up to fifteen.
    assert 5 < admitted <= 15
    assert reasons[:admitted] == [""] * admitted
    assert reasons[-1] in ("utilisation", "late")
    gate.leave(0)
    gate.enter("another")


@pytest.mark.parametrize("kind", ["whole", "per_visit"])
def test_second_runs_beside_fp8_count_when_robots_are_admitted(kind: str) -> None:
    def admitted(beside_ms: float) -> int:
        gate = Gate(period_ms=100.0, deadline_ms=80.0)
        gate.open(profile(kind, (20.0, 22.0, 24.0, 26.0), beside_ms))
        return [refusal(gate, robot) for robot in range(20)].count("")

    # 6.5 ms a robot in batches of four, and as much again for second runs.
    assert admitted(6.5) <= 0.6 * admitted(0.0)


def test_a_robot_whose_deadline_is_shorter_than_one_inference_is_never_admitted() -> None:
    gate = Gate(period_ms=100.0, deadline_ms=10.0)
    gate.open(profile("whole", (20.0, 22.0)))
    with pytest.raises(CapacityError, match=r"one request takes 20\.0 ms"):
        gate.enter(0)


def test_half_a_rhythm_is_refused() -> None:
    with pytest.raises(ConfigError, match="both or none"):
        Gate(100.0, None)
    with pytest.raises(ConfigError, match="period_s"):
        Gate(0.0, 10.0)


def test_a_policy_refuses_the_robot_too_many_and_serves_the_others(tiny_checkpoint: Path) -> None:
    policy = load_policy(tiny_checkpoint, replace(OPTIONS, robot_period_ms=1e5, robot_deadline_ms=5e4))
    policy.warm()
    first = policy.open_session("a")
    assert policy.infer(observation(0))["actions"].shape == (10, 7)
    policy.close_session(first)
    policy.close()
    tight = load_policy(tiny_checkpoint, replace(OPTIONS, robot_period_ms=100.0, robot_deadline_ms=0.001))
    tight.warm()
    with pytest.raises(CapacityError, match="one request takes"):
        tight.open_session("b")
    # Who calls in process is no robot of the fleet.
    assert tight.infer(observation(0))["actions"].shape == (10, 7)
    tight.close()
