"""Which keys of an observation are cameras, state and prompt: presets for known robots, and a declared map for others.

Keys are paths: `images/cam_high` is found both as a flat key and as `{"images": {"cam_high": ...}}`. Keys that a map does
not name are ignored, unless they hold an image: a camera that nobody expects is a fault of the setup.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from stretto.core.errors import ConfigError

OPENPI_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True, slots=True)
class ImageKey:
    """A camera of the robot and the slot of the model that it fills."""

    key: str
    slot: str
    required: bool = True
    layout: Literal["hwc", "chw"] = "hwc"
    """What the robot is told to send; both layouts are read."""
    order: Literal["rgb", "bgr"] = "rgb"


@dataclass(frozen=True, slots=True)
class StateKey:
    """One piece of the state vector; pieces are joined in the order of the map."""

    key: str
    width: int | None = None
    """None: whatever is left of the checkpoint's state width (one key of a map at most)."""


@dataclass(frozen=True)
class KeyMap:
    """The observation's keys of one kind of robot.

    Raises:
        ConfigError: on construction, if two entries claim one key or one slot.
    """

    name: str
    images: tuple[ImageKey, ...]
    state: tuple[StateKey, ...]
    prompt: str = "prompt"
    prompt_aliases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Keys that such robots are known to send besides; images among them are no fault."""

    def __post_init__(self) -> None:
        keys = [*(i.key for i in self.images), *(s.key for s in self.state), self.prompt, *self.prompt_aliases, *self.ignored]
        for what, names in (("keys", keys), ("slots", [i.slot for i in self.images])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ConfigError(f"key_map.{what}", got=f"{twice} more than once", expected="each once")
        if not self.images or not self.state:
            raise ConfigError(
                "key_map", got=f"{len(self.images)} images, {len(self.state)} state keys", expected="at least one each"
            )
        if sum(s.width is None for s in self.state) > 1:
            raise ConfigError("key_map.state", got="several keys without a width", expected="one at most")

    @cached_property
    def known(self) -> frozenset[str]:
        """Every key that the map speaks of."""
        named = {i.key for i in self.images} | {s.key for s in self.state}
        return frozenset({*named, self.prompt, *self.prompt_aliases, *self.ignored})

    def onto(self, cameras: Sequence[str], required: Sequence[str]) -> KeyMap:
        """Lay the map onto a checkpoint's own camera names: by name where they match, else in order.

        Raises:
            ConfigError: if a required camera of the checkpoint gets no key, or a required key gets no camera.
        """
        by_name = {i.slot for i in self.images} & set(cameras)
        if by_name:
            images = [i for i in self.images if i.slot in cameras]
            left_over = [i.key for i in self.images if i.slot not in cameras and i.required]
        else:
            images = [replace(i, slot=slot) for i, slot in zip(self.images, cameras, strict=False)]
            left_over = [i.key for i in self.images[len(cameras) :] if i.required]
        lacking = [c for c in required if c not in {i.slot for i in images}]
        if left_over or lacking:
            raise ConfigError(
                f"key_map {self.name}",
                got=f"keys {[i.key for i in self.images]}",
                expected=f"a key for each camera of the checkpoint: {list(cameras)}",
                hint=f"Without a camera: {left_over}; without a key: {lacking}.",
            )
        return replace(self, images=tuple(replace(i, required=i.slot in required) for i in images))

    @staticmethod
    def from_mapping(raw: Mapping[str, Any], name: str = "declared") -> KeyMap:
        """Read a declared map: `{"images": {key: slot | {...}}, "state": [key | {...}], "prompt": key, "ignored": [key]}`.

        Raises:
            ConfigError: naming the entry that is unknown or malformed.
        """
        allowed = {"images", "state", "prompt", "prompt_aliases", "ignored"}
        if set(raw) - allowed or not isinstance(raw.get("images"), Mapping) or not isinstance(raw.get("state"), list | tuple):
            raise ConfigError(
                "key_map", got=sorted(raw), expected=f"an images table and a state list; keys among {sorted(allowed)}"
            )
        images = tuple(
            _entry(ImageKey, f"key_map.images[{key}]", {"slot": slot} if isinstance(slot, str) else slot, {"key": key})
            for key, slot in raw["images"].items()
        )
        state = tuple(
            _entry(StateKey, f"key_map.state[{i}]", {"key": entry} if isinstance(entry, str) else entry, {})
            for i, entry in enumerate(raw["state"])
        )
        prompt = raw.get("prompt", "prompt")
        if not isinstance(prompt, str):
            raise ConfigError("key_map.prompt", got=repr(prompt), expected="a key")
        rest = {k: _names(k, raw[k]) for k in ("prompt_aliases", "ignored") if k in raw}
        return KeyMap(name, images, state, prompt, **rest)

    @staticmethod
    def from_file(path: Path) -> KeyMap:
        """Read a declared map from a `.toml` or `.json` file.

        Raises:
            ConfigError: if the file cannot be read as such a map.
        """
        try:
            text = path.read_text()
            raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as e:
            raise ConfigError("key_map", got=f"{path}: {e}", expected="a TOML or JSON file") from e
        if not isinstance(raw, dict):
            raise ConfigError("key_map", got=type(raw).__name__, expected="a table")
        return KeyMap.from_mapping(raw, path.stem)


E = TypeVar("E", ImageKey, StateKey)
_CHOICES = {"layout": ("hwc", "chw"), "order": ("rgb", "bgr")}


def _names(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"key_map.{field}", got=repr(value), expected="a list of keys")
    return tuple(value)


def _entry(kind: type[E], where: str, declared: object, more: Mapping[str, Any]) -> E:
    known = {f.name for f in fields(kind)}
    if not isinstance(declared, Mapping):
        raise ConfigError(where, got=repr(declared), expected=f"text, or a table with keys among {sorted(known)}")
    raw = {**declared, **more}
    if set(raw) - known or not isinstance(raw.get("key"), str) or (kind is ImageKey and not isinstance(raw.get("slot"), str)):
        raise ConfigError(where, got=sorted(raw), expected=f"keys among {sorted(known)}")
    for name, choices in _CHOICES.items():
        if raw.get(name, choices[0]) not in choices:
            raise ConfigError(f"{where}.{name}", got=repr(raw[name]), expected=f"one of {list(choices)}")
    if not isinstance(raw.get("required", True), bool):
        raise ConfigError(f"{where}.required", got=repr(raw["required"]), expected="true or false")
    width = raw.get("width")
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise ConfigError(f"{where}.width", got=repr(width), expected="a positive whole number")
    return kind(**raw)


_BASE, _LEFT, _RIGHT = OPENPI_SLOTS

LIBERO = KeyMap(
    "libero",
    images=(ImageKey("observation/image", _BASE), ImageKey("observation/wrist_image", _LEFT)),
    state=(StateKey("observation/state", 8),),
)
METAWORLD = KeyMap(
    "metaworld",
    images=(ImageKey("observation/image", _BASE), ImageKey("observation/wrist_image", _LEFT, required=False)),
    state=(StateKey("observation/state"),),
)
DROID = KeyMap(
    "droid",
    images=(ImageKey("observation/exterior_image_1_left", _BASE), ImageKey("observation/wrist_image_left", _LEFT)),
    state=(StateKey("observation/joint_position", 7), StateKey("observation/gripper_position", 1)),
    ignored=(
        "observation/exterior_image_1_right",
        "observation/exterior_image_2_left",
        "observation/exterior_image_2_right",
        "observation/exterior_image_0_left",
        "observation/exterior_image_0_right",
        "observation/wrist_image_right",
        "observation/cartesian_position",
        "session_id",
    ),
)
ALOHA = KeyMap(
    "aloha",
    images=(
        ImageKey("images/cam_high", _BASE, layout="chw"),
        ImageKey("images/cam_left_wrist", _LEFT, required=False, layout="chw"),
        ImageKey("images/cam_right_wrist", _RIGHT, required=False, layout="chw"),
    ),
    state=(StateKey("state", 14),),
    ignored=("images/cam_low",),
)
PRESETS: Mapping[str, KeyMap] = {m.name: m for m in (LIBERO, DROID, ALOHA, METAWORLD)}


def key_map(preset: object) -> KeyMap:
    """Return the map that a preset name, a declared table or a file stands for.

    Raises:
        ConfigError: if there is no such preset, or the declaration is malformed.
    """
    if isinstance(preset, KeyMap):
        return preset
    if isinstance(preset, Mapping):
        return KeyMap.from_mapping(preset)
    if not isinstance(preset, str | Path):
        raise ConfigError("preset", got=repr(preset), expected=f"one of {sorted(PRESETS)}, a table or a file")
    if isinstance(preset, Path) or preset.endswith((".toml", ".json")):
        return KeyMap.from_file(Path(preset))
    if preset not in PRESETS:
        raise ConfigError("preset", got=repr(preset), expected=f"one of {sorted(PRESETS)}, or a .toml or .json key map")
    return PRESETS[preset]
