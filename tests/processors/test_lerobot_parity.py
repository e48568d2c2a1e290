"""Processors against LeRobot 0.6.1, on pipelines that LeRobot saved and ran (see tests/golden/README.md)."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from stretto.core.errors import CheckpointError, PromptTooLongError
from stretto.core.plan import whole
from stretto.models.pi0 import build
from stretto.models.pi0_config import Pi0Config
from stretto.processors.images import read_picture, resize
from stretto.processors.policy import ModelInputs, PolicyProcessor
from stretto.runtime.engine import Engine
from stretto.runtime.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden"
LEROBOT = GOLDEN / "lerobot"
pattern_image = runpy.run_path(str(GOLDEN / "patterns.py"))["pattern_image"]
CAMERAS = [f"observation.images.{name}" for name in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")]
PIPELINES = sorted(p.parent.name for p in LEROBOT.glob("processors/*/io.json"))
WHOLE_PROMPTS = [name for name in PIPELINES if name != "pi05_short_prompt"]
OFF_THE_CONSTANT = 6
"""The row whose state differs from the constant of the column without spread; such columns are held here on purpose."""


@cache
def io(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    folder = LEROBOT / "processors" / name
    return json.loads((folder / "io.json").read_text()), load_file(folder / "io.safetensors")


def load(folder: Path, **options: Any) -> PolicyProcessor:
    return PolicyProcessor.from_lerobot(folder, tokenizer=LEROBOT / "tokenizer", degenerate="hold", **options)


@cache
def processor(name: str) -> PolicyProcessor:
    return load(LEROBOT / "processors" / name, optional_cameras=tuple(CAMERAS[1:]))


def preprocess(name: str, row: int) -> ModelInputs:
    texts, tensors = io(name)
    black = np.zeros((224, 224, 3), np.uint8)
    return processor(name).preprocess(
        {CAMERAS[0]: black, "observation.state": tensors["state"][row], "task": texts["tasks"][row]}
    )


@pytest.mark.parametrize("name", WHOLE_PROMPTS)
@pytest.mark.parametrize("row", range(OFF_THE_CONSTANT))
def test_state_and_tokens_equal_lerobots(name: str, row: int) -> None:
    tensors = io(name)[1]
    inputs = preprocess(name, row)
    np.testing.assert_array_equal(inputs.state[:8], tensors["model_state"][row])
    assert not inputs.state[8:].any()
    assert inputs.token_count == tensors["token_mask"][row].sum()
    np.testing.assert_array_equal(inputs.tokens, tensors["tokens"][row])


@pytest.mark.parametrize("name", WHOLE_PROMPTS)
def test_actions_equal_lerobots_in_the_robots_units(name: str) -> None:
    tensors = io(name)[1]
    for row in range(OFF_THE_CONSTANT + 1):
        chunk = np.pad(tensors["model_actions"][row], ((0, 0), (0, 32 - 7)), constant_values=9.0)
        actions = processor(name).postprocess(chunk, preprocess(name, row).context)
        np.testing.assert_allclose(actions, tensors["actions"][row], rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("name", WHOLE_PROMPTS)
def test_actions_beyond_the_datas_range_are_not_clipped(name: str) -> None:
    """LeRobot's own figures reach far outside, so parity on them would catch a clip; this says that they do."""
    tensors = io(name)[1]
    assert np.abs(tensors["model_actions"]).max() > 2
    assert np.ptp(tensors["actions"][:, :, 0]) > np.ptp(tensors["actions"][:, 0, 0])


@pytest.mark.parametrize("name", ["pi05_quantiles", "pi05_min_max", "pi05_quantile10", "pi0_mean_std"])
def test_a_column_without_spread_is_held_where_lerobot_would_send_the_model_far_off(name: str) -> None:
    theirs, ours = io(name)[1]["model_state"][OFF_THE_CONSTANT], preprocess(name, OFF_THE_CONSTANT).state
    np.testing.assert_array_equal(ours[:7], theirs[:7])
    assert ours[7] == (0 if name == "pi0_mean_std" else -1)
    assert theirs[7] > 1e5


