"""From a raw observation to checked pieces. What is absent is never invented, and what is wrong is named.

Shape legend: S width of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from stretto.core.errors import ObservationError
from stretto.processors.images import Picture, read_picture
from stretto.processors.presets import KeyMap, StateKey
from stretto.processors.stats import Array


@dataclass(frozen=True)
class Checked:
    """An observation that passed: pictures by slot, the joined state [S] in the robot's units, and the instruction."""

    pictures: Mapping[str, Picture]
    state_S: Array
    prompt: str


def check_observation(
    observation: Mapping[str, object], keys: KeyMap, state_dim: int, default_prompt: str | None = None
) -> Checked:
    """Check one observation against the keys of a robot.

    Raises:
        ObservationError: naming the field, what was given and what was expected.
    """
    if not isinstance(observation, Mapping):
        raise ObservationError("observation", got=type(observation).__name__, expected="a map of named fields")
    flat = _flatten(observation)
    _check_cameras(flat, keys)
    pictures = {}
    for image in keys.images:
        if image.key in flat:
            picture = read_picture(image.key, flat[image.key])
            pictures[image.slot] = Picture(picture.pixels_HWC[..., ::-1], picture.clipped) if image.order == "bgr" else picture
    return Checked(pictures, _join_state(flat, keys, state_dim), _read_prompt(flat, keys, default_prompt))


def _flatten(observation: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in observation.items():
        if not isinstance(key, str):
            raise ObservationError("observation", got=f"a {type(key).__name__} key {key!r}", expected="text keys")
        inner = {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value}
        for path, leaf in inner.items():
            if path in flat:
                raise ObservationError(path, got="the field twice, flat and nested", expected="one of them")
            flat[path] = leaf
    return flat


def _check_cameras(flat: Mapping[str, object], keys: KeyMap) -> None:
    extra = [k for k, v in flat.items() if k not in keys.known and (_is_image(v) or k.startswith("images/"))]
    missing = [i.key for i in keys.images if i.required and flat.get(i.key) is None]
    if not (missing or extra):
        return
    required = [i.key for i in keys.images if i.required]
    optional = [i.key for i in keys.images if not i.required]
    cameras = f"cameras {required}" + (f", optional {optional}" if optional else "")
    if missing:
        came = sorted(flat)
        raise ObservationError(", ".join(missing), got=f"no such camera among {came}", expected=cameras)
    raise ObservationError(", ".join(sorted(extra)), got="a camera that the policy does not know", expected=cameras)


def _is_image(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim >= 3)


def _join_state(flat: Mapping[str, object], keys: KeyMap, state_dim: int) -> Array:
    widths = state_widths(keys.state, state_dim)
    return np.concatenate([_read_state(key.key, flat, width) for key, width in zip(keys.state, widths, strict=True)])


def state_widths(keys: Iterable[StateKey], state_dim: int) -> list[int]:
    """Return the width of each state key; the one without a width takes what is left of `state_dim`."""
    declared = [k.width for k in keys]
    rest = state_dim - sum(w for w in declared if w is not None)
    return [rest if w is None else w for w in declared]


def _read_state(field: str, flat: Mapping[str, object], width: int) -> Array:
    value = flat.get(field)
    if value is None:
        raise ObservationError(field, got=f"no such field among {sorted(flat)}", expected=f"a state of {width} numbers")
    if isinstance(value, str | bytes) or not isinstance(value, np.ndarray | np.generic | list | tuple | int | float):
        raise ObservationError(field, got=type(value).__name__, expected=f"{width} numbers")
    try:
        state = np.asarray(value)
    except ValueError as e:
        raise ObservationError(field, got=f"a ragged list ({e})", expected=f"{width} numbers") from e
    if state.dtype.kind not in "iuf":
        raise ObservationError(field, got=f"dtype {state.dtype}", expected="float or integer numbers")
    if state.ndim == 0 and width == 1:
        state = state[None]
    if state.shape != (width,):
        raise ObservationError(field, got=f"shape {state.shape}", expected=f"({width},)")
    bad = np.flatnonzero(~np.isfinite(state))
    if bad.size:
        raise ObservationError(field, got=f"NaN or infinity in dimensions {bad.tolist()}", expected="finite numbers")
    return state


def _read_prompt(flat: Mapping[str, object], keys: KeyMap, default: str | None) -> str:
    names = (keys.prompt, *keys.prompt_aliases)
    field = next((n for n in names if flat.get(n) is not None), None)
    if field is None:
        if default is not None:
            return default
        raise ObservationError(keys.prompt, got="no instruction", expected="text; this policy has no default prompt")
    value = flat[field]
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "US":
        value = value.item()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as e:
            raise ObservationError(field, got=f"bytes that are not UTF-8 ({e.reason})", expected="text") from e
    if not isinstance(value, str):
        what = f"array of dtype {value.dtype}, shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ObservationError(field, got=what, expected="text (str, or UTF-8 bytes)")
    return str(value)
