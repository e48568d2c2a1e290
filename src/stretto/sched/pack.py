"""Offline: a list of streams on a pool, by every strategy, with the promises checked by simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.core.errors import ConfigError
from stretto.core.plan import Device
from stretto.sched.cluster import Cluster, Placed, StreamSpec
from stretto.sched.equal import EqualPartition
from stretto.sched.lds import Effort
from stretto.sched.placement import STRATEGIES, Planner, Strategy
from stretto.sched.profile import Profile
from stretto.sched.verify import TRIAL, Trial, Verified, verify

METHODS = ("equal", "bestfit", "lds", "portfolio", "exact")
WIDE = Effort(discrepancies=3, ranks=10, leaves=300, nodes=1500)
"""For offline use: more ranks a stream and more leaves than an arrival has time for."""


@dataclass(frozen=True)
class Packed:
    """Streams that found a place, those that did not, and what the simulation of the plan says."""

    method: str
    placed: Mapping[str, Placed]
    refused: tuple[str, ...]
    verified: Verified | None
    """None if nothing was placed."""


def place_all(
    devices: Sequence[Device], profiles: Mapping[str, Profile], specs: Sequence[StreamSpec], method: str, *, batch: int = 1
) -> dict[str, Placed]:
    """Place streams in order by one method, without a simulation.

    Raises:
        ConfigError: if the method is unknown.
    """
    if method == "equal":
        partition = EqualPartition(devices, Cluster(devices, profiles).views)
        return {s.name: p for s in specs if (p := partition.place(s)) is not None}
    if method == "exact":
        from stretto.sched.exact import solve

        return solve(devices, profiles, specs)
    if method != "portfolio":
        if method not in STRATEGIES:
            raise ConfigError("compare", got=repr(method), expected=f"one of {METHODS}")
        return _one_by_one(devices, profiles, specs, STRATEGIES[method], batch)
    equal = place_all(devices, profiles, specs, "equal")
    orders = _orders(profiles, specs, equal)
    variants = [_one_by_one(devices, profiles, order, s, batch) for order in orders for s in _wide()]
    # What equal partition takes is kept, whatever else a variant might hold instead.
    return max([*variants, equal], key=lambda placed: (equal.keys() <= placed.keys(), len(placed)))


def _wide() -> list[Strategy]:
    wide = (replace(STRATEGIES[n], effort=WIDE) for n in ("portfolio", "cells", "lds"))
    return [STRATEGIES["portfolio"], *wide]


def _orders(
    profiles: Mapping[str, Profile], specs: Sequence[StreamSpec], first: Mapping[str, Placed]
) -> list[list[StreamSpec]]:
    """Return the orders to try: as given, by load, and with the streams that must have a place first.

    One where all streams are alike.
    """
    load: Callable[[StreamSpec], float] = lambda s: profiles[s.model].work_s / s.interval_s  # noqa: E731
    given = list(specs)
    if len({(s.model, s.interval_s, s.response_s) for s in specs}) == 1:
        return [given]
    rising = sorted(given, key=load)
    must, rest = [s for s in rising if s.name in first], [s for s in rising if s.name not in first]
    return [given, rising[::-1], rising, [*must, *rest], [*must[::-1], *rest]]


def _one_by_one(
    devices: Sequence[Device], profiles: Mapping[str, Profile], specs: Sequence[StreamSpec], strategy: Strategy, batch: int
) -> dict[str, Placed]:
    planner = Planner(devices, profiles, strategy, expected=specs, batch=batch)
    alike = len({(s.model, s.interval_s, s.response_s) for s in specs}) == 1
    for spec in specs:
        # Nobody leaves here, so where one had no room another of its kind has none.
        if planner.place(spec) is None and alike:
            break
    return dict(planner.placed)


def pack(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    specs: Sequence[StreamSpec],
    method: str,
    trial: Trial = TRIAL,
) -> Packed:
    """Place streams by one method and keep only a plan whose promises hold in the simulation.

    Where they do not, the streams placed last leave, one by one. The portfolio keeps equal partition's plan if that
    holds more streams.

    Raises:
        ConfigError: if the method is unknown.
    """
    placed = place_all(devices, profiles, specs, method)
    found = _hold(devices, profiles, placed, method, trial)
    if method == "portfolio":
        equal = _hold(devices, profiles, place_all(devices, profiles, specs, "equal"), method, trial)
        found = max(found, equal, key=lambda f: (equal[0].keys() <= f[0].keys(), len(f[0])))
    kept, verified = found
    return Packed(method, kept, tuple(s.name for s in specs if s.name not in kept), verified)


def _hold(
    devices: Sequence[Device], profiles: Mapping[str, Profile], placed: Mapping[str, Placed], method: str, trial: Trial
) -> tuple[dict[str, Placed], Verified | None]:
    kept = dict(placed)
    while kept:
        verified = verify(devices, profiles, kept, trial, kind=method)
        if not verified.broken:
            return kept, verified
        for _ in range(max(1, len(verified.broken) // 4)):
            kept.popitem()
    return {}, None
