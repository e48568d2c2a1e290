"""What an engine asks of a device, whether its executor is in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from stretto.runtime.arena import PackedRow
from stretto.runtime.flow import Flow


class Seat(Protocol):
    """One device of a plan. `Executor` is the near one."""

    name: str

    @property
    def dead(self) -> str | None:
        """Why the device cannot run any more, or None."""

    @property
    def queue_depth(self) -> int: ...
    @property
    def captures(self) -> int: ...
    @property
    def costs(self) -> Mapping[tuple[str, ...], Sequence[float]]:
        """Stages that run as one task -> measured seconds of a batch of 1, 2, ...; empty where nothing was measured."""

    def warm(self) -> None: ...
    def start(self) -> None: ...
    def row(self) -> PackedRow: ...
    def pack(self, inputs: Mapping[str, np.ndarray], row: PackedRow | None = None) -> PackedRow: ...
    def open_stream(self, stream: int, stream_class: str) -> None: ...
    def close_stream(self, stream: int, closed: Callable[[], None]) -> None: ...
    def set_condition(self, stream: int, name: str, version: int, value: Tensor) -> None: ...
    def offer(self, flow: Flow) -> None: ...
    def close(self) -> None: ...
