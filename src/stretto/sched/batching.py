"""Whether batches pay, by a profile: on a device that one row fills, a batch of n takes n times as long."""

from __future__ import annotations

from stretto.sched.profile import Profile

NOISE = 0.03
"""Share of a row's time below which a gain may be noise of the measurement."""


def row_s(profile: Profile, batch: int) -> float:
    """Return the device time of one chunk on the whole route when all its stages run in batches of this size."""
    return sum(profile.stage(v.stage).cost(batch) for v in profile.visits) / batch


def worthwhile_cap(profile: Profile, most: int, noise: float = NOISE) -> int:
    """Return the smallest batch, up to `most`, whose time a row is within noise of the best: 1 where batching gains nothing.

    Larger batches would only make chunks wait for each other.
    """
    seconds = {n: row_s(profile, n) for n in range(1, most + 1)}
    enough = min(seconds.values()) * (1.0 + noise)
    return next(n for n, s in seconds.items() if s <= enough)
