"""The part of a device that kernels may fill, where another queue of work has the rest of its multiprocessors.

A kernel of persistent programs is made for a number of multiprocessors; on fewer, its last programs wait for the first to end
and it takes twice as long. So whoever launches (or captures) on a part says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MULTIPROCESSORS: ContextVar[int] = ContextVar("multiprocessors", default=0)


@contextmanager
def on_part(multiprocessors: int) -> Iterator[None]:
    """Let what this thread launches inside be made for so many multiprocessors; 0: for all of them."""
    before = _MULTIPROCESSORS.set(multiprocessors)
    try:
        yield
    finally:
        _MULTIPROCESSORS.reset(before)


def part() -> int:
    """Return the multiprocessors that kernels are made for now; 0: all of the device's."""
    return _MULTIPROCESSORS.get()
