"""Three robots, one policy, one machine: a server that takes one request at a time, and ours.

    OMP_NUM_THREADS=1 python benchmarks/three_robots.py --out benchmarks/results/three_robots

Every robot is a simulator in a process of its own, under a control clock that never waits: a control step without a command
is a step at which the arm stands still. A robot has the job done if it needs at most `--takt` times the control steps that
the same policy needs in the same scene when the world waits for every answer. Scenes come in rounds, in a fixed order;
a scene that the policy does not solve even then is passed over. In every round all three kinds meet the same scenes:

`one_at_a_time`: requests in order of arrival, each alone, as openpi's server does; robots execute half a chunk, then wait
for the next, as with openpi's broker. `one_at_a_time_async`: the same server; robots ask while they move, and jump to the new
chunk when it comes. `ours`: batches under deadlines, joined between denoise steps; robots ask while they move, and each
chunk continues the one before it.

All go through the same server code, wire, client and weights, with the same number of denoise steps. Writes, per kind, one
trace of all rounds (`stretto roofline` reads it), and a summary and a picture: `--out` names the files without their ending.
The picture shows the round that is nearest to the median of all three, by the number of robots that are done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quiet import undisturbed
from three_robots_result import MOST, Run, draw, summary

from stretto.deploy.device import resolve_device
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.deploy.provenance import provenance
from stretto.evals.env import check_tasks, find_environment, held_out_seeds
from stretto.evals.workers import Act, Report, Start, Worker
from stretto.serve import ServerThread
from stretto_client import PolicyClient, RealtimeBroker
from stretto_client.trace import TracedPolicy

EXECUTE = 8
KINDS = ("one_at_a_time", "one_at_a_time_async", "ours")
MODES = {"one_at_a_time": "sync", "one_at_a_time_async": "naive", "ours": "rtc"}


@dataclass(frozen=True)
class Scene:
    """One task in one start position."""

    task: str
    seed: int
    needed: int
    """Control steps to success when the world waits for every answer."""


@dataclass(frozen=True)
class World:
    """The world that all robots live in."""

    env: str
    control_hz: float
    held: tuple[int, ...]
    width: int
    camera_every: int = 1
    """Control steps from one picture to the next."""

    def still(self, last: np.ndarray) -> np.ndarray:
        command = np.zeros(self.width, np.float32)
        for d in self.held:
            command[d] = last[d]
        return command


class Robot:
    """One simulator under a control clock that never waits."""

    def __init__(self, run: Run, seed: int, world: World, worker: Worker) -> None:
        self.run = run
        self._world, self._seed, self._worker = world, seed, worker
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
            command = broker.infer(report.observation or None)
            # The world went on while the controller was busy.
            passed = math.floor((time.monotonic() - start_s) * hz + 1e-6) - self.run.steps
            stops = [self._world.still(self._last)] * min(max(0, passed), self.run.limit - self.run.steps - 1)
            starved = bool(command["broker"]["starved"])
            action = np.asarray(command["actions"], np.float32)
            every, steps = self._world.camera_every, self.run.steps
            seen = (steps + len(stops) + 1) // every > steps // every
            report = self._worker.ask(Act(np.stack([*stops, action]), observe=seen))
            for _ in stops:
                self._note(0.0, still=True)
            self._note(0.0 if starved else float(np.linalg.norm(np.delete(action, self._world.held))), still=starved)
            self._last = action
        self.run.success = report.success

    def _note(self, speed: float, *, still: bool) -> None:
        run = self.run
        run.steps += 1
        run.speeds.append(round(speed, 4))
        self._stopped = self._stopped + 1 if still else 0
        run.still += still
        run.longest_stop = max(run.longest_stop, self._stopped)


def scenes(policy: Policy, tasks: Sequence[str], rounds: int, robots: int, worker: Worker) -> list[list[Scene]]:
    """Return the scenes of each round: tasks in turn, seeds in order, and what each needs when the world waits."""
    found: list[Scene] = []
    seeds = {task: iter(held_out_seeds(100)) for task in tasks}
    while len(found) < rounds * robots:
        task = tasks[len(found) % len(tasks)]
        seed = next(seeds[task])
        report = worker.ask(Start(task, seed))
        policy.reset()
        while not report.done:
            report = worker.ask(Act(policy.infer(report.observation)["actions"][:EXECUTE]))
        if report.success:
            found.append(Scene(task, seed, report.steps))
        else:
            print(f"passed over: {task}, seed {seed}, fails even when the world waits", flush=True)
    return [found[i * robots : (i + 1) * robots] for i in range(rounds)]


def served(kind: str, options: argparse.Namespace) -> PolicyOptions:
    common: dict[str, Any] = {
        "device": options.device,
        "degenerate": "hold",
        "control_hz": options.control_hz,
        "denoise_steps": options.denoise_steps,
    }
    if kind == "ours":
        return PolicyOptions(**common, max_batch=4, plan="per_visit", dispatch="deadline_limited")
    return PolicyOptions(**common, max_batch=1, plan="whole", dispatch="first_come_first_served", rtc=())


def broker_for(kind: str, client: Any, options: argparse.Namespace, world: World) -> RealtimeBroker:
    mode = MODES[kind]
    guidance = {"guidance": options.guidance} if mode == "rtc" else {}
    return RealtimeBroker(
        client,
        options.control_hz,
        mode=mode,  # type: ignore[arg-type]
        relative_actions=True,
        held_dims=list(world.held),
        execution_horizon=EXECUTE,
        max_failures=1000,
        **guidance,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Shop:
    """The simulators, and the servers that they can ask."""

    options: argparse.Namespace
    world: World
    workers: Sequence[Worker]
    ports: Mapping[str, int]
    horizon: int

    def measure(self, kind: str, number: int, scenes: Sequence[Scene], folder: Path) -> list[Run]:
        """Play a round, again where others took too much of the machine meanwhile."""
        if self.options.others is None:
            return self.play(kind, number, scenes, folder)
        play = partial(self.play, kind, number, scenes, folder)
        runs, share = undisturbed(play, self.options.others, self.options.patience_s)
        return [replace(run, others=round(share, 4)) for run in runs]

    def play(self, kind: str, number: int, scenes: Sequence[Scene], folder: Path) -> list[Run]:
        """Run all robots of one round at once; add what they asked to the trace of this kind in `folder`."""
        robots = [
            Robot(Run(f"robot {i + 1}", s.task, math.ceil(MOST * s.needed), number, s.needed), s.seed, self.world, worker)
            for i, (s, worker) in enumerate(zip(scenes, self.workers, strict=True))
        ]
        for path in folder.glob(f"{kind}-{number}-*.jsonl"):  # of a run that was disturbed
            path.unlink()
        reports = [robot.prepare() for robot in robots]
        start_s = time.monotonic() + 0.2
        errors: list[BaseException] = []

        def work(i: int) -> None:
            # The edge of one robot: what ends it is raised again below.
            try:
                self._live(kind, number, robots[i], reports[i], start_s, folder)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(i,), name=r.run.robot) for i, r in enumerate(robots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [robot.run for robot in robots]

    def _live(self, kind: str, number: int, robot: Robot, report: Report, start_s: float, folder: Path) -> None:
        path = folder / f"{kind}-{number}-{robot.run.robot}.jsonl"
        extra = {"robot": robot.run.robot, "round": number, "mode": MODES[kind], "horizon": self.horizon}
        hz = self.options.control_hz
        with (
            PolicyClient("127.0.0.1", self.ports[kind]) as client,
            TracedPolicy(client, path, control_hz=hz, executed_steps=EXECUTE, extra=extra) as traced,
        ):
            broker = broker_for(kind, traced, self.options, self.world)
            robot.live(report, broker, start_s)
            broker.close()
        run, stats = robot.run, broker.stats
        run.chunks, run.late_chunks, run.failures = stats.chunks, stats.late, stats.failures


def gather(kind: str, folder: Path, trace: Path) -> None:
    """Write one trace of all rounds, in order of time."""
    lines = [line for path in sorted(folder.glob(f"{kind}-*.jsonl")) for line in path.read_text().splitlines()]
    trace.write_text("\n".join(sorted(lines, key=lambda line: json.loads(line)["t_s"])) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="pi05-metaworld")
    parser.add_argument("--env", default="metaworld")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", help="in turn; by default all of the environment")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--robots", type=int, default=3)
    parser.add_argument("--held", type=int, nargs="*", default=[3], help="action dimensions kept while the arm stands still")
    parser.add_argument("--control-hz", type=float, default=32.0, help="control steps a second of wall clock")
    parser.add_argument("--camera-every", type=int, default=2, help="control steps from one picture to the next")
    parser.add_argument("--denoise-steps", type=int, help="of both servers; by default what the checkpoint says")
    parser.add_argument("--takt", type=float, default=1.25, help="time allowed, in times of what is needed without latency")
    parser.add_argument("--others", type=float, help="play again where others took more than this share of the machine")
    parser.add_argument("--patience-s", type=float, default=600.0, help="how long to wait for that")
    parser.add_argument("--guidance", default="identity", choices=("identity", "vjp", "hard"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-figures", dest="figures", action="store_false")
    parser.add_argument("--figures-from", type=Path, help="draw the picture of this .json, and run nothing")
    options = parser.parse_args(arguments)
    if not 1.0 <= options.takt <= MOST:
        parser.error(f"--takt: got {options.takt}, expected from 1 to {MOST}")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    if options.figures_from is not None:
        return redraw(options.figures_from)
    adapter = find_environment(options.env)
    world = World(options.env, options.control_hz, tuple(options.held), adapter.action_dim, options.camera_every)
    tasks = check_tasks(adapter, tuple(options.tasks or ()))
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [Worker(world.env) for _ in range(options.robots)]
        for worker in workers:
            stack.callback(worker.close)
        policies = {kind: load_policy(options.checkpoint, served(kind, options)) for kind in ("one_at_a_time", "ours")}
        ports = {kind: stack.enter_context(ServerThread(policy)).port for kind, policy in policies.items()}
        ports["one_at_a_time_async"] = ports["one_at_a_time"]
        rounds = scenes(policies["one_at_a_time"], tasks, options.rounds, options.robots, workers[0])
        shop = Shop(options, world, workers, ports, policies["ours"].processor.action_horizon)
        for number, mine in enumerate(rounds, start=1):
            # Kinds in turn within each round, so that whatever else the machine does falls on all of them.
            for kind in KINDS:
                found[kind] += (runs := shop.measure(kind, number, mine, folder))
                told = ", ".join(f"{r.task} {r.steps / r.needed:.2f}{'' if r.success else ' (never)'}" for r in runs)
                print(f"round {number}, {kind}: {sum(r.within(options.takt) for r in runs)} done; {told}", flush=True)
            result = conclude(options, found, folder)
    print(json.dumps(result["summary"], indent=1))
    return result


def conclude(options: argparse.Namespace, found: Mapping[str, Sequence[Run]], folder: Path) -> dict[str, Any]:
    """Write what is known so far."""
    said = ("checkpoint", "control_hz", "camera_every", "others", "takt", "guidance", "denoise_steps", "rounds", "robots")
    result = {
        **provenance(resolve_device(options.device)),
        **{name: getattr(options, name) for name in said},
        "executed_steps": EXECUTE,
        "threads": torch.get_num_threads(),
        "summary": {kind: summary(runs, options.takt) for kind, runs in found.items()},
        "runs": {kind: [asdict(run) for run in runs] for kind, runs in found.items()},
    }
    if (out := options.out) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_name(out.name + ".json").write_text(json.dumps(result) + "\n")
        for kind in found:
            gather(kind, folder, out.with_name(f"{out.name}_{kind}_trace.jsonl"))
        if options.figures:
            redraw(out.with_name(out.name + ".json"))
    return result


def redraw(saved: Path) -> dict[str, Any]:
    """Draw the picture of a result."""
    result: dict[str, Any] = json.loads(saved.read_text())
    found = {kind: [Run(**run) for run in runs] for kind, runs in result["runs"].items()}
    draw(found, result["control_hz"], result["takt"], [saved.with_suffix(f".{end}") for end in ("png", "svg")])
    return result


if __name__ == "__main__":
    main()
