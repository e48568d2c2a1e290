"""Fleets of robots on a simulated clock, with the costs of pi0.5 at true shape as they were measured on one H200."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import load_predict
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


@pytest.mark.parametrize("demand", [Demand(), Demand(deadline_ms=200.0, loop="open"), Demand(chunks_hz=5.0, deadline_ms=200.0)])
def test_as_many_robots_are_on_time_as_can_be_whatever_their_phases(demand: Demand) -> None:
    plan = load_sim.line(COSTS_MS, "stages", 8)
    (most, _), (spread, batch) = (load_predict.most_served(plan, demand, batches) for batches in (1, 2))
    assert 1 < batch <= 8
    found = load_sim.Case(plan, demand).predict(SECONDS, (), spread)["largest"]["robots"]
    assert 0.9 * spread <= found <= most + 1


def test_predictions_join_the_rows_of_a_result_and_say_that_they_are_none(tmp_path: Path) -> None:
    costs = {"vision": COSTS_MS["vision"], "prefix": COSTS_MS["prefix"], "denoise": COSTS_MS["denoise"]}
    rows = [
        {"precision": "dtype", "demand": asdict(Demand())},
        {"precision": "fp8", "demand": asdict(Demand()), "left": "no time"},
    ]
    known = {"dtype": {"costs_ms": costs, "single_flight_ms": 20.6}}
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"plan": "stages", "cap": 8, "denoise_steps": 10, "precisions": known, "demands": rows}))
    load_predict.main([str(file)])
    first, second = json.loads(file.read_text())["demands"]
    assert "predicted" not in second
    told = first["predicted"]
    assert told.pop("what") == "simulated, not measured"
    robots = {name: case["largest"]["robots"] for name, case in told.items()}
    peers = sorted(load_predict.PEERS_MS, key=lambda name: load_predict.PEERS_MS[name][0])
    assert [robots[p] for p in peers] == sorted((robots[p] for p in peers), reverse=True)
    assert robots["deadline_limited"] >= 2 * robots["single_flight"] > 2
    assert all("H200" in told[p]["source"] for p in peers)


def test_a_robot_that_waits_beyond_its_beat_has_missed_it() -> None:
    case = load_sim.Case(load_sim.one_at_a_time(40.0), Demand(deadline_ms=10000.0), single=True)
    found = case.trial(5, SECONDS)
    assert found["late"] == 0
    assert found["missed"] == pytest.approx(0.5, abs=0.06)


def test_costs_of_pieces_are_shared_among_their_visits() -> None:
    costs = load_predict.per_visit_ms({"vision": [2.0], "denoise+denoise": [3.0, 4.0]})
    assert costs == {"vision": [2.0], "denoise": [1.5, 2.0]}
    with pytest.raises(ValueError, match="one stage"):
        load_predict.per_visit_ms({"vision+prefix": [2.0]})
