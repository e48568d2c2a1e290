"""How a policy is run, and the plan that follows from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from stretto.control.rtc import Schedule
from stretto.core.errors import ConfigError
from stretto.core.plan import Plan, overlapped, per_visit, whole
from stretto.core.route import Route
from stretto.deploy.device import resolve_mode
from stretto.processors.stats import Degenerate

PlanKind = Literal["auto", "whole", "per_visit", "overlapped"]

BATCH_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 48, 64)
"""Sizes to capture, up to the cap. Vision and prefix cost nearly as many times more as there are rows, so padding costs too."""


@dataclass(frozen=True)
class PolicyOptions:
    """How a policy is run. `auto` takes the first CUDA device with bf16 and graphs, or the CPU with fp32, eager."""

    device: str = "auto"
    dtype: str = "auto"
    mode: str = "auto"
    precision: str = "dtype"
    """`dtype`, `fp8` (products in e4m3; needs a calibration and a GPU of compute capability 8.9 or more), or `fp8-emulated`
    (the same numbers on any device, slowly)."""
    fp8_scales: Path | None = None
    """The calibration; None takes `fp8_scales.json` beside the checkpoint."""
    fp8_shadow: int = 0
    """With FP8, one request in so many runs a second time without it, and the difference is a metric; 0 is none."""
    plan: PlanKind = "auto"
    """`whole`: one segment, the lowest latency of one robot. `per_visit`: robots join and leave batches between denoise
    steps. `overlapped`: the denoise loop of some robots beside vision and prefix of others. `auto` is `whole` for a batch of
    one and `per_visit` above."""
    lane_sms: tuple[int, ...] = ()
    """With `overlapped` on a GPU: the multiprocessors that each lane has while the other is at work, such as 88 and 44 of 132.
    None: the lanes take turns."""
    max_batch: int = 8
    """Most robots in one batch."""
    dispatch: str | None = None
    """Dispatch policy. None takes `deadline_limited`: the most urgent robot first, in batches with which it is still on time;
    what cannot be on time is refused, and a robot's newer observation takes the place of one that has not started."""
    rtc: tuple[str, ...] | None = None
    """Modes of real-time chunking that requests may ask for: `identity`, `vjp`, `hard` (for policies trained with given
    actions). The first is taken where a request names none. `vjp` makes every denoise step of every robot slower. None
    offers `identity`, and before it `hard` where the checkpoint says that it was trained for that."""
    control_hz: float | None = None
    """Control rate of the robots; with it, deadlines follow from the steps that requests name."""
    max_delay: int | None = None
    """Longest delay, in control steps, that requests may name; None takes what the checkpoint was trained for where `hard`
    is offered, and else all but a whole chunk."""
    robot_period_ms: float | None = None
    """How often every robot asks. With `robot_deadline_ms`, a robot is admitted only if all of them, it included, are
    predicted to be on time at the 99th percentile."""
    robot_deadline_ms: float | None = None
    rtc_schedule: Schedule = "exp"
    rtc_cap: float = 5.0
    """Bound on the strength of a correction."""
    preset: str | None = None
    """Observation keys: `libero`, `droid`, `aloha`, `metaworld`, or a key-map file. None takes the checkpoint's."""
    tokenizer: Path | None = None
    default_prompt: str | None = None
    optional_cameras: tuple[str, ...] = ()
    """Cameras a request may leave out; their slot is masked, as in training."""
    degenerate: Degenerate = "refuse"
    """Statistics without spread: `refuse` the checkpoint, or `hold` those dimensions at their constant."""
    pad_state_bins: bool = False
    """For a pi0.5 that LeRobot before 0.5 trained: its prompt holds the state padded with zeros to the model's width."""
    denoise_steps: int | None = None
    """Euler steps a chunk; None takes the checkpoint's."""
    seed: int = 0
    threads: int = min(4, os.cpu_count() or 1)
    """Threads that prepare observations."""


def plan_for(route: Route, options: PolicyOptions, device: torch.device) -> Plan:
    """Make the plan that the options ask for.

    Raises:
        ConfigError: naming the option that cannot be, or does not go with the others.
    """
    if options.max_batch < 1:
        raise ConfigError("max_batch", got=options.max_batch, expected="1 or more")
    mode = resolve_mode(options.mode, device)
    kind = options.plan if options.plan != "auto" else ("whole" if options.max_batch == 1 else "per_visit")
    sms = options.lane_sms
    if sms and (kind != "overlapped" or len(sms) != 2 or min(sms) < 1 or device.type != "cuda"):
        expected = "none, or with plan overlapped the multiprocessors of two lanes of a GPU"
        raise ConfigError("lane_sms", got=f"{sms} with plan {kind} on {device.type}", expected=expected)
    if kind == "whole":
        plan = whole(route, str(device), batch_cap=options.max_batch, mode=mode)
    elif kind == "overlapped":
        # A launch a lane serves more robots than one a visit, with parts or without; only batches join between visits.
        between = options.max_batch > 1
        plan = overlapped(route, str(device), batch_cap=options.max_batch, mode=mode, between_visits=between)
        plan = replace(plan, lane_sms={str(device): sms} if sms else {})
    else:
        plan = per_visit(route, str(device), batch_cap=options.max_batch, mode=mode)
    plan = plan.with_shapes({"batch": (*[n for n in BATCH_SIZES if n < options.max_batch], options.max_batch)})
    return plan.with_dispatch(options.dispatch or "deadline_limited")
