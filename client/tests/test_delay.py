"""The delay estimate, and the image helpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stretto_client.delay import DelayEstimator, steps_during
from stretto_client.errors import FieldError
from stretto_client.images import convert_to_uint8, resize_with_pad


def test_a_slow_first_inference_does_not_stay_in_the_estimate() -> None:
    e = DelayEstimator()
    e.add(0.7)
    assert e.steps(30) == 21
    for _ in range(3):
        e.add(0.3)
    assert e.steps(30) == 9


def test_old_measurements_leave_the_window() -> None:
    e = DelayEstimator(window=4, warmup=0)
    for s in (0.3, 0.2, 0.2, 0.2, 0.2):
        e.add(s)
    assert e.seconds == 0.2


def test_a_lone_spike_does_not_count_but_three_in_a_row_are_the_new_normal() -> None:
    e = DelayEstimator(warmup=0)
    for _ in range(5):
        e.add(0.1)
    e.add(2.0)
    assert e.seconds == 0.1
    e.add(0.1)
    for _ in range(3):
        e.add(1.0)
    assert e.seconds == 1.0
    assert e.spikes_seen == 4


def test_a_percentile_and_a_floor_can_be_asked_for() -> None:
    e = DelayEstimator(percentile=50, warmup=0)
    for s in (0.1, 0.11, 0.12):
        e.add(s)
    assert e.seconds == pytest.approx(0.11)
    assert DelayEstimator(floor_s=0.4).steps(10) == 4


def test_the_step_at_hand_always_counts() -> None:
    assert DelayEstimator().steps(10) == 1
    assert [steps_during(s, 10) for s in (0.0, 0.05, 0.1, 0.11)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "kwargs", [{"window": 0}, {"percentile": 0}, {"percentile": 101}, {"warmup": -1}, {"floor_s": float("nan")}]
)
def test_settings_out_of_range_are_refused_by_name(kwargs: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=next(iter(kwargs))):
        DelayEstimator(**kwargs)


@pytest.mark.parametrize("delay_s", [0, -1.0, float("nan"), float("inf")])
def test_a_measurement_that_is_no_time_is_refused(delay_s: float) -> None:
    with pytest.raises(FieldError, match="delay_s"):
        DelayEstimator().add(delay_s)


def test_an_image_keeps_its_shape_and_is_centred_on_black() -> None:
    image = np.full((2, 30, 60, 3), 200, np.uint8)
    out = resize_with_pad(image, 40, 40)
    assert out.shape == (2, 40, 40, 3)
    assert (out[:, 10:30] == 200).all()
    assert (out[:, :10] == 0).all()
    assert (out[:, 30:] == 0).all()
    assert resize_with_pad(image[0, ..., :1], 15, 30).shape == (15, 30, 1)


def test_resizing_agrees_with_the_published_openpi_client() -> None:
    tools = pytest.importorskip("openpi_client.image_tools")
    rng = np.random.default_rng(0)
    for h, w in ((48, 64), (64, 48), (33, 97), (224, 224)):
        image = rng.integers(0, 256, (h, w, 3), dtype=np.uint8)
        np.testing.assert_array_equal(resize_with_pad(image, 56, 56), tools.resize_with_pad(image, 56, 56))


def test_float_images_become_bytes_and_strange_ones_are_refused() -> None:
    np.testing.assert_array_equal(convert_to_uint8(np.array([[[0.0, 0.5, 1.0]]])), [[[0, 127, 255]]])
    for bad in (np.array([2.0]), np.array([np.nan]), np.array([1], np.int32)):
        with pytest.raises(FieldError, match="image"):
            convert_to_uint8(bad)
    with pytest.raises(FieldError, match="images"):
        resize_with_pad(np.zeros((3, 30, 60), np.uint8), 10, 10)
