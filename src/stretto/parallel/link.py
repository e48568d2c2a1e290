"""How a chunk crosses from one device to the next: one interface, whatever carries it.

A link goes one way. The producer calls `send` and never waits for the consumer; the consumer's callback gets headers and
values in the order in which they were sent. What waits in a link is bounded from outside: by the number of chunks that
the engine admits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from stretto.core.errors import StrettoError
from stretto.parallel.order import Mark

Header = Any
"""What the consumer must know of a chunk beside its values; plain data."""
Values = Mapping[str, Tensor]

Receive = Callable[[Header, Values, Mark], None]
"""Takes a chunk off a link once it is there: header, values (owned by the receiver), and the point from which they were.

Called on the link's thread, in order. On a CUDA device, whoever reads the values first calls `Mark.wait` on its stream.
"""
Lost = Callable[[str, str], None]
"""Told once that a peer is gone: its name and why. Not called after an orderly end."""


class LinkError(StrettoError):
    """A link could not be set up; nothing runs slower in its place."""

    code = "link"


class Link(Protocol):
    """The producer's end."""

    peer: str

    def send(self, header: Header, values: Values) -> None:
        """Hand over one chunk: a row of each value, ready on the current stream. Any thread; does not block or synchronise.

        The values must not be written afterwards. After the peer is gone, chunks are dropped.
        """
        ...

    def close(self) -> None:
        """Send what is queued, say goodbye, and free the end. Safe to call twice."""
        ...
