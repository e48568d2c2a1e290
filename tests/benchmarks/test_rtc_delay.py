"""Robots under delay, in control steps: which action runs when, and what the policy is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rtc_delay import GUIDED, MODES, DelayedRobot, Steps
from rtc_delay_result import draw, judge, sign_test, table

from stretto.core.policy import RequestOptions

H, A = 12, 3


class Script:
    """Chunk n holds n * 100 + row in every motion dimension; the last dimension is a gripper."""

    def __init__(self) -> None:
        self.asked: list[RequestOptions] = []

    def __call__(self, observation: Mapping[str, Any], options: RequestOptions) -> np.ndarray:
        n = len(self.asked)
        self.asked.append(options)
        chunk = np.repeat(np.arange(H, dtype=np.float32)[:, None] + 100 * n, A, axis=1)
        chunk[:, -1] = 1.0
        return chunk


def live(mode: str, delay: int, execute: int, answers: int) -> tuple[list[float], Script, Steps, list[int]]:
    """Return the commands (their first dimension), and at which of them each observation was taken."""
    script, steps = Script(), Steps()
    robot = DelayedRobot(script, steps, mode=mode, delay=delay, execute=execute, held=(2,), limits=1e9)
    commands: list[float] = []
    observed = []
    for _ in range(answers):
        observed.append(len(commands))
        commands += robot.infer({})["actions"][:, 0].tolist()
    return commands, script, steps, observed


def test_without_delay_every_mode_plays_the_same_rows() -> None:
    for mode in MODES:
        commands, _, steps, _ = live(mode, 0, 4, 3)
        assert commands == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203], mode
        assert steps.starved == 0
        assert steps.inside == pytest.approx([np.sqrt(2.0)] * 9)


def test_a_synchronous_robot_stands_still_while_it_waits() -> None:
    commands, _, steps, _ = live("sync", 2, 4, 3)
    assert commands == [0, 0, 0, 1, 2, 3, 0, 0, 100, 101, 102, 103, 0, 0, 200, 201, 202, 203]
    assert steps.starved == 6
    assert len(steps.seams) == 4


@pytest.mark.parametrize("mode", [m for m in MODES if m != "sync"])
def test_a_moving_robot_takes_over_each_chunk_at_the_action_that_belongs_to_now(mode: str) -> None:
    commands, _, steps, observed = live(mode, 2, 4, 3)
    assert commands[2:] == [0, 1, 2, 3, 4, 5, 102, 103, 104, 105, 202, 203]
    assert steps.starved == 2
    assert observed == [0, 6, 10]


@pytest.mark.parametrize("mode", GUIDED)
def test_the_policy_is_told_what_was_executed_what_is_committed_and_what_is_left(mode: str) -> None:
    _, script, _, _ = live(mode, 3, 5, 3)
    assert [o.mode for o in script.asked] == [None, mode, mode]
    for number, asked in enumerate(script.asked[1:]):
        assert (asked.executed_steps, asked.delay_steps) == (5, 3)
        assert asked.prefix_KD is not None
        np.testing.assert_array_equal(asked.prefix_KD[:, 0], np.arange(5, H) + 100 * number)
    assert [o.seed for o in script.asked] == [0, 1, 2]


def test_a_delay_longer_than_what_is_left_starves_and_never_skips_an_action() -> None:
    commands, script, steps, _ = live("hard", 8, 4, 3)
    assert steps.starved > 8
    assert script.asked[1].delay_steps == H - 8
    moving = [c for c in commands[8:] if c != 0]
    assert len(moving) == len(set(moving))
    rows = [int(c) % 100 for c in moving if c >= 100]
    assert rows[0] == H - 8


def test_the_table_and_the_figure_show_every_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "mode": mode,
            "delay": delay,
            "success_rate": 0.5,
            "interval": [0.4, 0.6],
            "largest_step_mean": 1.0,
            "seam_step_mean": None if mode == "sync" else 0.25,
        }
        for mode in MODES
        for delay in (0, 5)
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "| delay | sync | naive | identity | vjp | hard |"
    assert lines[3].startswith("| 5 | 50 %, 1.00, 0.00 | 50 %, 1.00, 0.25 |")
    draw(rows, [tmp_path / "a.png", tmp_path / "a.svg"])
    assert (tmp_path / "a.svg").stat().st_size > 1000


def judged(**steps: list[int]) -> list[dict[str, Any]]:
    """Rows of modes in the same scenes; a scene of 0 steps was never solved."""
    rows = []
    for name, mine in steps.items():
        mode, _, delay = name.partition("_")
        runs = [["t", seed, n > 0, n or 500] for seed, n in enumerate(mine)]
        rows.append({"mode": mode, "delay": int(delay), "runs": runs})
    judge(rows, 1.25)
    return rows


def test_on_time_counts_scenes_that_are_solved_without_delay_within_the_time_allowed() -> None:
    plain, naive, identity = judged(naive_0=[80, 80, 100, 0], naive_4=[100, 101, 0, 90], identity_4=[90, 100, 125, 90])
    assert plain["on_time"] == 1.0
    assert naive["on_time"] == pytest.approx(1 / 3, abs=1e-4)
    assert identity["on_time"] == 1.0
    assert identity["against_naive"]["on_time"] == {"scenes": 3, "only_this": 2, "only_naive": 0, "p": 0.5}
    assert identity["against_naive"]["in_the_end"] == {"scenes": 4, "only_this": 1, "only_naive": 0, "p": 1.0}
    assert identity["on_time_by_takt"]["1.1"] == 0
    assert "against_naive" not in naive


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 0, 1.0), (1, 1, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (9, 1, 22 / 1024)])
def test_the_sign_test_is_exact(wins: int, losses: int, p: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p)
