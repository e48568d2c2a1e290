"""The first frame of a connection: what the policy takes and gives, and how large a message may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stretto import __version__
from stretto.core.errors import ConfigError

RT_VERSION = 1
MIB = 1 << 20
_CAMERA_PIXELS = 1920 * 1080
_KINDS = ("image", "state", "prompt")
_OWN_KEYS = ("stretto", "rt")


def default_max_message_bytes(observation: Mapping[str, Any]) -> int:
    """Return a bound that any honest observation stays under: every camera at 1080p, twice over, plus the rest.

    Frames are resized by the server, so a camera's own resolution counts, not the model's.
    """
    total = 2 * MIB
    for entry in observation.values():
        size = math.prod(n or 1 for n in entry["shape"])
        if entry["kind"] == "image":
            total += 2 * max(3 * _CAMERA_PIXELS, size)
        elif entry["kind"] == "state":
            total += 8 * size
    return min(total, 256 * MIB)


def build_metadata(described: Mapping[str, object], *, max_message_bytes: int | None, ping_interval_s: float) -> dict[str, Any]:
    """Make the handshake of what a service says about itself.

    Raises:
        ConfigError: if the service's description is incomplete, not plain, or takes a key of the protocol.
    """
    model, horizon, width = described.get("model"), described.get("action_horizon"), described.get("action_dim")
    if not isinstance(model, str) or not model:
        raise ConfigError("metadata.model", got=repr(model), expected="the model's name")
    for name, value in (("action_horizon", horizon), ("action_dim", width)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"metadata.{name}", got=repr(value), expected="an integer of 1 or more")
    observation = _observation(described.get("observation"))
    extra = described.get("policy_metadata", {})
    if not isinstance(extra, Mapping) or any(key in extra for key in _OWN_KEYS):
        raise ConfigError("metadata.policy_metadata", got=repr(extra), expected=f"a map without the keys {_OWN_KEYS}")
    offered = described.get("rt", {})
    if not isinstance(offered, Mapping):
        raise ConfigError("metadata.rt", got=repr(offered), expected="a map")
    modes = offered.get("rtc_modes", ())
    if not isinstance(modes, (list, tuple)) or any(not isinstance(mode, str) for mode in modes):
        raise ConfigError("metadata.rt.rtc_modes", got=repr(modes), expected="a list of names")
    stretto = {
        "version": __version__,
        "model": model,
        "mode": described.get("mode", "eager"),
        "precision": described.get("precision", {"name": "dtype"}),
        "action_horizon": horizon,
        "action_dim": width,
        "max_message_bytes": max_message_bytes or default_max_message_bytes(observation),
        "ping_interval_s": ping_interval_s,
        "observation": observation,
    }
    rt = {**offered, "version": RT_VERSION, "horizon": horizon, "action_dim": width}
    whole = {**extra, "stretto": stretto, "rt": rt}
    return {key: _plain(f"metadata.{key}", value) for key, value in whole.items()}


def _observation(schema: object) -> dict[str, dict[str, Any]]:
    if not isinstance(schema, Mapping) or not schema:
        raise ConfigError("metadata.observation", got=repr(schema), expected="a map of key -> description")
    plain: dict[str, dict[str, Any]] = {}
    for key, entry in schema.items():
        where = f"metadata.observation[{key}]"
        if not isinstance(entry, Mapping) or not {"kind", "shape", "dtype", "required"} <= set(entry):
            raise ConfigError(where, got=repr(entry), expected="kind, shape, dtype and required")
        if entry["kind"] not in _KINDS:
            raise ConfigError(f"{where}.kind", got=repr(entry["kind"]), expected=f"one of {_KINDS}")
        shape = entry["shape"]
        if not isinstance(shape, (list, tuple)) or any(n is not None and (type(n) is not int or n < 1) for n in shape):
            raise ConfigError(f"{where}.shape", got=repr(shape), expected="a list of lengths, None where any will do")
        plain[str(key)] = dict(entry)
    return plain


def _plain(where: str, value: object) -> Any:
    """Turn maps, lists and numpy values into what every peer can read without numpy."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(where, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, got=value, expected="a finite number")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(where, got=type(value).__name__, expected="plain values: text, numbers, lists and maps")
