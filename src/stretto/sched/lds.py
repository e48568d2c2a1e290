"""Best fit with limited discrepancy search: where the ranks of one stream go.

A node of the search is the next column to place. Its children are (device, end of range) pairs, best first; taking the
k-th best costs k discrepancies, and leaves with few are tried first. With none it is plain best fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.sched.cluster import Cluster, DeviceState, ModelView, StreamSpec
from stretto.sched.columns import Rank

_LEAST_SHARE = 1 / 8  # of a stream: smaller ranks are not worth their hand-overs


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search. Counted, not timed, so that the same input gives the same plan."""

    discrepancies: int = 2
    branches: int = 5
    ranks: int = 8
    leaves: int = 100
    nodes: int = 400


SEARCH = Effort()
BEST_FIT = Effort(discrepancies=0)

Score = tuple[float, ...]


class Search:
    """One stream's search in one state of the pool."""

    def __init__(self, cluster: Cluster, spec: StreamSpec, effort: Effort, *, open_most: int | None = None) -> None:
        """Look for a place that opens at most `open_most` empty devices."""
        self._cluster, self._spec, self._effort = cluster, spec, effort
        self._view: ModelView = cluster.view(spec.model)
        self._open_most = len(cluster.devices) if open_most is None else open_most
        self._candidates = self._prune()
        self._leaves = self._nodes = 0
        self._best: tuple[Score, tuple[Rank, ...]] | None = None

    def run(self) -> tuple[Rank, ...] | None:
        """Return the best place found, or None."""
        if not self._promising():
            return None
        for allowed in range(self._effort.discrepancies + 1):
            self._dive(0, (), 0, allowed, exactly=allowed)
            if self._spent():
                break
        return self._best[1] if self._best else None

    def _promising(self) -> bool:
        """Tell whether the room of all candidates together could take the stream."""
        need = self._view.work_sum[-1] / self._spec.interval_s
        rooms = sorted((d.room for d in self._candidates if d.open), reverse=True)
        empty = sorted((d.room for d in self._cluster.devices.values() if not d.open), reverse=True)
        return sum((*rooms, *empty[: self._open_most])) + 1e-9 >= need

    def _prune(self) -> list[DeviceState]:
        """Keep open devices with some room, and enough empty ones of every node (they are all alike)."""
        share = self._view.work_sum[-1] / self._spec.interval_s * _LEAST_SHARE
        least = min(share, min(w for w in self._view.work) / self._spec.interval_s * 4)
        kept: list[DeviceState] = []
        empty: dict[tuple[str, int], int] = {}
        for state in self._cluster.devices.values():
            if state.open:
                if state.room >= least:
                    kept.append(state)
            else:
                key = (state.device.node, state.device.memory_bytes)
                empty[key] = empty.get(key, 0) + 1
                if empty[key] <= min(self._effort.ranks, self._open_most):
                    kept.append(state)
        return kept

    def _spent(self) -> bool:
        return self._leaves >= self._effort.leaves or self._nodes >= self._effort.nodes

    def _dive(self, at: int, ranks: tuple[Rank, ...], used: int, allowed: int, *, exactly: int) -> None:
        if self._spent():
            return
        if at == len(self._view):
            if used == exactly:  # fewer were tried in an earlier round
                self._leaf(ranks)
            return
        if len(ranks) == self._effort.ranks:
            return
        self._nodes += 1
        for cost, (_, state, stop) in enumerate(self._children(at, ranks)):
            if used + cost > allowed or cost >= self._effort.branches:
                break
            self._dive(stop, (*ranks, Rank(at, stop, state.device.name)), used + cost, allowed, exactly=exactly)

    def _children(self, at: int, ranks: tuple[Rank, ...]) -> list[tuple[Score, DeviceState, int]]:
        taken = {r.device for r in ranks}
        opened = sum(not self._cluster.devices[name].open for name in taken)
        last = self._cluster.devices[ranks[-1].device].device if ranks else None
        seen_empty: set[tuple[str, int]] = set()
        found: list[tuple[Score, int, DeviceState, int]] = []
        for i, state in enumerate(self._candidates):
            if state.device.name in taken:
                continue
            if not state.open:
                key = (state.device.node, state.device.memory_bytes)
                if key in seen_empty or opened >= self._open_most:
                    continue
                seen_empty.add(key)
            for stop in self._stops(state, at, ranks):
                hop = last is not None and last.node != state.device.node
                found.append((self._score(state, at, stop, hop), i, state, stop))
        found.sort(key=lambda f: f[:2])
        return [(score, state, stop) for score, _, state, stop in found]

    def _stops(self, state: DeviceState, at: int, ranks: tuple[Rank, ...]) -> Iterator[int]:
        """Yield the longest range that fits, and the one that would leave equal ranges for the devices after it."""
        spec, view = self._spec, self._view
        longest = state.longest(spec.model, view, at, spec.interval_s)
        if longest == at:
            return
        yield longest
        rest = len(view) - at
        if longest < len(view):
            parts = math.ceil(rest / (longest - at))
            balanced = at + math.ceil(rest / parts)
            if balanced < longest:
                yield balanced

    def _score(self, state: DeviceState, at: int, stop: int, hop: bool) -> Score:
        spec, view = self._spec, self._view
        load = (view.work_sum[stop] - view.work_sum[at]) / spec.interval_s
        time_left = state.room - load
        limit = state.device.memory_bytes
        bytes_left = limit - state.used_bytes - state.added_bytes(spec.model, view, at, stop) if limit else 0
        memory_left = bytes_left / limit if limit else time_left
        tight = min(time_left, memory_left) + 0.25 * abs(time_left - memory_left)
        return (stop < len(view), not state.open, hop, round(tight, 9), -(stop - at))

    def _leaf(self, ranks: tuple[Rank, ...]) -> None:
        self._leaves += 1
        cluster, spec = self._cluster, self._spec
        if cluster.response_s(spec, ranks) > spec.response_s or cluster.late_neighbour(spec, ranks):
            return
        score = objective(cluster, spec, ranks)
        if self._best is None or score < self._best[0]:
            self._best = (score, ranks)


def objective(cluster: Cluster, spec: StreamSpec, ranks: tuple[Rank, ...]) -> Score:
    """Rate a place, less is better: devices opened, ranks, node changes, then how whole the room is that it leaves."""
    view = cluster.view(spec.model)
    states = [cluster.devices[r.device] for r in ranks]
    hops = sum(a.device.node != b.device.node for a, b in itertools.pairwise(states))
    left = 0.0
    for rank, state in zip(ranks, states, strict=True):
        left += (state.room - (view.work_sum[rank.stop] - view.work_sum[rank.start]) / spec.interval_s) ** 2
    return (sum(not s.open for s in states), len(ranks), hops, -round(left, 9))
