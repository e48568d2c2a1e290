"""Simulators in processes of their own: one environment and one GL context each, driven over a pipe.

The parent sends a `Start`, then `Act`s, and reads one `Report` for each. An error inside the simulator comes back as text;
a simulator that dies is noticed by the closed pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError, StrettoError
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
    observe: bool = True
    """Else the report's observation is empty: for cameras that are slower than control."""


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
    refused: tuple[str, str, str, str] | None = None
    """Field, got, expected and hint of a ConfigError, which no other episode would escape."""


class Worker:
    """The parent's end of one simulator process."""

    def __init__(self, env: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # A fresh interpreter: a GL context and torch's threads do not survive a fork, and the caller's main module,
        # which `multiprocessing` would run again, is none of the simulator's business.
        code = f"from stretto.evals.workers import serve; serve({theirs.fileno()}, {env!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            # Ctrl-C is the parent's to handle; the closed pipe then ends this process too.
            start_new_session=True,
        )
        theirs.close()

    def ask(self, command: Start | Act) -> Report:
        """Send a command and wait for its report.

        Raises:
            SimulatorError: if the simulator raised an error, or its process ended.
            ConfigError: if the simulator cannot run here at all, or not with such actions.
        """
        try:
            self._pipe.send(command)
            report: Report = self._pipe.recv()
        except (EOFError, OSError) as e:
            raise SimulatorError(f"the simulator process ended (exit code {self._stop()})") from e
        if report.refused is not None:
            field, got, expected, hint = report.refused
            raise ConfigError(field, got=got, expected=expected, hint=hint)
        if report.error:
            raise SimulatorError(report.error)
        return report

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; it may be busy."""
        self._pipe.close()
        self._stop()

    def _stop(self) -> int:
        """Wait for the end that a closed pipe brings, and force it if it does not come."""
        for patience_s, force in ((STOP_S / 5, self._process.terminate), (STOP_S, self._process.kill)):
            try:
                return self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                force()
        return self._process.wait()


def serve(fd: int, env_name: str) -> None:
    """Be the simulator process at the other end of a pipe, until it closes."""
    pipe = Connection(fd)
    host = _Host(env_name)
    try:
        while True:
            command = pipe.recv()
            # The edge of the process: whatever a simulator raises belongs to this episode alone.
            try:
                report = host.start(command) if isinstance(command, Start) else host.act(command)
            except ConfigError as e:
                report = Report({}, 0, 0.0, True, False, refused=(e.field, str(e.got), str(e.expected), e.hint))
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

    def act(self, act: Act) -> Report:
        env = self._env
        if env is None:
            raise SimulatorError("an action before the first reset")
        frames: list[NDArray[np.uint8]] = []
        done = success = False
        observation: Observation = {}
        for i, action in enumerate(act.actions, start=1):
            observation, reward, done, success = env.step(action, observe=act.observe and i == len(act.actions))
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
