"""One policy written in both layouts: the openpi export says nearly nothing, and is the same policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stretto.core.errors import CheckpointError, ConfigError
from stretto.core.policy import RequestOptions
from stretto.deploy.checkpoint import open_checkpoint, read_network
from stretto.deploy.describe import describe
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.models.pi0 import build
from stretto.models.pi0_config import Pi0Config
from stretto.processors.openpi import read_network_table
from stretto.processors.spec import read_json
from stretto.runtime.weights import save_weights, tensor_shapes

QUICK = {"device": "cpu", "preset": "libero", "denoise_steps": 2, "degenerate": "hold"}


@pytest.fixture(scope="module")
def layouts(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A LeRobot folder and an openpi export of the same weights and statistics."""
    root = tmp_path_factory.mktemp("layouts")
    lerobot, openpi = root / "lerobot", root / "openpi"
    shutil.copytree(tiny_checkpoint, lerobot)
    config = read_json(lerobot / "config.json")
    for camera in [name for name in config["input_features"] if "right_wrist" in name]:
        del config["input_features"][camera]
    config["empty_cameras"] = 1
    (lerobot / "config.json").write_text(json.dumps(config))
    model = build(Pi0Config.from_lerobot(config), dtype="float32")
    model.randomize(seed=3)
    save_weights(model, lerobot)
    assets = openpi / "assets" / "lab" / "arm"
    assets.mkdir(parents=True)
    shutil.copy(lerobot / "model.safetensors", openpi)
    shutil.copy(lerobot / "tokenizer.json", openpi)
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": _statistics(lerobot)}))
    heads = config["stretto"]["vision"]["heads"]
    said = {"processor": {"discrete_state": True}, "network": {"vision_heads": heads}}
    (openpi / "stretto.json").write_text(json.dumps(said))
    return lerobot, openpi


def _statistics(lerobot: Path) -> dict[str, dict[str, list[float]]]:
    path = next(lerobot.glob("policy_postprocessor_step_*.safetensors"))
    pre = load_file(next(lerobot.glob("policy_preprocessor_step_*.safetensors")))
    names = ("mean", "std", "q01", "q99")
    return {
        "state": {name: pre[f"observation.state.{name}"].tolist() for name in names},
        "actions": {name: load_file(path)[f"action.{name}"].tolist() for name in names},
    }


def first_chunk(policy: Policy) -> Any:
    rng = np.random.default_rng(4)
    cameras = {f"observation/{name}": rng.integers(0, 256, (56, 56, 3), dtype=np.uint8) for name in ("image", "wrist_image")}
    observation = {**cameras, "observation/state": rng.uniform(-0.5, 0.5, 8), "prompt": "open the drawer"}
    policy.warm()
    try:
        return policy.infer(observation, RequestOptions(seed=1))["actions"]
    finally:
        policy.close()


def test_an_openpi_export_tells_its_network_by_its_tensors_and_gives_the_same_actions(layouts: tuple[Path, Path]) -> None:
    lerobot, openpi = (load_policy(folder, PolicyOptions(**QUICK)) for folder in layouts)  # type: ignore[arg-type]
    assert (lerobot.loaded.layout, openpi.loaded.layout) == ("lerobot", "openpi")
    assert openpi.loaded.model.config == lerobot.loaded.model.config
    np.testing.assert_allclose(first_chunk(openpi), first_chunk(lerobot), atol=1e-3)


def test_an_export_that_claims_another_family_is_refused(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    shutil.copytree(layouts[1], folder)
    said = read_json(folder / "stretto.json") | {"processor": {"family": "pi0", "action_horizon": 10}}
    (folder / "stretto.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="family: network pi05, processor pi0"):
        load_policy(folder, PolicyOptions(**QUICK))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"optional_cameras": ("observation/wrist_image",)}, {"pad_state_bins": True}])
def test_an_option_of_the_other_layout_is_refused_rather_than_ignored(
    option: dict[str, Any], layouts: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        load_policy(layouts[1], PolicyOptions(**QUICK, **option))


def test_a_state_padded_in_the_prompt_is_a_longer_prompt(layouts: tuple[Path, Path]) -> None:
    plain, padded = (open_checkpoint(layouts[0], preset="libero", degenerate="hold", pad_state_bins=p) for p in (False, True))
    observation = {f"observation/{name}": np.zeros((8, 12, 3), np.uint8) for name in ("image", "wrist_image")}
    observation |= {"observation/state": np.zeros(8), "prompt": "open"}
    few, many = (opened.processor.preprocess(observation).token_count for opened in (plain, padded))
    assert few < many


def test_a_network_is_read_without_statistics_or_a_tokenizer(layouts: tuple[Path, Path], tmp_path: Path) -> None:
    lerobot, openpi = layouts
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(lerobot / "config.json", folder)
    expected = Pi0Config.from_lerobot(read_json(folder / "config.json"))
    assert read_network(folder) == expected
    (folder / "config.json").write_text(json.dumps({"action_horizon": 10}))
    (folder / "assets").mkdir()
    shutil.copy(openpi / "model.safetensors", folder)
    with pytest.raises(ConfigError, match=r"vision_heads: got none for an image tower \d+ wide"):
        read_network(folder)
    shutil.copy(openpi / "stretto.json", folder)
    expected = Pi0Config.from_openpi(tensor_shapes(folder), vision_heads=expected.vision.heads, action_horizon=10)
    assert read_network(folder) == expected


@pytest.mark.parametrize("said", [{"vision_heads": 0}, {"vision_heads": "4"}, {"heads": 4}, [4]])
def test_what_is_said_of_the_network_is_checked_by_name(said: object, tmp_path: Path) -> None:
    (tmp_path / "stretto.json").write_text(json.dumps({"network": said}))
    with pytest.raises(CheckpointError, match="vision_heads"):
        read_network_table(tmp_path)


def load(folder: Path) -> Policy:
    return load_policy(folder, PolicyOptions(**QUICK))  # type: ignore[arg-type]


def inspect(folder: Path) -> dict[str, Any]:
    return describe(folder, dtype="float32", preset="libero", tokenizer=None, degenerate="hold")


@pytest.mark.parametrize("reads", [load, inspect])
def test_inspecting_finds_the_tensors_that_loading_would_refuse(
    reads: Callable[[Path], object], layouts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(layouts[0], folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("action_in_proj.weight"))
    spoilt = {name: tensors[name][:-1].copy(), "another.weight": np.zeros(1, np.float32)}
    save_file(tensors | spoilt, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2 problem\(s\)") as caught:
        reads(folder)
    assert name in str(caught.value)
    assert "another.weight" in str(caught.value)
