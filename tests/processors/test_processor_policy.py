"""The whole processor: every bad observation by its message, the published schema, key maps and withheld actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.core.errors import ConfigError, NonFiniteActionsError, ObservationError, PromptTooLongError
from stretto.processors.policy import PolicyProcessor
from stretto.processors.presets import ALOHA, DROID, LIBERO, KeyMap, key_map

Write = Callable[..., Path]
Obs = Callable[..., dict[str, Any]]
IMAGE = "observation/image"


@pytest.fixture
def libero_policy(openpi_folder: Write) -> PolicyProcessor:
    return PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset="libero")


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda o: o.pop(key)


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda o: o.update({key: value})


S = "observation/state"
BAD: list[tuple[Callable[[dict[str, Any]], None], str, str]] = [
    (_without(IMAGE), IMAGE, r"got no such camera among .*expected cameras \['observation/image', 'observation/wrist_image'\]"),
    (_with(IMAGE, None), IMAGE, "no such camera"),
    (_with("observation/top", np.zeros((8, 8, 3), np.uint8)), "observation/top", "a camera that the policy does not know"),
    (_with("images", {"cam_high": np.zeros((8, 8, 3), np.uint8)}), "images/cam_high", "does not know, expected cameras"),
    (_with(IMAGE, np.zeros((3, 64, 3), np.uint8)), IMAGE, "both as HWC and as CHW"),
    (_with(IMAGE, np.full((64, 64, 3), 128.0)), IMAGE, r"float values in 128\.\.128"),
    (_with(IMAGE, np.zeros((64, 64, 3), object)), IMAGE, "dtype object"),
    (_without(S), S, "got no such field among .*expected a state of 8 numbers"),
    (_with(S, np.zeros(7)), S, r"got shape \(7,\), expected \(8,\)"),
    (_with(S, np.zeros((1, 8))), S, r"got shape \(1, 8\)"),
    (_with(S, 0.5), S, r"got shape \(\)"),
    (_with(S, np.array([0, 1, np.nan, 3, 4, np.inf, 6, 7])), S, r"NaN or infinity in dimensions \[2, 5\]"),
    (_with(S, np.full(8, 1e300)), S, r"values up to 1e\+300, expected numbers that fit float32"),
    (_with(IMAGE, np.full((9, 8, 3), 1e300)), IMAGE, "NaN or infinity"),
    (_with(S, np.zeros(8, object)), S, "dtype object"),
    (_with(S, np.zeros(8, bool)), S, "dtype bool"),
    (_with(S, np.zeros(8, [("x", "f4")])), S, "dtype .*'x'"),
    (_with(S, ["a"] * 8), S, "dtype <U1"),
    (_with(S, [[1.0], [1.0, 2.0]]), S, "ragged list"),
    (_with(S, {"x": 1}), S, "no such field"),
    (_with(S, "12345678"), S, "got str"),
    (_without("prompt"), "prompt", "got no instruction.*no default prompt"),
    (_with("prompt", 7), "prompt", r"got int, expected text \(str, or UTF-8 bytes\)"),
    (_with("prompt", ["go"]), "prompt", "got list"),
    (_with("prompt", np.zeros(3)), "prompt", r"array of dtype float64, shape \(3,\)"),
    (_with("prompt", b"\xff\xfe"), "prompt", "bytes that are not UTF-8"),
    (lambda o: o.update({3: "x"}), "observation", "a int key 3, expected text keys"),
    (_with("observation", {"image": np.zeros((8, 8, 3), np.uint8)}), IMAGE, "the field twice, flat and nested"),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD)
def test_a_bad_observation_names_field_got_and_expected(
    libero_policy: PolicyProcessor, libero: Obs, change: Callable[[dict[str, Any]], None], field: str, message: str
) -> None:
    obs = libero(size=(64, 64))
    change(obs)
    with pytest.raises(ObservationError, match=message) as e:
        libero_policy.preprocess(obs)
    assert e.value.field == field


def test_what_is_not_a_map_is_refused(libero_policy: PolicyProcessor) -> None:
    with pytest.raises(ObservationError, match="observation: got list, expected a map"):
        libero_policy.preprocess([1])  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_is_refused_with_counts(libero_policy: PolicyProcessor, libero: Obs) -> None:
    with pytest.raises(PromptTooLongError, match=r"prompt: got \d+ tokens .* expected at most 200"):
        libero_policy.preprocess({**libero(), "prompt": "0" * 400})


def test_unknown_fields_that_are_no_images_are_ignored(libero_policy: PolicyProcessor, libero: Obs) -> None:
    obs = libero()
    plain = libero_policy.preprocess(obs)
    more = libero_policy.preprocess({**obs, "rt": {"seed": 3, "prefix": np.zeros((4, 7))}, "timestamp": 1.5})
    for name, value in plain.arrays().items():
        np.testing.assert_array_equal(value, more.arrays()[name])


def test_prompts_are_read_as_text_bytes_or_numpy_text(libero_policy: PolicyProcessor, libero: Obs) -> None:
    tokens = [
        libero_policy.preprocess({**libero(), "prompt": value}).tokens.tolist()
        for value in ("open it", b"open it", np.array("open it"), np.str_("open it"))
    ]
    assert all(t == tokens[0] for t in tokens)


def test_a_default_prompt_stands_in_only_for_an_absent_one(openpi_folder: Write, libero: Obs) -> None:
    p = PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset="libero", default_prompt="open the drawer")
    given, absent = libero(), libero()
    del absent["prompt"]
    want = p.tokenizer.encode(("open the drawer", "\n"))
    x = p.preprocess(absent)
    assert x.tokens[: x.token_count].tolist() == want
    y = p.preprocess(given)
    assert y.tokens[: y.token_count].tolist() != want
    assert p.observation_schema()["prompt"]["required"] is False


@pytest.mark.parametrize(("height", "width"), [(720, 1280), (480, 640), (360, 640)])
def test_cameras_of_different_sizes_are_resized_apart(
    openpi_folder: Write, lerobot_folder: Write, libero: Obs, height: int, width: int
) -> None:
    obs = libero(size=(224, 224))
    obs[IMAGE] = np.full((height, width, 3), 255, np.uint8)
    uint8 = PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset="libero").preprocess(obs)
    floats = PolicyProcessor.from_lerobot(lerobot_folder(), preset="libero").preprocess(obs)
    assert uint8.images.shape == (3, 224, 224, 3)
    assert floats.images.shape == (3, 56, 56, 3)
    inner = int(height / (width / 224))
    assert int((uint8.images[0, :, 112, 0] == 255).sum()) == inner
    np.testing.assert_array_equal(uint8.images[1], obs["observation/wrist_image"])


def test_the_schema_describes_an_observation_that_is_taken(openpi_folder: Write) -> None:
    shapes = {"libero": (8, 7), "droid": (8, 8), "aloha": (14, 14), "metaworld": (4, 4)}
    for preset, (state_dim, action_dim) in shapes.items():
        folder = openpi_folder(state_dim=state_dim, action_dim=action_dim)
        p = PolicyProcessor.from_openpi(folder, family="pi05", preset=preset)
        schema = p.observation_schema()
        assert json.loads(json.dumps(schema)) == schema
        obs: dict[str, Any] = {
            key: "go" if f["kind"] == "prompt" else np.zeros(f["shape"], f["dtype"])
            for key, f in schema.items()
            if f["required"]
        }
        x = p.preprocess(obs)
        assert x.image_mask.sum() == sum(f["kind"] == "image" and f["required"] for f in schema.values())


def test_the_clipped_pixels_of_all_cameras_are_counted(libero_policy: PolicyProcessor, libero: Obs) -> None:
    obs = libero()
    image = np.full((64, 64, 3), 0.5)
    image[0, 0] = 1.01
    obs[IMAGE] = obs["observation/wrist_image"] = image
    assert libero_policy.preprocess(obs).clipped_values == 6


def test_inputs_are_the_callers_and_the_observation_is_left_alone(libero_policy: PolicyProcessor, libero: Obs) -> None:
    obs = libero()
    copy = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in obs.items()}
    x = libero_policy.preprocess(obs)
    for array in x.arrays().values():
        array[...] = 1
    for key, value in copy.items():
        np.testing.assert_array_equal(obs[key], value)
    assert not np.array_equal(libero_policy.preprocess(obs).state, x.state)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_actions_are_withheld_and_counted(libero_policy: PolicyProcessor, libero: Obs, bad: float) -> None:
    context = libero_policy.preprocess(libero()).context
    actions = np.zeros((10, 32), np.float32)
    actions[3, 2] = actions[4, 1] = bad
    with pytest.raises(NonFiniteActionsError, match=r"got 2 NaN or infinite values of 70 .*step 3, dimension 2"):
        libero_policy.postprocess(actions, context)
    padding = np.zeros((10, 32), np.float32)
    padding[0, 31] = bad
    assert np.isfinite(libero_policy.postprocess(padding, context)).all()


def test_a_chunk_of_another_width_is_refused(libero_policy: PolicyProcessor, libero: Obs) -> None:
    context = libero_policy.preprocess(libero()).context
    with pytest.raises(ConfigError, match=r"actions: got shape \(10, 7\), expected \[H, 32\]"):
        libero_policy.postprocess(np.zeros((10, 7)), context)
    with pytest.raises(ConfigError, match=r"expected \[K, 7\]"):
        libero_policy.encode_actions(np.zeros((10, 32)), context)


def test_threads_share_one_processor(libero_policy: PolicyProcessor, libero: Obs) -> None:
    alone = [libero_policy.preprocess(libero(i)).arrays() for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: libero_policy.preprocess(libero(i % 4)).arrays(), range(16)))
    for i, arrays in enumerate(together):
        for name, value in arrays.items():
            np.testing.assert_array_equal(value, alone[i % 4][name])


def test_a_declared_key_map_reads_from_toml_and_json(tmp_path: Path) -> None:
    toml = tmp_path / "robot.toml"
    toml.write_text(
        'state = ["arm", {key = "gripper", width = 1}]\nprompt = "task"\nignored = ["depth"]\n'
        '[images]\ntop = "base_0_rgb"\n[images.wrist]\nslot = "left_wrist_0_rgb"\nrequired = false\norder = "bgr"\n'
    )
    as_json = tmp_path / "robot.json"
    table = {
        "state": ["arm", {"key": "gripper", "width": 1}],
        "prompt": "task",
        "ignored": ["depth"],
        "images": {"top": "base_0_rgb", "wrist": {"slot": "left_wrist_0_rgb", "required": False, "order": "bgr"}},
    }
    as_json.write_text(json.dumps(table))
    assert key_map(toml) == key_map(str(as_json))
    assert key_map(table).images == key_map(toml).images
    assert key_map("droid") is DROID


def test_declared_bgr_cameras_are_turned_to_rgb(openpi_folder: Write, libero: Obs) -> None:
    table = {
        "images": {IMAGE: {"slot": "base_0_rgb", "order": "bgr"}, "observation/wrist_image": "left_wrist_0_rgb"},
        "state": [S],
    }
    p = PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset=table)
    obs = libero()
    np.testing.assert_array_equal(p.preprocess(obs).images[0], obs[IMAGE][..., ::-1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"image": {}, "state": []}, r"key_map: got \['image', 'state'\]"),
        ({"images": {"a": "s"}, "state": [{"key": "x", "wide": 3}]}, r"key_map\.state\[0\]: got \['key', 'wide'\]"),
        ({"images": {"a": {"slot": "s", "order": "grb"}}, "state": ["x"]}, r"order: got 'grb'"),
        ({"images": {"a": "s"}, "state": [{"key": "x", "width": 0}]}, "width: got 0"),
        ({"images": {"a": "s", "b": "s"}, "state": ["x"]}, r"key_map\.slots: got \['s'\] more than once"),
        ({"images": {"a": "s"}, "state": ["a"]}, r"key_map\.keys: got \['a'\] more than once"),
        ({"images": {"a": "s"}, "state": ["x", "y"]}, "several keys without a width"),
        ({"images": {}, "state": ["x"]}, "got 0 images"),
    ],
)
def test_a_malformed_key_map_is_refused_by_entry(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeyMap.from_mapping(table)


def test_slots_that_the_model_does_not_have_are_refused(openpi_folder: Write) -> None:
    table = {"images": {"a": "nose"}, "state": ["x"]}
    with pytest.raises(ConfigError, match=r"key_map\.images: got slots \['nose'\], expected slots among"):
        PolicyProcessor.from_openpi(openpi_folder(), family="pi05", preset=table)


def test_presets_ask_for_what_their_robots_send() -> None:
    assert [i.required for i in LIBERO.images] == [True, True]
    assert next((i.key, i.required, i.layout) for i in ALOHA.images) == ("images/cam_high", True, "chw")
    assert [s.width for s in DROID.state] == [7, 1]
