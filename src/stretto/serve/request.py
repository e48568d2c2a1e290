"""From the bytes of one request to an observation and its options: the `rt` extension, field by field.

Shape legend: H action horizon, D action width, K steps of an action prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.core.errors import FieldError
from stretto.core.policy import RequestOptions
from stretto_client.codec import CodecError, unpack

__all__ = ["RT", "Exchange", "MessageError", "Offer", "read_request"]

RT = "rt"
MAX_ID_CHARS = 128


class MessageError(FieldError):
    """A message does not hold what the protocol says; nothing was run and the session goes on."""

    code = "bad_message"


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Numbered by arrival until the client's own name for it has been read."""

    payload: bytes
    request_id: str
    session_id: str
    began_s: float
    decode_ms: float = 0.0
    options: RequestOptions = field(default_factory=RequestOptions)
    """What it said, once it has been read."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one policy publishes of its replies and of real-time chunking; requests are checked against it."""

    horizon: int
    """H of every reply."""
    width: int
    """D of every reply."""
    rtc_modes: tuple[str, ...] = ()
    """Empty: a request may not speak of the chunk before it."""


def read_request(exchange: Exchange, offer: Offer) -> tuple[dict[str, Any], RequestOptions]:
    """Decode one request; sets the names in `exchange` as soon as they are known, so that an error can carry them.

    Raises:
        MessageError: naming the field that cannot be read.
    """
    try:
        observation = unpack(exchange.payload)
    except CodecError as e:
        raise MessageError(e.path, got=e.got, expected=e.expected) from e
    if not isinstance(observation, dict):
        raise MessageError("message", got=type(observation).__name__, expected="a map of observation key -> value")
    strange = [key for key in observation if not isinstance(key, str)]
    if strange:
        raise MessageError("message", got=f"the key {strange[0]!r}", expected="text keys")
    if not observation.keys() - {RT}:
        raise MessageError("message", got="no observation", expected="the keys listed in the metadata frame")
    rt = observation.pop(RT, {})
    return observation, _read_options(rt, exchange, offer)


def _read_options(rt: object, exchange: Exchange, offer: Offer) -> RequestOptions:
    if not isinstance(rt, dict):
        raise MessageError(RT, got=type(rt).__name__, expected="a map")
    if rt.get("request_id") is not None:
        exchange.request_id = _name("rt.request_id", rt["request_id"])
    unknown = [key for key in rt if key not in _FIELDS]
    if unknown:
        raise MessageError(RT, got=f"the key {unknown[0]!r}", expected=f"keys among {sorted(_FIELDS)}")
    said = {key: _FIELDS[key](f"rt.{key}", value) for key, value in rt.items() if value is not None}
    # A client that names a new session starts a new episode; stock clients have no other way to say so.
    if said.get("session_id", exchange.session_id) != exchange.session_id:
        exchange.session_id, said["reset"] = said["session_id"], True
    _check_chunking(said, offer)
    prefix, noise = said.pop("prefix", None), said.pop("noise", None)
    if noise is not None and noise.shape[0] != offer.horizon:
        raise MessageError("rt.noise", got=f"shape {list(noise.shape)}", expected=f"[{offer.horizon}, model width]")
    said.pop("session_id", None)
    said["request_id"] = exchange.request_id
    return RequestOptions(**said, prefix_KD=prefix, noise_HD=noise)


def _check_chunking(said: Mapping[str, Any], offer: Offer) -> None:
    """Refuse what the policy does not offer, half of what belongs together, and steps beyond a chunk."""
    mode, prefix, delay = said.get("mode", "none"), said.get("prefix"), said.get("delay_steps")
    if mode not in ("none", *offer.rtc_modes):
        raise MessageError("rt.mode", got=repr(mode), expected=f"one of {['none', *offer.rtc_modes]}")
    about = [key for key in ("prefix", "executed_steps", "delay_steps") if key in said]
    if not about and mode == "none":
        return
    if not offer.rtc_modes:
        raise MessageError(f"rt.{about[0]}", got="a value", expected="none: this policy offers no real-time chunking")
    if delay is None:
        raise MessageError("rt.delay_steps", got="nothing", expected=f"a number of steps, because of {about or ['mode']}")
    if about == ["delay_steps"]:
        raise MessageError("rt.prefix", got="nothing", expected="prefix or executed_steps beside delay_steps")
    if delay > offer.horizon:
        raise MessageError("rt.delay_steps", got=delay, expected=f"at most the {offer.horizon} steps of a chunk")
    if prefix is None:
        return
    if prefix.shape[1] != offer.width or not 1 <= len(prefix) <= offer.horizon:
        expected = f"[1 to {offer.horizon}, {offer.width}]"
        raise MessageError("rt.prefix", got=f"shape {list(prefix.shape)}", expected=expected)
    if delay > len(prefix):
        raise MessageError("rt.delay_steps", got=delay, expected=f"at most the {len(prefix)} steps of rt.prefix")


def _name(where: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS or not value.isprintable():
        raise MessageError(where, got=_short(value), expected=f"1 to {MAX_ID_CHARS} printable characters")
    return value


def _flag(where: str, value: object) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise MessageError(where, got=_short(value), expected="true or false")


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def read(where: str, value: object) -> int:
        if isinstance(value, np.integer):
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise MessageError(where, got=_short(value), expected=f"an integer from {low} to {high}")
        return value

    return read


def _duration(where: str, value: object) -> float:
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise MessageError(where, got=_short(value), expected="a positive, finite number of milliseconds")
    return float(value)  # type: ignore[arg-type]


def _rows(where: str, value: object) -> np.ndarray[Any, Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim != 2:
        got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, np.ndarray) else _short(value)
        raise MessageError(where, got=got, expected="a real array with one row a step")
    if not np.isfinite(value).all():
        raise MessageError(where, got="NaN or infinity", expected="finite values")
    return value


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)}"
    text = f"{type(value).__name__} {value!r}" if isinstance(value, (bool, int, float, str)) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


_FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    "request_id": _name,
    "session_id": _name,
    "reset": _flag,
    "seed": _integer(0, 2**63 - 1),
    "deadline_ms": _duration,
    "priority": _integer(-100, 100),
    "obs_time_ns": _integer(0, 2**63 - 1),
    "executed_steps": _integer(0, 2**31),
    "delay_steps": _integer(0, 2**31),
    "prefix": _rows,
    "noise": _rows,
    "mode": _name,
    "late": _flag,
    "starved_steps": _integer(0, 2**31),
    "path_ms": _duration,
}
