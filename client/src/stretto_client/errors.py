"""Every error that the robot side raises on purpose. Bad bytes are `codec.CodecError`."""

from __future__ import annotations

import re

_REFUSED = re.compile(r"refused \((\w+)\)")
_CODE = re.compile(r"\[(\w+)\] ")


class ClientError(Exception):
    """Base of the client's errors."""


class FieldError(ClientError, ValueError):
    """A named argument or field has a value that cannot be used."""

    def __init__(self, field: str, *, got: object, expected: object, hint: str = "") -> None:
        self.field, self.got, self.expected = field, got, expected
        text = f"{field}: got {got}, expected {expected}"
        super().__init__(f"{text}. {hint}" if hint else text)


class ServerError(ClientError, RuntimeError):
    """The server answered with an error text; the connection may still be good.

    `reason` is the short word of a refusal (`deadline`, `capacity`, `superseded`, ...), or None for any other error.
    `code` is the stable word that Stretto's server puts in front, or None from a stock server.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        found = _REFUSED.search(text)
        self.reason = found.group(1) if found else None
        code = _CODE.match(text)
        self.code = code.group(1) if code else None
        super().__init__(f"error in the inference server: {text}")


class ReplyError(ClientError, RuntimeError):
    """The server sent something that this protocol does not allow."""


class ConnectionLostError(ClientError, ConnectionError):
    """The connection ended before the answer came; the next call opens a new one."""


class PolicyTimeoutError(ClientError, TimeoutError):
    """No answer in time. The connection was dropped, so the late answer can never be taken for a newer one."""


class StarvedError(ClientError, RuntimeError):
    """No action is left for this control step, and the starvation policy is to raise."""


class ClockError(ClientError, RuntimeError):
    """The clock went backwards or gave no number; control needs a monotonic clock."""
