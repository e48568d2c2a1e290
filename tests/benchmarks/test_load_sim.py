"""Fleets of robots on a simulated clock, with the costs of pi0.5 at true shape as they were measured on one H200."""

from __future__ import annotations

from functools import cache
from typing import Any

import load_sim
import pytest
from fleet import Demand

SIZES = (1, 2, 4, 6, 8, 12, 16)
MEASURED_MS = {
    "vision": (2.2652, 3.5554, 5.9461, 8.3652, 11.6177, 16.9577, 23.1049),
    "prefix": (6.0292, 10.8447, 21.7853, 29.779, 42.833, 60.7467, 86.5842),
    "denoise": (1.187, 1.1442, 1.3101, 1.4075, 1.5869, 2.0534, 2.4531),
}
SECONDS = 6.0
CAPACITY = 95.0  # chunks/s with 10 robots, all of them on time


def padded(table: tuple[float, ...]) -> list[float]:
    return [table[next(i for i, size in enumerate(SIZES) if size >= n)] for n in range(1, SIZES[-1] + 1)]


COSTS_MS = {stage: padded(table) for stage, table in MEASURED_MS.items()}


@cache
def trial(
    robots: int, plan: str = "per_visit", noise: float = 0.02, jitter: float = 0.1, loop: str = "closed"
) -> dict[str, Any]:
    case = load_sim.Case(load_sim.line(COSTS_MS, plan, 8), Demand(jitter=jitter, loop=loop), noise=noise)
    return case.trial(robots, SECONDS)


def test_ten_robots_are_on_time_where_one_at_a_time_serves_four() -> None:
    single = load_sim.Case(load_sim.line(COSTS_MS, "whole", 1), Demand(), single=True)
    assert trial(10)["missed"] <= 0.01
    assert single.trial(4, SECONDS)["missed"] <= 0.01
    assert single.trial(6, SECONDS)["missed"] > 0.1


@pytest.mark.parametrize("plan", ["per_visit", "stages"])
@pytest.mark.parametrize("robots", [15, 20, 30])
def test_goodput_is_kept_under_overload(plan: str, robots: int) -> None:
    assert trial(robots, plan)["goodput_chunks_s"] >= CAPACITY


@pytest.mark.parametrize(("noise", "jitter", "loop"), [(0.1, 0.1, "closed"), (0.02, 0.5, "closed"), (0.1, 0.3, "open")])
def test_goodput_is_kept_when_costs_and_robots_jitter(noise: float, jitter: float, loop: str) -> None:
    assert trial(16, "per_visit", noise, jitter, loop)["goodput_chunks_s"] >= 0.9 * CAPACITY


@pytest.mark.parametrize("robots", [15, 20])
def test_under_overload_no_robot_starves_and_hardly_a_started_chunk_is_late(robots: int) -> None:
    found = trial(robots)
    mean = found["goodput_chunks_s"] / robots
    assert found["goodput_worst_robot"] >= 0.7 * mean
    assert set(found["refused"]) == {"deadline"}
    assert found["late"] <= 0.02 * found["goodput_chunks_s"] * (SECONDS - 1.0)


def test_a_host_that_does_not_know_what_the_device_has_yet_to_do_serves_fewer() -> None:
    case = load_sim.Case(load_sim.line(COSTS_MS, "per_visit", 8), Demand())
    shop = load_sim.Shop(case.line, load_sim.policy("deadline_limited"), case.demand, 16, 16, knows_backlog=False)
    assert load_sim.measure(shop, SECONDS)["goodput_chunks_s"] < 0.8 * trial(16)["goodput_chunks_s"]


def test_a_trial_is_the_same_each_time() -> None:
    assert trial.__wrapped__(12) == trial(12)


def test_costs_between_captured_sizes_lie_on_straight_lines() -> None:
    table = load_sim.every_size(padded((1.0, 2.0, 4.0, 4.5, 5.0, 9.0, 9.5)))
    assert table[:8] == [1.0, 2.0, 3.0, 4.0, 4.25, 4.5, 4.75, 5.0]
    assert table[8:12] == [6.0, 7.0, 8.0, 9.0]
