"""A robot on a line, cheap enough for tests of the evaluation loop; it breaks on request."""

from __future__ import annotations

import os
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError
from stretto.evals.env import Observation, Step

CRASH_SEED, RAISE_SEED = 666, 667


class LineWorld:
    """Move along x until the light in the picture is in the middle; `left` starts right of it, `right` left of it."""

    name: ClassVar[str] = "line"
    control_hz: ClassVar[float] = 10.0
    action_dim: ClassVar[int] = 1

    def __init__(self, task: str) -> None:
        self.task, self.instruction, self.max_steps = task, f"go {task}", 40
        self.x, self.steps, self.seed = 0.0, 0, 0

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        return ("left", "right")

    @classmethod
    def wrong_instruction(cls, task: str) -> str:
        return "go right" if task == "left" else "go left"

    def reset(self, seed: int) -> Observation:
        self.seed, self.steps = seed, 0
        self.x = float(np.random.default_rng(seed).uniform(0.5, 1.0)) * (1 if self.task == "left" else -1)
        return self._observe()

    def step(self, action: NDArray[np.floating], *, observe: bool = True) -> Step:
        if action.shape != (1,):
            raise ConfigError("action", got=action.shape, expected=(1,))
        if self.steps == 3 and self.seed == CRASH_SEED:
            os._exit(3)
        if self.steps == 3 and self.seed == RAISE_SEED:
            raise ArithmeticError("the floor is gone")
        self.steps += 1
        self.x += float(np.clip(action[0], -1, 1)) * 0.1
        success = abs(self.x) < 0.06
        return Step(self._observe() if observe else {}, -abs(self.x), success or self.steps >= self.max_steps, success)

    def frame(self, size: int) -> NDArray[np.uint8]:
        picture = np.zeros((size, size, 3), np.uint8)
        picture[:, int(np.clip((self.x + 1.5) / 3, 0, 0.99) * size)] = 255
        return picture

    def expert_action(self) -> NDArray[np.float32]:
        return np.array([-np.sign(self.x)], np.float32)

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        state = np.array([self.seed], np.float32)
        return {"observation/image": self.frame(16), "observation/state": state, "prompt": self.instruction}
