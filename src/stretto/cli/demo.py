"""`stretto demo`: three simulated robots with three tasks, one server, the real protocol; a film and a page in `out/`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from tyro.conf import Positional, UseAppendAction

if TYPE_CHECKING:
    from rich.table import Table

    from stretto.evals.policies import Connect
    from stretto.evals.results import Episode
    from stretto.evals.video import Frames

T = TypeVar("T")
TASKS = ("drawer-open", "button-press-topdown", "window-open")


@dataclass(frozen=True)
class Args:
    checkpoint: Positional[str] = "pi05-metaworld"
    task: Annotated[tuple[str, ...], UseAppendAction] = ()
    """One robot a task; say it again for more. By default drawer-open, button-press-topdown and window-open."""
    out: Path = Path("out")
    seed: int | None = None
    """Scene of all robots; the first held-out one by default."""
    execute_steps: int = 8
    """Actions taken from each chunk before the next question."""


@dataclass
class Seen:
    """One robot as the live table shows it. Written by the robot's thread, read by the screen's."""

    task: str
    prompt: str = ""
    chunks: int = 0
    steps: int = 0
    waits_ms: list[float] = field(default_factory=list)
    batch: int = 0
    state: str = "starting"


class Watched:
    """A robot's connection that notes what happens on it."""

    def __init__(self, policy: Any, seen: Seen, execute_steps: int) -> None:
        self._policy, self._seen, self._steps = policy, seen, execute_steps

    def infer(self, obs: Mapping[str, Any]) -> Mapping[str, Any]:
        begin = time.perf_counter()
        reply: Mapping[str, Any] = self._policy.infer(obs)
        self._seen.waits_ms.append((time.perf_counter() - begin) * 1e3)
        self._seen.prompt, self._seen.state = str(obs["prompt"]), "moving"
        self._seen.chunks += 1
        self._seen.steps += min(self._steps, len(reply["actions"]))
        self._seen.batch = max(self._seen.batch, int(reply.get("rt", {}).get("batch_size", 1)))
        return reply

    def close(self) -> None:
        self._policy.close()


def run(args: Args) -> int:
    from rich.console import Console
    from rich.live import Live

    from stretto.deploy.policy import PolicyOptions, load_policy
    from stretto.evals.env import check_tasks, find_environment, held_out_seeds
    from stretto.evals.policies import connect_to
    from stretto.serve.run import ServerThread

    console = Console()
    adapter = find_environment("metaworld")
    tasks = check_tasks(adapter, args.task or TASKS)
    seed = held_out_seeds(1)[0] if args.seed is None else args.seed
    began = time.monotonic()
    policy = load_policy(args.checkpoint, PolicyOptions(max_batch=max(2, len(tasks))))
    console.print(f"[bold]{policy.loaded.path.name}[/]: {policy.loaded.report}")
    seen = [Seen(task) for task in tasks]
    try:
        with ServerThread(policy) as server:
            console.print(f"serving on {server.url} ({policy.device}, {policy.engine.plan.mode}); {len(tasks)} robots connect")
            connect = connect_to(server.url)
            with Live(_table(seen), console=console, refresh_per_second=8) as live:
                results = _run_robots(args, adapter, seed, seen, connect, lambda: live.update(_table(seen)))
            if not console.is_terminal:
                console.print()  # the last table stands without an end of line where nothing is live
            films, episodes = [r[1] for r in results], [r[0] for r in results]
    finally:
        policy.close()
    film, page = _leave(args.out, adapter.control_hz, seen, episodes, films, time.monotonic() - began)
    console.print(f"film: {film}\nsummary: {page}")
    return 0 if all(not e.cause for e in episodes) else 1


def _run_robots(
    args: Args, adapter: Any, seed: int, seen: Sequence[Seen], connect: Connect, refresh: Any
) -> list[tuple[Episode, Frames]]:
    from stretto.evals.ablations import find_ablation
    from stretto.evals.evaluate import FILM_FPS
    from stretto.evals.policies import Connected
    from stretto.evals.robots import Job, Robot

    every = max(1, round(adapter.control_hz / FILM_FPS))

    def drive(row: Seen) -> tuple[Episode, Frames]:
        asker = Connected(lambda: Watched(connect(), row, args.execute_steps))
        robot = Robot("metaworld", adapter, asker, None, find_ablation("none"), args.execute_steps)
        try:
            episode, frames = robot.run(Job(row.task, seed, every))
            row.steps = episode.steps
            row.state = f"broken off: {episode.cause}" if episode.cause else ("solved" if episode.success else "not solved")
            return episode, frames
        finally:
            robot.close()
            asker.close()

    driven = [_in_thread(partial(drive, row)) for row in seen]
    while wait(driven, timeout=0.1).not_done:
        refresh()
    refresh()
    return [future.result() for future in driven]


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run work in a thread that does not outlive an interrupted demo."""
    done: Future[T] = Future()

    def run() -> None:
        # The edge of one robot: its error is raised where the results are gathered.
        try:
            done.set_result(work())
        except Exception as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return done


def _table(seen: Sequence[Seen]) -> Table:
    from rich.table import Table

    table = Table("robot", "told", "steps", "chunks", "latency", "worst", "batch", "state")
    for i, row in enumerate(seen):
        waits = sorted(row.waits_ms)
        middle, worst = (f"{waits[len(waits) // 2]:.0f} ms", f"{waits[-1]:.0f} ms") if waits else ("", "")
        colour = {"solved": "green", "moving": "cyan", "starting": "dim"}.get(row.state, "yellow")
        told = f'"{row.prompt}"' if row.prompt else row.task
        numbers = [str(row.steps), str(row.chunks), middle, worst, str(row.batch or "")]
        table.add_row(str(i + 1), told, *numbers, f"[{colour}]{row.state}[/]")
    return table


def _leave(
    out: Path, control_hz: float, seen: Sequence[Seen], episodes: Sequence[Episode], films: Sequence[Frames], seconds: float
) -> tuple[Path, Path]:
    """Write the film of all robots and the one-page summary."""
    from stretto.evals.evaluate import FILM_FPS
    from stretto.evals.video import side_by_side, write_video

    out.mkdir(parents=True, exist_ok=True)
    film, page = out / "robots.gif", out / "summary.md"
    shown = [f for f in films if f]
    if shown:
        write_video(film, side_by_side(shown), control_hz / max(1, round(control_hz / FILM_FPS)))
    lines = [
        "# Three robots, one server",
        "",
        f"{sum(e.success for e in episodes)} of {len(episodes)} robots solved their task; {seconds:.0f} s in all.",
        "",
        "| robot | task | told | solved | control steps | action chunks | latency p50 | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i, (row, episode) in enumerate(zip(seen, episodes, strict=True)):
        waits = sorted(row.waits_ms) or [0.0]
        solved = "yes" if episode.success else (episode.cause or "no")
        numbers = f"{episode.steps} | {row.chunks} | {waits[len(waits) // 2]:.1f} ms | {waits[-1]:.1f} ms"
        lines.append(f"| {i + 1} | {row.task} | {row.prompt} | {solved} | {numbers} |")
    lines += ["", "![the robots side by side](robots.gif)", ""]
    lines += ["Latency is from handing an observation to the client until its actions are there, over the openpi protocol.", ""]
    page.write_text("\n".join(lines))
    return film, page
