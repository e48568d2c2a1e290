"""What closed-loop evaluation asks of a simulated robot, and the table of the environments that ship with it.

An adapter is one class: `Adapter(task)` builds one robot in one scene. It is a thin wrapper around a simulator, holds no
policy, and never shows the policy more than a real robot would see.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError

Observation = dict[str, NDArray[np.generic] | str]
"""Cameras (uint8 [H, W, 3]), state (float32 [S]) and `prompt`, under the keys that the policy expects."""

FIRST_HELD_OUT_SEED = 1_000_000
"""Demonstrations use seeds below this; evaluation uses seeds from here on."""


class Step(NamedTuple):
    """What one control step gave. `observation` is empty when the step was taken with `observe=False`."""

    observation: Observation
    reward: float
    done: bool
    success: bool


class Environment(Protocol):
    """One simulated robot that works on one task."""

    name: ClassVar[str]
    control_hz: ClassVar[float]
    action_dim: ClassVar[int]
    max_steps: int
    """Control steps after which an episode has failed."""
    task: str
    instruction: str

    def __init__(self, task: str) -> None: ...
    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """Return the names of all tasks."""
        ...

    @classmethod
    def wrong_instruction(cls, task: str) -> str:
        """Return an instruction that does not ask for this task, for the ablation that shows whether a policy listens."""
        ...

    def reset(self, seed: int) -> Observation:
        """Start an episode. The same seed gives the same scene, whatever ran before."""
        ...

    def step(self, action: NDArray[np.floating], *, observe: bool = True) -> Step:
        """Apply one action [A] for one control period. With `observe=False` nothing is rendered."""
        ...

    def frame(self, size: int) -> NDArray[np.uint8]:
        """Render the scene for a person to look at, [size, size, 3]."""
        ...

    def close(self) -> None:
        """Free the simulator and its GL context. Further calls are errors."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """An environment that comes with a scripted expert, which may look at the simulator's own state."""

    def expert_action(self) -> NDArray[np.float32]:
        """Return the expert's action [A] for the present moment."""
        ...


ENVIRONMENTS = MappingProxyType({"metaworld": "stretto.evals.metaworld:MetaWorld"})
"""Name -> `module:class` of the adapters that ship with the project."""


def find_environment(name: str) -> type[Environment]:
    """Return the adapter class for a known name, or for `module:class` of your own.

    Raises:
        ConfigError: if the name is not known, or the module or class does not exist.
    """
    path = ENVIRONMENTS.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError("env", got=repr(name), expected=f"one of {sorted(ENVIRONMENTS)}, or `module:class` of an adapter")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError("env", got=f"{path!r} ({e})", expected="an importable module and a class in it") from e
    adapter: type[Environment] = found
    return adapter


def check_tasks(adapter: type[Environment], tasks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tasks asked for; none means all of them.

    Raises:
        ConfigError: if a task is not known; it lists the known ones.
    """
    known = adapter.tasks()
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ConfigError("task", got=", ".join(map(repr, unknown)), expected=f"among {', '.join(known)}")
    return tasks or known


def held_out_seeds(episodes: int) -> tuple[int, ...]:
    """Return the fixed evaluation seeds of the first `episodes` episodes of every task."""
    return tuple(range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + episodes))
