"""openpi exports: statistics, presets, properties that openpi keeps in code, and the observations of three robots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.core.errors import CheckpointError, ConfigError
from stretto.processors.openpi import OpenpiOptions
from stretto.processors.policy import PolicyProcessor
from stretto.processors.transforms import AlohaJoints

Write = Callable[..., Path]
Obs = Callable[..., dict[str, Any]]


def table(folder: Path) -> dict[str, dict[str, list[float]]]:
    return json.loads((folder / "assets/lab/robot/norm_stats.json").read_text())["norm_stats"]


def droid(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation/exterior_image_1_left": rng.integers(0, 256, (180, 320, 3), dtype=np.uint8),
        "observation/wrist_image_left": rng.integers(0, 256, (224, 224, 3), dtype=np.uint8),
        "observation/joint_position": rng.normal(size=7),
        "observation/gripper_position": rng.random(1),
        "prompt": b"open the drawer",
    }


def aloha(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    cameras = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    images = {name: rng.integers(0, 256, (3, 224, 224), dtype=np.uint8) for name in cameras}
    return {"state": rng.normal(size=14), "images": images, "prompt": "open the drawer"}


@pytest.mark.parametrize("padded", [0, 32])
def test_libero_on_pi05_leaves_the_state_out_of_the_prompt(openpi_folder: Write, libero: Obs, padded: int) -> None:
    folder = openpi_folder(padded=padded)
    p = PolicyProcessor.from_openpi(folder, family="pi05", preset="libero")
    obs = libero()
    x = p.preprocess(obs)
    np.testing.assert_array_equal(x.images[0], obs["observation/image"])
    np.testing.assert_array_equal(x.images[1], obs["observation/wrist_image"])
    assert x.images.dtype == np.uint8
    assert not x.images[2].any()
    assert x.image_mask.tolist() == [True, True, False]
    assert x.tokens[: x.token_count].tolist() == p.tokenizer.encode(("pick up the red block", "\n"))
    s = table(folder)["state"]
    want = [(v - a) / (b - a + 1e-6) * 2 - 1 for v, a, b in zip(obs["observation/state"], s["q01"], s["q99"], strict=False)]
    np.testing.assert_array_equal(x.state[:8], np.float32(want))
    assert x.state.shape == (32,)


def test_the_state_is_in_the_prompt_when_the_checkpoint_says_so(openpi_folder: Write, libero: Obs) -> None:
    options = OpenpiOptions(discrete_state=True)
    p = PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset="libero", options=options)
    x, other = p.preprocess(libero(0)), p.preprocess({**libero(0), "observation/state": np.zeros(8)})
    assert p.spec.prompt.has_state
    assert x.tokens.tolist() != other.tokens.tolist()


def test_actions_come_back_in_float64_at_the_robots_width(openpi_folder: Write, libero: Obs) -> None:
    folder = openpi_folder(padded=32)
    p = PolicyProcessor.from_openpi(folder, family="pi05", preset="libero")
    model = np.random.default_rng(0).normal(size=(10, 32)).astype(np.float32)
    out = p.postprocess(model, p.preprocess(libero()).context)
    a = {k: np.array(v)[:7] for k, v in table(folder)["actions"].items()}
    np.testing.assert_array_equal(out, (model[:, :7].astype(np.float64) + 1) / 2 * (a["q99"] - a["q01"] + 1e-6) + a["q01"])
    assert out.dtype == np.float64
    assert out.shape == (10, 7)


def test_pi0_on_libero_takes_offsets_except_for_the_gripper(openpi_folder: Write, libero: Obs) -> None:
    folder = openpi_folder(horizon=50)
    p = PolicyProcessor.from_openpi(folder, family="pi0", preset="libero")
    obs = libero()
    out = p.postprocess(np.zeros((50, 32), np.float32), p.preprocess(obs).context)
    mean = np.array(table(folder)["actions"]["mean"])
    np.testing.assert_allclose(out[0, :6], mean[:6] + obs["observation/state"][:6])
    assert out[0, 6] == mean[6]
    assert p.spec.prompt.token_limit == 48


def test_droid_joins_its_state_and_reads_a_bytes_prompt(openpi_folder: Write) -> None:
    folder = openpi_folder(state_dim=8, action_dim=8, horizon=None)
    p = PolicyProcessor.from_openpi(folder, family="pi05", preset="droid")
    obs = droid()
    x = p.preprocess(obs)
    assert p.action_horizon == 15
    joined = np.concatenate([obs["observation/joint_position"], obs["observation/gripper_position"]])
    np.testing.assert_array_equal(x.context.states[0], joined)
    scalar = {**obs, "observation/gripper_position": float(obs["observation/gripper_position"][0])}
    np.testing.assert_array_equal(p.preprocess(scalar).state, x.state)
    extra = {**obs, "observation/wrist_image_right": obs["observation/wrist_image_left"], "session_id": "a"}
    np.testing.assert_array_equal(p.preprocess(extra).images, x.images)
    (text,) = p.spec.prompt.pieces("open the drawer", x.context.states[-2])
    assert x.tokens[: x.token_count].tolist() == p.tokenizer.encode((text,))


def test_aloha_reads_nested_chw_images_and_masks_absent_wrists(openpi_folder: Write) -> None:
    folder = openpi_folder(state_dim=14, action_dim=14, horizon=None)
    p = PolicyProcessor.from_openpi(folder, family="pi0", preset="aloha")
    obs = aloha()
    x = p.preprocess(obs)
    np.testing.assert_array_equal(x.images[1], np.moveaxis(obs["images"]["cam_left_wrist"], 0, -1))
    assert x.image_mask.tolist() == [True, True, True]
    del obs["images"]["cam_left_wrist"]
    one = p.preprocess(obs)
    assert one.image_mask.tolist() == [True, False, True]
    assert not one.images[1].any()
    assert p.action_horizon == 50


def test_aloha_joints_change_sign_and_gripper_units() -> None:
    state = np.arange(14, dtype=np.float64) / 14
    out = AlohaJoints().state(state)
    assert out[[0, 1, 2, 3, 8, 9]].tolist() == [state[0], -state[1], -state[2], state[3], -state[8], -state[9]]
    opening = state[6] * (0.05800 - 0.01844) + 0.01844
    angle = np.arcsin((0.022**2 + opening**2 - 0.036**2) / (2 * 0.022 * opening))
    np.testing.assert_allclose(out[6], (angle - 0.5476) / (1.6296 - 0.5476))
    actions = np.random.default_rng(0).normal(size=(5, 14))
    robot = AlohaJoints().to_robot(actions, state)
    np.testing.assert_allclose(robot[:, 13], (actions[:, 13] + 0.5476 + 0.6213) / (1.4910 + 0.6213))
    np.testing.assert_allclose(AlohaJoints().to_model(robot, state), actions)


def test_aloha_offsets_use_the_state_in_the_models_convention(openpi_folder: Write) -> None:
    folder = openpi_folder(state_dim=14, action_dim=14)
    p = PolicyProcessor.from_openpi(folder, family="pi0", preset="aloha")
    obs = aloha()
    out = p.postprocess(np.zeros((10, 32), np.float32), p.preprocess(obs).context)
    mean = np.array(table(folder)["actions"]["mean"])
    np.testing.assert_allclose(out[0, 0], mean[0] + obs["state"][0])
    np.testing.assert_allclose(out[0, 1], -(mean[1] - obs["state"][1]))


def test_metaworld_takes_its_widths_from_the_statistics(openpi_folder: Write, libero: Obs) -> None:
    folder = openpi_folder(state_dim=4, action_dim=4)
    p = PolicyProcessor.from_openpi(folder, family="pi05", preset="metaworld")
    obs = {**libero(), "observation/state": np.zeros(4)}
    del obs["observation/wrist_image"]
    assert p.preprocess(obs).image_mask.tolist() == [True, False, False]
    assert p.observation_schema()["observation/state"]["shape"] == [4]
    assert p.action_dim == 4


def test_a_manifest_beside_the_weights_says_what_openpi_keeps_in_code(openpi_folder: Write, libero: Obs) -> None:
    folder = openpi_folder()
    manifest = {
        "family": "pi05",
        "keys": {"images": {"observation/image": "base_0_rgb"}, "state": ["observation/state"], "prompt": "prompt"},
        "discrete_state": False,
        "relative": [True, True, True, False],
        "token_limit": 99,
    }
    (folder / "stretto.json").write_text(json.dumps({"processor": manifest}))
    p = PolicyProcessor.from_openpi(folder)
    obs = libero()
    del obs["observation/wrist_image"]
    x = p.preprocess(obs)
    assert x.tokens.shape == (99,)
    out = p.postprocess(np.zeros((10, 32), np.float32), x.context)
    absolute = PolicyProcessor.from_openpi(folder, options=OpenpiOptions(relative=()))
    base = absolute.postprocess(np.zeros((10, 32)), absolute.preprocess(obs).context)
    np.testing.assert_allclose((out - base)[0], [*obs["observation/state"][:3], 0, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize(
    "entry", [{"discrete": True}, {"discrete_state": "no"}, {"relative": [1]}, {"action_horizon": True}, {"token_limit": -1}]
)
def test_a_manifest_with_a_wrong_entry_is_refused_by_name(openpi_folder: Write, entry: dict[str, Any]) -> None:
    folder = openpi_folder()
    (folder / "stretto.json").write_text(json.dumps({"processor": entry}))
    with pytest.raises(CheckpointError, match=next(iter(entry))):
        PolicyProcessor.from_openpi(folder, family="pi05", preset="libero")


def _drop(name: str, stat: str) -> Callable[[dict[str, Any]], None]:
    return lambda t: t[name].pop(stat)


def _set(name: str, stat: str, dim: int, value: float) -> Callable[[dict[str, Any]], None]:
    return lambda t: t[name][stat].__setitem__(dim, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("state", "q01"), r"norm_stats\.json: state\.q01: missing"),
        (_drop("actions", "q99"), r"actions\.q99: missing"),
        (lambda t: t.pop("actions"), r"norm_stats\.actions: missing, so no normaliser would be active"),
        (_set("state", "q99", 1, float("nan")), r"state\.q99: got NaN or infinity in dimensions \[1\]"),
        (lambda t: t["state"]["q99"].__setitem__(3, t["state"]["q01"][3]), r"q01 = q99 in dimensions \[3\]"),
        (lambda t: t["state"]["q01"].append(0.0), r"state\.q01: got shape \(9,\), expected \(8,\) \(or 32, padded\)"),
    ],
)
def test_wrong_statistics_are_refused(openpi_folder: Write, change: Callable[..., None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        PolicyProcessor.from_openpi(openpi_folder(change_stats=change), family="pi05", preset="libero")


def test_several_assets_need_an_id_and_are_listed(openpi_folder: Write) -> None:
    folder = openpi_folder()
    other = folder / "assets" / "droid"
    other.mkdir()
    (other / "norm_stats.json").write_text((folder / "assets/lab/robot/norm_stats.json").read_text())
    with pytest.raises(CheckpointError, match=r"found those of \['droid', 'lab/robot'\]"):
        PolicyProcessor.from_openpi(folder, family="pi05", preset="libero")
    options = OpenpiOptions(asset_id="lab/robot")
    assert PolicyProcessor.from_openpi(folder, family="pi05", preset="libero", options=options).action_dim == 7


def test_what_an_export_does_not_say_must_be_given(openpi_folder: Write) -> None:
    folder = openpi_folder(horizon=None)
    with pytest.raises(ConfigError, match="family: got None"):
        PolicyProcessor.from_openpi(folder, preset="libero")
    with pytest.raises(ConfigError, match="preset: got none"):
        PolicyProcessor.from_openpi(folder, family="pi05")
    with pytest.raises(ConfigError, match="preset: got 'franka', expected one of"):
        PolicyProcessor.from_openpi(folder, family="pi05", preset="franka")
    with pytest.raises(ConfigError, match="action_horizon: got none"):
        PolicyProcessor.from_openpi(folder, family="pi0", preset="libero")
    with pytest.raises(ConfigError, match="discrete_state: got True, expected False for pi0"):
        PolicyProcessor.from_openpi(
            folder, family="pi0", preset="droid", options=OpenpiOptions(discrete_state=True, action_dim=7)
        )
    with pytest.raises(ConfigError, match="state width: got statistics of width 32, expected a declared width"):
        PolicyProcessor.from_openpi(openpi_folder(padded=32), family="pi05", preset="metaworld")
