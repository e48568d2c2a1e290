"""Closed loop under delay: success and smoothness of synchronous, naive and real-time-chunking robots, by control steps.

    python benchmarks/rtc_delay.py --out benchmarks/results/rtc_delay --episodes 10 --workers 4

The world never waits: every control step moves the simulator, and an answer takes `delay` of them from its observation to
its first action. Nothing is slept, so the result does not depend on the speed of the machine.

| mode | while an answer is computed | when it is there |
|---|---|---|
| `sync` | the robot stands still | it executes the chunk from its first action |
| `naive` | it goes on with the old chunk | it jumps to the action that belongs to now |
| `identity`, `vjp`, `hard` | it goes on with the old chunk | the same; the chunk was made to continue the old one |

Success comes in two forms: within the episode's own limit, and on time, that is within `--takt` times the control steps
that the same policy needs in the same scene without delay (scenes that it then fails do not count). The second is what a
robot is paid for; a robot that waits or dithers long enough solves most tasks by the first.

A robot asks again after `max(--execute, delay)` actions. One that has no action left stands still. All modes start with
the same noise for the n-th chunk of an episode. `--out` names files without their ending: .json, .md, .png and .svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rtc_delay_result import draw, judge, table

from stretto.core.policy import RequestOptions, Session
from stretto.deploy.device import resolve_device
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.deploy.provenance import provenance
from stretto.evals.evaluate import Settings, evaluate
from stretto.evals.results import Evaluation
from stretto_client.timeline import Chunk, Fallback, Timeline

MODES = ("sync", "naive", "identity", "vjp", "hard")
STILL = -1
GUIDED = ("identity", "vjp", "hard")
Ask = Callable[[Mapping[str, Any], RequestOptions], np.ndarray]


@dataclass
class Steps:
    """How far consecutive commands of one condition were apart, over all dimensions that are not held."""

    largest: list[float] = field(default_factory=list)
    """One an episode, from the first command of a chunk on: setting out from rest is the same for all."""
    largest_seam: list[float] = field(default_factory=list)
    seams: list[float] = field(default_factory=list)
    """Where a chunk takes over from another, or the arm stops or sets out again."""
    inside: list[float] = field(default_factory=list)
    """Within a chunk."""
    starved: int = 0
    commands: int = 0


class DelayedRobot:
    """Answers an observation with all commands up to the next observation, as a robot under delay would have sent them."""

    def __init__(
        self, ask: Ask, steps: Steps, *, mode: str, delay: int, execute: int, held: tuple[int, ...], limits: float = 1.0
    ) -> None:
        self._ask, self._steps, self._mode, self._delay = ask, steps, mode, delay
        self._execute = max(execute, delay)
        self._held, self._limits = held, limits
        self.reset()

    def reset(self) -> None:
        """Begin a new episode."""
        self._timeline = Timeline()
        self._fallback = Fallback("hold", relative=True, held_dims=self._held)
        self._step = self._asked = 0
        self._last: np.ndarray | None = None
        self._source = STILL
        self._begun = False

    def infer(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return `actions`: the commands of the control steps until this robot observes again."""
        if not self._begun:
            self._steps.largest.append(0.0)
            self._steps.largest_seam.append(0.0)
            self._begun = True
        start = self._step
        actions = self._ask(observation, self._options())
        self._asked += 1
        if self._mode == "sync":
            self._timeline.clear()
        commands = [self._command(actions.shape[1]) for _ in range(self._delay)]
        self._timeline.commit(Chunk(start, {"actions": actions}, actions, len(actions)))
        while self._timeline.remaining(self._step) and self._step - start < self._execute:
            commands.append(self._command(actions.shape[1]))
        if not commands:
            raise RuntimeError("the robot would never move")
        return {"actions": np.stack(commands).astype(np.float32)}

    def _options(self) -> RequestOptions:
        chunk, seed = self._timeline.newest, self._asked
        left = self._timeline.remaining(self._step)
        if self._mode not in GUIDED or chunk is None or not left:
            return RequestOptions(seed=seed)
        executed = self._step - chunk.start
        delay = min(self._delay, left)
        return RequestOptions(
            seed=seed, mode=self._mode, executed_steps=executed, delay_steps=delay, prefix_KD=chunk.actions[executed:]
        )

    def _command(self, width: int) -> np.ndarray:
        planned = self._timeline.at(self._step)
        chunk = self._timeline.newest
        if planned is None:
            waited = self._fallback.next()
            command = np.zeros(width) if waited is None else np.asarray(waited["actions"])
            self._steps.starved += 1
        else:
            command = np.asarray(planned["actions"])
            self._fallback.saw(planned)
            self._step += 1
        self._note(np.clip(command, -self._limits, self._limits), chunk, planned is not None)
        return command

    def _note(self, command: np.ndarray, chunk: Chunk | None, moving: bool) -> None:
        steps, source = self._steps, STILL if chunk is None or not moving else chunk.start
        steps.commands += 1
        if self._last is None and source == STILL:
            return
        if self._last is not None:
            free = [i for i in range(len(command)) if i not in self._held]
            step = float(np.linalg.norm((command - self._last)[free]))
            steps.largest[-1] = max(steps.largest[-1], step)
            if source != self._source:
                steps.seams.append(step)
                steps.largest_seam[-1] = max(steps.largest_seam[-1], step)
            elif source != STILL:
                steps.inside.append(step)
        self._last, self._source = command, source


