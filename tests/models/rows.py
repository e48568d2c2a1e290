"""The smallest batch that a stage can run on: arenas in a dict, nothing captured, nothing scheduled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from stretto.core.model import Model, Row
from torch import Tensor


class DictRows:
    """Rows of one batch over arenas of their own; row i is in slot i + 1, and `padding` more rows share slot 0."""

    def __init__(self, model: Model, inputs: Mapping[str, Tensor], *, padding: int = 0, lengths: Mapping[str, int] | None = None):
        self.model = model
        real = next(iter(inputs.values())).shape[0]
        slots = [*range(1, real + 1), *[0] * padding]
        self.slots_B = torch.tensor(slots)
        self.state_slots_B = self.slots_B
        self.steps_B = torch.zeros(len(slots), dtype=torch.int64)
        self._lengths = {b.axis: (lengths or {}).get(b.axis, b.lengths[-1]) for b in model.buckets}
        self._cut = {name: (axis, b.axis) for b in model.buckets for name, axis in b.values.items()}
        specs = {**model.values, **model.state}
        self._arenas = {n: torch.zeros(real + 1, *s.shape, dtype=getattr(torch, s.dtype)) for n, s in specs.items()}
        for name, value in inputs.items():
            self._arenas[name][1:] = value

    @property
    def size(self) -> int:
        return len(self.slots_B)

    @property
    def host(self) -> Sequence[Row]:
        return [Row(i, 0, int(self.steps_B[i]), int(s)) for i, s in enumerate(self.slots_B) if s]

    def get(self, name: str) -> Tensor:
        value = self._arenas[name][self.slots_B]
        if name in self._cut:
            axis, bucket = self._cut[name]
            value = value.narrow(axis + 1, 0, self._lengths[bucket])
        return value

    def put(self, name: str, value: Tensor) -> None:
        arena = self._arenas[name]
        assert value.shape == (self.size, *arena.shape[1:]), f"{name}: got {list(value.shape)}, declared {list(arena.shape[1:])}"
        assert value.dtype == arena.dtype, f"{name}: got {value.dtype}, declared {arena.dtype}"
        arena[self.slots_B] = value

    def arena(self, name: str) -> Tensor:
        return self._arenas[name]

    def length(self, axis: str) -> int:
        return self._lengths[axis]


def run_route(model: Model, inputs: Mapping[str, Tensor], **options: object) -> DictRows:
    """Run every visit of the route and return the rows, whose arenas hold all values."""
    rows = DictRows(model, inputs, **options)  # type: ignore[arg-type]
    for visit in model.route.visits:
        rows.steps_B = torch.full_like(rows.steps_B, visit.step)
        model.stages[visit.stage].run(rows)
    return rows


def outputs(model: Model, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
    """Return the route's first output for every real row."""
    return run_route(model, inputs, **options).arena(model.route.outputs[0])[1:]
