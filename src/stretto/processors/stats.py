"""Normalisation of one feature, by the checkpoint family's own rule, and the proof at load that its statistics can be used.

Two families differ in the epsilon and in the number type. With span = high - low:

| family  | mean/std               | min/max, quantiles                                | computed in |
|---------|------------------------|---------------------------------------------------|-------------|
| LeRobot | (x - mean) / (std+eps) | (x - low) / span * 2 - 1, span 0 taken as eps     | float32     |
| openpi  | (x - mean) / (std+eps) | (x - low) / (span + eps) * 2 - 1                  | float64     |

The inverse is exact for openpi; LeRobot's mean/std inverse leaves the epsilon out. Nothing is ever clipped.

Shape legend: D width of the feature.
Source: LeRobot 0.6.1 normaliser (eps 1e-8 by default), openpi transforms (eps 1e-6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stretto.core.errors import CheckpointError

Array = NDArray[Any]
Mode = Literal["identity", "mean_std", "min_max", "quantiles", "quantile10"]
Degenerate = Literal["refuse", "hold"]

NEEDED: dict[Mode, tuple[str, str] | None] = {
    "identity": None,
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
}


@dataclass(frozen=True)
class Rule:
    """How a family uses its epsilon, and in which number type it computes."""

    name: str
    eps: float
    always: bool
    """True: the epsilon is added to every span and undone exactly. False: it only stands in for a span of zero."""
    dtype: DTypeLike


LEROBOT = Rule("lerobot", 1e-8, False, np.float32)
OPENPI = Rule("openpi", 1e-6, True, np.float64)


def widened(x: Array, width: int) -> Array:
    """Return x, [..., D], with zeros up to `width`; x itself if it is as wide."""
    missing = width - x.shape[-1]
    return x if missing <= 0 else np.concatenate((x, np.zeros((*x.shape[:-1], missing), x.dtype)), axis=-1)


@dataclass(frozen=True)
class Normalizer:
    """Take one feature to model space and back; every array is [D]."""

    feature: str
    mode: Mode
    width: int
    offset: Array
    divisor: Array
    multiplier: Array
    held: Array
    """Dimensions without spread, kept only on request: their normalised value is the constant of the data."""

    def normalize(self, x: Array) -> Array:
        """Return x, [..., D], in model space."""
        if self.mode == "identity":
            return x
        z = (x - self.offset) / self.divisor
        if self.mode == "mean_std":
            return np.where(self.held, self.divisor.dtype.type(0.0), z)
        return np.where(self.held, self.divisor.dtype.type(-1.0), z * 2.0 - 1.0)

    def unnormalize(self, z: Array) -> Array:
        """Return z, [..., D], in the robot's units. Values outside the data's range stay outside."""
        if self.mode == "identity":
            return z
        if self.mode == "mean_std":
            return z * self.multiplier + self.offset
        return (z + 1.0) / 2.0 * self.multiplier + self.offset

    def statistics(self) -> dict[str, Array]:
        """Return the statistics in use by name, each [D] in the robot's units: `mean` and `std`, or two ends of a range."""
        names = NEEDED[self.mode]
        if names is None:
            return {}
        first, second = names
        return {first: self.offset, second: self.multiplier if self.mode == "mean_std" else self.offset + self.multiplier}


def build_normalizer(
    feature: str,
    mode: Mode,
    stats: Mapping[str, Any] | None,
    *,
    width: int,
    rule: Rule,
    padded_width: int | None = None,
    degenerate: Degenerate = "refuse",
) -> Normalizer:
    """Check the statistics of one feature and build its normaliser.

    `padded_width` is a second width that the statistics may have; what lies beyond `width` is padding and is not used.
    `degenerate="hold"` keeps dimensions without spread, at the constant that the data had.

    Raises:
        CheckpointError: naming the feature, the statistic and the dimensions that cannot be used.
    """
    needed = NEEDED[mode]
    if needed is None:
        none = np.zeros(width, rule.dtype)
        return Normalizer(feature, mode, width, none, none + 1, none + 1, np.zeros(width, bool))
    if not stats:
        raise CheckpointError(
            f"{feature}: no statistics, so mode {mode} would silently do nothing; expected {list(needed)} of width {width}"
        )
    first, second = (_read(feature, name, stats, width, padded_width) for name in needed)
    spread = second if mode == "mean_std" else second - first
    where = f"{feature}.{needed[1]}" if mode == "mean_std" else f"{feature}.{needed[0]}/{needed[1]}"
    negative = np.flatnonzero(spread < 0)
    if negative.size:
        raise CheckpointError(f"{where}: got a negative spread in dimensions {negative.tolist()}, expected {needed[1]} above")
    held = spread == 0
    if held.any() and degenerate == "refuse":
        same = "std = 0" if mode == "mean_std" else f"{needed[0]} = {needed[1]}"
        raise CheckpointError(
            f"{where}: got {same} in dimensions {np.flatnonzero(held).tolist()}, expected some spread. "
            'Recompute the statistics, or pass degenerate="hold" to keep those dimensions at their constant'
        )
    first, spread = first.astype(rule.dtype), _spread(first, second, mode, rule)
    if mode == "mean_std":
        return Normalizer(feature, mode, width, first, spread + spread.dtype.type(rule.eps), _undo(spread, rule), held)
    divisor = _undo(spread, rule) if rule.always else np.where(spread == 0, spread.dtype.type(rule.eps), spread)
    return Normalizer(feature, mode, width, first, divisor, divisor, held)


def _spread(first: Array, second: Array, mode: Mode, rule: Rule) -> Array:
    second = second.astype(rule.dtype)
    return second if mode == "mean_std" else np.asarray(second - first.astype(rule.dtype))


def _undo(spread: Array, rule: Rule) -> Array:
    return spread + spread.dtype.type(rule.eps) if rule.always else spread


def _read(feature: str, name: str, stats: Mapping[str, Any], width: int, padded_width: int | None) -> Array:
    where = f"{feature}.{name}"
    if stats.get(name) is None:
        raise CheckpointError(f"{where}: missing; found {sorted(stats)}")
    try:
        value = np.asarray(stats[name], dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{where}: got {type(stats[name]).__name__} ({e}), expected {width} numbers") from e
    if value.ndim != 1 or value.shape[0] not in (width, padded_width):
        also = f" (or {padded_width}, padded)" if padded_width not in (None, width) else ""
        raise CheckpointError(f"{where}: got shape {value.shape}, expected ({width},){also}")
    value = value[:width]
    bad = np.flatnonzero(~np.isfinite(value))
    if bad.size:
        raise CheckpointError(f"{where}: got NaN or infinity in dimensions {bad.tolist()}, expected finite numbers")
    return value
