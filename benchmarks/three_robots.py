"""Three robots, one policy, one machine: synchronous robots at a single-flight server, and chunking robots at ours.

    python benchmarks/three_robots.py --out benchmarks/results/three_robots

Every robot is a simulator with a control clock of its own that never waits: a control step without a command is a step at
which the arm stands still. Each task must be done in `--patience` times the steps that it takes when answers cost nothing.

`naive`: requests one after the other, in order of arrival, each alone; robots execute a chunk, then wait for the next.
`ours`: batches under deadlines; robots ask while they move, and each chunk continues the one before it.

Both go through the same server, wire and client. Writes, per server, one trace (`stretto roofline` reads it), and a summary
and a picture of both: `--out` names the files without their ending.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.deploy.device import resolve_device
from stretto.deploy.policy import PolicyOptions, load_policy
from stretto.deploy.provenance import provenance
from stretto.evals.env import find_environment
from stretto.evals.workers import Act, Report, Start, Worker
from stretto.serve import ServerThread
from stretto_client import PolicyClient, RealtimeBroker
from stretto_client.trace import TracedPolicy

EXECUTE = 8
SEED = 1_000_000


@dataclass
class Run:
    """What one robot did; one entry of `moving` a control step."""

    robot: str
    task: str
    limit: int
    success: bool = False
    steps: int = 0
    still: int = 0
    """Control steps without a command of a chunk."""
    longest_stop: int = 0
    speeds: list[float] = field(default_factory=list)
    """Size of each command's motion; 0 where the arm stood still."""


@dataclass(frozen=True)
class World:
    """The world that all robots live in."""

    env: str
    control_hz: float
    held: tuple[int, ...]
    width: int

    def still(self, last: np.ndarray) -> np.ndarray:
        command = np.zeros(self.width, np.float32)
        for d in self.held:
            command[d] = last[d]
        return command


class Robot:
    """One simulator under a control clock that never waits."""

    def __init__(self, name: str, task: str, seed: int, limit: int, world: World) -> None:
        self.run = Run(name, task, limit)
        self._world, self._seed = world, seed
        self._worker = Worker(world.env)
        self._last = np.zeros(world.width, np.float32)
        self._stopped = 0

    def prepare(self) -> Report:
        """Start the episode; slow once."""
        return self._worker.ask(Start(self.run.task, self._seed))

    def live(self, report: Report, broker: RealtimeBroker, start_s: float) -> None:
        """Work until the task is done or the steps are used up."""
        hz = self._world.control_hz
        while not report.done and self.run.steps < self.run.limit:
            time.sleep(max(0.0, start_s + self.run.steps / hz - time.monotonic()))
            command = broker.infer(report.observation)
            # The world went on while the controller was busy.
            passed = math.floor((time.monotonic() - start_s) * hz + 1e-6) - self.run.steps
            stops = [self._world.still(self._last)] * min(max(0, passed), self.run.limit - self.run.steps - 1)
            starved = bool(command["broker"]["starved"])
            action = np.asarray(command["actions"], np.float32)
            report = self._worker.ask(Act(np.stack([*stops, action])))
            for _ in stops:
                self._note(0.0, still=True)
            self._note(0.0 if starved else float(np.linalg.norm(np.delete(action, self._world.held))), still=starved)
            self._last = action
        self.run.success = report.success

    def close(self) -> None:
        self._worker.close()

    def _note(self, speed: float, *, still: bool) -> None:
        run = self.run
        run.steps += 1
        run.speeds.append(round(speed, 4))
        self._stopped = self._stopped + 1 if still else 0
        run.still += still
        run.longest_stop = max(run.longest_stop, self._stopped)


def steps_needed(checkpoint: str, device: str, tasks: Sequence[str], seeds: Sequence[int], world: World) -> list[int]:
    """Return the steps of each task when the world waits for every answer."""
    policy = load_policy(checkpoint, PolicyOptions(device=device, max_batch=1, degenerate="hold"))
    policy.warm()
    needed = []
    for task, seed in zip(tasks, seeds, strict=True):
        worker = Worker(world.env)
        report = worker.ask(Start(task, seed))
        while not report.done:
            report = worker.ask(Act(policy.infer(report.observation)["actions"][:EXECUTE]))
        worker.close()
        if not report.success:
            raise SystemExit(f"{task}, seed {seed}: fails even when the world waits; choose another task or seed")
        needed.append(report.steps)
    policy.close()
    return needed


def served(kind: str, options: argparse.Namespace) -> PolicyOptions:
    common: dict[str, Any] = {"device": options.device, "degenerate": "hold", "control_hz": options.control_hz}
    if kind == "naive":
        return PolicyOptions(**common, max_batch=1, plan="whole", dispatch="first_come_first_served", rtc=())
    return PolicyOptions(**common, max_batch=4, plan="per_visit", dispatch="deadline_limited")


def broker_for(kind: str, client: Any, options: argparse.Namespace, world: World) -> RealtimeBroker:
    common: dict[str, Any] = {"relative_actions": True, "held_dims": list(world.held), "execution_horizon": EXECUTE}
    if kind == "naive":
        return RealtimeBroker(client, options.control_hz, mode="sync", **common)
    return RealtimeBroker(client, options.control_hz, mode="rtc", guidance=options.guidance, max_failures=1000, **common)


