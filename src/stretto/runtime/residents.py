"""The streams that live on one device: their state slots, whose turn it is at each placement, their conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.errors import PlanError
from stretto.core.model import Model, StateKey
from stretto.core.plan import Placement
from stretto.core.route import Segment
from stretto.runtime.arena import SlotPool

Placements = tuple[Placement, ...]


def state_keys(model: Model, placements: Placements, device: str) -> tuple[StateKey, ...]:
    """Return the distinct state slots that a stream of these placements needs on a device, in route order."""
    visits = (v for p in placements if p.device == device for v in model.route.on(p.segment))
    return tuple(dict.fromkeys(key for v in visits if (key := model.state_key(v)) is not None))


def predecessors(model: Model, placements: Placements) -> tuple[int | None, ...]:
    """Return, for each placement, the placement that the previous chunk must have passed; None where it waits for nothing.

    Raises:
        PlanError: if state would have to be on two devices.
    """
    place = {v: i for i, p in enumerate(placements) for v in model.route.on(p.segment)}
    found: list[int | None] = []
    for i, placement in enumerate(placements):
        last: int | None = None
        for visit in model.route.on(placement.segment):
            carry = model.carry(visit)
            if carry is None:
                continue
            if placements[place[carry]].device != placement.device:
                raise PlanError(
                    f"placements[{i}].device",
                    got=f"{visit} on {placement.device}, {carry} on {placements[place[carry]].device}",
                    expected="both on one device, since they share state and state never moves",
                )
            last = max(place[carry], i if last is None else last)
        found.append(last)
    return tuple(found)


@dataclass
class Resident:
    """One stream as one device knows it."""

    slots: Mapping[StateKey, int]
    waits: tuple[int | None, ...]
    passed: dict[int, int] = field(default_factory=dict)
    """Placement index -> the last chunk that was launched there."""
    conditions: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(name, version) -> tensor on the device."""


class Residents:
    """All streams of one device."""

    def __init__(self, model: Model, device: str, pools: Mapping[str, SlotPool]) -> None:
        self._model, self._device, self._pools = model, device, pools
        self._streams: dict[int, Resident] = {}

    def __contains__(self, stream: int) -> bool:
        return stream in self._streams

    def open(self, stream: int, placements: Placements) -> None:
        """Take state slots for a stream.

        Raises:
            CapacityError: if not enough are free.
        """
        keys = state_keys(self._model, placements, self._device)
        slots = {key: self._pools[key.pool].take() for key in keys}
        self._streams[stream] = Resident(slots, predecessors(self._model, placements))

    def close(self, stream: int) -> None:
        resident = self._streams.pop(stream, None)
        for key, slot in resident.slots.items() if resident else ():
            self._pools[key.pool].give(slot)

    def set_condition(self, stream: int, name: str, version: int, tensor: Tensor) -> None:
        """Keep a new version; older ones stay until the chunks that were admitted with them have passed."""
        if stream in self._streams:
            self._streams[stream].conditions[name, version] = tensor

    def may_run(self, stream: int, chunk: int, placement: int, versions: Mapping[str, int]) -> bool:
        """Tell whether it is this chunk's turn at a placement and its conditions have arrived."""
        resident = self._streams[stream]
        before = resident.waits[placement]
        its_turn = before is None or resident.passed.get(before, -1) >= chunk - 1
        return its_turn and all(v in resident.conditions for v in versions.items())

    def pass_by(self, stream: int, chunk: int, placement: int, versions: Mapping[str, int], *, last: bool) -> None:
        """Note that a chunk was launched at a placement; on its last one here, drop conditions that no later chunk uses."""
        resident = self._streams[stream]
        resident.passed[placement] = chunk
        if last:
            for name, version in [k for k in resident.conditions if k[1] < versions.get(k[0], 0)]:
                del resident.conditions[name, version]

    def slots(self, stream: int, segment: Segment) -> tuple[int, ...]:
        """Return the state slot of every visit of a segment; 0 where a visit keeps none."""
        slots = self._streams[stream].slots
        keys = [self._model.state_key(v) for v in self._model.route.on(segment)]
        return tuple(0 if key is None else slots[key] for key in keys)

    def conditions(self, stream: int, versions: Mapping[str, int]) -> dict[str, tuple[int, Tensor]]:
        kept = self._streams[stream].conditions
        return {name: (version, kept[name, version]) for name, version in versions.items()}
