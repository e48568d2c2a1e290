"""What an evaluation found: episodes, success with its confidence interval, latency and wait."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode. `cause` says why it could not be finished; empty if it ran to its end."""

    task: str
    seed: int
    success: bool
    steps: int
    reward: float
    inferences: int = 0
    inference_ms: tuple[float, ...] = ()
    """From handing over an observation to having its actions, for each action chunk."""
    cause: str = ""

    def to_json(self) -> str:
        """Return one line for a JSONL file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Evaluation:
    """All episodes of one run."""

    env: str
    policy: str
    ablation: str
    episodes: tuple[Episode, ...]
    seconds: float
    control_hz: float
    details: dict[str, Any] = field(default_factory=dict)
    """Whatever the caller wants beside the numbers: device, dtype, commit."""

    @property
    def success_rate(self) -> float:
        return rate(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(sum(e.success for e in self.episodes), len(self.episodes))

    def as_dict(self) -> dict[str, Any]:
        tasks = list(dict.fromkeys(e.task for e in self.episodes))
        latencies = sorted(ms for e in self.episodes for ms in e.inference_ms)
        steps = sum(e.steps for e in self.episodes)
        return {
            "success_rate": self.success_rate,
            "interval": list(self.interval),
            "episodes": len(self.episodes),
            "tasks": [_task(task, [e for e in self.episodes if e.task == task]) for task in tasks],
            "env": self.env,
            "policy": self.policy,
            "ablation": self.ablation,
            "steps": steps,
            "control_hz": self.control_hz,
            "inference_ms": {"p50": percentile(latencies, 50), "p99": percentile(latencies, 99), "count": len(latencies)},
            "wait_ms_per_step": sum(latencies) / steps if steps else 0.0,
            "seconds": self.seconds,
            "failures": [{"task": e.task, "seed": e.seed, "cause": e.cause} for e in self.episodes if e.cause],
            **self.details,
        }

    def to_json(self) -> str:
        """Return `{"success_rate", "interval", "episodes", "tasks": [...], ...}`."""
        return json.dumps(self.as_dict(), indent=1)


def _task(task: str, episodes: Sequence[Episode]) -> dict[str, Any]:
    solved = [e.steps for e in episodes if e.success]
    return {
        "task": task,
        "success_rate": rate(episodes),
        "episodes": len(episodes),
        "interval": list(wilson(len(solved), len(episodes))),
        "steps_to_success": sum(solved) / len(solved) if solved else None,
    }


def rate(episodes: Sequence[Episode]) -> float:
    return sum(e.success for e in episodes) / len(episodes) if episodes else 0.0


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a success probability, 95 % by default; (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    p, n = successes / trials, trials
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Exact ends: rounding would leave a trace beside 0 and 1.
    return 0.0 if not successes else centre - half, 1.0 if successes == trials else centre + half


def percentile(ordered: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank percentile of sorted values; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]
