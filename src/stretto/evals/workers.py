"""Simulators in processes of their own: one environment and one GL context each, driven over a pipe.

The parent sends a `Start`, then `Act`s, and reads one `Report` for each. An error inside the simulator comes back as text;
a simulator that dies is noticed by the closed pipe.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import StrettoError
from stretto.evals.env import Environment, HasExpert, Observation, find_environment

Baseline = Literal["expert", "zero"]
BASELINES: tuple[Baseline, ...] = ("expert", "zero")
STOP_S = 5.0


class SimulatorError(StrettoError):
    """A simulator process failed or ended; the episode it ran is lost."""

    code = "simulator"


@dataclass(frozen=True, slots=True)
class Start:
    """Begin an episode. A baseline plays it to its end without asking anyone."""

    task: str
    seed: int
    baseline: Baseline | None = None
    film_every: int = 0
    """Control steps between two frames for a video; 0 films nothing."""
    film_size: int = 240


@dataclass(frozen=True, slots=True)
class Act:
    """Apply these actions [K, A] one after the other, and then observe."""

    actions: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Report:
    """Where the episode stands. `observation` is empty once it is done."""

    observation: Observation
    steps: int
    reward: float
    done: bool
    success: bool
    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    """Filmed since the last report."""
    error: str = ""


class Worker:
    """The parent's end of one simulator process."""

    def __init__(self, env: str) -> None:
        # Spawned, not forked: a GL context and torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, env), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: Start | Act) -> Report:
        """Send a command and wait for its report.

        Raises:
            SimulatorError: if the simulator raised an error, or its process ended.
        """
        try:
            self._pipe.send(command)
            report: Report = self._pipe.recv()
        except (EOFError, OSError) as e:
            self._process.join(STOP_S)
            raise SimulatorError(f"the simulator process ended (exit code {self._process.exitcode})") from e
        if report.error:
            raise SimulatorError(report.error)
        return report

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """End the process; it may be busy."""
        self._pipe.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(STOP_S)


def _serve(pipe: Connection, env_name: str) -> None:
    host = _Host(env_name)
    try:
        while True:
            command = pipe.recv()
            # The edge of the process: whatever a simulator raises belongs to this episode alone.
            try:
                report = host.start(command) if isinstance(command, Start) else host.act(command.actions)
            except StrettoError as e:
                report = Report({}, 0, 0.0, True, False, error=str(e))
            except Exception:
                report = Report({}, 0, 0.0, True, False, error=traceback.format_exc(limit=-3))
            pipe.send(report)
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        host.close()


class _Host:
    """One environment at a time; it is built anew only when the task changes."""

    def __init__(self, env_name: str) -> None:
        self._adapter = find_environment(env_name)
        self._env: Environment | None = None
        self._start = Start("", 0)
        self._steps, self._reward = 0, 0.0

    def start(self, start: Start) -> Report:
        if self._env is None or self._env.task != start.task:
            self.close()
            self._env = self._adapter(start.task)
        self._start, self._steps, self._reward = start, 0, 0.0
        observation = self._env.reset(start.seed)
        if start.baseline is not None:
            return self._play(self._env, start.baseline)
        return Report(observation, 0, 0.0, False, False, [self._env.frame(start.film_size)] if start.film_every else [])

    def act(self, actions: NDArray[np.floating]) -> Report:
        env = self._env
        if env is None:
            raise SimulatorError("an action before the first reset")
        frames: list[NDArray[np.uint8]] = []
        done = success = False
        observation: Observation = {}
        for i, action in enumerate(actions):
            observation, reward, done, success = env.step(action, observe=i == len(actions) - 1)
            self._steps, self._reward = self._steps + 1, self._reward + reward
            if self._start.film_every and (done or self._steps % self._start.film_every == 0):
                frames.append(env.frame(self._start.film_size))
            if done:
                break
        return Report({} if done else observation, self._steps, self._reward, done, success, frames)

    def _play(self, env: Environment, baseline: Baseline) -> Report:
        choose = _expert_of(env) if baseline == "expert" else lambda: np.zeros(env.action_dim, np.float32)
        frames: list[NDArray[np.uint8]] = []
        while True:
            action = choose()
            _, reward, done, success = env.step(action, observe=False)
            self._steps, self._reward = self._steps + 1, self._reward + reward
            if self._start.film_every and (done or self._steps % self._start.film_every == 0):
                frames.append(env.frame(self._start.film_size))
            if done:
                return Report({}, self._steps, self._reward, done, success, frames)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _expert_of(env: Environment) -> Callable[[], NDArray[np.float32]]:
    if not isinstance(env, HasExpert):
        raise SimulatorError(f"{env.name} has no scripted expert")
    return env.expert_action
