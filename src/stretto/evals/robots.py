"""Robots that work through episodes: each is a simulator process, a way to get actions, and the loop between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError
from stretto.evals.ablations import Ablation
from stretto.evals.env import Environment
from stretto.evals.policies import Asker
from stretto.evals.results import Episode
from stretto.evals.video import Frames
from stretto.evals.workers import Act, Baseline, Report, Start, Worker


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    task: str
    seed: int
    film_every: int = 0


@dataclass(slots=True)
class _Log:
    """What is known of an episode while it runs."""

    report: Report | None = None
    waits_ms: list[float] = field(default_factory=list)
    frames: list[NDArray[np.uint8]] = field(default_factory=list)

    def add(self, report: Report) -> Report:
        self.report = report
        self.frames.extend(report.frames)
        return report


class Robot:
    """One simulated robot. Its process starts with the first episode, and again after it died."""

    def __init__(
        self,
        env: str,
        adapter: type[Environment],
        asker: Asker | None,
        baseline: Baseline | None,
        ablation: Ablation,
        execute_steps: int,
    ) -> None:
        self._env, self._adapter, self._asker, self._baseline = env, adapter, asker, baseline
        self._ablation, self._execute_steps = ablation, execute_steps
        self._worker: Worker | None = None

    def run(self, job: Job) -> tuple[Episode, Frames]:
        """Run one episode. What goes wrong in it ends this episode only, and is named in it.

        Raises:
            ConfigError: if no episode could run: no GL, say, or actions that are not this robot's.
        """
        log = _Log()
        cause = ""
        # The edge of one episode: simulator, policy and connection may all fail here.
        try:
            self._play(job, log)
        except ConfigError:
            raise
        except Exception as e:
            cause = f"{type(e).__name__}: {e}"
            if self._asker is not None:
                self._asker.lost()
            if self._worker is not None and not self._worker.alive:
                self.close()
        steps, reward = (log.report.steps, log.report.reward) if log.report else (0, 0.0)
        success = not cause and log.report is not None and log.report.success
        waits = tuple(round(ms, 3) for ms in log.waits_ms)
        return Episode(job.task, job.seed, success, steps, reward, len(waits), waits, cause), log.frames

    def _play(self, job: Job, log: _Log) -> None:
        if self._worker is None:
            self._worker = Worker(self._env)
        if self._asker is not None:
            self._asker.new_episode()
        report = log.add(self._worker.ask(Start(job.task, job.seed, self._baseline, job.film_every)))
        while not report.done:
            assert self._asker is not None, "a baseline plays to the end by itself"
            shown = self._ablation(report.observation, self._adapter, job.task)
            asked_at = time.perf_counter()
            actions = self._asker.actions(shown)
            log.waits_ms.append((time.perf_counter() - asked_at) * 1e3)
            report = log.add(self._worker.ask(Act(actions[: self._execute_steps])))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def run_all(
    robots: Sequence[Robot], jobs: Sequence[Job], finished: Callable[[Episode], None], film: Callable[[Job, Frames], None]
) -> list[Episode]:
    """Share the jobs among the robots, one thread each; close the robots at the end, also after Ctrl-C."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    episodes: list[Episode] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(robot: Robot) -> None:
        try:
            while not stop.is_set():
                job = waiting.get_nowait()
                episode, frames = robot.run(job)
                if stop.is_set():
                    return
                episodes.append(episode)
                finished(episode)
                film(job, frames)
        except queue.Empty:
            pass
        except BaseException as e:
            # Raised again by the caller's thread: a film that cannot be written, say.
            errors.append(e)
            stop.set()

    threads = [threading.Thread(target=work, args=(robot,), daemon=True) for robot in robots]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for robot in robots:
            robot.close()
    if errors:
        raise errors[0]
    return episodes
