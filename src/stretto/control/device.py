"""The compute and bandwidth roofline of one device, with a model's stages on it.

A stage that moves `bytes` and does `flops` in measured `seconds` has intensity flops / bytes and reaches flops / seconds;
at that intensity the device allows min(peak, bandwidth x intensity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.core.errors import FieldError


@dataclass(frozen=True, slots=True)
class DeviceRoof:
    """Measured or stated ceilings of a device."""

    name: str
    peak_flops: float
    bandwidth_bytes_s: float

    @property
    def ridge(self) -> float:
        """Intensity, in FLOP per byte, from which compute is the ceiling."""
        return self.peak_flops / self.bandwidth_bytes_s

    def allows(self, intensity: float) -> float:
        return min(self.peak_flops, self.bandwidth_bytes_s * intensity)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage takes in one run: all its visits together."""

    name: str
    seconds: float
    flops: float
    nbytes: float
    """Bytes that have to move at least: weights, inputs, outputs, caches."""


@dataclass(frozen=True, slots=True)
class StagePoint:
    """Where a stage stands."""

    name: str
    intensity: float
    reached_flops: float
    allowed_flops: float
    share_of_roof: float
    """Above 1 means that the FLOPs, the bytes or the ceilings given are wrong."""
    bound: Literal["memory", "compute"]
    seconds: float
    least_seconds: float


def place(stages: Sequence[StageCost], device: DeviceRoof) -> tuple[StagePoint, ...]:
    """Place stages on the roofline of a device.

    Raises:
        FieldError: if a number is not finite and positive.
    """
    if not stages:
        raise FieldError("stages", got="none", expected="at least one stage")
    for name, value in (("peak_flops", device.peak_flops), ("bandwidth_bytes_s", device.bandwidth_bytes_s)):
        _check(f"device.{name}", value)
    return tuple(_place(s, device) for s in stages)


def _place(stage: StageCost, device: DeviceRoof) -> StagePoint:
    for name in ("seconds", "flops", "nbytes"):
        _check(f"stages[{stage.name}].{name}", getattr(stage, name))
    intensity, reached = stage.flops / stage.nbytes, stage.flops / stage.seconds
    allowed = device.allows(intensity)
    bound: Literal["memory", "compute"] = "compute" if intensity >= device.ridge else "memory"
    return StagePoint(stage.name, intensity, reached, allowed, reached / allowed, bound, stage.seconds, stage.flops / allowed)


def _check(field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise FieldError(field, got=repr(value), expected="a finite number above 0")
