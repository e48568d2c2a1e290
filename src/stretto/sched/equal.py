"""Equal partition: every stream gets whole devices of its own, split evenly. The baseline, and the floor of the portfolio."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from stretto.core.plan import Device
from stretto.sched.cluster import EXCLUSIVE_CAP, ModelView, Placed, StreamSpec
from stretto.sched.columns import Rank


def equal_ranks(view: ModelView, devices: Sequence[Device]) -> tuple[Rank, ...]:
    """Split the columns evenly by time over these devices."""
    ends = view.columns.balanced(len(devices))
    return tuple(Rank(a, b, d.name) for (a, b), d in zip(itertools.pairwise((0, *ends)), devices, strict=True))


def alone_fits(view: ModelView, spec: StreamSpec, ranks: Sequence[Rank], devices: Sequence[Device]) -> bool:
    """Tell whether a stream keeps its promises on devices of its own."""
    return not alone_lacks(view, spec, ranks, devices)


def alone_lacks(view: ModelView, spec: StreamSpec, ranks: Sequence[Rank], devices: Sequence[Device]) -> str:
    """Return what a stream lacks even on devices of its own: `interval`, `memory`, `response`, or an empty string."""
    by_name = {d.name: d for d in devices}
    for r in ranks:
        if view.columns.work_s_of(r.start, r.stop) > EXCLUSIVE_CAP * spec.interval_s:
            return "interval"
        limit = by_name[r.device].memory_bytes
        weights = view.weight_sum[r.stop] - view.weight_sum[r.start]
        need = view.profile.reserved_bytes + weights + view.state_sum[r.stop] - view.state_sum[r.start]
        if limit and need > limit:
            return "memory"
    slowest = max((view.hop_s(by_name[a.device], by_name[b.device]) for a, b in itertools.pairwise(ranks)), default=0.0)
    if view.profile.work_s + view.hops(ranks) * slowest > spec.response_s:
        return "response"
    return ""


def equal_share(view: ModelView, spec: StreamSpec, devices: Sequence[Device]) -> int:
    """Return the least number of devices with which a stream keeps its promises alone; 0 if no number does."""
    for g in range(1, min(len(devices), len(view)) + 1):
        chosen = devices[:g]
        if alone_fits(view, spec, equal_ranks(view, chosen), chosen):
            return g
    return 0


class EqualPartition:
    """Allocates whole devices. A stream's devices are of one node where one has enough."""

    def __init__(self, devices: Sequence[Device], views: dict[str, ModelView]) -> None:
        self._devices, self._views = tuple(devices), views
        self._free = dict.fromkeys(d.name for d in devices)
        self._by_name = {d.name: d for d in devices}
        self._held: dict[str, tuple[str, ...]] = {}
        self._shares: dict[tuple[str, float, float], int] = {}

    @property
    def open_devices(self) -> int:
        return len(self._devices) - len(self._free)

    @property
    def free_devices(self) -> int:
        return len(self._free)

    def held(self, name: str) -> int:
        """Return how many devices a stream has."""
        return len(self._held.get(name, ()))

    def share(self, spec: StreamSpec) -> int:
        key = (spec.model, spec.interval_s, spec.response_s)
        if key not in self._shares:
            self._shares[key] = equal_share(self._views[spec.model], spec, self._devices)
        return self._shares[key]

    def place(self, spec: StreamSpec) -> Placed | None:
        """Give a stream its devices; None if too few are free."""
        g = self.share(spec)
        chosen = pick(g, (self._by_name[n] for n in self._free)) if g else None
        if not chosen:
            return None
        for device in chosen:
            del self._free[device.name]
        self._held[spec.name] = tuple(d.name for d in chosen)
        return Placed(spec, equal_ranks(self._views[spec.model], chosen), "equal")

    def leave(self, name: str) -> None:
        """Free a stream's devices; nothing if it has none."""
        for device in self._held.pop(name, ()):
            self._free[device] = None


def pick(count: int, free: Iterable[Device]) -> tuple[Device, ...] | None:
    """Choose devices of the node that is left with the fewest, else across nodes; None if there are not enough."""
    free = sorted(free, key=lambda d: (d.node, len(d.name), d.name))
    if len(free) < count:
        return None
    sizes = Counter(d.node for d in free)
    enough = sorted((size, node) for node, size in sizes.items() if size >= count)
    if enough:
        return tuple([d for d in free if d.node == enough[0][1]][:count])
    return tuple(sorted(free, key=lambda d: (-sizes[d.node], d.node))[:count])