class Asking:
    """One robot's session with a policy of this process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._session: Session = policy.open_session("simulated robot")

    def __call__(self, observation: Mapping[str, Any], options: RequestOptions) -> np.ndarray:
        return np.asarray(self._policy.submit(observation, options, self._session).result().actions)


def run_condition(
    policy: Policy, mode: str, delay: int, settings: Settings, execute: int, held: tuple[int, ...]
) -> dict[str, Any]:
    """Evaluate one mode at one delay."""
    found: list[Steps] = []

    def connect() -> DelayedRobot:
        found.append(Steps())
        return DelayedRobot(Asking(policy), found[-1], mode=mode, delay=delay, execute=execute, held=held)

    result = evaluate(connect=connect, settings=settings, console=sys.stderr)
    return {**row(mode, delay, result, found), "runs": [[e.task, e.seed, e.success, e.steps] for e in result.episodes]}


def row(mode: str, delay: int, result: Evaluation, found: Sequence[Steps]) -> dict[str, Any]:
    largest, at_seams = (np.concatenate([getattr(s, name) for s in found]) for name in ("largest", "largest_seam"))
    seams, inside = (np.concatenate([getattr(s, name) for s in found]) for name in ("seams", "inside"))
    failures = [e.cause for e in result.episodes if e.cause]
    if failures:
        raise RuntimeError(f"{mode}, delay {delay}: {len(failures)} episodes broke, the first with: {failures[0]}")
    mean = lambda values: round(float(np.mean(values)), 4) if len(values) else None  # noqa: E731
    return {
        "mode": mode,
        "delay": delay,
        "episodes": len(result.episodes),
        "success_rate": round(result.success_rate, 4),
        "interval": [round(x, 4) for x in result.interval],
        "steps_to_success": mean([e.steps for e in result.episodes if e.success]),
        "largest_step_mean": mean(largest),
        "largest_step_p95": round(float(np.quantile(largest, 0.95)), 4),
        "largest_seam_step_mean": mean(at_seams),
        "seam_step_mean": mean(seams),
        "seam_step_p99": round(float(np.quantile(seams, 0.99)), 4) if len(seams) else None,
        "inside_step_mean": mean(inside),
        "inside_step_p99": round(float(np.quantile(inside, 0.99)), 4) if len(inside) else None,
        "starved_share": round(sum(s.starved for s in found) / max(1, sum(s.commands for s in found)), 4),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="pi05-metaworld")
    parser.add_argument("--env", default="metaworld")
    parser.add_argument("--held", default="3", help="action dimensions that are kept when a robot stands still (a gripper)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--task", action="append", default=[], help="say it again for more; all by default")
    parser.add_argument("--episodes", type=int, default=10, help="a task and condition")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--execute", type=int, default=8)
    parser.add_argument("--delays", default="0,1,2,3,4,5,6,7,8,9,10")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--takt", type=float, default=1.25, help="time allowed, in times of what is needed without delay")
    parser.add_argument("--schedule", default="exp", choices=("exp", "linear", "ones", "zeros"))
    parser.add_argument("--cap", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-figures", dest="figures", action="store_false")
    parser.add_argument("--figures-from", type=Path, help="judge and draw the rows of this .json again, and run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    if options.figures_from is not None:
        return redraw(options.figures_from, options.takt)
    modes, delays = options.modes.split(","), [int(d) for d in options.delays.split(",")]
    settings = Settings(
        env=options.env,
        tasks=tuple(options.task),
        episodes=options.episodes,
        workers=options.workers,
        # Commands up to the next observation come in one answer, all of which is executed.
        execute_steps=1 << 30,
    )
    held = tuple(int(d) for d in options.held.split(",") if d)
    rows: list[dict[str, Any]] = []
    # vjp slows every row of its policy, so it has one of its own.
    for offered in (("identity", "hard"), ("vjp",)):
        mine = [m for m in modes if m in offered or (m not in GUIDED and "hard" in offered)]
        if not mine:
            continue
        policy = load_policy(
            options.checkpoint,
            PolicyOptions(
                device=options.device,
                max_batch=options.workers,
                plan="per_visit",
                dispatch="fill_first",
                degenerate="hold",
                rtc=offered,
                max_delay=max(delays),
                rtc_schedule=options.schedule,
                rtc_cap=options.cap,
            ),
        )
        policy.warm()
        for delay, mode in itertools.product(delays, mine):
            rows.append(run_condition(policy, mode, delay, settings, options.execute, held))
            judge(rows, options.takt)
            save(options, rows)
            told = ("success_rate", "on_time", "seam_step_mean", "against_naive")
            print(
                f"{mode}, delay {delay}: " + ", ".join(f"{name} {rows[-1][name]}" for name in told if name in rows[-1]),
                flush=True,
            )
        policy.close()
    print(table(rows))
    if options.out is not None and options.figures:
        draw(rows, [options.out.with_suffix(".png"), options.out.with_suffix(".svg")])
    return rows


def redraw(saved: Path, takt: float) -> list[dict[str, Any]]:
    """Write table and figures of a result."""
    result = json.loads(saved.read_text())
    rows: list[dict[str, Any]] = result["rows"]
    judge(rows, takt)
    saved.write_text(json.dumps({**result, "takt": takt}) + "\n")
    saved.with_suffix(".md").write_text(table(rows))
    draw(rows, [saved.with_suffix(".png"), saved.with_suffix(".svg")])
    return rows


def save(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what is known so far."""
    if options.out is None:
        return
    said = ("checkpoint", "env", "episodes", "execute", "takt", "schedule", "cap")
    result = {
        **provenance(resolve_device(options.device)),
        **{name: getattr(options, name) for name in said},
        "tasks": options.task or "all",
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result) + "\n")
    options.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
