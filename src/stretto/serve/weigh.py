"""How many values a message claims to hold, before any of them is made.

The decoder can bound each list but not their product: 33 MB of nested empty lists cost 2.4 GB and half a minute, most of
it under the interpreter lock, so every other client would stand still. Reading only the headers finds that out in
milliseconds. An honest observation holds a few dozen values, its bulk is in arrays.
"""

from __future__ import annotations

from stretto.core.errors import FieldError

MAX_VALUES = 1 << 15


class MessageError(FieldError):
    """A message does not hold what the protocol says; nothing was run and the session goes on."""

    code = "bad_message"


def _table() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First byte -> bytes of payload that follow, and width of the length field that says so (0 where there is none)."""
    follow, width = [0] * 256, [0] * 256
    for first in range(0xA0, 0xC0):
        follow[first] = first & 0x1F
    for first, n in {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}.items():
        follow[first] = n
    for first, n in {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xC7: 1, 0xC8: 1, 0xC9: 1}.items():
        follow[first] = n  # extension types carry one byte of type
    for first, n in {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.items():
        width[first] = n
    for first, n in {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.items():
        follow[first] = n  # a list or map: its entries are values that come next
    return tuple(follow), tuple(width)


_FOLLOW, _WIDTH = _table()


def weigh(message: bytes, limit: int = MAX_VALUES) -> int:
    """Count the values of a msgpack message by its headers. Says nothing about whether it is well formed.

    Raises:
        MessageError: as soon as there are more than `limit`.
    """
    at, values, end = 0, 0, len(message)
    while at < end:
        values += 1
        if values > limit:
            hint = "Send images and vectors as arrays, not as lists"
            raise MessageError("message", got=f"more than {limit} separate values", expected="fewer", hint=hint)
        first = message[at]
        at += 1
        width = _WIDTH[first]
        if width:
            at += width + int.from_bytes(message[at : at + width], "big")
        at += _FOLLOW[first]
    return values
