"""The batch a stage sees: rows of the arenas, picked by slot. Implements `core.model.Rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from stretto.core.model import Buckets, Row
from stretto.runtime.arena import Arenas


class BatchRows:
    """One batch on its way through the visits of a segment.

    Values that only pass between visits of the same segment stay local; `flush` stores those that live on. Either way
    they are cast to their declared dtype, so cutting a segment elsewhere cannot change a result.
    """

    def __init__(
        self,
        arenas: Arenas,
        slots_B: Tensor,
        steps_VB: Tensor,
        state_slots_VB: Tensor,
        *,
        host: Sequence[Row] = (),
        steps: Sequence[Sequence[int]] = (),
        state_slots: Sequence[Sequence[int]] = (),
        conditions: Sequence[Mapping[str, tuple[int, Tensor]]] = (),
        buckets: Sequence[Buckets] = (),
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self._arenas = arenas
        self.slots_B = slots_B
        self._steps_VB = steps_VB
        self._state_slots_VB = state_slots_VB
        self._rows = tuple(host)
        self._host_steps = steps
        self._host_state_slots = state_slots
        self._conditions = conditions
        self._cuts = {name: (axis, b.axis) for b in buckets for name, axis in b.values.items()}
        self._lengths = dict(lengths or {})
        self._local: dict[str, Tensor] = {}
        self._visit = 0
        self._host: dict[tuple[tuple[int, ...], tuple[int, ...]], Sequence[Row]] = {}

    def enter(self, visit: int) -> None:
        """Move on to the visit with this index in the segment."""
        self._visit = visit

    @property
    def size(self) -> int:
        return self.slots_B.shape[0]

    @property
    def steps_B(self) -> Tensor:
        return self._steps_VB[self._visit]

    @property
    def state_slots_B(self) -> Tensor:
        return self._state_slots_VB[self._visit]

    @property
    def host(self) -> Sequence[Row]:
        if not self._rows:
            return ()
        steps, slots = self._host_steps[self._visit], self._host_state_slots[self._visit]
        # Most visits of a segment are alike in this, so they share the rows.
        found = self._host.get(at := (tuple(steps), tuple(slots)))
        if found is None:
            found = self._host[at] = [
                Row(row.stream, row.chunk, step, row.slot, slot, row.seed)
                for row, step, slot in zip(self._rows, steps, slots, strict=True)
            ]
        return found

    def length(self, axis: str) -> int:
        return self._lengths[axis]

    def condition(self, row: int, name: str) -> tuple[int, Tensor]:
        return self._conditions[row][name]

    def arena(self, name: str) -> Tensor:
        return self._arenas[name]

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._cuts:
            return tensor
        axis, bucket = self._cuts[name]
        return tensor.narrow(axis + 1, 0, self._lengths[bucket]) if bucket in self._lengths else tensor

    def get(self, name: str) -> Tensor:
        if name in self._local:
            return self._local[name]
        return self._cut(name, self._arenas[name]).index_select(0, self.slots_B)

    def put(self, name: str, value: Tensor) -> None:
        self._local[name] = value.to(self._arenas[name].dtype)

    def flush(self, names: Sequence[str]) -> None:
        """Store the local values among `names` into their arenas."""
        for name in names:
            if name in self._local:
                self._cut(name, self._arenas[name]).index_copy_(0, self.slots_B, self._local[name])
