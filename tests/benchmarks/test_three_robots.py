"""A robot under a control clock that never waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from three_robots import Robot, Run, World, draw

WORLD = World("line_world:LineWorld", 50.0, (), 1)


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
    robot = Robot("r", "left", 1, limit, WORLD)
    try:
        report = robot.prepare()
        robot.live(report, Controller(late_s), time.monotonic())  # type: ignore[arg-type]
    finally:
        robot.close()
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


def test_the_picture_shows_both_servers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Run("robot 1", "left", 10, success=True, steps=3, speeds=[1.0, 0.0, 1.0])
    draw({"naive": [run], "ours": [run]}, 20.0, [tmp_path / "a.png"])
    assert (tmp_path / "a.png").stat().st_size > 1000