@pytest.mark.parametrize("name", ["pi05_quantiles", "pi05_min_max", "pi05_quantile10", "pi0_mean_std"])
def test_a_column_without_spread_is_refused_unless_asked_for(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"observation\.state.* in dimensions \[7\]"):
        PolicyProcessor.from_lerobot(LEROBOT / "processors" / name, tokenizer=LEROBOT / "tokenizer")


@pytest.mark.parametrize("row", [0, 3])
def test_a_prompt_that_lerobot_cuts_silently_is_refused(row: int) -> None:
    tensors = io("pi05_short_prompt")[1]
    assert tensors["token_mask"][row].all(), "LeRobot filled the whole width, so it cut"
    with pytest.raises(PromptTooLongError, match="at most 20"):
        preprocess("pi05_short_prompt", row)


FRAMES = json.loads((LEROBOT / "processors" / "images.json").read_text())


@pytest.mark.parametrize("entry", FRAMES["images"], ids=lambda e: f"{e['height']}x{e['width']}")
@pytest.mark.parametrize("as_float", [False, True])
def test_frames_are_resized_and_padded_as_lerobot_does(entry: dict[str, Any], as_float: bool) -> None:
    frame = pattern_image(entry["height"], entry["width"], entry["seed"])
    value = frame.astype(np.float32) / 255 if as_float else frame
    if entry["height"] != 3:  # such a frame could also be channels first, and is refused
        value = read_picture("image", value).pixels_HWC
    side, stride = FRAMES["model_size"], FRAMES["stride"]
    ours = resize("image", value, (side, side), "torch")
    theirs = load_file(LEROBOT / "processors" / "images.safetensors")[str(entry["seed"])]
    np.testing.assert_allclose(np.moveaxis(ours, -1, 0)[:, ::stride, ::stride], theirs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.mean((0, 1), dtype=np.float64), entry["channel_means"], rtol=0, atol=1e-6)


POLICY_CASES = [
    (family, name)
    for family in ("pi05", "pi0")
    for name in json.loads((LEROBOT / f"{family}_tiny" / "policy_cases.json").read_text())
]


@cache
def tiny_policy(family: str) -> Any:
    folder = LEROBOT / f"{family}_tiny"
    raw = json.loads((folder / "config.json").read_text())
    raw["stretto"] = json.loads((folder / "sizes.json").read_text())
    model = build(Pi0Config.from_lerobot(raw), dtype="float32", pixels="float32")
    load_weights(model, folder)
    return model


@pytest.mark.parametrize(("family", "name"), POLICY_CASES)
def test_a_whole_policy_equals_lerobots_from_observation_to_robot_actions(family: str, name: str) -> None:
    folder = LEROBOT / f"{family}_tiny"
    entry = json.loads((folder / "policy_cases.json").read_text())[name]
    tensors = {k.partition("/")[2]: v for k, v in load_file(folder / "policy_cases.safetensors").items() if k.startswith(name)}
    observation: dict[str, Any] = {"observation.state": tensors["state"], "task": entry["task"]}
    for camera, frame in entry["images"].items():
        observation[f"observation.images.{camera}"] = pattern_image(**frame)
    pipeline = load(folder, optional_cameras=[c for c in CAMERAS if c not in observation])
    inputs = pipeline.preprocess(observation)
    np.testing.assert_array_equal(inputs.tokens, tensors["tokens"])
    model = tiny_policy(family)
    arrays = inputs.arrays() | {"x": tensors["noise"], "token_count": np.asarray(inputs.token_count, np.int32)}
    engine = Engine(model, whole(model.route, "cpu:0"))
    engine.warm()
    try:
        row = {key: arrays[key] for key in model.route.inputs}
        chunk = engine.open().submit(row, lengths={"prompt": inputs.token_count}).result(30)
    finally:
        engine.close()
    np.testing.assert_allclose(chunk.outputs["x"][:, :7], tensors["model_actions"], rtol=0, atol=1e-4)
    actions = pipeline.postprocess(chunk.outputs["x"], inputs.context)
    np.testing.assert_allclose(actions, tensors["actions"], rtol=0, atol=2e-4)
