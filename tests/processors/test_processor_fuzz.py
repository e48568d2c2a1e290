"""Whatever arrives, the answer is model inputs or an error that names a field; nothing else leaves the processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

from stretto.core.errors import ObservationError, StrettoError
from stretto.processors.lerobot import lerobot_spec
from stretto.processors.openpi import openpi_spec
from stretto.processors.policy import PolicyProcessor

KEYS = [
    "observation/image",
    "observation/wrist_image",
    "observation/state",
    "prompt",
    "observation",
    "images",
    "images/cam_high",
    "rt",
]
SIDES = array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
ARRAYS = arrays(scalar_dtypes(), SIDES) | arrays(np.uint8, st.just((9, 9, 3))) | arrays(np.float64, st.just((8,)))
LEAVES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60) | st.binary(max_size=9)
)
VALUES = (
    LEAVES
    | ARRAYS
    | st.lists(LEAVES, max_size=9)
    | st.dictionaries(st.sampled_from([*KEYS, "image"]), LEAVES | ARRAYS, max_size=3)
)


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    image = np.zeros((9, 9, 3), np.uint8)
    return {
        "observation/image": image,
        "observation/wrist_image": image,
        "observation/state": np.zeros(8),
        "prompt": "go",
    }


@pytest.fixture
def p(openpi_folder: Callable[..., Path]) -> PolicyProcessor:
    return PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset="libero")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), VALUES, max_size=3))
def test_any_observation_gives_inputs_or_a_named_field(
    p: PolicyProcessor, good: dict[str, Any], changes: dict[str, Any]
) -> None:
    refusal, x = None, None
    try:
        x = p.preprocess({**good, **changes})
    except ObservationError as e:
        refusal = e
    if x is None:
        assert str(refusal).startswith(f"{refusal.field}: got " if refusal else "-")
    else:
        assert np.isfinite(x.state).all()
        assert x.images.shape == (3, 224, 224, 3)
        assert 0 < x.token_count <= len(x.tokens)


FILES = {
    "lerobot": ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"),
    "openpi": ("config.json", "stretto.json", "assets/lab/robot/norm_stats.json"),
}
WRONG: list[Any] = [None, -1, [["x"]], {"x": []}]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from _places(node[key])


@pytest.mark.parametrize("family", ["lerobot", "openpi"])
def test_any_wrong_value_in_a_checkpoints_files_is_an_error_that_we_raise(
    family: str, lerobot_folder: Callable[..., Path], openpi_folder: Callable[..., Path]
) -> None:
    folder = lerobot_folder(relative=True) if family == "lerobot" else openpi_folder(state_dim=2, action_dim=2)
    if family == "openpi":
        keys = {"images": {"a": {"slot": "base_0_rgb", "order": "rgb"}}, "state": [{"key": "s", "width": 2}], "ignored": ["x"]}
        settings = {"family": "pi05", "keys": keys, "relative": [True, False], "token_limit": 9, "asset_id": "lab/robot"}
        (folder / "stretto.json").write_text(json.dumps({"processor": settings}))
    load = lerobot_spec if family == "lerobot" else openpi_spec
    load(folder)
    refused = 0
    for name in FILES[family]:
        text = (folder / name).read_text()
        tree = json.loads(text)
        for node, key in _places(tree):
            kept = node[key]
            for value in WRONG:
                node[key] = value
                (folder / name).write_text(json.dumps(tree))
                try:
                    load(folder)
                except StrettoError:
                    refused += 1
            node[key] = kept
        (folder / name).write_text(text)
    assert refused > 100
