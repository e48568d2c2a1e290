"""A robot under a control clock that never waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from three_robots import KINDS, Robot, World
from three_robots_result import Run, draw, summary, typical_round

from stretto.evals.workers import Worker

WORLD = World("line_world:LineWorld", 50.0, (), 1, camera_every=2)


class Controller:
    """Moves left; the third command comes late."""

    def __init__(self, late_s: float) -> None:
        self.late_s, self.calls = late_s, 0

    def infer(self, observation: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 3:
            time.sleep(self.late_s)
        return {"actions": np.array([-1.0], np.float32), "broker": {"starved": False}}


def live(late_s: float, limit: int) -> Run:
    worker = Worker(WORLD.env)
    robot = Robot(Run("r", "left", limit, round=1, needed=10), 1, WORLD, worker)
    try:
        report = robot.prepare()
        robot.live(report, Controller(late_s), time.monotonic())  # type: ignore[arg-type]
    finally:
        worker.close()
    return robot.run


def test_the_world_goes_on_while_a_controller_is_late() -> None:
    run = live(0.5, limit=100)
    assert run.success
    assert 20 <= run.longest_stop <= run.still
    assert run.steps == len(run.speeds)
    assert run.speeds.count(0.0) == run.still


def test_a_robot_that_stands_still_for_too_long_fails() -> None:
    run = live(0.5, limit=15)
    assert not run.success
    assert run.steps == 15


def ended(number: int, steps: int, *, success: bool = True) -> Run:
    return Run("r", "left", 20, round=number, needed=10, success=success, steps=steps, still=2, speeds=[1.0, 0.0])


def test_a_robot_is_done_if_it_succeeds_within_the_time_allowed() -> None:
    runs = [ended(1, 12), ended(1, 13), ended(2, 12), ended(2, 11, success=False), ended(3, 10), ended(3, 11)]
    found = summary(runs, 1.25)
    assert found["robots_done_by_round"] == [1, 1, 2]
    assert found["rounds_with_all_done"] == 1
    assert (found["robots_done"], found["robots"]) == (4, 6)
    assert found["robots_done_by_takt"]["1.3"] == 5


def test_the_round_that_is_shown_is_typical_of_all_kinds_and_not_the_best() -> None:
    best, middle, worst = (10, 10), (10, 20), (20, 20)

    def rounds(*each: tuple[int, int]) -> list[Run]:
        return [ended(number, steps) for number, pair in enumerate(each, start=1) for steps in pair]

    assert typical_round({"a": rounds(worst, middle, best)}, 1.25) == 2
    assert typical_round({"a": rounds(middle, middle, middle), "b": rounds(best, worst, middle)}, 1.25) == 3


def test_the_picture_shows_all_kinds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {kind: [ended(1, 12), ended(2, 20, success=False)] for kind in KINDS}
    draw(found, 20.0, 1.25, [tmp_path / "a.png"])
    assert (tmp_path / "a.png").stat().st_size > 1000
