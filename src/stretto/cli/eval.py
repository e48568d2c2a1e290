"""`stretto eval CHECKPOINT|ws://...`: success in the closed loop, on fixed held-out seeds, with its confidence interval."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from stretto.cli.options import PolicyFlags

if TYPE_CHECKING:
    from stretto.evals.results import Evaluation


@dataclass(frozen=True)
class Args:
    policy: Positional[str]
    """A checkpoint folder, an embedded checkpoint, a server (`ws://host:port`), or a baseline: `expert` or `zero`."""
    env: str = "metaworld"
    task: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A task to run; say it again for more. All of the environment by default."""
    episodes: int = 20
    """Episodes a task."""
    workers: int = 4
    """Simulated robots at once, one process each; their observations share batches."""
    execute_steps: int = 8
    """Actions taken from each chunk before the next question."""
    ablation: Literal["none", "blank_cameras", "wrong_instruction"] = "none"
    jsonl: Path | None = None
    """One line an episode."""
    video: Path | None = None
    """Folder for a film of each task's first episode."""
    api_key: str | None = None
    """For a server that asks for one."""
    client: Literal["stretto", "openpi"] = "stretto"
    """Who talks to a server: our client, or the one from PyPI that robots have."""
    json: bool = False
    """Print the result as JSON on standard output, and nothing else there."""
    out: Path | None = None
    """Also write that JSON to a file."""
    run: Annotated[PolicyFlags, OmitArgPrefixes] = field(default_factory=PolicyFlags)


def run(args: Args) -> int:
    from stretto.evals.evaluate import Settings

    settings = Settings(
        env=args.env,
        tasks=args.task,
        episodes=args.episodes,
        workers=args.workers,
        execute_steps=args.execute_steps,
        ablation=args.ablation,
        jsonl=args.jsonl,
        video=args.video,
    )
    result = _evaluated(args, settings)
    text = result.to_json()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        _table(result)
    return 0


def _evaluated(args: Args, settings: Any) -> Evaluation:
    from dataclasses import replace

    from stretto.deploy.provenance import commit, provenance
    from stretto.evals.evaluate import evaluate
    from stretto.evals.policies import connect_stock, connect_to

    if args.policy in ("expert", "zero"):
        result = evaluate(args.policy, settings, console=sys.stderr)  # type: ignore[arg-type]
        return replace(result, details={"commit": commit()})
    if args.policy.startswith(("ws://", "wss://")):
        stock = args.client == "openpi"
        connect = (
            connect_stock(args.policy, api_key=args.api_key)
            if stock
            else connect_to(args.policy, api_key=args.api_key, wait_s=10.0)
        )
        result = evaluate(None, settings, connect=connect, name=args.policy, console=sys.stderr)
        return replace(result, details={"client": args.client, "commit": commit()})
    from stretto.deploy.policy import load_policy

    policy = load_policy(args.policy, args.run.resolve())
    policy.warm()
    try:
        result = evaluate(policy, settings, name=args.policy, console=sys.stderr)
        details = {
            **provenance(policy.device),
            "dtype": str(policy.loaded.model.module.dtype).removeprefix("torch."),
            "precision": policy.metadata["precision"],
            "mode": policy.engine.plan.mode,
        }
        return replace(result, details=details)
    finally:
        policy.close()


def _table(result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = result.as_dict()
    table = Table("task", "success", "95 % interval", "episodes", "steps to success")
    for row in facts["tasks"]:
        low, high = row["interval"]
        steps = "-" if row["steps_to_success"] is None else f"{row['steps_to_success']:.0f}"
        table.add_row(row["task"], f"{row['success_rate']:.0%}", f"{low:.0%} to {high:.0%}", str(row["episodes"]), steps)
    low, high = facts["interval"]
    table.add_section()
    table.add_row("all", f"{facts['success_rate']:.0%}", f"{low:.0%} to {high:.0%}", str(facts["episodes"]), "")
    console = Console()
    console.print(table)
    latency = facts["inference_ms"]
    if latency["count"]:
        p50, p99 = latency["p50"], latency["p99"]
        console.print(f"inference {p50:.1f} ms (p99 {p99:.1f}); wait {facts['wait_ms_per_step']:.2f} ms a control step")
    for failure in facts["failures"]:
        console.print(f"broken off: {failure['task']} (seed {failure['seed']}): {failure['cause']}", markup=False)
