"""A chunk in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stretto.core.plan import Placement
from stretto.parallel.order import Mark
from stretto.runtime.arena import PackedRow
from stretto.runtime.timing import Stamp
from stretto.runtime.ways import MAIN

CROSSES = (
    "stream", "serial", "chunk", "stream_class", "route", "seed", "submitted_s", "deadline_s", "lengths", "versions",
    "before", "at", "started_s", "ran_eagerly", "behind",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class Flow:
    """One chunk on its way, as the device that has it sees it."""

    stream: int
    chunk: int
    """The chunk's number as the model knows it."""
    placements: tuple[Placement, ...]
    serial: int = 0
    """Which of the stream's submissions it is. Differs from `chunk` where a chunk is made again."""
    stream_class: str = "default"
    route: str = MAIN
    before: Mapping[str, int] = field(default_factory=dict)
    """Route -> how many earlier submissions of the stream take it."""
    seed: int = 0
    submitted_s: float = 0.0
    deadline_s: float = math.inf
    lengths: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of the stream's conditions, frozen when the chunk was admitted."""
    packed: PackedRow | None = None
    """Route inputs of a chunk that starts here."""
    values: Mapping[str, Tensor] | None = None
    """Values that came with a chunk from another device."""
    there: Mark | None = None
    """Where in the device's work those values are there."""
    at: int = 0
    slot: int = 0
    ready_s: float = 0.0
    started_s: float = math.inf
    ran_eagerly: bool = False
    """Whether any segment so far was not a replay."""
    spans: list[tuple[str, Stamp, Stamp, int]] = field(default_factory=list)
    behind: int = 0
    """How many chunks of its last batch follow it to the same device."""

    @property
    def placement(self) -> Placement:
        return self.placements[self.at]

    @property
    def key(self) -> tuple[int, int]:
        """The chunk's name in every process."""
        return self.stream, self.serial

    def header(self) -> dict[str, Any]:
        """Return what another process must know of it beside its values; plain data."""
        return {name: getattr(self, name) for name in CROSSES}


def flow_of(header: Mapping[str, Any], placements: Callable[[str, str], tuple[Placement, ...]]) -> Flow:
    """Rebuild a chunk from its header; `placements` gives those of a route and a stream class."""
    return Flow(placements=placements(header["route"], header["stream_class"]), **header)
