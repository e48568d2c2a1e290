"""Images: layouts, types and ranges that are read, those that are refused, and the two resizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stretto.core.errors import ObservationError
from stretto.processors.images import Resizer, blacken, read_picture, resize

RNG = np.random.default_rng(0)


def picture(height: int = 20, width: int = 30) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 60), st.integers(5, 60), st.sampled_from([np.uint8, np.float16, np.float32, np.float64]))
def test_both_layouts_and_all_number_types_read_as_the_same_picture(height: int, width: int, dtype: Any) -> None:
    hwc = np.random.default_rng(height * 100 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    value = hwc if dtype == np.uint8 else (hwc / 255).astype(dtype)
    a = read_picture("image", value).pixels_HWC
    b = read_picture("image", np.moveaxis(value, -1, 0)).pixels_HWC
    np.testing.assert_array_equal(a, b)
    assert a.shape == (height, width, 3)
    assert a.dtype == (np.uint8 if dtype == np.uint8 else np.float32)


def test_grey_opaque_rgba_and_pil_images_become_rgb() -> None:
    image = picture()
    grey = image[..., 0]
    for value in (grey, grey[..., None], grey[None]):
        np.testing.assert_array_equal(read_picture("image", value).pixels_HWC, np.stack([grey] * 3, -1))
    rgba = np.concatenate([image, np.full((20, 30, 1), 255, np.uint8)], -1)
    np.testing.assert_array_equal(read_picture("image", rgba).pixels_HWC, image)
    palette = Image.fromarray(image).convert("P")
    np.testing.assert_array_equal(read_picture("image", palette).pixels_HWC, np.asarray(palette.convert("RGB")))


REFUSED: list[tuple[Any, str]] = [
    (np.zeros((3, 40, 3), np.uint8), r"image: got shape \(3, 40, 3\), which can be read both as HWC and as CHW"),
    (np.zeros((3, 40, 4), np.uint8), "both as HWC and as CHW"),
    (np.full((8, 9, 3), 200.0), r"got float values in 200..200, expected 0..1. Send 0..255 images as uint8"),
    (np.full((8, 9, 3), -1.0), r"got float values in -1..-1, expected 0..1. Undo the -1..1 scaling"),
    (np.full((8, 9, 3), np.nan, np.float32), "got NaN or infinity, expected finite values"),
    (np.zeros((8, 9, 2), np.uint8), r"shape \(8, 9, 2\) with 2 or 8 channels, expected 1, 3 or 4 channels"),
    (np.zeros((8, 9, 4), np.uint8), "4 channels with transparent pixels"),
    (np.zeros((1, 8, 9, 3), np.uint8), r"shape \(1, 8, 9, 3\), expected \[H, W, 3\]"),
    (np.zeros((8,), np.uint8), r"shape \(8,\)"),
    (np.zeros((0, 9, 3), np.uint8), "empty"),
    (np.zeros((8, 9, 3), np.int32), "dtype int32, expected uint8, or float in 0..1"),
    (np.zeros((8, 9, 3), bool), "dtype bool"),
    (np.zeros((8, 9, 3), object), "dtype object"),
    (np.zeros((8, 9), [("r", "u1"), ("g", "u1")]), r"dtype \[\('r', 'u1'\)"),
    ([[1, 2, 3]], "got list, expected a numpy array"),
    ("camera.png", "got str, expected a numpy array"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_is_not_plainly_a_picture_is_refused_by_field(value: Any, message: str) -> None:
    with pytest.raises(ObservationError, match=message) as e:
        read_picture("image", value)
    assert e.value.field == "image"


def test_a_small_overshoot_is_clipped_and_counted() -> None:
    image = np.full((8, 9, 3), 0.5, np.float32)
    image[0, 0] = (1.02, -0.03, 0.5)
    read = read_picture("image", image)
    assert read.clipped == 2
    assert read.pixels_HWC[0, 0].tolist() == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("method", ["pil", "torch"])
@pytest.mark.parametrize("size", [(720, 1280), (480, 640), (360, 640), (640, 480), (100, 30)])
def test_the_aspect_is_kept_with_centred_black_bars(method: Resizer, size: tuple[int, int]) -> None:
    white = np.full((*size, 3), 255, np.uint8)
    out = resize("image", white, (224, 224), method)
    assert out.shape == (224, 224, 3)
    lit = out[..., 0] > (128 if method == "pil" else 0.5)
    rows, columns = np.flatnonzero(lit.any(1)), np.flatnonzero(lit.any(0))
    ratio = max(size[0], size[1]) / 224
    assert (len(rows), len(columns)) == (int(size[0] / ratio), int(size[1] / ratio))
    assert 0 <= (223 - rows[-1]) - rows[0] <= 1
    assert 0 <= (223 - columns[-1]) - columns[0] <= 1
    empty = np.ones_like(out)
    blacken(empty, method)
    np.testing.assert_array_equal(out[~lit], empty[~lit])


def test_shrinking_with_pil_averages_and_with_torch_does_not() -> None:
    stripes = np.zeros((448, 448, 3), np.uint8)
    stripes[:, ::4] = 255
    pil = resize("image", stripes, (112, 112), "pil")
    sampled = resize("image", stripes, (112, 112), "torch")
    assert abs(float(pil[50, 50:60].mean()) - 64) < 8
    assert set(np.unique(sampled)) == {-1.0}


@pytest.mark.parametrize("size", [(720, 1280), (480, 640)])
def test_the_torch_resize_is_bilinear_sampling_at_pixel_centres(size: tuple[int, int]) -> None:
    image = picture(*size)
    out = resize("image", image, (224, 224), "torch")
    ratio = size[1] / 224
    top = (224 - int(size[0] / ratio)) // 2
    scale_y, scale_x = size[0] / int(size[0] / ratio), size[1] / 224
    for row, column in ((0, 0), (10, 100), (60, 223)):
        y, x = max((row + 0.5) * scale_y - 0.5, 0), max((column + 0.5) * scale_x - 0.5, 0)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, size[0] - 1), min(x0 + 1, size[1] - 1)
        p = image.astype(np.float64) / 255
        upper = p[y0, x0] * (1 - (x - x0)) + p[y0, x1] * (x - x0)
        lower = p[y1, x0] * (1 - (x - x0)) + p[y1, x1] * (x - x0)
        want = (upper * (1 - (y - y0)) + lower * (y - y0)) * 2 - 1
        np.testing.assert_allclose(out[top + row, column], want, atol=2e-4)


def test_a_picture_of_the_right_size_passes_unchanged_and_unaliased() -> None:
    image = picture(56, 56)
    out = resize("image", image, (56, 56), "pil")
    np.testing.assert_array_equal(out, image)
    assert not np.shares_memory(out, image)
    np.testing.assert_array_equal(resize("image", image, (56, 56), "torch"), (torch.from_numpy(image) / 255 * 2 - 1).numpy())


@pytest.mark.parametrize("method", ["pil", "torch"])
def test_read_only_and_strided_pictures_are_taken(method: Resizer) -> None:
    image = picture(40, 50)
    view = image[::-1, ::2]
    frozen = np.frombuffer(np.ascontiguousarray(view).tobytes(), np.uint8).reshape(view.shape)
    np.testing.assert_array_equal(resize("i", view, (24, 24), method), resize("i", frozen, (24, 24), method))


def test_float_pictures_become_uint8_by_truncation_for_the_pil_family() -> None:
    image = np.full((56, 56, 3), 0.999, np.float32)
    assert set(np.unique(resize("image", image, (56, 56), "pil"))) == {254}


def test_a_sliver_that_would_vanish_is_refused() -> None:
    with pytest.raises(ObservationError, match="1000x2 pixels"):
        resize("image", np.zeros((2, 1000, 3), np.uint8), (224, 224), "pil")
