"""The streams that live on one device: their state slots, whose turn it is at each placement, their conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.model import Model
from stretto.core.plan import Placement
from stretto.core.route import Segment
from stretto.runtime.arena import SlotPool


def state_keys(model: Model, placements: tuple[Placement, ...], device: str) -> tuple[int, ...]:
    """Return the distinct state keys a stream of these placements needs on a device, in route order."""
    keys: dict[int, None] = {}
    for p in placements:
        if p.device == device:
            for visit in model.route.visits[p.segment.start : p.segment.stop]:
                if model.route.stages[visit.stage].state:
                    keys.setdefault(model.state_key(visit))
    return tuple(keys)


@dataclass
class Resident:
    """One stream as one device knows it."""

    slots: Mapping[int, int]
    """State key -> slot in the state arenas."""
    turn: dict[int, int] = field(default_factory=dict)
    """Placement index -> the chunk that may run there next. Only placements that keep state are in it."""
    conditions: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(name, version) -> tensor on the device."""


class Residents:
    """All streams of one device."""

    def __init__(self, model: Model, device: str, pool: SlotPool) -> None:
        self._model, self._device, self._pool = model, device, pool
        self._streams: dict[int, Resident] = {}

    def __contains__(self, stream: int) -> bool:
        return stream in self._streams

    def open(self, stream: int, placements: tuple[Placement, ...]) -> None:
        """Take state slots for a stream.

        Raises:
            CapacityError: if not enough are free.
        """
        keys = state_keys(self._model, placements, self._device)
        turn = {i: 0 for i, p in enumerate(placements) if p.device == self._device and self._model.route.keeps_state(p.segment)}
        self._streams[stream] = Resident({key: self._pool.take() for key in keys}, turn)

    def close(self, stream: int) -> None:
        resident = self._streams.pop(stream, None)
        for slot in resident.slots.values() if resident else ():
            self._pool.give(slot)

    def set_condition(self, stream: int, name: str, version: int, tensor: Tensor) -> None:
        """Keep a new version; older ones stay until the chunks that were admitted with them have passed."""
        if stream in self._streams:
            self._streams[stream].conditions[name, version] = tensor

    def may_run(self, stream: int, chunk: int, placement: int, versions: Mapping[str, int]) -> bool:
        """Tell whether it is this chunk's turn at a placement and its conditions have arrived."""
        resident = self._streams[stream]
        return resident.turn.get(placement, chunk) == chunk and all(v in resident.conditions for v in versions.items())

    def pass_by(self, stream: int, placement: int, versions: Mapping[str, int]) -> None:
        """Note that the stream's current chunk was launched at a placement; drop conditions that no later chunk uses."""
        resident = self._streams[stream]
        if placement not in resident.turn:
            return
        resident.turn[placement] += 1
        if placement == max(resident.turn):
            for name, version in [k for k in resident.conditions if k[1] < versions.get(k[0], 0)]:
                del resident.conditions[name, version]

    def slots(self, stream: int, segment: Segment) -> tuple[int, ...]:
        """Return the state slot of every visit of a segment; 0 where a visit keeps none."""
        slots = self._streams[stream].slots
        visits = self._model.route.visits[segment.start : segment.stop]
        stages = self._model.route.stages
        return tuple(slots[self._model.state_key(v)] if stages[v.stage].state else 0 for v in visits)

    def conditions(self, stream: int, versions: Mapping[str, int]) -> dict[str, tuple[int, Tensor]]:
        kept = self._streams[stream].conditions
        return {name: (version, kept[name, version]) for name, version in versions.items()}
