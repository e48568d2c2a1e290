"""pi0 and pi0.5 against LeRobot 0.6.1, on reduced checkpoints that LeRobot wrote (see tests/golden/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.core.errors import CheckpointError
from stretto.core.plan import Device, Placement, Plan
from stretto.models.pi0 import Pi0Model, build
from stretto.models.pi0_config import Pi0Config
from stretto.runtime.engine import Engine
from stretto.runtime.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
FAMILIES = ("pi05", "pi0")
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "pi05_tiny" / "cases.json").read_text())
TOLERANCE = 1e-5
PALIGEMMA = "paligemma_with_expert.paligemma."


def folder(family: str) -> Path:
    return GOLDEN / f"{family}_tiny"


@cache
def golden(family: str) -> dict[str, Tensor]:
    return load_file(folder(family) / "cases.safetensors")


def case(family: str, name: str) -> dict[str, Tensor]:
    return {key.partition("/")[2]: value for key, value in golden(family).items() if key.startswith(f"{name}/")}


def config(family: str, **changes: Any) -> Pi0Config:
    raw = json.loads((folder(family) / "config.json").read_text())
    raw["stretto"] = json.loads((folder(family) / "sizes.json").read_text())
    return replace(Pi0Config.from_lerobot(raw), **changes)


@cache
def model(family: str, cameras: int = 3, denoise_steps: int = 10) -> Pi0Model:
    made = build(config(family, cameras=cameras, denoise_steps=denoise_steps), dtype="float32", pixels="float32")
    load_weights(made, folder(family))
    return made


def pool(family: str) -> Tensor:
    """Model images [6, 56, 56, 3] in [-1, 1]."""
    return golden(family)["image_pool"].permute(0, 2, 3, 1).float() / 255 * 2 - 1


def route_inputs(family: str, inputs: Mapping[str, Tensor], cameras: int) -> list[dict[str, np.ndarray]]:
    """Rows for the engine; slots that the case does not have are absent cameras."""
    rows, slots = inputs["image_index"].shape
    images = torch.full((rows, cameras, 56, 56, 3), -1.0)
    mask = torch.zeros(rows, cameras, dtype=torch.bool)
    mask[:, :slots] = inputs["image_mask"]
    images[:, :slots][inputs["image_mask"]] = pool(family)[inputs["image_index"][inputs["image_mask"]]]
    limit = config(family).tokenizer_max_length
    tokens = torch.nn.functional.pad(inputs["tokens"], (0, limit - inputs["tokens"].shape[1]))
    count = inputs["token_mask"].sum(1, dtype=torch.int32)
    batch = {"images": images, "image_mask": mask, "tokens": tokens, "token_count": count, "x": inputs["noise"]}
    if family == "pi0":
        batch["state"] = inputs["state"]
    return [{name: value[i].numpy() for name, value in batch.items()} for i in range(rows)]


def plan(made: Pi0Model, cuts: tuple[int, ...]) -> Plan:
    placements = tuple(Placement(segment, "cpu:0") for segment in made.route.cut(cuts))
    return Plan("test", (Device("cpu:0"),), {"default": placements}, {"cpu:0": 2})


def run(made: Pi0Model, rows: list[dict[str, np.ndarray]], cuts: tuple[int, ...] = ()) -> np.ndarray:
    engine = Engine(made, plan(made, cuts))
    engine.warm()
    try:
        futures = [engine.open().submit(row, lengths={"prompt": int(row["token_count"])}) for row in rows]
        return np.stack([future.result(30).outputs["x"] for future in futures])
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_actions_equal_lerobots(family: str, name: str) -> None:
    inputs = case(family, name)
    made = model(family, denoise_steps=CASES[name]["denoise_steps"])
    actions = run(made, route_inputs(family, inputs, cameras=3))
    np.testing.assert_allclose(actions, inputs["actions"].numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["one_camera", "two_cameras"])
def test_actions_equal_lerobots_when_the_policy_has_fewer_cameras(family: str, name: str) -> None:
    inputs = case(family, name)
    cameras = inputs["image_index"].shape[1]
    actions = run(model(family, cameras), route_inputs(family, inputs, cameras))
    np.testing.assert_allclose(actions, inputs["actions"].numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(1, 2), (2, 5, 6), tuple(range(1, 12))])
def test_actions_do_not_depend_on_where_the_route_is_cut(family: str, cuts: tuple[int, ...]) -> None:
    inputs = case(family, "batch_of_two")
    actions = run(model(family), route_inputs(family, inputs, cameras=3), cuts)
    np.testing.assert_allclose(actions, inputs["actions"].numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_image_tokens_equal_lerobots(family: str) -> None:
    tower = model(family).module.vision
    expected = golden(family)["image_features"]
    torch.testing.assert_close(tower(pool(family)[:, None]), expected, rtol=0, atol=2e-5)
    pixels = golden(family)["image_pool"].permute(0, 2, 3, 1).contiguous()
    torch.testing.assert_close(tower(pixels[:, None]), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["middle_camera_absent", "batch_of_two"])
@torch.no_grad()
def test_the_training_forward_gives_lerobots_velocity(family: str, name: str) -> None:
    inputs = case(family, name)
    rows = route_inputs(family, inputs, cameras=3)
    batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
    velocity = model(family).module.train_forward(
        batch["images"],
        batch["image_mask"],
        batch["tokens"],
        batch["token_count"],
        batch["x"],
        torch.ones(len(rows)),
        batch.get("state"),
    )
    torch.testing.assert_close(velocity, inputs["velocity_0"], rtol=0, atol=2e-5)


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def tied_head_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Only the head's name holds the embedding, as writers that tie the two leave it."""
    tensors = without_prefix(tensors)
    tensors[f"{PALIGEMMA}lm_head.weight"] = tensors.pop(f"{PALIGEMMA}model.language_model.embed_tokens.weight")
    return tensors


def names_of_older_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    old = {
        f"{PALIGEMMA}model.language_model.": f"{PALIGEMMA}language_model.model.",
        f"{PALIGEMMA}lm_head.": f"{PALIGEMMA}language_model.lm_head.",
        f"{PALIGEMMA}model.vision_tower.": f"{PALIGEMMA}vision_tower.",
        f"{PALIGEMMA}model.multi_modal_projector.": f"{PALIGEMMA}multi_modal_projector.",
    }
    out = {}
    for name, value in without_prefix(tensors).items():
        start = next((start for start in old if name.startswith(start)), "")
        out[old.get(start, "") + name.removeprefix(start)] = value
    return out


def without_unused_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if "lm_head" not in name}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rewrite", [without_prefix, tied_head_only, names_of_older_transformers, without_unused_heads])
def test_other_writers_names_load_the_same_weights(family: str, rewrite: Any, tmp_path: Path) -> None:
    save_file(rewrite(load_file(folder(family) / "model.safetensors")), tmp_path / "model.safetensors")
    made = build(config(family), dtype="float32", pixels="float32")
    load_weights(made, tmp_path)
    expected = model(family).weight_map().views
    for name, view in made.weight_map().views.items():
        assert torch.equal(view, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(family: str, tmp_path: Path) -> None:
    tensors = load_file(folder(family) / "model.safetensors")
    del tensors["model.action_out_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"action_out_proj\.bias"):
        load_weights(build(config(family), dtype="float32"), tmp_path)
