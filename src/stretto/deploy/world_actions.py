"""Actions on their way from whoever steers a world to the chunks that reflect them."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from stretto.core.errors import CapacityError, ObservationError
from stretto.models.wan_actions import ActionTrack

MOST_WAITING = 4096


class HeldTrack:
    """One track of a session: what is held until something else is said, and what is still to be shown.

    Every value that is said is shown for at least one sample, however quickly the next one follows, so that a tap between
    two chunks is not lost. The last one is held.
    """

    def __init__(self, track: ActionTrack) -> None:
        self.track = track
        self.taken = 0
        """Samples that chunks have used so far."""
        self._waiting: deque[tuple[np.ndarray, int | None]] = deque()
        self._held = np.zeros(track.dim, np.float32)

    def say(self, values: ArrayLike, event: int, *, pulse: bool = False) -> None:
        """Add one value [A], or one for each of the next samples [n, A]; a pulse goes back to what was held.

        Raises:
            ObservationError: if the values have another width or are not finite.
            CapacityError: if too much is waiting already.
        """
        field = f"actions.{self.track.name}"
        try:
            said = np.asarray(values, np.float32)
        except (TypeError, ValueError) as e:
            raise ObservationError(field, got=f"{type(values).__name__} ({e})", expected="numbers") from e
        rows = said[None] if said.ndim == 1 else said
        if rows.ndim != 2 or rows.shape[1] != self.track.dim or not len(rows):
            raise ObservationError(field, got=f"shape {said.shape}", expected=f"[{self.track.dim}] or [n, {self.track.dim}]")
        if not np.isfinite(rows).all():
            raise ObservationError(field, got="a number that is not finite", expected="finite numbers")
        if len(self._waiting) + len(rows) >= MOST_WAITING:
            raise CapacityError("actions", f"{len(self._waiting)} samples of {self.track.name} are waiting to be shown")
        back = self._waiting[-1][0] if self._waiting else self._held
        self._waiting.extend((row.copy(), event) for row in rows)
        if pulse:
            self._waiting.append((back, None))

    def take(self, samples: int) -> tuple[Tensor, set[int]]:
        """Return the next samples [n, A], and the events that they show."""
        rows, events = [], set()
        for _ in range(samples):
            if self._waiting:
                self._held, event = self._waiting.popleft()
                if event is not None:
                    events.add(event)
            rows.append(self._held)
        self.taken += samples
        return torch.from_numpy(np.stack(rows)), events
