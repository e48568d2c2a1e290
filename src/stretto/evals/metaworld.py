"""Meta-World as an environment: nine table-top tasks of a Sawyer arm, with two small cameras.

What the policy sees is what a real arm would know: the two pictures, the gripper's position and how far it is open.
Object and goal poses stay in the simulator; only the scripted expert reads them.
"""

from __future__ import annotations

import warnings
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError
from stretto.evals.env import Observation, Step
from stretto.evals.rendering import Renderer, camera_at, import_mujoco

INSTRUCTIONS = MappingProxyType(
    {
        "button-press-topdown": "press the button",
        "drawer-open": "open the drawer",
        "drawer-close": "close the drawer",
        "window-open": "open the window",
        "window-close": "close the window",
        "door-open": "open the door",
        "door-close": "close the door",
        "faucet-open": "open the faucet",
        "faucet-close": "close the faucet",
    }
)
"""Task -> what a person would tell the robot."""

OPPOSITE = MappingProxyType(
    {
        "drawer-open": "drawer-close",
        "drawer-close": "drawer-open",
        "window-open": "window-close",
        "window-close": "window-open",
        "door-open": "door-close",
        "door-close": "door-open",
        "faucet-open": "faucet-close",
        "faucet-close": "faucet-open",
    }
)
"""Tasks that share a scene, so that only the instruction tells them apart."""

BASE_CAMERA, WRIST_CAMERA, STATE = "observation/image", "observation/wrist_image", "observation/state"
FRAME_SIZE = 320
"""Largest picture that `frame` can draw."""


class MetaWorld:
    """One Meta-World scene.

    Actions are [dx, dy, dz, grip] in [-1, 1]: one unit moves the hand by 1 cm; grip 1 closes, -1 opens.
    Observations hold `observation/image` and `observation/wrist_image` (uint8 [size, size, 3]), `observation/state`
    (float32 [4]: hand x, y, z in metres, and the opening of the gripper, 0 to 1) and `prompt`.

    Raises:
        ConfigError: if the task is not known, or Meta-World or a headless GL is missing.
    """

    name: ClassVar[str] = "metaworld"
    control_hz: ClassVar[float] = 80.0
    action_dim: ClassVar[int] = 4

    def __init__(self, task: str, *, image_size: int = 80, max_steps: int = 300) -> None:
        if task not in INSTRUCTIONS:
            raise ConfigError("task", got=repr(task), expected=f"one of {', '.join(INSTRUCTIONS)}")
        self.task, self.instruction = task, INSTRUCTIONS[task]
        self.image_size, self.max_steps = image_size, max_steps
        import_mujoco()
        try:
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        except ModuleNotFoundError as e:
            raise ConfigError(
                "metaworld", got=f"not installed ({e.name})", expected="Meta-World 3", hint="pip install 'stretto[sim]'"
            ) from e
        self._env = _unlock(ALL_V3_ENVIRONMENTS[f"{task}-v3"]())
        self._experts: dict[str, Any] = {}
        self._renderer: Renderer | None = None
        self._full: NDArray[np.float64] = np.zeros(39)
        self._steps = 0

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        return tuple(INSTRUCTIONS)

    @classmethod
    def wrong_instruction(cls, task: str) -> str:
        known = cls.tasks()
        return INSTRUCTIONS[OPPOSITE.get(task) or known[(known.index(task) + 1) % len(known)]]

    def reset(self, seed: int) -> Observation:
        self.restart(seed)
        return self.observe()

    def restart(self, seed: int) -> None:
        """Start an episode without rendering it."""
        self._env.seed(seed)
        self._full, _ = self._env.reset()
        self._steps = 0

    def step(self, action: NDArray[np.floating], *, observe: bool = True) -> Step:
        """Apply one action [4].

        Raises:
            ConfigError: if the action has another shape or is not finite.
        """
        action = np.asarray(action, np.float32)
        if action.shape != (self.action_dim,) or not np.isfinite(action).all():
            raise ConfigError("action", got=f"{action.tolist()}", expected=f"{self.action_dim} finite numbers")
        self._full, reward, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        success = bool(info["success"])
        return Step(self.observe() if observe else {}, float(reward), success or self._steps >= self.max_steps, success)

    def observe(self) -> Observation:
        """Render both cameras now."""
        hand = self._full[:3]
        base = camera_at((0.0, 0.72, 0.12), 1.0, 120, -35)
        # Fixed to the hand, so that what the gripper is about to touch stays large in the picture.
        wrist = camera_at(hand + np.array([0.0, 0.06, -0.08]), 0.55, 60, -40)
        return {
            BASE_CAMERA: self._render(base, self.image_size),
            WRIST_CAMERA: self._render(wrist, self.image_size),
            STATE: self._full[:4].astype(np.float32),
            "prompt": self.instruction,
        }

    def frame(self, size: int) -> NDArray[np.uint8]:
        return self._render(camera_at((0.0, 0.68, 0.15), 1.25, 130, -30), size)

    def expert_action(self, task: str | None = None) -> NDArray[np.float32]:
        """Return what the scripted expert would do, within [-1, 1].

        With `task`, ask the expert of another task that has the same kind of scene, such as `faucet-close` for `faucet-open`.
        """
        task = task or self.task
        if task not in self._experts:
            from metaworld.policies import ENV_POLICY_MAP

            self._experts[task] = ENV_POLICY_MAP[f"{task}-v3"]()
        with warnings.catch_warnings():
            # The experts warn of gains that saturate the action; they are meant to.
            warnings.simplefilter("ignore", UserWarning)
            # A copy: they also shift parts of what they are given in place.
            action = self._experts[task].get_action(self._full.copy())
        return np.asarray(np.clip(action, -1.0, 1.0), np.float32)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._env.close()

    def _render(self, camera: Any, size: int) -> NDArray[np.uint8]:
        if self._renderer is None:
            self._renderer = Renderer(self._env.model, max(FRAME_SIZE, self.image_size))
        return self._renderer.render(self._env.data, camera, size)


def _unlock(env: Any) -> Any:
    """Let the seed choose the scene, and show the goal to the expert: Meta-World's benchmarks freeze both."""
    env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
    env._partially_observable = False
    del env.sawyer_observation_space
    return env
