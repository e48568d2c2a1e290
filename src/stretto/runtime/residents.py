"""The streams that live on one device: their state slots, whose turn it is at each placement, their conditions."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.errors import CapacityError, PlanError
from stretto.core.model import Model, StateKey
from stretto.core.route import Segment
from stretto.runtime.arena import SlotPool
from stretto.runtime.flow import Flow
from stretto.runtime.layout import Streams
from stretto.runtime.pools import StatePools
from stretto.runtime.ways import MAIN, Placements, Ways


@dataclass(frozen=True)
class Baton:
    """State that chunks hand on: where on each route a chunk must have it, and where it lets it go."""

    waits: frozenset[tuple[str, int]]
    """(route, placement) that cannot begin before the chunk has the state from its predecessor."""
    leaves: frozenset[tuple[str, int]]
    """(route, placement) after which the successor may have it."""
    routes: frozenset[str]
    """Routes that use the state; a chunk on another route is not in the sequence."""


def batons(model: Model, ways: Mapping[str, Placements], routes: Ways) -> tuple[Baton, ...]:
    """Return what the chunks of a stream hand on. State that always changes hands together is one baton.

    Where chunks hand state on, they keep their order everywhere: one that overtook its predecessor between two states
    could take the last slot of a device and then wait for the one that has none.

    Raises:
        PlanError: if state would have to be on two devices.
    """
    waits: dict[tuple[str, StateKey | None], set[tuple[str, int]]] = {}
    leaves: dict[tuple[str, StateKey | None], set[tuple[str, int]]] = {}
    for name, placements in ways.items():
        route = routes.routes[name]
        place = {v: i for i, p in enumerate(placements) for v in route.on(p.segment)}
        for visit, i in place.items():
            carry = model.carry(visit)
            if carry is None:
                continue
            if placements[place[carry]].device != placements[i].device:
                raise PlanError(
                    f"placements[{i}].device",
                    got=f"{visit} on {placements[i].device}, {carry} on {placements[place[carry]].device}",
                    expected="both on one device, since they share state and state never moves",
                )
            token = visit.stage, model.state_key(visit)
            waits.setdefault(token, set()).add((name, i))
            leaves.setdefault(token, set()).add((name, place[carry]))
    found = [Baton(frozenset(waits[t]), frozenset(leaves[t]), frozenset(name for name, _ in waits[t])) for t in waits]
    if found:
        held = {place for baton in found for place in baton.waits}
        every = {(name, i) for name, placements in ways.items() for i in range(len(placements))}
        found += [Baton(frozenset({place}), frozenset({place}), frozenset({place[0]})) for place in sorted(every - held)]
    return tuple(dict.fromkeys(found))


class Order:
    """The batons of a stream class, looked up by place: (route, placement)."""

    def __init__(self, handed: tuple[Baton, ...]) -> None:
        self.size = len(handed)
        self.waits: dict[tuple[str, int], list[tuple[int, frozenset[str]]]] = {}
        """Place -> the batons that a chunk must have there, and the routes that use them."""
        self.leaves: dict[tuple[str, int], list[int]] = {}
        for i, baton in enumerate(handed):
            for place in baton.waits:
                self.waits.setdefault(place, []).append((i, baton.routes))
            for place in baton.leaves:
                self.leaves.setdefault(place, []).append(i)


Seat = Mapping[StateKey, int]


@dataclass
class Resident:
    """One stream as one device knows it."""

    stream_class: str
    seat: tuple[int, Seat]
    order: Order
    passed: list[int]
    """For each baton, how many chunks have let it go."""
    conditions: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(name, version) -> tensor on the device."""


