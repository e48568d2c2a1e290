"""Rows of host memory in which requests are packed for their one copy to the device.

A row that has been copied is used again: pinned memory is dear to get, and a fresh row would have to be cleared.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from stretto.runtime.arena import InputLayout, PackedRow
from stretto.runtime.timing import Stamp

_READY = 8


class Staging:
    """Packs requests, any thread, into rows that wait here for their next use."""

    def __init__(self, layout: InputLayout, *, pin: bool, keep: int) -> None:
        """Make an empty store of at most `keep` idle rows."""
        self._layout, self._pin = layout, pin
        self._lock, self._keep = threading.Lock(), keep
        self._idle: deque[tuple[PackedRow, Stamp]] = deque(maxlen=keep)

    def warm(self, device: torch.device) -> None:
        """Make rows ahead of the first requests."""
        for _ in range(min(_READY, self._keep)):
            self.give(self._layout.row(pin=self._pin), Stamp(device))

    def pack(self, inputs: Mapping[str, np.ndarray], row: PackedRow | None = None) -> PackedRow:
        """Pack one request, into a row that was taken for it or another; it is the caller's until it is given back.

        Raises:
            FieldError: if an input is missing, unknown, of another dtype, or larger than declared.
        """
        return self._layout.pack(inputs, row or self.take())

    def give(self, row: PackedRow, copied: Stamp) -> None:
        """Let a row be used again once the device has reached the end of its copy."""
        with self._lock:
            self._idle.append((row, copied))

    def take(self) -> PackedRow:
        """Return a row to be filled; what is in it is not defined. One that is never given back is merely lost."""
        with self._lock:
            # The row used last is still in the processor's cache; the one used first is the most likely to be free.
            if self._idle and self._idle[-1][1].reached():
                return self._idle.pop()[0]
            if self._idle and self._idle[0][1].reached():
                return self._idle.popleft()[0]
        return self._layout.row(pin=self._pin)
