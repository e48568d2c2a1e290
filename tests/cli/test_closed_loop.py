"""The whole chain on real simulated robots: checkpoint, processors, engine, server and client. It breaks if any does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.evals.evaluate import Settings, evaluate
from stretto.evals.policies import connect_to
from stretto.serve.run import ServerThread

TASKS = ("drawer-open", "button-press-topdown", "window-close")
SETTINGS = Settings(tasks=TASKS, episodes=2, workers=2)


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    policy = load_policy("pi05-metaworld", PolicyOptions(device="cpu", max_batch=4))
    with ServerThread(policy):  # warms it, too
        yield policy
    policy.close()


def test_the_embedded_policy_solves_its_tasks_in_process(policy: Policy) -> None:
    result = evaluate(policy, SETTINGS)
    assert not [e.cause for e in result.episodes if e.cause]
    assert result.success_rate >= 5 / 6


def test_the_embedded_policy_solves_its_tasks_through_server_and_client(policy: Policy) -> None:
    with ServerThread(policy_again := load_policy("pi05-metaworld", PolicyOptions(device="cpu", max_batch=4))) as server:
        result = evaluate(None, SETTINGS, connect=connect_to(server.url))
    policy_again.close()
    assert not [e.cause for e in result.episodes if e.cause]
    assert result.success_rate >= 5 / 6


def test_a_policy_that_cannot_see_does_not_solve_them(policy: Policy) -> None:
    result = evaluate(policy, Settings(tasks=TASKS[:2], episodes=1, workers=2, ablation="blank_cameras"))
    assert result.success_rate == 0.0


def test_eval_prints_the_result_and_nothing_else_on_standard_output() -> None:
    command = [sys.executable, "-m", "stretto", "eval", "zero", "--task", "drawer-open", "--episodes", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert list(result)[:4] == ["success_rate", "interval", "episodes", "tasks"]
    assert result["tasks"][0]["task"] == "drawer-open"
    assert "solved" in done.stderr


def test_an_unknown_task_lists_the_known_ones() -> None:
    command = [sys.executable, "-m", "stretto", "eval", "zero", "--task", "juggle"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "juggle" in done.stderr
    assert "drawer-open" in done.stderr


def test_the_demo_leaves_a_film_and_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "demo", "--out", str(tmp_path), "--task", "button-press-topdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "robots.gif").stat().st_size > 10_000
    assert "press the button" in (tmp_path / "summary.md").read_text()


def test_ctrl_c_ends_the_demo_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "demo", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        while "robots connect" not in (line := demo.stdout.readline()):
            assert line, "the demo ended early"
        time.sleep(1.0)
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
        assert demo.wait(30) == 130
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(demo.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes of the demo are still there")


def test_a_demo_that_cannot_simulate_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "MUJOCO_GL": "bogus"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: MUJOCO_GL: got 'bogus'")
    assert "Traceback" not in done.stderr
