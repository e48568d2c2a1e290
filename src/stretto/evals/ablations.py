"""Changes to what a policy is shown, to prove that it uses it: its success must fall when they apply."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np

from stretto.core.errors import ConfigError
from stretto.evals.env import Environment, Observation

Ablation = Callable[[Observation, type[Environment], str], Observation]
"""(observation, adapter, task) -> what the policy is shown instead."""


def unchanged(observation: Observation, adapter: type[Environment], task: str) -> Observation:
    return observation


def blank_cameras(observation: Observation, adapter: type[Environment], task: str) -> Observation:
    """Replace every picture by black."""
    return {k: np.zeros_like(v) if isinstance(v, np.ndarray) and v.ndim == 3 else v for k, v in observation.items()}


def wrong_instruction(observation: Observation, adapter: type[Environment], task: str) -> Observation:
    """Tell the robot to do something else."""
    return {**observation, "prompt": adapter.wrong_instruction(task)}


ABLATIONS = MappingProxyType({"none": unchanged, "blank_cameras": blank_cameras, "wrong_instruction": wrong_instruction})


def find_ablation(name: str) -> Ablation:
    """Return an ablation by name.

    Raises:
        ConfigError: if the name is not known; it lists the known ones.
    """
    if name not in ABLATIONS:
        raise ConfigError("ablation", got=repr(name), expected=f"one of {', '.join(ABLATIONS)}")
    return ABLATIONS[name]
