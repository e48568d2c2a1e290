"""The Meta-World adapter: reproducible scenes, no privileged state, readable errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from stretto.core.errors import ConfigError
from stretto.evals.env import FIRST_HELD_OUT_SEED, check_tasks, find_environment, held_out_seeds
from stretto.evals.metaworld import INSTRUCTIONS, MetaWorld

IMAGE, WRIST, STATE = "observation/image", "observation/wrist_image", "observation/state"


@pytest.fixture(scope="module")
def faucet() -> Iterator[MetaWorld]:
    env = MetaWorld("faucet-open", image_size=48)
    yield env
    env.close()


def test_the_same_seed_gives_the_same_pictures_whatever_ran_before(faucet: MetaWorld) -> None:
    first = faucet.reset(7)
    for _ in range(20):
        faucet.step(np.array([1.0, -1.0, 0.5, 1.0]), observe=False)
    faucet.reset(8)
    again = faucet.reset(7)
    for key in (IMAGE, WRIST, STATE):
        assert np.array_equal(first[key], again[key]), key


def test_another_seed_moves_the_object(faucet: MetaWorld) -> None:
    pictures = [faucet.reset(seed)[IMAGE] for seed in (1, 2)]
    assert np.mean(pictures[0] != pictures[1]) > 0.01


def test_the_state_holds_the_arm_and_nothing_of_the_scene(faucet: MetaWorld) -> None:
    states = [faucet.reset(seed)[STATE] for seed in (1, 2, 3)]
    assert states[0].shape == (4,)
    np.testing.assert_allclose(states[0], states[1], atol=1e-4)
    np.testing.assert_allclose(states[0], states[2], atol=1e-4)


def test_one_unit_of_action_moves_the_hand_along_its_axis(faucet: MetaWorld) -> None:
    before = np.asarray(faucet.reset(1)[STATE])
    for _ in range(10):
        step = faucet.step(np.array([1.0, 0.0, 0.0, -1.0]))
    moved = np.asarray(step.observation[STATE]) - before
    assert 0.05 < moved[0] < 0.12
    assert abs(moved[1]) < 0.02


def test_the_scripted_expert_opens_the_faucet_and_doing_nothing_does_not(faucet: MetaWorld) -> None:
    faucet.restart(FIRST_HELD_OUT_SEED)
    done = False
    while not done:
        _, _, done, success = faucet.step(faucet.expert_action(), observe=False)
    assert success
    faucet.restart(FIRST_HELD_OUT_SEED)
    for _ in range(faucet.max_steps):
        _, _, done, success = faucet.step(np.zeros(4), observe=False)
    assert done
    assert not success


def test_an_action_that_is_not_finite_is_refused(faucet: MetaWorld) -> None:
    faucet.restart(1)
    with pytest.raises(ConfigError, match="action: got"):
        faucet.step(np.array([0.0, np.nan, 0.0, 0.0]))
    with pytest.raises(ConfigError, match="4 finite numbers"):
        faucet.step(np.zeros(7))


def test_instructions_are_distinct() -> None:
    assert len(INSTRUCTIONS) >= 5
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS)


def test_an_unknown_task_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'juggle'.*drawer-open"):
        MetaWorld("juggle")
    with pytest.raises(ConfigError, match=r"'juggle'.*drawer-open"):
        check_tasks(MetaWorld, ("drawer-open", "juggle"))
    assert check_tasks(MetaWorld, ()) == MetaWorld.tasks()


def test_an_unknown_environment_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'mars'.*metaworld"):
        find_environment("mars")
    with pytest.raises(ConfigError, match="no_such_module"):
        find_environment("no_such_module:Env")
    assert find_environment("metaworld") is MetaWorld
    assert find_environment("stretto.evals.metaworld:MetaWorld") is MetaWorld


def test_held_out_seeds_are_fixed() -> None:
    assert held_out_seeds(3) == (FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 1, FIRST_HELD_OUT_SEED + 2)


def test_a_gl_that_cannot_render_is_answered_with_the_variable_and_the_package() -> None:
    code = "from stretto.evals.metaworld import MetaWorld\nMetaWorld('drawer-open').reset(1)"
    # OSMesa under EGL's platform is a pair that no machine can satisfy.
    env = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"}
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last
    assert "MUJOCO_GL" in last
    assert "libegl1" in last
