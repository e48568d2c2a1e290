"""The whole recipe in one go: collect, train, let the policy drive, collect again, train on, export, and try it out.

On one H200 with 16 cores it takes about eight minutes; `--toy` runs every step in well under a minute on two cores and
learns nothing.

Usage: python recipes/metaworld/run.py --out out/metaworld --minutes 5
       python recipes/metaworld/run.py --out /tmp/toy --toy
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import collect

from stretto.evals.evaluate import Settings, evaluate
from stretto.evals.results import Evaluation

RESERVE_MINUTES = 1.0
"""Kept free at the end for loading, export and check."""


def defaults(add: object, **changes: object) -> argparse.Namespace:
    """Return a script's own default options with some of them changed."""
    parser = argparse.ArgumentParser()
    add(parser)  # type: ignore[operator]
    options = parser.parse_args([])
    unknown = set(changes) - set(vars(options))
    assert not unknown, unknown
    vars(options).update(changes)
    return options


def check(trained: Path, options: argparse.Namespace) -> Evaluation:
    """Run the trained policy in the closed loop on held-out seeds, without the runtime."""
    from reference import Reference

    policy = Reference(trained, options.device)
    settings = Settings(tasks=tuple(options.tasks), episodes=options.check, workers=options.workers)
    result = evaluate(policy, settings, name="reference")
    low, high = result.interval
    print(f"success {result.success_rate:.1%} ({low:.1%} to {high:.1%}) in {result.seconds:.0f} s", flush=True)
    for row in result.as_dict()["tasks"]:
        print(
            f"  {row['task']:24} {row['success_rate']:6.1%} of {row['episodes']}, {row['steps_to_success']} steps", flush=True
        )
    for failure in result.as_dict()["failures"]:
        print(f"  broken off: {failure}", flush=True)
    return result


def run(options: argparse.Namespace) -> None:
    # Not at the top: simulator processes import this file too, and have no use for torch.
    import export
    import torch
    import train

    out, began = Path(options.out), time.monotonic()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained, folder = out / "train", out / "pi05-metaworld"

    def stage(name: str) -> None:
        print(f"== {name} (at {time.monotonic() - began:.0f} s)", flush=True)

    gathering = {"tasks": options.tasks, "workers": options.workers, "image_size": options.image_size, "shard": options.shard}
    stage("collect")
    plain = {"episodes": options.episodes, "contrast": options.contrast, "out": str(out / "demos")}
    collect.collect(defaults(collect.add_arguments, **gathering, **plain))
    learning = {"out": str(trained), "size": options.size, "device": options.device, "seed": options.seed}
    learning |= {"steps": options.steps, "batch": options.batch, "draws": options.draws}
    stage("train")
    share = options.first_share if options.driven else 1.0
    first = {**learning, "demos": [str(out / "demos")], "minutes": options.minutes * share}
    state = train.train(defaults(train.add_arguments, **first))
    shutil.copyfile(trained / "losses.json", out / "losses-1.json")
    if options.driven:
        stage("collect where the policy leads")
        driven = {"episodes": options.driven, "contrast": 0, "out": str(out / "driven"), "driver": str(trained)}
        collect.collect(defaults(collect.add_arguments, **gathering, **driven))
        export.export(trained, folder)
        stage("train on both")
        both = [str(out / "demos"), str(out / "driven")]
        left = options.total_minutes - RESERVE_MINUTES - (time.monotonic() - began) / 60
        minutes = max(0.1, min(options.minutes * (1 - share), left))
        second = {**learning, "demos": both, "minutes": minutes, "lr": options.second_lr}
        train.train(defaults(train.add_arguments, **second), state)
        shutil.copyfile(trained / "losses.json", out / "losses-2.json")
    stage("export")
    export.export(trained, folder)
    if options.check:
        stage("check")
        result = check(trained, options)
        (out / "check.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    stage("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/metaworld")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time, both rounds together")
    parser.add_argument("--total-minutes", type=float, default=9.0, help="shorten the second round to end before this")
    parser.add_argument("--first-share", type=float, default=0.4, help="share of the training time before the policy drives")
    parser.add_argument("--second-lr", type=float, default=7e-4)
    parser.add_argument("--episodes", type=int, default=120, help="demonstrations a task")
    parser.add_argument("--contrast", type=int, default=30, help="episodes a task with the opposite instruction")
    parser.add_argument("--driven", type=int, default=80, help="episodes a task that the policy starts; 0: no second round")
    parser.add_argument("--check", type=int, default=10, help="held-out episodes a task at the end; 0 leaves it out")
    parser.add_argument("--tasks", nargs="+", default=list(collect.INSTRUCTIONS), metavar="TASK")
    parser.add_argument("--image-size", type=int, default=80)
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--shard", type=int, default=10)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="", help="cuda where there is one, by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="the smallest run that goes through every step")
    options = parser.parse_args()
    if options.toy:
        toy = {"episodes": 1, "contrast": 1, "driven": 1, "check": 1, "steps": 3, "batch": 4, "draws": 1, "size": "toy"}
        vars(options).update(toy, tasks=["drawer-open", "drawer-close", "faucet-open"], workers=min(2, options.workers))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run(options)


if __name__ == "__main__":
    main()
