"""Bytes on the wire: msgpack with numpy arrays as maps, in the dialect of openpi. No pickle anywhere.

An array is `{b"__ndarray__": True, b"data": C-order bytes, b"dtype": dtype.str, b"shape": [...]}`, a numpy scalar is
`{b"__npgeneric__": True, b"data": value, b"dtype": dtype.str}`. Peers of other dialects are understood (the same keys as
text, and the `nd`/`type`/`kind`/`shape`/`data` maps of the msgpack-numpy package), but only this one is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

MAX_DEPTH = 64
MAX_VALUES = 1 << 15
"""Most values of one message. An honest one holds a few dozen: its bulk is in arrays."""

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|[SU][1-9]\d{0,8}|[mM]8(?:\[\d*[A-Za-z]{1,2}\])?)")
_RESERVED = frozenset(("__ndarray__", "__npgeneric__"))


def _payload_sizes() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First byte of a value -> bytes that follow it, and width of the field in front of them that says how many more."""
    follow, width = [0] * 256, [0] * 256
    for first in range(0xA0, 0xC0):
        follow[first] = first & 0x1F
    for first, n in {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}.items():
        follow[first] = n
    for first, n in {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xC7: 1, 0xC8: 1, 0xC9: 1}.items():
        follow[first] = n  # extension types carry one byte of type
    for first, n in {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.items():
        width[first] = n
    return tuple(follow), tuple(width)


_FOLLOW, _WIDTH = _payload_sizes()
_LISTS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


class CodecError(ValueError):
    """Something cannot be written as, or read from, a message; `path` names the field."""

    def __init__(self, path: str, got: str, expected: str = "the openpi msgpack dialect") -> None:
        self.path, self.got, self.expected = path, got, expected
        super().__init__(f"{path}: got {got}, expected {expected}")


def pack(obj: Any) -> bytes:
    """Write a tree of dicts, lists, arrays and plain values as one message.

    Raises:
        CodecError: naming the field whose type, dtype or key has no place on the wire, or if there are more than
            MAX_VALUES separate values.
    """
    _check(obj, "", 0)
    try:
        frame = bytes(msgpack.packb(obj, default=_encode))
    except (ValueError, TypeError, OverflowError) as e:
        raise CodecError("message", f"a value that cannot be packed ({e})") from e
    weigh(frame)
    return frame


def unpack(frame: bytes | bytearray | memoryview) -> Any:
    """Read one message. Arrays are read-only views on it; tuples arrive as lists.

    Raises:
        CodecError: if the frame is cut, has bytes left over, claims more than MAX_VALUES separate values, or holds a
            field that is not allowed; the field is named.
    """
    weigh(frame)
    try:
        raw = msgpack.unpackb(frame, max_array_len=MAX_VALUES, max_map_len=MAX_VALUES)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        why = str(e) or type(e).__name__
        raise CodecError("message", f"{len(frame)} bytes that cannot be read as one msgpack message ({why})") from e
    return _decode(raw, "", 0)


def weigh(frame: bytes | bytearray | memoryview, limit: int = MAX_VALUES) -> int:
    """Count the values that a message claims, by its headers alone, before any of them is made.

    The decoder can bound each list but not their product: 33 MB of nested empty lists cost 2.4 GB and half a minute,
    most of it under the interpreter lock. This finds out in milliseconds. It does not say whether a frame is well formed.

    Raises:
        CodecError: as soon as there are more than `limit`.
    """
    at, expected, claimed, end = 0, 1, 1, len(frame)
    while expected and at < end:
        first = frame[at]
        at += 1
        expected -= 1
        entries = 0
        if 0x80 <= first < 0xA0:
            entries = (first & 0x0F) * (2 if first < 0x90 else 1)
        elif size := _LISTS.get(first) or _MAPS.get(first):
            entries = int.from_bytes(frame[at : at + size], "big") * (2 if first in _MAPS else 1)
            at += size
        elif width := _WIDTH[first]:
            at += width + int.from_bytes(frame[at : at + width], "big")
        at += _FOLLOW[first]
        expected += entries
        claimed += entries
        if claimed > limit:
            raise CodecError("message", f"more than {limit} separate values", "images and vectors as arrays")
    return claimed


def _check(obj: Any, path: str, depth: int) -> None:
    if type(obj) in _PLAIN:
        return
    if isinstance(obj, (np.ndarray, np.generic)):
        if isinstance(obj, np.ma.MaskedArray):
            raise CodecError(path or "message", "a masked array", "one without a mask, which would be lost")
        if isinstance(obj, np.generic) and obj.dtype.kind in "mM":
            raise CodecError(path or "message", f"a numpy scalar of {obj.dtype}", "an integer")
        if not _DTYPE.fullmatch(obj.dtype.str):
            raise CodecError(path or "message", f"dtype {obj.dtype}", "a bool, integer, real or text dtype")
    elif isinstance(obj, (dict, list, tuple)):
        _check_depth(path, depth)
        if isinstance(obj, dict):
            for key, value in obj.items():
                where = _key(path, key)
                if _text(key) in _RESERVED:
                    raise CodecError(where, "a key that is reserved to mark arrays", "another key")
                _check(value, where, depth + 1)
        else:
            for i, value in enumerate(obj):
                if type(value) not in _PLAIN:
                    _check(value, f"{path}[{i}]", depth + 1)
    elif not isinstance(obj, (int, float, str, bytes, bytearray, memoryview)):
        raise CodecError(path or "message", type(obj).__name__, "a dict, list, array or plain value")


def _encode(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return {b"__ndarray__": True, b"data": obj.tobytes(), b"dtype": obj.dtype.str, b"shape": obj.shape}
    if isinstance(obj, np.generic):
        return {b"__npgeneric__": True, b"data": obj.item(), b"dtype": obj.dtype.str}
    raise TypeError(f"{type(obj).__name__} has no place on the wire")


def _decode(obj: Any, path: str, depth: int) -> Any:
    if type(obj) in _PLAIN:
        return obj
    if isinstance(obj, dict):
        _check_depth(path, depth)
        if b"__ndarray__" in obj or "__ndarray__" in obj:
            return _array(obj, path or "message", "dtype")
        if b"__npgeneric__" in obj or "__npgeneric__" in obj:
            return _scalar(obj, path or "message")
        nd = _get(obj, "nd")
        if isinstance(nd, bool) and _get(obj, "type") is not None:
            return _foreign(obj, path or "message", is_array=nd)
        if _get(obj, "complex") is True and _get(obj, "data") is not None:
            raise CodecError(path or "message", "a complex number", "a real one")
        for key, value in obj.items():
            if type(value) not in _PLAIN:
                obj[key] = _decode(value, _key(path, key), depth + 1)
        return obj
    if isinstance(obj, list):
        _check_depth(path, depth)
        for i, value in enumerate(obj):
            if type(value) not in _PLAIN:
                obj[i] = _decode(value, f"{path}[{i}]", depth + 1)
        return obj
    raise CodecError(path or "message", f"a msgpack extension type ({type(obj).__name__})")


def _array(obj: Mapping[Any, Any], path: str, dtype_key: str) -> np.ndarray:
    data, shape = _get(obj, "data"), _get(obj, "shape")
    dtype = _dtype(_get(obj, dtype_key), path)
    if not isinstance(data, bytes):
        raise CodecError(path, f"array data of type {type(data).__name__}", "bytes")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise CodecError(path, f"array shape {shape!r}", "a list of integers >= 0")
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(data):
        raise CodecError(path, f"{len(data)} bytes of array data", f"{needed} for shape {shape} of {dtype}")
    try:
        return np.ndarray(shape=tuple(shape), dtype=dtype, buffer=data)
    except (ValueError, OverflowError) as e:
        raise CodecError(path, f"an array of shape {shape} ({e})") from e


def _scalar(obj: Mapping[Any, Any], path: str) -> Any:
    dtype, value = _dtype(_get(obj, "dtype"), path), _get(obj, "data")
    fits = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "S": (bytes,), "U": (str,)}.get(dtype.kind, ())
    if type(value) not in fits:
        raise CodecError(path, type(value).__name__, f"a scalar of {dtype}")
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise CodecError(path, str(value), f"a scalar of {dtype}")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value)
    return dtype.type(value)


