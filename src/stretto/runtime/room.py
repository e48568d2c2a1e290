"""How many more streams an engine's devices have state for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from stretto.core.errors import CapacityError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.runtime.layout import Streams, state_slots
from stretto.runtime.pools import StatePools


class Room:
    """State slots by device and pool, counted ahead of the devices that hand them out. The engine asks under its lock."""

    def __init__(self, model: Model, plan: Plan, streams: Streams, devices: Iterable[str]) -> None:
        self._pools = {d: StatePools(model, plan.classes, d) for d in devices}
        self.free = {d: Counter(state_slots(model, plan, d, streams)) for d in self._pools}

    def needs(self, device: str, stream_class: str) -> Mapping[str, int]:
        """Return how many slots of each pool a stream of a class has on a device."""
        return self._pools[device].counts(stream_class)

    def take(self, stream_class: str) -> None:
        """Take the slots of one stream everywhere.

        Raises:
            CapacityError: if a device has too few; nothing is taken then.
        """
        need = {d: Counter(self.needs(d, stream_class)) for d in self._pools}
        for d, wanted in need.items():
            if not wanted <= self.free[d]:
                has, asks = dict(self.free[d]), dict(wanted)
                raise CapacityError("state", f"{d} has {has} state slots free, a stream needs {asks}")
        for d, wanted in need.items():
            self.free[d].subtract(wanted)

    def give(self, device: str, slots: Mapping[str, int]) -> None:
        self.free[device].update(slots)
