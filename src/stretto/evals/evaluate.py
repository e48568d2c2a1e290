"""Closed-loop evaluation: robots in parallel simulators, all asking one policy, over fixed held-out seeds.

A robot waits for its actions (the simulation stands still meanwhile), so success does not depend on the speed of the
machine; how long it waited is reported beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stretto.core.errors import ConfigError
from stretto.evals.ablations import find_ablation
from stretto.evals.env import check_tasks, find_environment, held_out_seeds
from stretto.evals.policies import Asker, Connect, Connected, Policy, Shared
from stretto.evals.progress import Progress
from stretto.evals.results import Evaluation
from stretto.evals.robots import Job, Robot, run_all
from stretto.evals.video import Frames, write_video
from stretto.evals.workers import BASELINES, Baseline

FILM_FPS = 20.0


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    Raises:
        ConfigError: on construction, naming the setting that cannot be used.
    """

    env: str = "metaworld"
    tasks: tuple[str, ...] = ()
    """Empty: all that the environment has."""
    episodes: int = 20
    """Episodes a task."""
    seeds: tuple[int, ...] = ()
    """One an episode, the same for every task. Empty: the fixed held-out ones."""
    workers: int = 4
    execute_steps: int = 8
    """Actions taken from each chunk before the next question."""
    ablation: str = "none"
    jsonl: Path | None = None
    """One line an episode, as they finish."""
    video: Path | None = None
    """Folder for one film of each task's first episode."""
    video_format: str = "gif"

    def __post_init__(self) -> None:
        for name in ("episodes", "workers", "execute_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(name, got=getattr(self, name), expected="1 or more")
        if self.seeds and len(self.seeds) != self.episodes:
            raise ConfigError("seeds", got=len(self.seeds), expected=f"{self.episodes}, one an episode")
        if self.video_format not in ("gif", "mp4"):
            raise ConfigError("video_format", got=repr(self.video_format), expected="gif or mp4")
        find_ablation(self.ablation)


def evaluate(
    policy: Policy | Baseline | None = None,
    settings: Settings | None = None,
    *,
    connect: Connect | None = None,
    name: str = "",
    console: IO[str] | None = None,
) -> Evaluation:
    """Run all episodes and return what happened.

    Args:
        policy: one policy for all robots, or the baseline `expert` or `zero`.
        connect: instead of `policy`: makes one connection a robot, as for a server (`policies.connect_to(url)`).
        name: what the policy is called in the result.
        console: where to show progress, such as `sys.stderr`; None shows nothing.

    Raises:
        ConfigError: if the environment or a task is not known, the simulator cannot run here, the actions are not the
            robot's, there is no server to begin with, or not exactly one of policy and connect is given.
    """
    settings = settings or Settings()
    adapter = find_environment(settings.env)
    tasks = check_tasks(adapter, settings.tasks)
    if (policy is None) == (connect is None):
        raise ConfigError("policy", got="both or none of policy and connect", expected="exactly one")
    if isinstance(policy, str) and policy not in BASELINES:
        raise ConfigError("policy", got=repr(policy), expected=f"a policy, or one of {BASELINES}")
    seeds = settings.seeds or held_out_seeds(settings.episodes)
    every = max(1, round(adapter.control_hz / FILM_FPS)) if settings.video else 0
    # Task by task: a simulator is built anew only when its task changes.
    jobs = [Job(task, seed, every if seed == seeds[0] else 0) for task in tasks for seed in seeds]
    started = time.monotonic()
    with ExitStack() as stack:
        askers = _askers(policy, connect, min(settings.workers, len(jobs)), stack)
        baseline = policy if isinstance(policy, str) else None
        ablation = find_ablation(settings.ablation)
        robots = [Robot(settings.env, adapter, asker, baseline, ablation, settings.execute_steps) for asker in askers]
        progress = stack.enter_context(Progress(console, len(jobs), settings.jsonl))
        episodes = run_all(robots, jobs, progress.finished, _film_to(settings, adapter.control_hz))
    label = name or (policy if isinstance(policy, str) else "server" if policy is None else type(policy).__name__)
    ordered = tuple(sorted(episodes, key=lambda e: (tasks.index(e.task), seeds.index(e.seed))))
    return Evaluation(settings.env, label, settings.ablation, ordered, time.monotonic() - started, adapter.control_hz)


def _askers(policy: Policy | Baseline | None, connect: Connect | None, count: int, stack: ExitStack) -> list[Asker | None]:
    """Return one way to actions for each robot; a baseline needs none."""
    if connect is not None:
        connections = [Connected(connect) for _ in range(count)]
        for connection in connections:
            stack.callback(connection.close)
        # A server that was never there is the caller's error, not that of each episode.
        try:
            connections[0].open()
        except OSError as e:
            raise ConfigError("server", got=str(e), expected="a policy server that answers") from e
        return list(connections)
    if policy is None or isinstance(policy, str):
        return [None] * count
    shared = Shared(policy, max_batch=count)
    stack.callback(shared.close)
    return [shared] * count


def _film_to(settings: Settings, control_hz: float) -> Callable[[Job, Frames], None]:
    def film(job: Job, frames: Frames) -> None:
        if settings.video is not None and frames:
            write_video(settings.video / f"{job.task}.{job.seed}.{settings.video_format}", frames, control_hz / job.film_every)

    return film
