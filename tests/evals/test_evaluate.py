"""The closed loop: success, baselines, ablations, and that one broken episode leaves the others alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_world import CRASH_SEED, RAISE_SEED
from PIL import Image
from websockets.sync.server import Server, ServerConnection, serve

from stretto.core.errors import ConfigError
from stretto.evals.evaluate import Settings, evaluate
from stretto.evals.policies import connect_to
from stretto.evals.results import wilson
from stretto_client.codec import pack, unpack

LINE = "line_world:LineWorld"
GONE_SEED = 3


class Follower:
    """Goes where it is told, as long as it sees the light."""

    def infer(self, obs: Any) -> dict[str, Any]:
        seen = np.asarray(obs["observation/image"]).any()
        direction = (-1.0 if obs["prompt"] == "go left" else 1.0) * seen
        return {"actions": np.full((6, 1), direction, np.float32)}


class BatchFollower(Follower):
    """Takes its time, so that robots have to wait together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def infer_batch(self, observations: Sequence[Any]) -> list[dict[str, Any]]:
        self.sizes.append(len(observations))
        time.sleep(0.02)
        return [self.infer(o) for o in observations]


def settings(**changes: Any) -> Settings:
    return Settings(**{"env": LINE, "episodes": 4, "workers": 2, "execute_steps": 3, **changes})


def test_a_policy_that_looks_and_listens_solves_every_task() -> None:
    result = evaluate(Follower(), settings())
    assert result.success_rate == 1.0
    found = json.loads(result.to_json())
    assert list(found)[:4] == ["success_rate", "interval", "episodes", "tasks"]
    assert found["episodes"] == 8
    assert [(t["task"], t["success_rate"], t["episodes"]) for t in found["tasks"]] == [("left", 1.0, 4), ("right", 1.0, 4)]
    assert found["inference_ms"]["count"] == sum(e.inferences for e in result.episodes) > 0
    assert found["wait_ms_per_step"] > 0
    assert not found["failures"]


@pytest.mark.parametrize("ablation", ["blank_cameras", "wrong_instruction"])
def test_it_fails_when_what_it_uses_is_taken_away(ablation: str) -> None:
    result = evaluate(Follower(), settings(ablation=ablation, episodes=1))
    assert result.success_rate == 0.0
    assert all(e.steps == 40 and not e.cause for e in result.episodes)


def test_the_scripted_expert_succeeds_and_doing_nothing_does_not() -> None:
    assert evaluate("expert", settings()).success_rate == 1.0
    zero = evaluate("zero", settings(episodes=1))
    assert zero.success_rate == 0.0
    assert [e.inferences for e in zero.episodes] == [0, 0]


def test_the_same_seeds_give_the_same_episodes_in_the_same_order() -> None:
    runs = [evaluate(Follower(), settings(seeds=(5, 9), episodes=2, workers=n)) for n in (1, 3)]
    told = [[(e.task, e.seed, e.steps, e.reward) for e in run.episodes] for run in runs]
    assert told[0] == told[1]
    assert [(task, seed) for task, seed, *_ in told[0]] == [("left", 5), ("left", 9), ("right", 5), ("right", 9)]


def test_robots_that_wait_together_are_answered_as_one_batch() -> None:
    policy = BatchFollower()
    result = evaluate(policy, settings(workers=4, episodes=6))
    assert result.success_rate == 1.0
    assert max(policy.sizes) > 1
    assert max(policy.sizes) <= 4


def test_a_simulator_that_dies_or_raises_costs_its_own_episode_only() -> None:
    seeds = (1, CRASH_SEED, RAISE_SEED, 2)
    result = evaluate(Follower(), settings(tasks=("left",), seeds=seeds))
    causes = {e.seed: e.cause for e in result.episodes}
    assert "exit code 3" in causes[CRASH_SEED]
    assert "the floor is gone" in causes[RAISE_SEED]
    assert [e.success for e in result.episodes] == [True, False, False, True]
    assert [f["seed"] for f in result.as_dict()["failures"]] == [CRASH_SEED, RAISE_SEED]


def test_a_policy_that_answers_nonsense_fails_the_episode_with_the_reason() -> None:
    class Nonsense:
        def infer(self, obs: Any) -> dict[str, Any]:
            return {"actions": np.full((6, 1), np.nan)}

    result = evaluate(Nonsense(), settings(tasks=("left",), episodes=1))
    assert "expected a finite float array [H, A]" in result.episodes[0].cause
    assert result.episodes[0].success is False


