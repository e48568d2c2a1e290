"""Where models and the runtime meet. Neither imports the other; both import these protocols.

Shape legend: B rows of a batch, one row a task.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stretto.core.errors import FieldError
from stretto.core.route import Route, StageSpec, TensorSpec, Visit

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Row:
    """What the host knows of one row of a batch. Never read under graph capture."""

    stream: int
    chunk: int
    step: int
    slot: int
    """Index of the chunk's values in every value arena of this device."""
    state_slot: int = 0
    """Index of the (stream, step) state in every state arena of this device."""
    seed: int = 0


class Rows(Protocol):
    """The batch that a stage runs on.

    A stage takes its inputs with `get` and hands on its outputs with `put`; how segments are cut, batched or captured
    cannot change what it computes. Kernels that index by slot use `arena` with `slots_B` and copy nothing.
    """

    @property
    def size(self) -> int: ...
    @property
    def host(self) -> Sequence[Row]:
        """Host-side view of the rows; fewer than `size` when the batch was padded up to a bucket."""

    @property
    def slots_B(self) -> Tensor: ...  # int64, on the device
    @property
    def steps_B(self) -> Tensor: ...  # int64, on the device
    @property
    def state_slots_B(self) -> Tensor: ...  # int64, on the device
    def get(self, name: str) -> Tensor:
        """Return value `name` as [B, ...]; its bucketed axis is cut to `length(name)`."""
        ...

    def put(self, name: str, value: Tensor) -> None:
        """Store value `name`, [B, ...], for the visits that follow."""
        ...

    def arena(self, name: str) -> Tensor:
        """Return the storage of a value or of state: [slots, ...]. Slot 0 takes the writes of padded rows."""
        ...

    def length(self, axis: str) -> int:
        """Return the static length chosen for this batch on a bucketed axis."""
        ...

    def condition(self, row: int, name: str) -> tuple[int, Tensor]:
        """Return (version, tensor) of a stream-scoped condition, as frozen when the row's chunk was admitted."""
        ...


@runtime_checkable
class Stage(Protocol):
    """A piece of network with its own weights. It does not know how many devices there are."""

    spec: StageSpec

    def run(self, rows: Rows) -> None: ...


@runtime_checkable
class CapturesByRows(Protocol):
    """What a stage offers when its captured work depends on which rows it runs, not on their number alone.

    Stages with an attribute `alike` of the same value give the same keys for the same rows, so one of them is asked for all.
    """

    def capture_key(self, host: Sequence[Row]) -> Hashable:
        """Return what a capture of these rows bakes in: it serves every batch of equal key. None: run them eagerly."""
        ...

    def prepare(self, rows: Rows) -> None:
        """Do what must happen before these rows are replayed. Called outside any capture; an eager run does it itself."""
        ...


@dataclass(frozen=True, slots=True)
class StateKey:
    """One state slot of a stream: the pool it comes from, and which of the stream's slots in that pool.

    Stages whose slots are counted differently (rings a denoise step, decoder caches a stream) use different pools.
    """

    pool: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Buckets:
    """An axis whose length differs between requests; graphs exist for these lengths only.

    A request of length n runs in the smallest bucket >= n. The real length is data on the device.
    """

    axis: str
    lengths: tuple[int, ...]
    values: Mapping[str, int]
    """Value name -> which axis of one row (0 is the first after the batch axis) is cut to the bucket."""
    stages: tuple[str, ...]
    """Stages whose shapes depend on the bucket; the others are captured once."""

    def fit(self, n: int) -> int:
        for length in self.lengths:
            if n <= length:
                return length
        raise FieldError(self.axis, got=n, expected=f"at most {self.lengths[-1]}, the largest bucket")


class Model(Protocol):
    """A network bound to its route. Single-device and stateless: caches, capture and loops live in the runtime."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def route(self) -> Route: ...
    @property
    def stages(self) -> Mapping[str, Stage]: ...
    @property
    def values(self) -> Mapping[str, TensorSpec]:
        """Every value of the route, at its largest bucket."""

    @property
    def state(self) -> Mapping[str, TensorSpec]:
        """Every state tensor, for one state slot."""

    @property
    def conditions(self) -> Mapping[str, TensorSpec]:
        """Tensors that belong to a stream and change rarely, such as a prompt's embedding."""

    @property
    def buckets(self) -> tuple[Buckets, ...]: ...
    def state_key(self, visit: Visit) -> StateKey | None:
        """Return which of a stream's state slots a visit uses; None if its stage keeps no state."""
        ...

    def carry(self, visit: Visit) -> Visit | None:
        """Return the visit of the previous chunk that must be done before this one; None if there is none.

        The same visit where chunks overlap (state at the same denoise step); a later one where a chunk needs more of its
        predecessor, up to all of it. Both use the same state, so they run on the same device.
        """
        ...
