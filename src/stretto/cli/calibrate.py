"""`stretto calibrate CHECKPOINT`: make the scales that `--precision fp8` needs, and write them beside the checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from stretto.cli.options import PolicyFlags

if TYPE_CHECKING:
    from stretto.deploy.calibration import Observer
    from stretto.deploy.precision import Calibration


@dataclass(frozen=True)
class Args:
    checkpoint: Positional[str]
    """A LeRobot folder, an openpi PyTorch export, or the name of an embedded checkpoint."""
    observations: Path | None = None
    """An .npz file of a robot's observations: one array a key of the observation, its first axis counting them."""
    env: str | None = None
    """Observe a simulator instead (metaworld), with the policy in the loop."""
    task: Annotated[tuple[str, ...], UseAppendAction] = ()
    """With --env: a task to run; say it again for more. All of the environment by default."""
    episodes: int = 1
    """With --env: episodes a task."""
    synthetic: int | None = None
    """So many random inputs instead, where there is nothing better; whoever asks the server is told so."""
    out: Path | None = None
    """Where to write; fp8_scales.json beside the checkpoint by default."""
    policy: Annotated[PolicyFlags, OmitArgPrefixes] = field(default_factory=PolicyFlags)


def run(args: Args) -> int:
    from stretto.core.errors import ConfigError
    from stretto.deploy.calibration import Observer
    from stretto.deploy.precision import FILE

    sources = {"observations": args.observations, "env": args.env, "synthetic": args.synthetic}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise ConfigError("source", got=given or "none", expected="one of --observations FILE, --env NAME, --synthetic N")
    if args.policy.precision != "dtype":
        raise ConfigError("precision", got=args.policy.precision, expected="dtype: a calibration observes the policy as it is")
    if args.synthetic is not None and args.synthetic < 1:
        raise ConfigError("synthetic", got=args.synthetic, expected="1 or more")
    observer = Observer(args.checkpoint, args.policy.resolve())
    observer.warm()
    try:
        calibration = _calibration(args, observer)
    finally:
        observer.close()
    out = args.out or observer.path / FILE
    calibration.write(out)
    largest = max(calibration.input_max.items(), key=lambda item: item[1])
    print(
        f"{out}: {len(calibration.input_max)} products over {calibration.observations} {calibration.observed} observations of "
        f"{calibration.denoise_steps} denoise steps; largest input {largest[1]:.4g} ({largest[0]})"
    )
    return 0


def _calibration(args: Args, observer: Observer) -> Calibration:
    from stretto.deploy.calibration import read_observations

    if args.observations is not None:
        return observer.answer(read_observations(args.observations), "recorded")
    if args.env is None:
        return observer.run_random(args.synthetic or 0)
    from stretto.evals.evaluate import Settings, evaluate

    seeds = tuple(range(args.episodes))  # none of the held-out ones, on which policies are judged
    settings = Settings(env=args.env, tasks=args.task, episodes=args.episodes, seeds=seeds, workers=1)
    result = evaluate(observer.policy, settings, name=args.checkpoint, console=sys.stderr)
    return observer.calibration("simulated", sum(e.inferences for e in result.episodes))
