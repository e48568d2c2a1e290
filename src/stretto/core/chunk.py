"""What a stream gives back: one finished chunk, with the account of how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

from stretto.core.plan import Mode


@dataclass(frozen=True)
class Chunk:
    """One chunk's outputs on the host. The arrays belong to the receiver; they never alias device buffers."""

    stream: int
    index: int
    outputs: Mapping[str, np.ndarray]
    mode: Mode
    """How it really ran: `graph` only if all of its segments were replayed."""
    queue_ms: float
    """From submission to the first launch."""
    run_ms: float
    """From the first launch to the outputs on the host."""
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    """Device time by segment, named after its stages; visits of one stage are added up."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """Largest batch that each segment of this chunk ran in."""
    device_ms: Mapping[str, float] = field(default_factory=dict)
    """Device -> the chunk's share of its time, where each batch is shared out evenly; sums over chunks to the busy time."""
