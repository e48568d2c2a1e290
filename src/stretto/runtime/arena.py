"""Storage of one device: every declared value and state tensor, with a leading slot axis and a fixed address.

Slot 0 belongs to nobody: padded rows of a batch read and write it, so fixed shapes need no masks.
Inputs of the route share one packed byte row per slot, so that a request is one copy to the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import CapacityError, FieldError
from stretto.core.packing import packed
from stretto.core.route import TensorSpec

_ALIGN = 16


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class SlotPool:
    """Hands out slot indices `first`, `first` + 1, ..., lowest first, so that a run is reproducible.

    `in_turn`: the one that has been free for longest first. A slot is given back when its last work is launched: with several
    lanes, whoever takes it at once waits on the device until another lane has done that work.
    """

    def __init__(self, slots: int, what: str, first: int = 1, *, in_turn: bool = False) -> None:
        self._free = list(range(first, slots + first))
        self._what, self._in_turn = what, in_turn
        self.size = slots

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take one slot.

        Raises:
            CapacityError: if none is free.
        """
        if not self._free:
            raise CapacityError("slots", f"all {self.size} {self._what} are in use")
        return self._free.pop(0) if self._in_turn else heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        if self._in_turn:
            self._free.append(slot)
        else:
            heapq.heappush(self._free, slot)


@dataclass(frozen=True)
class InputLayout:
    """Where each route input lies in the packed byte row of a slot."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    row_bytes: int

    @staticmethod
    def of(specs: Mapping[str, TensorSpec]) -> InputLayout:
        return InputLayout(dict(specs), *packed(specs, _ALIGN))

    def row(self, *, pin: bool = False) -> PackedRow:
        """Return a new row of host memory; what is in it is not defined."""
        data = torch.empty(self.row_bytes, dtype=torch.uint8, pin_memory=pin)
        raw = data.numpy()
        # numpy has no bfloat16: no input is of that dtype.
        known = {n: s for n, s in self.specs.items() if hasattr(np, s.dtype)}
        return PackedRow(data, {n: np.ndarray(s.shape, s.dtype, raw, self.offsets[n]) for n, s in known.items()})

    def pack(self, inputs: Mapping[str, np.ndarray], row: PackedRow | None = None, *, pin: bool = False) -> PackedRow:
        """Pack one request into a row, a new one by default.

        Raises:
            FieldError: if an input is missing, unknown, of another dtype, or larger than declared.
        """
        row = row or self.row(pin=pin)
        self.fill(row, inputs)
        return row

    def fill(self, row: PackedRow, inputs: Mapping[str, np.ndarray]) -> None:
        """Write one request into a row; inputs shorter than declared are padded with zeros.

        An input that is the row's own view of it is there already.

        Raises:
            FieldError: if an input is missing, unknown, of another dtype, or larger than declared.
        """
        if inputs.keys() != self.specs.keys():
            raise FieldError("inputs", got=sorted(inputs), expected=sorted(self.specs))
        for name, value in inputs.items():
            target = row.views.get(name)
            if value is target:
                continue
            if target is not None and _alike(value, target):
                target[...] = value
            else:
                self._fit(name, np.asarray(value), target)

    def _fit(self, name: str, value: np.ndarray, target: np.ndarray | None) -> None:
        """Write an input that may not have the declared shape."""
        spec = self.specs[name]
        if target is None or value.dtype != target.dtype or not _fits(value.shape, spec.shape):
            raise FieldError(name, got=f"{value.dtype.name}{list(value.shape)}", expected=f"{spec.dtype}{list(spec.shape)}")
        if value.shape != spec.shape:
            target.fill(0)
            target = target[tuple(slice(0, n) for n in value.shape)]
        target[...] = value


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Host memory of one request's inputs, side by side as they lie in a slot."""

    data: Tensor
    views: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Input -> its place in the row, where the row is to be filled here."""


def _alike(value: np.ndarray, target: np.ndarray) -> bool:
    return value.__class__ is np.ndarray and value.shape == target.shape and value.dtype == target.dtype


def _fits(shape: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return shape == most or (len(shape) == len(most) and all(n <= m for n, m in zip(shape, most, strict=True)))


class Arenas:
    """All tensors of one device that outlive a stage. Addresses never change."""

    def __init__(
        self,
        inputs: Mapping[str, TensorSpec],
        values: Mapping[str, TensorSpec],
        state: Mapping[str, Mapping[str, TensorSpec]],
        *,
        device: torch.device,
        slots: int,
        state_slots: Mapping[str, int] | None = None,
        unpadded: Collection[str] = (),
        lanes: int = 1,
    ) -> None:
        """Allocate everything.

        Args:
            inputs: route inputs, packed; `values`: all other values that this device sees.
            state: state tensors by the pool whose slots index them, with `state_slots` of each pool.
            lanes: queues of work that share the slots.
            unpadded: pools that padded rows never touch. They have no slot to spare: a ring can be of many GB.
        """
        self.device = device
        self.slots = SlotPool(slots, "chunk slots", in_turn=lanes > 1)
        counts = state_slots or {}
        spare = {pool: int(pool not in unpadded) for pool in state}
        self.state_slots = {pool: SlotPool(counts.get(pool, 0), f"{pool} slots", spare[pool]) for pool in state}
        self.layout = InputLayout.of(inputs)
        self._packed = torch.zeros(slots + 1, self.layout.row_bytes, dtype=torch.uint8, device=device)
        self._packed_rows = self._packed.unbind()
        self._numbers = torch.arange(slots + 1, device=device)
        self._tensors = {name: self._input_view(name) for name in inputs}
        self._tensors |= {name: self._zeros(slots + 1, spec) for name, spec in values.items()}
        for pool, specs in state.items():
            rows = counts.get(pool, 0) + spare[pool]
            self._tensors |= {name: self._zeros(rows, spec) for name, spec in specs.items()}

    def _zeros(self, slots: int, spec: TensorSpec) -> Tensor:
        return torch.zeros((slots, *spec.shape), dtype=torch_dtype(spec.dtype), device=self.device)

    def _input_view(self, name: str) -> Tensor:
        spec, start = self.layout.specs[name], self.layout.offsets[name]
        return self._packed[:, start : start + spec.nbytes].view(torch_dtype(spec.dtype)).view(-1, *spec.shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def load(self, slot: int, packed: PackedRow) -> None:
        """Copy one packed request into a slot; asynchronous when the row is pinned."""
        self._packed_rows[slot].copy_(packed.data, non_blocking=True)

    def rows(self, names: Sequence[str], slots: Sequence[int], *, view: bool = False) -> dict[str, Tensor]:
        """Return values, [B, ...], of these slots in their order: copies, or with `view` the storage itself where it can be.

        Does not synchronise.
        """
        first, last = slots[0], slots[-1]
        if tuple(slots) == tuple(range(first, last + 1)):
            if view:
                return {name: self._tensors[name][first : last + 1] for name in names}
            index = self._numbers[first : last + 1]  # no copy from the host
        else:
            index = torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)
        return {name: self._tensors[name].index_select(0, index) for name in names}

    @property
    def nbytes(self) -> int:
        own = sum(t.nbytes for n, t in self._tensors.items() if n not in self.layout.specs)
        return own + self._packed.nbytes
