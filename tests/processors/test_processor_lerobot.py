"""LeRobot folders: what is read from them, and every way in which they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stretto.core.errors import CheckpointError, ConfigError
from stretto.processors.policy import PolicyProcessor

Write = Callable[..., Path]
Obs = Callable[..., dict[str, Any]]
STATE = "observation.state"


def test_a_pi05_folder_gives_normalised_padded_inputs(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    folder = lerobot_folder()
    p = PolicyProcessor.from_lerobot(folder)
    obs = lerobot_obs()
    x = p.preprocess(obs)
    assert x.images.shape == (3, 56, 56, 3)
    assert x.images.dtype == np.float32
    assert x.image_mask.tolist() == [True, True, False]
    assert set(np.unique(x.images[2])) == {-1.0}
    stats = load_file(folder / "a_step_5.safetensors")
    low, high = (stats[f"{STATE}.{q}"].astype(np.float64) for q in ("q01", "q99"))
    want = 2 * (obs[STATE].astype(np.float64) - low) / (high - low) - 1
    np.testing.assert_allclose(x.state[:8], want, rtol=1e-5, atol=1e-6)
    assert x.state[8:].tolist() == [0.0] * 24
    assert x.state.dtype == np.float32
    assert x.tokens.shape == (200,)
    assert x.tokens.dtype == np.int64
    assert (x.tokens[x.token_count :] == 0).all()
    bins = [sum(-1 + 2 * i / 256 <= v for i in range(256)) - 1 for v in x.state[:8].tolist()]
    text = f"Task: pick up the red block, State: {' '.join(map(str, bins))};\nAction: "
    assert x.tokens[: x.token_count].tolist() == p.tokenizer.encode((text,))


def test_pi0_uses_mean_and_std_and_a_plain_prompt(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    folder = lerobot_folder("pi0", mode="MEAN_STD")
    p = PolicyProcessor.from_lerobot(folder)
    obs = lerobot_obs()
    x = p.preprocess(obs)
    stats = load_file(folder / "a_step_5.safetensors")
    want = (obs[STATE] - stats[f"{STATE}.mean"]) / (stats[f"{STATE}.std"] + np.float32(1e-8))
    np.testing.assert_array_equal(x.state[:8], want)
    assert x.tokens[: x.token_count].tolist() == p.tokenizer.encode(("pick up the red block\n",))
    assert p.spec.prompt.token_limit == 48


def test_actions_are_cut_to_the_robot_and_unnormalised(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    folder = lerobot_folder()
    p = PolicyProcessor.from_lerobot(folder)
    model = np.random.default_rng(1).normal(size=(10, 32)).astype(np.float32)
    before = model.copy()
    out = p.postprocess(model, p.preprocess(lerobot_obs()).context)
    stats = load_file(folder / "b_step_0.safetensors")
    low, high = (stats[f"action.{q}"].astype(np.float64) for q in ("q01", "q99"))
    np.testing.assert_allclose(out, (model[:, :7].astype(np.float64) + 1) / 2 * (high - low) + low, rtol=1e-5, atol=1e-6)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(model, before)
    assert (p.action_dim, p.action_horizon) == (7, 10)


def test_relative_actions_are_added_to_the_state_that_produced_them(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    plain = PolicyProcessor.from_lerobot(lerobot_folder())
    p = PolicyProcessor.from_lerobot(lerobot_folder(relative=True))
    first, second = lerobot_obs(0), lerobot_obs(1)
    context = p.preprocess(first).context
    p.preprocess(second)
    model = np.random.default_rng(1).normal(size=(10, 32)).astype(np.float32)
    offset = p.postprocess(model, context) - plain.postprocess(model, plain.preprocess(first).context)
    np.testing.assert_allclose(offset[:, :6], np.tile(first[STATE][:6], (10, 1)), rtol=1e-5, atol=1e-5)
    assert (offset[:, 6] == 0).all()


def test_robot_actions_go_back_to_the_same_model_space(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    p = PolicyProcessor.from_lerobot(lerobot_folder(relative=True))
    context = p.preprocess(lerobot_obs()).context
    model = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    again = p.encode_actions(p.postprocess(model, context), context)
    np.testing.assert_allclose(again[:, :7], model[:, :7], rtol=1e-4, atol=1e-4)
    assert (again[:, 7:] == 0).all()


def test_renamed_observations_are_asked_for_by_their_first_name(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    def rename(pre: dict[str, Any]) -> None:
        pre["steps"][0]["config"]["rename_map"] = {"observation.images.front": "observation.images.image"}

    p = PolicyProcessor.from_lerobot(lerobot_folder(change_pre=rename))
    obs = lerobot_obs()
    obs["observation.images.front"] = obs.pop("observation.images.image")
    assert p.preprocess(obs).image_mask.tolist() == [True, True, False]
    assert "observation.images.front" in p.observation_schema()


def test_a_preset_lays_the_robots_keys_onto_the_cameras_in_order(lerobot_folder: Write, lerobot_obs: Obs, libero: Obs) -> None:
    folder = lerobot_folder()
    own, wire = PolicyProcessor.from_lerobot(folder), PolicyProcessor.from_lerobot(folder, preset="libero")
    obs = libero(size=(64, 64))
    named = {
        "observation.images.image": obs["observation/image"],
        "observation.images.image2": obs["observation/wrist_image"],
        STATE: obs["observation/state"],
        "task": obs["prompt"],
    }
    a, b = own.preprocess(named), wire.preprocess(obs)
    for name, value in a.arrays().items():
        np.testing.assert_array_equal(value, b.arrays()[name])


def test_a_preset_that_does_not_fit_the_cameras_is_refused(lerobot_folder: Write) -> None:
    with pytest.raises(ConfigError, match=r"key_map\.state.*expected widths that add up to the checkpoint's 8"):
        PolicyProcessor.from_lerobot(lerobot_folder(), preset="aloha")

    def third(config: dict[str, Any]) -> None:
        config["input_features"]["observation.images.image3"] = {"type": "VISUAL", "shape": [3, 56, 56]}

    with pytest.raises(ConfigError, match=r"without a key: \['observation\.images\.image3'\]"):
        PolicyProcessor.from_lerobot(lerobot_folder(change_config=third), preset="libero")


def test_a_camera_may_be_left_out_only_if_declared_optional(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    folder, obs = lerobot_folder(), lerobot_obs()
    del obs["observation.images.image2"]
    p = PolicyProcessor.from_lerobot(folder, optional_cameras=["observation.images.image2"])
    assert p.preprocess(obs).image_mask.tolist() == [True, False, False]
    with pytest.raises(ConfigError, match=r"optional_cameras: got \['nose'\]"):
        PolicyProcessor.from_lerobot(folder, optional_cameras=["nose"])


def test_statistics_are_read_from_the_named_state_file(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    folder = lerobot_folder()
    decoy = {k: v + 1 for k, v in load_file(folder / "a_step_5.safetensors").items()}
    save_file(decoy, folder / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    before = PolicyProcessor.from_lerobot(folder).preprocess(lerobot_obs()).state
    (folder / "a_step_5.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a_step_5\.safetensors: state of step normalizer_processor cannot be read"):
        PolicyProcessor.from_lerobot(folder)
    assert np.isfinite(before).all()


def test_given_statistics_replace_those_of_the_checkpoint(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    stats = {STATE: {"q01": [-1.0] * 8, "q99": [1.0] * 8}, "action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}
    obs = lerobot_obs()
    x = PolicyProcessor.from_lerobot(lerobot_folder(), stats=stats).preprocess(obs)
    np.testing.assert_allclose(x.state[:8], obs[STATE], rtol=1e-6, atol=1e-6)


Change = Callable[[dict[str, Any]], None]


def _step(i: int, **entry: Any) -> Change:
    return lambda pipeline: pipeline["steps"][i].update(entry)


def _config(i: int, **entry: Any) -> Change:
    return lambda pipeline: pipeline["steps"][i]["config"].update(entry)


def _swap(pipeline: dict[str, Any]) -> None:
    steps = pipeline["steps"]
    steps[3], steps[4] = steps[4], steps[3]


def _no_stats(pipeline: dict[str, Any]) -> None:
    del pipeline["steps"][3]["state_file"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"change_pre": _step(1, registry_name="crop_processor")}, r"unknown steps \['crop_processor'\]; known are \['device"),
    ({"change_pre": lambda p: p["steps"].append({"class": "mine.Step"})}, r"unknown steps \['mine\.Step'\]"),
    ({"change_pre": lambda p: p["steps"].append(p["steps"][3])}, r"steps \['normalizer_processor'\] occur more than once"),
    ({"change_pre": lambda p: p.update(steps="none")}, "steps: expected a list"),
    ({"change_pre": _swap}, "binned before it is normalised"),
    ({"change_pre": lambda p: p["steps"].pop(4)}, r"got prompt steps \[\], expected exactly one"),
    ({"change_pre": lambda p: p["steps"].pop(5)}, "expected a tokenizer_processor after"),
    ({"change_pre": lambda p: p["steps"].pop(3)}, "no step normalizer_processor"),
    ({"change_pre": _config(5, padding_side="left")}, "padding_side: got 'left'"),
    ({"change_pre": _config(5, max_length=0)}, "max_length: got 0"),
    ({"change_pre": _config(6, float_dtype="bfloat16")}, r"device_processor\.float_dtype: got 'bfloat16'"),
    ({"change_pre": _step(3, state_file="../x.safetensors")}, "state_file: got '../x.safetensors'"),
    ({"change_pre": _no_stats}, r"no state_file\): observation\.state: no statistics.*silently do nothing"),
    (
        {"change_pre": _config(3, norm_map={"STATE": "MEAN_STD", "VISUAL": "IDENTITY"})},
        "uses MEAN_STD for STATE, but .*QUANTILES",
    ),
    ({"change_pre": _config(3, norm_map={"STATE": "MU_LAW"})}, "norm_map.STATE: got 'MU_LAW'"),
    ({"change_pre": _config(3, normalize_observation_keys=["x"])}, r"would skip observation\.state"),
    ({"change_pre": _config(3, features={})}, r"would skip observation\.state"),
    ({"change_pre": _config(2, enabled=True)}, "relative actions are True before the model but False after"),
    ({"change_pre": _config(0, rename_map={"a": "c", "b": "c"})}, "rename_map"),
    ({"change_post": lambda p: p["steps"].pop(0)}, "no step unnormalizer_processor"),
    ({"change_config": lambda c: c.update(type="smolvla")}, "type: got 'smolvla', expected one of"),
    ({"change_config": lambda c: c["input_features"].pop(STATE)}, r"input_features\.observation\.state: got None"),
    (
        {"change_config": lambda c: c.update(output_features={"action": {"shape": [6]}})},
        r"features\.action: got shape \[7\].*says \[6\]",
    ),
    ({"change_config": lambda c: c.update(max_action_dim=4)}, "action is 7 wide, more than max_action_dim 4"),
    ({"change_config": lambda c: c.update(chunk_size=True)}, "chunk_size: got True"),
    ({"change_config": lambda c: c.update(image_resolution=[0, 4])}, "image_resolution"),
    ({"change_config": lambda c: c["normalization_mapping"].update(VISUAL="MEAN_STD")}, "VISUAL normalisation: got MEAN_STD"),
    ({"change_stats": lambda s: s.pop("action.q99")}, r"b_step_0\.safetensors\): action\.q99: missing"),
    (
        {"change_stats": lambda s: s.update({f"{STATE}.q01": np.zeros(6, np.float32)})},
        r"q01: got shape \(6,\), expected \(8,\)",
    ),
    ({"change_stats": lambda s: s[f"{STATE}.q99"].__setitem__(2, np.nan)}, r"q99: got NaN or infinity in dimensions \[2\]"),
    ({"change_stats": lambda s: s[f"{STATE}.q99"].__setitem__(2, s[f"{STATE}.q01"][2])}, r"q01 = q99 in dimensions \[2\]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_folder_that_cannot_be_trusted_is_refused(lerobot_folder: Write, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        PolicyProcessor.from_lerobot(lerobot_folder(**changes))


def test_a_dimension_without_spread_can_be_held_on_request(lerobot_folder: Write, lerobot_obs: Obs) -> None:
    def flatten(stats: dict[str, np.ndarray]) -> None:
        stats[f"{STATE}.q99"][2] = stats[f"{STATE}.q01"][2]

    p = PolicyProcessor.from_lerobot(lerobot_folder(change_stats=flatten), degenerate="hold")
    assert p.spec.held == ("observation.state[2]",)
    assert p.preprocess(lerobot_obs()).state[2] == -1.0


def test_missing_and_damaged_files_are_named(lerobot_folder: Write) -> None:
    folder = lerobot_folder()
    (folder / "policy_postprocessor.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json: not readable as JSON"):
        PolicyProcessor.from_lerobot(folder)
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json: no such file, so the normalisation"):
        PolicyProcessor.from_lerobot(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        PolicyProcessor.from_lerobot(folder)


def test_an_old_checkpoint_with_buffers_in_its_weights_says_how_to_migrate(lerobot_folder: Write) -> None:
    folder = lerobot_folder()
    (folder / "policy_preprocessor.json").unlink()
    buffers = {"normalize_inputs.buffer_observation_state.mean": np.zeros(8, np.float32)}
    save_file(buffers, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"normalize_inputs\.buffer_observation_state\.mean.*migrate_policy_normalization"
    ):
        PolicyProcessor.from_lerobot(folder)
