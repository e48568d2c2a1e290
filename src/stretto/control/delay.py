"""Delay and slack of a robot, in control steps, as the server sees them. Measuring is the client's `DelayEstimator`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.core.errors import FieldError
from stretto_client.delay import DelayEstimator, steps_during

__all__ = ["DelayEstimator", "published_delay", "slack_s", "steps_during"]


def slack_s(*, unexecuted_steps: int, delay_steps: int, control_hz: float, service_s: float) -> float:
    """Return how long a request can wait before its robot runs out of actions; negative if it is too late already.

    Raises:
        FieldError: if a number of steps is negative, the rate is not positive or the service time is not a time.
    """
    for name, steps in (("unexecuted_steps", unexecuted_steps), ("delay_steps", delay_steps)):
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise FieldError(name, got=repr(steps), expected="an integer, 0 or more")
    if not 0 < control_hz < float("inf"):
        raise FieldError("control_hz", got=control_hz, expected="a finite number above 0")
    if not 0 <= service_s < float("inf"):
        raise FieldError("service_s", got=service_s, expected="a finite number, 0 or more")
    return (unexecuted_steps - delay_steps) / control_hz - service_s


def published_delay(latencies_s: Sequence[float], control_hz: float, horizon: int, quantile: float = 0.999) -> int:
    """Return the delay to promise a class of robots: real-time chunking wants an upper bound, not a mean.

    Raises:
        FieldError: if nothing was measured, or the delay does not fit into a chunk.
    """
    if not latencies_s or not np.isfinite(latencies_s).all() or min(latencies_s) < 0:
        raise FieldError("latencies_s", got=f"{len(latencies_s)} values", expected="at least one, all finite and 0 or more")
    if not 0 < control_hz < float("inf"):
        raise FieldError("control_hz", got=control_hz, expected="a finite number above 0")
    steps = max(1, steps_during(float(np.quantile(latencies_s, quantile)), control_hz))
    if steps >= horizon:
        raise FieldError(
            "delay_steps", got=steps, expected=f"below the chunk's {horizon} actions", hint="Lower the load or the rate."
        )
    return steps