def _foreign(obj: Mapping[Any, Any], path: str, *, is_array: bool) -> Any:
    """Read a map of the msgpack-numpy package; its scalars are raw memory, its objects are pickles."""
    if _get(obj, "kind") not in (None, b"", ""):
        raise CodecError(path, f"an array of kind {_get(obj, 'kind')!r}", "one that is neither structured nor pickled")
    if is_array:
        return _array(obj, path, "type")
    return _array({"data": _get(obj, "data"), "type": _get(obj, "type"), "shape": []}, path, "type")[()]


def _dtype(name: Any, path: str) -> np.dtype[Any]:
    text = _text(name)
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise CodecError(path, f"dtype {name!r}", "a bool, integer, real or text dtype such as '<f4'")
    try:
        return np.dtype(text)
    except (TypeError, ValueError) as e:
        raise CodecError(path, f"dtype {text!r}, which is not known here ({e})") from e


def _check_depth(path: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise CodecError(path or "message", "a value nested deeper", f"at most {MAX_DEPTH} levels")


def _get(obj: Mapping[Any, Any], key: str) -> Any:
    """Look a key up as bytes, then as text."""
    value = obj.get(key.encode())
    return obj.get(key) if value is None else value


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("ascii", "replace")
    return value


def _key(path: str, key: Any) -> str:
    if not isinstance(key, (str, bytes)):
        raise CodecError(path or "message", f"map key {key!r} of type {type(key).__name__}", "text or bytes")
    return f"{path}.{_text(key)}" if path else str(_text(key))