@pytest.fixture
def server() -> Iterator[Server]:
    """A policy server on the openpi protocol that hangs up in the middle of one episode."""

    def handle(connection: ServerConnection) -> None:
        connection.send(pack({}))
        doomed = 0
        for message in connection:
            assert isinstance(message, bytes)
            obs = unpack(message)
            doomed += obs["observation/state"][0] == GONE_SEED
            if doomed > 1:
                return
            connection.send(pack(Follower().infer(obs)))

    with serve(handle, "127.0.0.1", 0, compression=None) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_server_that_goes_away_fails_that_episode_and_the_others_go_on(server: Server) -> None:
    url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    seeds = (1, GONE_SEED, 4, 5)
    result = evaluate(None, settings(tasks=("left",), seeds=seeds, workers=1), connect=connect_to(url))
    assert [e.success for e in result.episodes] == [True, False, True, True]
    broken = result.episodes[1]
    assert "ConnectionLostError" in broken.cause
    assert broken.steps > 0


def test_a_server_that_was_never_there_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match=r"server: got .*refused"):
        evaluate(None, settings(), connect=connect_to("ws://127.0.0.1:9"))


def test_a_policy_for_another_robot_is_refused_rather_than_failing_every_episode() -> None:
    class Wide:
        def infer(self, obs: Any) -> dict[str, Any]:
            return {"actions": np.zeros((6, 7))}

    with pytest.raises(ConfigError, match=r"action: got \(7,\), expected \(1,\)"):
        evaluate(Wide(), settings())


def test_without_a_working_gl_evaluation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "osmesa")
    with pytest.raises(ConfigError, match=r"MUJOCO_GL.*libegl1"):
        evaluate(Follower(), Settings(tasks=("drawer-open",), episodes=1, workers=1))


def test_episodes_are_written_as_they_finish_and_the_first_is_filmed(tmp_path: Path) -> None:
    result = evaluate(Follower(), settings(episodes=2, jsonl=tmp_path / "e.jsonl", video=tmp_path / "films"))
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert {(e["task"], e["seed"]) for e in lines} == {(e.task, e.seed) for e in result.episodes}
    films = sorted((tmp_path / "films").glob("*.gif"))
    assert len(films) == 2
    with Image.open(films[0]) as film:
        assert film.n_frames > 2


def test_progress_goes_to_the_given_stream_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "progress").open("w+") as stream:
        evaluate(Follower(), settings(tasks=("left",), episodes=2), console=stream)
        stream.seek(0)
        assert "2 of 2 solved" in stream.read()
    assert capsys.readouterr().out == ""


def test_a_script_without_a_main_guard_may_evaluate_and_leaves_no_process() -> None:
    code = (
        "from stretto.evals.evaluate import Settings, evaluate\n"
        f"r = evaluate('expert', Settings(env={LINE!r}, episodes=1, workers=1))\n"
        "print(r.success_rate)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run([sys.executable, "-"], input=code, env=env, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "1.0\n", ran.stderr
    assert ran.stderr == ""


def test_what_cannot_be_evaluated_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'up'.*left, right"):
        evaluate(Follower(), settings(tasks=("up",)))
    with pytest.raises(ConfigError, match=r"'mars'.*metaworld"):
        evaluate(Follower(), settings(env="mars"))
    with pytest.raises(ConfigError, match=r"ablation: got 'deaf'.*wrong_instruction"):
        settings(ablation="deaf")
    with pytest.raises(ConfigError, match="exactly one"):
        evaluate(None, settings())
    with pytest.raises(ConfigError, match="one an episode"):
        settings(seeds=(1,))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (20, 20, 0.8389, 1.0), (0, 0, 0, 1)]
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    np.testing.assert_allclose(wilson(successes, trials), (low, high), atol=1e-4)


def test_metaworld_runs_in_the_loop_with_its_expert(tmp_path: Path) -> None:
    chosen = Settings(tasks=("drawer-open",), episodes=2, workers=1, video=tmp_path)
    result = evaluate("expert", chosen)
    assert result.success_rate == 1.0
    assert result.control_hz == 80.0
    assert len(list(tmp_path.glob("drawer-open.*.gif"))) == 1
