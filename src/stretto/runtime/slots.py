"""When the chunks of one stream may start where a plan gives them admission slots.

In the schedule of such a plan no two chunks want one device at the same time. As many chunks as the plan has entries are
under way, and each comes in just when the one that many before it is done, so once the first of them are in their places the
schedule keeps itself. Only those need a clock. A slot is a share of what a chunk takes alone, so until the first one is done
nothing goes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Slots:
    """The slots of one stream. Not thread-safe: the engine asks under its lock."""

    def __init__(self, admission: Sequence[int], visits: int) -> None:
        """Make them for `Plan.admission`; `visits` is how many slots a chunk takes, one a placement."""
        *self._entries, _ = admission
        self._visits = visits
        self._slot_s = math.inf
        self._begin_s = 0.0
        self._started = 0
        self._since_s: dict[int, float] = {}
        self.timed = False
        """Whether somebody waits for the next slot."""

    def wait_s(self, now_s: float, under_way: int) -> float:
        """Return how long the next chunk has yet to wait; infinity until one that is under way is done."""
        if not under_way or self._started >= len(self._entries):
            return 0.0
        return max(0.0, self._begin_s + self._entries[self._started] * self._slot_s - now_s)

    def start(self, serial: int, now_s: float, under_way: int) -> None:
        """Note that a chunk starts, beside so many others."""
        if not under_way:
            self._begin_s, self._started = now_s, 0
        self._started += 1
        self._since_s[serial] = now_s

    def done(self, serial: int, now_s: float) -> None:
        """Note that a chunk is done; the fastest says how long a slot is."""
        since_s = self._since_s.pop(serial, None)
        if since_s is not None:
            self._slot_s = min(self._slot_s, (now_s - since_s) / self._visits)
