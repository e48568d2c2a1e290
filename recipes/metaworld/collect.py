"""Collect demonstrations of Meta-World's scripted experts as seeded shards of small pictures and clean actions.

Four things make a small policy robust, all of them here rather than in the network:
- an episode starts from a hand that was pushed somewhere else;
- pushes of a few steps come again later, and no recorded chunk of actions reaches into one, so that every label is what
  the expert really did next from that picture, recoveries included;
- with `--driver`, an earlier version of the policy leads each episode somewhere first, and the expert takes over there, so
  that the next version knows its own mistakes;
- contrast episodes: a scene is shown with the opposite instruction ("close the drawer" where it is closed) and that
  instruction's expert, so the picture alone does not tell what to do.

Shard (`.npz`): images [N, 2, S, S, 3] uint8, states [N, 4] float32, chunks [N, H, 4] float32, prompts [N] int32 (index
into INSTRUCTIONS). N observations of several episodes, H actions from each.

Usage: python recipes/metaworld/collect.py --out out/demos --episodes 120 --contrast 30 --workers 16
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.evals.env import FIRST_HELD_OUT_SEED, Observation
from stretto.evals.metaworld import BASE_CAMERA, INSTRUCTIONS, OPPOSITE, STATE, WRIST_CAMERA, MetaWorld
from stretto.evals.policies import Policy

Array = NDArray[np.generic]
CONTRAST_STEPS = 70
"""Length of a contrast episode, which has no success to end it."""
DRIVEN_STEPS = 100
"""The expert takes over before this step."""
DRIVEN_SEED = 500_000
"""Driven episodes see other scenes than plain ones."""


@dataclass(frozen=True)
class Job:
    """Some episodes of one scene under one instruction."""

    scene: str
    told: str
    seeds: tuple[int, ...]
    out: str
    horizon: int
    stride: int
    """Control steps between two recorded observations."""
    image_size: int
    driver: str = ""
    """Folder of the policy that starts the episode, if any."""


@dataclass(frozen=True)
class Sample:
    """One observation and what the expert did next."""

    images: Array
    state: Array
    chunk: Array


def jobs_for(options: argparse.Namespace) -> list[Job]:
    """Split the work into shards; the same options give the same shards for any number of workers."""
    jobs = []
    base = options.seed + (DRIVEN_SEED if options.driver else 0)
    for index, scene in enumerate(options.tasks):
        plan = [(scene, options.episodes)]
        if OPPOSITE.get(scene) in options.tasks:
            plan.append((OPPOSITE[scene], options.contrast))
        for told, count in plan:
            first = base + index * 10_000 + (5_000 if told != scene else 0)
            seeds = tuple(range(first, first + count))
            for at in range(0, count, options.shard):
                name = f"{scene}.{told}.{at:05d}.npz"
                path = str(Path(options.out) / name)
                part = seeds[at : at + options.shard]
                jobs.append(Job(scene, told, part, path, options.horizon, options.stride, options.image_size, options.driver))
    if any(seed >= FIRST_HELD_OUT_SEED for job in jobs for seed in job.seeds):
        raise SystemExit(f"seeds from {FIRST_HELD_OUT_SEED} on are held out for evaluation")
    return jobs


def pushes(rng: np.random.Generator, horizon: int) -> list[tuple[int, int, Array]]:
    """Choose when the hand is pushed: (first step, steps, constant action) of each push, in order, apart from each other."""
    out = []
    at = 0 if rng.random() < 0.8 else horizon + int(rng.integers(0, 40))
    for _ in range(int(rng.integers(1, 4))):
        steps = int(rng.integers(2, 14 if at == 0 else 9))
        action = np.append(rng.uniform(-1, 1, 3), rng.uniform(-1, 1)).astype(np.float32)
        out.append((at, steps, action))
        at += steps + horizon + int(rng.integers(4, 40))
    return out


def drive(env: MetaWorld, policy: Policy, prompt: str, steps: int) -> None:
    """Let the policy act for about so many steps, half of each chunk at a time, or until the task is done."""
    while steps > 0:
        actions = policy.infer({**env.observe(), "prompt": prompt})["actions"]
        for action in actions[: len(actions) // 2]:
            steps -= 1
            if env.step(action, observe=False).done:
                return


def record(env: MetaWorld, job: Job, seed: int, driver: Policy | None) -> list[Sample]:
    """Run one episode and return what was recorded; nothing if the expert failed."""
    rng = np.random.default_rng([seed, list(INSTRUCTIONS).index(job.told)])
    schedule = [] if driver else pushes(rng, job.horizon)
    contrast = job.told != job.scene
    done_at = CONTRAST_STEPS if contrast else None
    end = CONTRAST_STEPS + job.horizon if contrast else env.max_steps
    seen: list[tuple[int, Observation]] = []
    actions: list[Array] = []
    env.restart(seed)
    if driver:
        drive(env, driver, INSTRUCTIONS[job.told], int(rng.integers(8, DRIVEN_STEPS)))
    while len(actions) < end:
        t = len(actions)
        clear = all(t + job.horizon <= first or t >= first + steps for first, steps, _ in schedule)
        if clear and t % job.stride == 0 and (done_at is None or t < done_at):
            seen.append((t, env.observe()))
        push = next((action for first, steps, action in schedule if first <= t < first + steps), None)
        actions.append(env.expert_action(job.told))
        success = env.step(actions[-1] if push is None else push, observe=False).success
        if success and done_at is None:
            # A tail completes the last chunks; no later push may disturb it.
            done_at, end = len(actions), min(end, len(actions) + job.horizon)
            schedule = [p for p in schedule if p[0] < done_at]
    if done_at is None:
        return []
    return [
        Sample(np.stack([o[BASE_CAMERA], o[WRIST_CAMERA]]), np.asarray(o[STATE]), np.stack(actions[t : t + job.horizon]))
        for t, o in seen
        if t + job.horizon <= len(actions)
    ]


def run_job(job: Job) -> tuple[str, int, int]:
    """Write one shard; return its path, the episodes kept and the observations in it."""
    env = MetaWorld(job.scene, image_size=job.image_size)
    try:
        driver = None
        if job.driver:
            import torch
            from reference import Reference

            torch.set_num_threads(1)
            driver = Reference(Path(job.driver), seed=job.seeds[0])
        episodes = [record(env, job, seed, driver) for seed in job.seeds]
    finally:
        env.close()
    samples = [sample for episode in episodes for sample in episode]
    kept = sum(bool(episode) for episode in episodes)
    if samples:
        np.savez(
            job.out,
            images=np.stack([s.images for s in samples]),
            states=np.stack([s.state for s in samples]),
            chunks=np.stack([s.chunk for s in samples]),
            prompts=np.full(len(samples), list(INSTRUCTIONS).index(job.told), np.int32),
        )
    return job.out, kept, len(samples)


def collect(options: argparse.Namespace) -> None:
    """Run all jobs over worker processes, one GL context each."""
    jobs = jobs_for(options)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for stale in Path(options.out).glob("*.npz"):
        stale.unlink()
    started, kept, observations = time.monotonic(), 0, 0
    with multiprocessing.get_context("spawn").Pool(min(options.workers, len(jobs))) as pool:
        for path, episodes, count in pool.imap_unordered(run_job, jobs):
            kept, observations = kept + episodes, observations + count
            elapsed = time.monotonic() - started
            print(f"{Path(path).name}: {episodes} episodes, {observations} observations so far, {elapsed:.0f} s", flush=True)
    asked = sum(len(job.seeds) for job in jobs)
    elapsed = time.monotonic() - started
    print(f"collected {kept} of {asked} episodes, {observations} observations in {elapsed:.1f} s", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="out/metaworld/demos", help="folder of the shards")
    parser.add_argument("--tasks", nargs="+", default=list(INSTRUCTIONS), choices=list(INSTRUCTIONS), metavar="TASK")
    parser.add_argument("--episodes", type=int, default=120, help="demonstrations a task")
    parser.add_argument("--contrast", type=int, default=30, help="episodes a task with the opposite instruction")
    parser.add_argument("--driver", default="", help="folder of a trained policy that starts each episode")
    parser.add_argument("--horizon", type=int, default=16, help="actions in a chunk")
    parser.add_argument("--stride", type=int, default=2, help="control steps between observations")
    parser.add_argument("--image-size", type=int, default=80)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shard", type=int, default=10, help="episodes a file")
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    collect(parser.parse_args())


if __name__ == "__main__":
    main()