def scenario(kind: str, options: argparse.Namespace, limits: Sequence[int], world: World, trace: Path) -> list[Run]:
    """Run all robots at once at one server; write what they asked to `trace`."""
    robots = [
        Robot(f"robot {i + 1}", task, seed, limit, world)
        for i, (task, seed, limit) in enumerate(zip(options.tasks, options.seeds, limits, strict=True))
    ]
    policy = load_policy(options.checkpoint, served(kind, options))
    with ServerThread(policy) as server, tempfile.TemporaryDirectory() as folder:
        reports = [robot.prepare() for robot in robots]
        start_s = time.monotonic() + 0.2
        errors: list[BaseException] = []

        def work(i: int) -> None:
            path = Path(folder) / f"{i}.jsonl"
            extra = {"robot": robots[i].run.robot, "mode": "sync" if kind == "naive" else "rtc", "horizon": 16}
            # The edge of one robot: what ends it is raised again below.
            try:
                with (
                    PolicyClient("127.0.0.1", server.port) as client,
                    TracedPolicy(client, path, control_hz=options.control_hz, executed_steps=EXECUTE, extra=extra) as traced,
                ):
                    broker = broker_for(kind, traced, options, world)
                    robots[i].live(reports[i], broker, start_s)
                    broker.close()
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(i,), name=r.run.robot) for i, r in enumerate(robots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for robot in robots:
            robot.close()
        if errors:
            raise errors[0]
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text().splitlines()]
        trace.write_text("\n".join(sorted(lines, key=lambda line: json.loads(line)["t_s"])) + "\n")
    return [robot.run for robot in robots]


def draw(found: Mapping[str, Sequence[Run]], control_hz: float, paths: Sequence[Path]) -> None:
    """Draw each robot's motion over time: gaps are stops, the end is a tick or a cross."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = {
        "naive": "One request at a time, robots that wait",
        "ours": "Batches under deadlines, robots that chunk in real time",
    }
    count = max(len(runs) for runs in found.values())
    figure = Figure(figsize=(10, 1.3 * count + 1.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(count, len(found), sharex=True, sharey=True, squeeze=False)
    for column, (kind, runs) in enumerate(found.items()):
        for line, run in enumerate(runs):
            axes = grid[line, column]
            t_s = np.arange(len(run.speeds)) / control_hz
            colour = "#009e73" if run.success else "#d55e00"
            axes.fill_between(t_s, run.speeds, step="post", color=colour, alpha=0.75, lw=0)
            end = f"done after {run.steps / control_hz:.1f} s" if run.success else "out of time"
            axes.set_title(f"{run.robot}, {run.task}: {end}, stood still {run.still} of {run.steps} steps", fontsize=8)
            axes.axvline(run.limit / control_hz, color="0.6", lw=0.8, ls=":")
            axes.spines[["top", "right"]].set_visible(False)
        grid[0, column].set_title(f"{titles[kind]}\n\n{grid[0, column].get_title()}", fontsize=8)
        grid[-1, column].set_xlabel("seconds")
    grid[count // 2, 0].set_ylabel("commanded motion")
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="pi05-metaworld")
    parser.add_argument("--env", default="metaworld")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", default=["drawer-open", "button-press-topdown", "window-close"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[SEED, SEED, SEED])
    parser.add_argument("--held", type=int, nargs="*", default=[3], help="action dimensions kept while the arm stands still")
    parser.add_argument("--control-hz", type=float, default=20.0, help="control steps a second of wall clock")
    parser.add_argument("--patience", type=float, default=1.5)
    parser.add_argument("--guidance", default="hard", choices=("identity", "vjp", "hard"))
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    adapter = find_environment(options.env)
    world = World(options.env, options.control_hz, tuple(options.held), adapter.action_dim)
    needed = steps_needed(options.checkpoint, options.device, options.tasks, options.seeds, world)
    limits = [math.ceil(options.patience * n) for n in needed]
    found: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "three_robots"
        out.parent.mkdir(parents=True, exist_ok=True)
        for kind in ("naive", "ours"):
            found[kind] = scenario(kind, options, limits, world, out.with_name(f"{out.name}_{kind}_trace.jsonl"))
            for run in found[kind]:
                end = "done" if run.success else "out of time"
                print(f"{kind}: {run.robot}, {run.task}: {end} after {run.steps} of {run.limit} steps, {run.still} still")
        result = {
            **provenance(resolve_device(options.device)),
            **{name: getattr(options, name) for name in ("checkpoint", "control_hz", "patience", "guidance")},
            "steps_needed": dict(zip(options.tasks, needed, strict=True)),
            "finished": {kind: sum(run.success for run in runs) for kind, runs in found.items()},
            "runs": {kind: [asdict(run) for run in runs] for kind, runs in found.items()},
        }
        if options.out is not None:
            out.with_name(out.name + ".json").write_text(json.dumps(result) + "\n")
            draw(found, options.control_hz, [out.with_name(f"{out.name}.{ending}") for ending in ("png", "svg")])
    return result


if __name__ == "__main__":
    main()
