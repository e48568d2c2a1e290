"""How long a batch may hold up whoever comes next, from the deadlines that streams had of late.

A device takes up its next batch only when the one in hand ends, and with a host that launches ahead one more is behind it. So
a robot that comes a moment too late waits for two. With batches of a quarter of its spare time it is still on time, and so is
another one in a hurry that comes with it.
"""

from __future__ import annotations

import math

REMEMBERED_S = 5.0
SHARE = 0.25
"""Of the spare time of the tightest robot, what one batch may take."""


class Patience:
    """Spare time of each stream's last request, forgotten after `REMEMBERED_S`. Not thread-safe."""

    def __init__(self) -> None:
        self._spare: dict[int, tuple[float, float]] = {}

    def note(self, stream: int, spare_s: float, now_s: float) -> float:
        """Take the spare time of a new request, its deadline less what it needs alone; return the longest batch for now."""
        self._spare.pop(stream, None)
        if 0.0 < spare_s < math.inf:
            self._spare[stream] = (spare_s, now_s)
        while self._spare:
            oldest = next(iter(self._spare))
            if self._spare[oldest][1] >= now_s - REMEMBERED_S:
                break
            del self._spare[oldest]
        return min((spare for spare, _ in self._spare.values()), default=math.inf) * SHARE

    def forget(self, stream: int) -> None:
        self._spare.pop(stream, None)