class Seats:
    """State slots in sets of what one stream needs, which stay together from one stream to the next.

    Where captures bake slots in, those that were made for a seat serve every stream that takes it.
    """

    def __init__(self, pools: Mapping[str, SlotPool], keys: Mapping[str, Sequence[StateKey]]) -> None:
        self._pools, self._keys = pools, keys
        self._free: dict[str, list[tuple[int, Seat]]] = {name: [] for name in keys}
        self._made = 0

    def reserve(self, stream_class: str, count: int) -> list[Seat]:
        """Make seats before streams come; returns those of the class that are free.

        Raises:
            CapacityError: if there are not enough slots.
        """
        free = self._free[stream_class]
        while len(free) < count:
            heapq.heappush(free, self._make(stream_class))
        return [seat for _, seat in sorted(free, key=lambda numbered: numbered[0])]

    def take(self, stream_class: str) -> tuple[int, Seat]:
        """Take the free seat that was made first, or make one; seats of other classes give way.

        Raises:
            CapacityError: if there are not enough slots.
        """
        free = self._free[stream_class]
        return heapq.heappop(free) if free else self._make(stream_class)

    def give(self, stream_class: str, seat: tuple[int, Seat]) -> None:
        heapq.heappush(self._free[stream_class], seat)

    def _make(self, stream_class: str) -> tuple[int, Seat]:
        need = Counter(key.pool for key in self._keys[stream_class])
        for others in self._free.values():
            while others and any(self._pools[pool].free < n for pool, n in need.items()):
                for key, slot in others.pop()[1].items():
                    self._pools[key.pool].give(slot)
        for pool, n in need.items():
            if self._pools[pool].free < n:
                raise CapacityError("slots", f"{self._pools[pool].free} {pool} slots are free, a stream needs {n}")
        self._made += 1
        return self._made, {key: self._pools[key.pool].take() for key in self._keys[stream_class]}


class Residents:
    """All streams of one device."""

    def __init__(self, model: Model, device: str, pools: Mapping[str, SlotPool], ways: Ways) -> None:
        self._model, self._device, self._ways = model, device, ways
        self._orders = {name: Order(batons(model, placed, ways)) for name, placed in ways.placed.items()}
        known = StatePools(model, {name: placed[MAIN] for name, placed in ways.placed.items()}, device)
        self._keys = {name: known.keys(name) for name in ways.placed}
        self._key_of = known.key
        self._seats = Seats(pools, self._keys)
        self._streams: dict[int, Resident] = {}

    def __contains__(self, stream: int) -> bool:
        return stream in self._streams

    def open(self, stream: int, stream_class: str) -> None:
        """Take state slots for a stream.

        Raises:
            CapacityError: if not enough are free.
        """
        order = self._orders[stream_class]
        self._streams[stream] = Resident(stream_class, self._seats.take(stream_class), order, [0] * order.size)

    def close(self, stream: int) -> None:
        resident = self._streams.pop(stream, None)
        if resident is not None:
            self._seats.give(resident.stream_class, resident.seat)

    def reserve(self, streams: Streams) -> dict[str, list[Seat]]:
        """Make the seats of streams to come, where it is known of which class they will be; returns them by class.

        Raises:
            CapacityError: if there are not enough slots.
        """
        if isinstance(streams, int):
            streams = dict.fromkeys(self._keys, streams) if len(self._keys) == 1 else {}
        return {name: self._seats.reserve(name, streams.get(name, 0)) for name, keys in self._keys.items() if keys}

    def set_condition(self, stream: int, name: str, version: int, tensor: Tensor) -> None:
        """Keep a new version; older ones stay until the chunks that were admitted with them have passed."""
        if stream in self._streams:
            self._streams[stream].conditions[name, version] = tensor

    def may_run(self, flow: Flow) -> bool:
        """Tell whether it is this chunk's turn where it stands and its conditions have arrived."""
        resident = self._streams[flow.stream]
        for baton, routes in resident.order.waits.get((flow.route, flow.at), ()):
            if resident.passed[baton] < sum(flow.before.get(route, 0) for route in routes):
                return False
        return not flow.versions or all(v in resident.conditions for v in flow.versions.items())

    def pass_by(self, flow: Flow, *, last: bool) -> None:
        """Note that a chunk was launched where it stands; on its last placement here, drop conditions no later one uses."""
        resident = self._streams[flow.stream]
        for baton in resident.order.leaves.get((flow.route, flow.at), ()):
            resident.passed[baton] += 1
        if last:
            for name, version in [k for k in resident.conditions if k[1] < flow.versions.get(k[0], 0)]:
                del resident.conditions[name, version]

    def slots(self, stream: int, segment: Segment, model: Model) -> tuple[int, ...]:
        """Return the state slot of every visit of a segment, 0 where it keeps none; nothing for a stream without state."""
        return self.slots_of(self._streams[stream].seat[1], segment, model)

    def slots_of(self, seat: Seat, segment: Segment, model: Model) -> tuple[int, ...]:
        """Return the same for whoever takes a seat."""
        if not seat:
            return ()
        keys = [self._key_of(v) for v in model.route.on(segment)]
        return tuple(0 if key is None else seat[key] for key in keys)

    def conditions(self, stream: int, versions: Mapping[str, int]) -> dict[str, tuple[int, Tensor]]:
        kept = self._streams[stream].conditions
        return {name: (version, kept[name, version]) for name, version in versions.items()}
