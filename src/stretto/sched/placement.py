"""Placement: a portfolio of ways to place one arriving stream, with equal partition as the floor.

In order: join a cell (the same cuts as a stream that runs), best fit with limited discrepancies, a fresh cell, whole
devices as equal partition would give. A shadow of equal partition sees the same arrivals and departures; as long as no
more devices are open than it has open, whatever it could take can be taken here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.core.plan import Device
from stretto.sched.cells import Cell, best_cell
from stretto.sched.cluster import Cluster, Placed, StreamSpec
from stretto.sched.columns import Rank
from stretto.sched.equal import EqualPartition, equal_ranks, pick
from stretto.sched.lds import BEST_FIT, SEARCH, Effort, Search, objective
from stretto.sched.profile import Profile


@dataclass(frozen=True, slots=True)
class Strategy:
    """What the portfolio holds."""

    name: str
    effort: Effort = SEARCH
    join: bool = True
    cells: bool = True
    cells_first: bool = False
    floor: bool = True
    """Never open more devices than equal partition would, and fall back to its slot."""


STRATEGIES: Mapping[str, Strategy] = {
    "bestfit": Strategy("bestfit", BEST_FIT, join=False, cells=False, floor=False),
    "lds": Strategy("lds", join=False, cells=False, floor=False),
    "portfolio": Strategy("portfolio"),
    "cells": Strategy("cells", cells_first=True),
}


class Planner:
    """Places streams one by one on a pool, and takes them away."""

    def __init__(
        self,
        devices: Sequence[Device],
        profiles: Mapping[str, Profile],
        strategy: Strategy = STRATEGIES["portfolio"],
        *,
        expected: Sequence[StreamSpec] = (),
        batch: int = 1,
    ) -> None:
        """Start with an empty pool.

        Args:
            expected: one stream of every kind that may come. Devices too few for any of them under equal partition are
                then free for all; without it they stay closed as long as equal partition leaves them closed.
            batch: batch size that loads are charged at; above 1 the plan holds only if a simulation says so.
        """
        self.pool = tuple(devices)
        self.cluster = Cluster(devices, profiles, batch=batch)
        self.strategy = strategy
        self.shadow = EqualPartition(devices, self.cluster.views)
        self._least_share = min((s for e in expected if (s := self.shadow.share(e))), default=1)
        self._cells: dict[tuple[str, float, float], Cell | None] = {}

    @property
    def placed(self) -> Mapping[str, Placed]:
        return self.cluster.streams

    def place(self, spec: StreamSpec) -> Placed | None:
        """Place a stream if all of it fits and every promise is predicted to hold; None changes nothing here.

        Raises:
            ConfigError: if the model is unknown.
            PlanError: if the name is in use.
        """
        self.cluster.view(spec.model)
        taken = self.shadow.place(spec) is not None
        if not self.shadow.share(spec):
            return None
        for find in self._candidates(taken):
            placed = find(spec, self.may_open())
            if placed is not None:
                self.cluster.commit(placed)
                return placed
        return None

    def leave(self, name: str) -> Placed:
        """Take a stream away; the others stay where they are.

        Raises:
            ConfigError: if there is no such stream.
        """
        placed = self.cluster.leave(name)
        self.shadow.leave(name)
        return placed

    def forget(self, name: str) -> None:
        """Tell the shadow that a refused stream, which it had taken, is gone."""
        self.shadow.leave(name)

    def _candidates(self, shadow_took_it: bool) -> list[Callable[[StreamSpec, int], Placed | None]]:
        s = self.strategy
        found: list[Callable[[StreamSpec, int], Placed | None]] = [self._join] if s.join else []
        cell = [self._fresh_cell] if s.cells else []
        found += [*cell, self._search] if s.cells_first else [self._search, *cell]
        return [*found, self._slot] if s.floor and shadow_took_it else found

    def may_open(self) -> int:
        """Return how many empty devices the next stream may open."""
        return self._may_open(self.shadow.open_devices, self.shadow.free_devices)

    def may_open_instead(self, name: str, share: int) -> tuple[int, bool]:
        """Return how many empty devices another stream may open in place of one that found no place.

        `share` is what equal partition would give it; the second value says whether it could.
        """
        held = self.shadow.held(name)
        taken, free = self.shadow.open_devices - held, self.shadow.free_devices + held
        could = 0 < share <= free
        return self._may_open(taken + share * could, free - share * could), could

    def _may_open(self, shadow_taken: int, shadow_free: int) -> int:
        free = len(self.pool) - self.cluster.open_devices
        if not self.strategy.floor or shadow_free < self._least_share:
            return free
        return max(0, min(free, shadow_taken - self.cluster.open_devices))

    def _accepts(self, spec: StreamSpec, ranks: Sequence[Rank]) -> bool:
        cluster, view = self.cluster, self.cluster.view(spec.model)
        return (
            all(cluster.devices[r.device].fits(spec.model, view, r.start, r.stop, spec.interval_s) for r in ranks)
            and cluster.response_s(spec, ranks) <= spec.response_s
            and cluster.late_neighbour(spec, ranks) is None
        )

    def _join(self, spec: StreamSpec, may_open: int) -> Placed | None:
        layouts = dict.fromkeys(p.ranks for p in self.cluster.streams.values() if p.spec.model == spec.model)
        fitting = [ranks for ranks in layouts if self._accepts(spec, ranks)]
        if not fitting:
            return None
        return Placed(spec, min(fitting, key=lambda r: objective(self.cluster, spec, r)), "join")

    def _search(self, spec: StreamSpec, may_open: int) -> Placed | None:
        effort = self.strategy.effort
        ranks = Search(self.cluster, spec, replace(effort, discrepancies=0), open_most=may_open).run()
        opens = ranks is None or any(not self.cluster.devices[r.device].open for r in ranks)
        if opens and effort.discrepancies:
            ranks = Search(self.cluster, spec, effort, open_most=may_open).run() or ranks
        return Placed(spec, ranks, "search") if ranks else None

    def _fresh_cell(self, spec: StreamSpec, may_open: int) -> Placed | None:
        key = (spec.model, spec.interval_s, spec.response_s)
        if key not in self._cells:
            self._cells[key] = best_cell(self.cluster.view(spec.model), spec, self.pool)
        cell = self._cells[key]
        if cell is None or cell.devices > may_open:
            return None
        return self._on_empty(spec, cell.devices, "cell")

    def _slot(self, spec: StreamSpec, may_open: int) -> Placed | None:
        return self._on_empty(spec, self.shadow.share(spec), "equal")

    def _on_empty(self, spec: StreamSpec, count: int, how: str) -> Placed | None:
        empty = (s.device for s in self.cluster.devices.values() if not s.open)
        chosen = pick(count, empty)
        if chosen is None:
            return None
        ranks = equal_ranks(self.cluster.view(spec.model), chosen)
        return Placed(spec, ranks, how) if self._accepts(spec, ranks) else None
