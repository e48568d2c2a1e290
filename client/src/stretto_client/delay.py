"""How long inference takes, as the number of control steps that pass meanwhile.

A largest-ever delay would remember the slow first inference for good, and a mean would be too short half of the time.
So: the first measurements are set aside, then a high percentile of a short window counts, and lone spikes do not.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from stretto_client.options import check_int, check_positive


class DelayEstimator:
    """Estimates the delay from the last measurements.

    Args:
        window: number of measurements that count.
        percentile: which of them is taken; 100 is the largest.
        warmup: first measurements that are used only while there are no others.
        spike_factor: a measurement above this many medians is a spike. The third spike in a row is the new normal.
        floor_s: the estimate is never below this; for instance the p99.9 that a server publishes.

    Raises:
        FieldError: if an argument is out of range.
    """

    def __init__(
        self,
        *,
        window: int = 16,
        percentile: float = 100.0,
        warmup: int = 1,
        spike_factor: float = 3.0,
        floor_s: float = 0.0,
    ) -> None:
        self._window: deque[float] = deque(maxlen=check_int("window", window, 1, 10_000))
        self._percentile = check_positive("percentile", percentile, 100.0)
        self._warmup_left = check_int("warmup", warmup, 0, 1000)
        self._spike_factor = check_positive("spike_factor", spike_factor)
        self._floor_s = 0.0 if floor_s == 0 else check_positive("floor_s", floor_s)
        self._warmup_s = 0.0
        self._spikes: list[float] = []
        self.spikes_seen = 0

    def add(self, delay_s: float) -> None:
        """Take one measurement, in seconds.

        Raises:
            FieldError: if it is not a finite positive number.
        """
        delay_s = check_positive("delay_s", delay_s)
        if self._warmup_left:
            self._warmup_left -= 1
            self._warmup_s = max(self._warmup_s, delay_s)
            return
        if len(self._window) >= 3 and delay_s > self._spike_factor * float(np.median(self._window)):
            self.spikes_seen += 1
            self._spikes.append(delay_s)
            if len(self._spikes) < 3:
                return
            self._window.clear()
            self._window.extend(self._spikes)
        else:
            self._window.append(delay_s)
        self._spikes = []

    @property
    def seconds(self) -> float:
        """The estimate; the warm-up, or the floor, while nothing else was measured."""
        measured = float(np.percentile(self._window, self._percentile)) if self._window else self._warmup_s
        return max(measured, self._floor_s)

    def steps(self, control_hz: float) -> int:
        """Return the control steps that pass during the delay; at least 1, since the step at hand is already taken.

        Raises:
            FieldError: if the rate is not a finite positive number.
        """
        return max(1, steps_during(self.seconds, control_hz))


def steps_during(seconds: float, control_hz: float) -> int:
    """Return how many control steps begin in `seconds`, counted from a control step.

    Raises:
        FieldError: if the rate is not a finite positive number.
    """
    return math.ceil(seconds * check_positive("control_hz", control_hz) - 1e-9)
