"""Which pool of slots a stage's state is in on a device.

Streams may be cut in different ways, so that a device runs some stages for all of them and others for a few. A stream holds
slots for the stages that it runs there and for no others: stages with the same users share a pool.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.model import Model, StateKey
from stretto.core.plan import Placement
from stretto.core.route import Visit

Placements = tuple[Placement, ...]


class StatePools:
    """The pools of one device. With one class of streams they are those that the model names."""

    def __init__(self, model: Model, classes: Mapping[str, Placements], device: str) -> None:
        self._model, self._classes, self._device = model, dict(classes), device
        users: dict[tuple[str, str], set[str]] = {}
        for name, placements in classes.items():
            for visit in self._visits(placements):
                key = model.state_key(visit)
                if key is not None:
                    users.setdefault((key.pool, visit.stage), set()).add(name)
        groups: dict[str, list[set[str]]] = {}
        self._pool: dict[str, str] = {}
        for (pool, stage), some in users.items():
            found = groups.setdefault(pool, [])
            if some not in found:
                found.append(some)
            self._pool[stage] = f"{pool}.{found.index(some)}" if found.index(some) else pool

    def _visits(self, placements: Placements) -> list[Visit]:
        return [v for p in placements if p.device == self._device for v in self._model.route.on(p.segment)]

    def key(self, visit: Visit) -> StateKey | None:
        """Return the slot of a visit's state on this device; None if its stage keeps none."""
        key = self._model.state_key(visit)
        return None if key is None else StateKey(self._pool.get(visit.stage, key.pool), key.index)

    def keys(self, stream_class: str) -> tuple[StateKey, ...]:
        """Return the distinct slots that a stream of a class needs, in route order."""
        keys = (self.key(v) for v in self._visits(self._classes[stream_class]))
        return tuple(dict.fromkeys(key for key in keys if key is not None))

    def counts(self, stream_class: str) -> dict[str, int]:
        """Return how many slots of each pool one stream of a class takes."""
        found: dict[str, int] = {}
        for key in self.keys(stream_class):
            found[key.pool] = found.get(key.pool, 0) + 1
        return found
