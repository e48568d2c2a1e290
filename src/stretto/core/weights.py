"""How a model's storage is named in checkpoints. Models make the map, the runtime reads and writes through it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightMap:
    """Checkpoint names and the storage behind them.

    A view has the shape that the checkpoint has; it may be a slice, a reshape or a permutation of fused storage, so that
    copying into it is all that loading does.
    """

    views: Mapping[str, Tensor]
    """Canonical checkpoint name -> the storage it fills."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Another name of the same tensor -> canonical name; read only where the canonical name is absent."""
    unused: tuple[str, ...] = ()
    """Patterns (whole name) of tensors that a checkpoint may hold and that the network never reads."""
    prefixes: tuple[str, ...] = ()
    """What some writers put before every name; one of them is taken away, the longest that fits."""
    renames: tuple[tuple[str, str], ...] = ()
    """Start of a name as older writers had it -> start of the canonical name; the first that fits applies."""

    def canonical(self, name: str) -> str:
        """Return the name without a writer's prefix and in today's form; it need not be one that the map knows."""
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        for old, new in self.renames:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def may_ignore(self, canonical: str) -> bool:
        return any(p.fullmatch(canonical) for p in self._unused)

    @cached_property
    def _unused(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(p) for p in self.unused)


@runtime_checkable
class Weighted(Protocol):
    """A model whose weights can be loaded and replaced in place."""

    def weight_map(self) -> WeightMap: ...
    def refresh(self) -> None:
        """Recompute, in place, everything derived from weights. Call after every change of a weight."""
        ...
