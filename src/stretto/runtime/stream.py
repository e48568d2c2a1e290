"""A stream as its owner sees it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.errors import StreamClosedError, WorkerDiedError
from stretto.runtime.arena import PackedRow
from stretto.runtime.flow import Flow
from stretto.runtime.slots import Slots
from stretto.runtime.ways import MAIN

if TYPE_CHECKING:
    from stretto.runtime.engine import Engine


@dataclass(eq=False)
class Stream:
    """One robot or one world session: a sequence of chunks, in order."""

    engine: Engine
    id: int
    stream_class: str
    seed: int
    submitted: int = 0
    """Chunks so far; the index of the next one."""
    versions: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    lost: str = ""
    """Why the stream ended before it was closed."""
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _before: dict[str, int] = field(default_factory=dict)
    _serial: int = 0
    in_flight: int = 0
    """Chunks between admission and completion; kept by the engine, under its lock."""
    held: deque[Flow] = field(default_factory=deque)
    """Chunks that wait for a credit; kept by the engine, under its lock."""
    slots: Slots | None = None
    """Where the plan has admission slots; asked by the engine, under its lock."""

    @property
    def room(self) -> int:
        """How many chunks would be admitted at once if they were submitted now."""
        return max(0, self.engine.plan.credit(self.stream_class) - self.in_flight - len(self.held))

    def set_condition(self, name: str, value: Tensor) -> int:
        """Change a condition, such as the prompt, for the chunks submitted from now on. Returns its version."""
        self.versions[name] = self.versions.get(name, -1) + 1
        self.engine._set_condition(self, name, self.versions[name], value)
        return self.versions[name]

    def row(self, route: str = MAIN) -> PackedRow:
        """Return memory from which the inputs of one chunk go to the device, for who would else write them twice."""
        return self.engine.executors[self.engine.ways.placements(route, self.stream_class)[0].device].row()

    def submit(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        lengths: Mapping[str, int] | None = None,
        seed: int | None = None,
        deadline_s: float = math.inf,
        route: str = MAIN,
        chunk: int | None = None,
        row: PackedRow | None = None,
    ) -> Future[Chunk]:
        """Queue one chunk; any thread, never blocks on the device.

        `inputs` holds every route input as one row. `lengths` are the real lengths on the model's bucketed axes.
        `deadline_s` is on the engine's clock (`engine.now_s`). `route` is one of those that the engine was built with.
        `chunk` makes a chunk of the stream again; None takes the next one. `row` is one that `row()` returned for this chunk:
        inputs that are its own views need not be copied.

        Callbacks of the future run on the engine's thread, and where streams have state no device chooses a batch while those
        of chunks that left together run: keep them short.

        Raises:
            FieldError: if an input is missing, unknown, or of another shape or dtype.
            StreamClosedError: if the stream was closed.
            WorkerDiedError: if a device that held its state is gone.
        """
        if self.closed:
            raise StreamClosedError("the stream was closed")
        if self.lost:
            raise WorkerDiedError(self.lost)
        with self._turn:
            placements = self.engine.ways.placements(route, self.stream_class)
            flow = Flow(
                self.id,
                self.submitted if chunk is None else chunk,
                placements,
                serial=self._serial,
                stream_class=self.stream_class,
                route=route,
                before=dict(self._before),
                seed=self.seed if seed is None else seed,
                submitted_s=self.engine.now_s,
                deadline_s=deadline_s,
                lengths=dict(lengths or {}),
                versions=dict(self.versions),
            )
            future = self.engine._submit(self, flow, inputs, row)
            self._before[route] = self._before.get(route, 0) + 1
            self._serial += 1
            self.submitted = max(self.submitted, flow.chunk + 1)
        return future

    def close(self) -> None:
        """Drop queued chunks; their futures raise StreamClosedError. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self.engine._close_stream(self)
