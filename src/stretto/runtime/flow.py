"""A chunk in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stretto.core.plan import Placement
from stretto.runtime.timing import Stamp


@dataclass(eq=False, slots=True)
class Flow:
    """One chunk on its way, as the device that has it sees it."""

    stream: int
    chunk: int
    placements: tuple[Placement, ...]
    seed: int = 0
    submitted_s: float = 0.0
    deadline_s: float = math.inf
    lengths: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of the stream's conditions, frozen when the chunk was admitted."""
    packed: Tensor | None = None
    """Route inputs of a chunk that starts here."""
    values: Mapping[str, Tensor] | None = None
    """Values that came with a chunk from another device."""
    at: int = 0
    slot: int = 0
    ready_s: float = 0.0
    started_s: float = math.inf
    spans: list[tuple[str, Stamp, Stamp, int]] = field(default_factory=list)

    @property
    def placement(self) -> Placement:
        return self.placements[self.at]
