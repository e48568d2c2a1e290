"""Guided sampling of whole reduced policies against LeRobot 0.6.1 (see tests/golden/README.md)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.control.rtc import guided_velocity, lerobot_weights
from stretto.models.pi0 import Pi0Model, build
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_net import euler_schedule
from stretto.runtime.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
SETTINGS: list[dict[str, Any]] = json.loads((GOLDEN / "rtc.json").read_text())["model"]


@cache
def model(family: str) -> Pi0Model:
    folder = GOLDEN / f"{family}_tiny"
    raw = json.loads((folder / "config.json").read_text())
    raw["stretto"] = json.loads((folder / "sizes.json").read_text())
    made = build(Pi0Config.from_lerobot(raw), dtype="float32", pixels="float32")
    load_weights(made, folder)
    return made


@cache
def batch(family: str) -> dict[str, Tensor]:
    tensors = load_file(GOLDEN / f"{family}_tiny" / "cases.safetensors")
    case = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith("batch_of_two/")}
    images = tensors["image_pool"].permute(0, 2, 3, 1).float()[case["image_index"].clamp(min=0)] / 255 * 2 - 1
    images[~case["image_mask"]] = -1
    return case | {"images": images}


@torch.no_grad()
def velocity(family: str, x_BHA: np.ndarray, t: float) -> np.ndarray:
    inputs = batch(family)
    out: Tensor = model(family).module.train_forward(
        inputs["images"],
        inputs["image_mask"],
        inputs["tokens"],
        inputs["token_mask"].sum(1),
        torch.from_numpy(x_BHA),
        torch.full((2,), t),
        inputs.get("state"),
    )
    return out.numpy()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s["key"].removeprefix("model/"))
def test_guided_actions_equal_lerobots(setting: dict[str, Any]) -> None:
    family, tensors = setting["family"], load_file(GOLDEN / "rtc.safetensors")
    tail = tensors[f"model/{family}/left_over"].numpy()
    x = batch(family)["noise"].numpy()
    target = np.pad(tail, ((0, 0), (0, x.shape[1] - tail.shape[1]), (0, 0)))
    weights = lerobot_weights(
        setting["schedule"].lower(),
        delay=setting["delay"],
        execution_horizon=setting["execution_horizon"],
        horizon=x.shape[1],
        tail=tail.shape[1],
    )
    for t, dt in euler_schedule(model(family).config.denoise_steps):
        guided = guided_velocity(
            x,
            velocity(family, x, t),
            t,
            target_BHA=target,
            weights_BH=np.tile(weights, (2, 1)),
            cap=setting["max_guidance_weight"],
        )
        x = x + np.float32(dt) * guided
    expected = tensors[setting["key"]].numpy()
    np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5)
    plain = batch(family)["actions"].numpy()
    assert np.abs(expected - plain).max() > 0.5, "the guidance must move the actions for this test to mean anything"
