"""`stretto bench` of a world model: its flags, and a row for each chunk shape and plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stretto.core.errors import ConfigError
from stretto.core.plan import Mode
from stretto.deploy.device import resolve_device, resolve_dtype, resolve_mode
from stretto.deploy.provenance import provenance
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_plans import ONE, SEVERAL, fitting
from stretto.deploy.worlds import config_of
from stretto.layers.tuning import choices
from stretto.models.wan_config import Precision, WanConfig


@dataclass(frozen=True)
class WorldBenchOptions:
    model: str
    chunk_frames: tuple[int, ...] = (1, 3)
    window_frames: tuple[int, ...] = (21,)
    steps: int | None = None
    """Denoise steps: the first so many of the model's own levels."""
    pixel_height: int | None = None
    pixel_width: int | None = None
    plans: tuple[str, ...] = ()
    """None: all that fit the devices."""
    decoder: Literal["none", "light", "vae"] = "none"
    streams: int = 1
    workers: Literal["threads", "processes"] = "threads"
    seconds: float = 4.0
    devices: tuple[str, ...] = ("auto",)
    dtype: str = "auto"
    mode: str = "auto"
    precision: Precision = "dtype"


def bench_world(options: WorldBenchOptions) -> dict[str, Any]:
    """Run a model at each chunk shape under each plan.

    Raises:
        ConfigError: if a flag does not fit; a plan that does not fit is a row that says so.
    """
    devices, mode, dtype = resolve(options.devices, options.mode, options.dtype)
    case = WorldCase(devices, mode, options.workers, options.streams, options.seconds)
    names = options.plans or fitting(devices)
    unknown = sorted(set(names) - {*ONE, *SEVERAL})
    if unknown:
        raise ConfigError("plan", got=unknown, expected=f"some of {(*ONE, *SEVERAL)}")
    rows: list[dict[str, Any]] = []
    for frames, window in itertools.product(options.chunk_frames, options.window_frames):
        rows += WorldBench(_sized(options, dtype, frames, window), case).rows(names)
    head = provenance(torch.device(devices[0].split(":")[0]))
    return {**head, "rows": rows, "kernels": choices(torch.device(devices[0])).report()}


def _sized(options: WorldBenchOptions, dtype: str, frames: int, window: int) -> WanConfig:
    levels = config_of(options.model).levels
    if options.steps is not None and not 1 <= options.steps <= len(levels):
        raise ConfigError("steps", got=options.steps, expected=f"1 to {len(levels)}, the levels of the model")
    return config_of(
        options.model,
        frames_per_chunk=frames,
        window_frames=window,
        levels=levels[: options.steps],
        pixel_height=options.pixel_height,
        pixel_width=options.pixel_width,
        decoder=options.decoder,
        dtype=dtype,
        precision=options.precision,
    )


def resolve(devices: Sequence[str], mode: str, dtype: str) -> tuple[tuple[str, ...], Mode, str]:
    """Resolve `auto`; several CPU devices are `cpu:0`, `cpu:1`, ...

    Raises:
        ConfigError: if a device is not there, or graphs are asked for where there are none.
    """
    places = [resolve_device(name) for name in devices]
    names = tuple(str(p) if p.type == "cuda" else f"cpu:{i}" for i, p in enumerate(places))
    if len(set(names)) != len(names):
        raise ConfigError("device", got=",".join(names), expected="each device once")
    return names, resolve_mode(mode, places[0]), resolve_dtype(dtype, places[0])
