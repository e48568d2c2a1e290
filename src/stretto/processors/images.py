"""Camera images: refuse what is not plainly an RGB picture, then resize by the checkpoint family's own method.

Contract: RGB; uint8, or float in 0..1; height-width-channel or channel-height-width. Range conversion happens here only.

Shape legend: H, W the camera's size; R the model's input size.
Source: openpi image tools (PIL, uint8), LeRobot 0.6.1 `resize_with_pad_torch` (float, no antialias).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image

from stretto.core.errors import ObservationError
from stretto.processors.stats import Array

Resizer = Literal["pil", "torch"]
"""`pil`: antialiased bilinear on uint8, gives uint8 (openpi).
`torch`: bilinear without antialiasing on floats, gives float32 in -1..1 (LeRobot)."""

OVERSHOOT = 0.1
"""How far a float image may leave 0..1, as filters make it do; it is clipped and counted."""

CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Picture:
    """An accepted camera image."""

    pixels_HWC: Array
    """[H, W, 3]: uint8, or float32 in 0..1."""
    clipped: int
    """Values that were outside 0..1 and were clipped."""


def read_picture(field: str, value: object) -> Picture:
    """Accept one camera image as RGB.

    Grey becomes RGB by repetition and opaque RGBA loses its alpha; PIL images are converted from any mode.

    Raises:
        ObservationError: naming the field, for any other type, dtype, layout, range or channel count.
    """
    if isinstance(value, Image.Image):
        return Picture(np.asarray(value.convert("RGB")), 0)
    if not isinstance(value, np.ndarray):
        raise ObservationError(field, got=type(value).__name__, expected="a numpy array [H, W, 3] or [3, H, W]")
    if value.dtype != np.uint8 and value.dtype not in (np.float16, np.float32, np.float64):
        raise ObservationError(field, got=f"dtype {value.dtype}", expected="uint8, or float in 0..1")
    pixels = _rgb(field, _channels_last(field, value))
    if pixels.dtype == np.uint8:
        return Picture(pixels, 0)
    with np.errstate(over="ignore"):
        return _unit_range(field, pixels.astype(np.float32, copy=False))


def _channels_last(field: str, value: Array) -> Array:
    expected = "[H, W, 3] or [3, H, W] of one camera, at one time step"
    if value.ndim == 2:
        value = value[..., None]
    if value.ndim != 3:
        raise ObservationError(field, got=f"shape {value.shape}", expected=expected)
    if 0 in value.shape:
        raise ObservationError(field, got=f"shape {value.shape} (empty)", expected=expected)
    first, last = value.shape[0] in CHANNELS, value.shape[-1] in CHANNELS
    if first and last:
        raise ObservationError(
            field, got=f"shape {value.shape}, which can be read both as HWC and as CHW", expected="an unambiguous layout"
        )
    if not first and not last:
        raise ObservationError(
            field, got=f"shape {value.shape} with {value.shape[-1]} or {value.shape[0]} channels", expected="1, 3 or 4 channels"
        )
    return value if last else np.moveaxis(value, 0, -1)


def _rgb(field: str, pixels: Array) -> Array:
    if pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    if pixels.shape[-1] == 4:
        opaque = 255 if pixels.dtype == np.uint8 else 1.0
        if (pixels[..., 3] != opaque).any():
            raise ObservationError(field, got="4 channels with transparent pixels", expected="3 channels, or opaque RGBA")
        return pixels[..., :3]
    return pixels


def _unit_range(field: str, pixels: Array) -> Picture:
    low, high = float(pixels.min()), float(pixels.max())
    if not np.isfinite([low, high]).all():
        raise ObservationError(field, got="NaN or infinity", expected="finite values in 0..1")
    if low < -OVERSHOOT or high > 1 + OVERSHOOT:
        hint = "Send 0..255 images as uint8." if high > 2 else "Undo the -1..1 scaling: it is done once, on this side."
        raise ObservationError(field, got=f"float values in {low:.3g}..{high:.3g}", expected="0..1", hint=hint)
    if low >= 0 and high <= 1:
        return Picture(pixels, 0)
    outside = int(np.count_nonzero((pixels < 0) | (pixels > 1)))
    return Picture(np.clip(pixels, 0.0, 1.0), outside)


DTYPES: dict[Resizer, type[np.generic]] = {"pil": np.uint8, "torch": np.float32}
"""What each method gives."""


def resize_into(out: Array, field: str, pixels_HWC: Array, method: Resizer) -> None:
    """Fit an accepted image into `out`, [R, R, 3] of the method's dtype, keeping its aspect, with centred black padding.

    Raises:
        ObservationError: if one side would shrink to nothing.
    """
    size = out.shape[:2]
    height, width = pixels_HWC.shape[:2]
    ratio = max(width / size[1], height / size[0])
    inner = (int(height / ratio), int(width / ratio))
    if 0 in inner:
        raise ObservationError(
            field, got=f"{width}x{height} pixels", expected=f"an image that survives a resize to {size[1]}x{size[0]}"
        )
    if method == "pil":
        _resize_pil(out, _as_uint8(pixels_HWC), inner)
    else:
        _resize_torch(out, _as_float(pixels_HWC), inner)


def resize(field: str, pixels_HWC: Array, size: tuple[int, int], method: Resizer) -> Array:
    """Return what `resize_into` makes, as an array of its own.

    Raises:
        ObservationError: if one side would shrink to nothing.
    """
    out = np.empty((*size, 3), DTYPES[method])
    resize_into(out, field, pixels_HWC, method)
    return out


def blacken(out: Array, method: Resizer) -> None:
    """Make `out` the picture that stands in for an absent camera."""
    out.fill(0 if method == "pil" else -1.0)


def _as_uint8(pixels: Array) -> Array:
    # Truncates rather than rounds, as openpi does with float input.
    return pixels if pixels.dtype == np.uint8 else (pixels * np.float32(255)).astype(np.uint8)


def _as_float(pixels: Array) -> Array:
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels


def _resize_pil(out: Array, pixels: Array, inner: tuple[int, int]) -> None:
    if pixels.shape == out.shape:
        out[...] = pixels
        return
    small = Image.fromarray(np.ascontiguousarray(pixels)).resize((inner[1], inner[0]), Image.Resampling.BILINEAR)
    blacken(out, "pil")
    _middle(out, inner)[...] = np.asarray(small)


def _resize_torch(out: Array, pixels: Array, inner: tuple[int, int]) -> None:
    if pixels.shape == out.shape:
        np.multiply(pixels, np.float32(2), out=out)
        out -= np.float32(1)
        return
    chw = torch.from_numpy(np.array(np.moveaxis(pixels, -1, 0), order="C"))
    small = F.interpolate(chw[None], size=inner, mode="bilinear", align_corners=False)[0].clamp(0.0, 1.0)
    blacken(out, "torch")
    _middle(out, inner)[...] = small.permute(1, 2, 0).numpy() * np.float32(2) - np.float32(1)


def _middle(out: Array, inner: tuple[int, int]) -> Array:
    top, left = (out.shape[0] - inner[0]) // 2, (out.shape[1] - inner[1]) // 2
    return out[top : top + inner[0], left : left + inner[1]]
