"""The smallest batch that a stage can run on: arenas in a dict, nothing captured, nothing scheduled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.core.model import Model, Row
from stretto.core.route import TensorSpec, Visit


class DictRows:
    """Rows of one batch over arenas of their own; row i is in slot i + 1, and `padding` more rows share slot 0.

    `streams` tells whose rows they are (noise and conditions follow the stream); by default 0, 1, ...
    """

    def __init__(
        self,
        model: Model,
        inputs: Mapping[str, Tensor],
        *,
        padding: int = 0,
        lengths: Mapping[str, int] | None = None,
        streams: Sequence[int] | None = None,
    ) -> None:
        self.model, self.real = model, next(iter(inputs.values())).shape[0]
        self.streams = list(range(self.real)) if streams is None else list(streams)
        self.slots_B = torch.tensor([*range(1, self.real + 1), *[0] * padding])
        self.chunk, self.steps_B, self.state_slots_B = 0, torch.zeros_like(self.slots_B), torch.zeros_like(self.slots_B)
        keys = [key for v in model.route.visits if (key := model.state_key(v))]
        self._keys = 1 + max((key.index for key in keys), default=0)
        self._lengths = {b.axis: (lengths or {}).get(b.axis, b.lengths[-1]) for b in model.buckets}
        self._cut = {name: (axis, b.axis) for b in model.buckets for name, axis in b.values.items()}
        self._arenas = {n: zeros(1 + self.real, spec) for n, spec in model.values.items()}
        self._arenas |= {n: zeros(1 + self.real * self._keys, spec) for n, spec in model.state.items()}
        for name, value in inputs.items():
            self._arenas[name][1:] = value

    def enter(self, visit: Visit) -> None:
        self.steps_B = torch.full_like(self.slots_B, visit.step)
        key = self.model.state_key(visit)
        slots = (self.slots_B - 1) * self._keys + 1 + (key.index if key else 0)
        self.state_slots_B = torch.where(self.slots_B > 0, slots, 0)

    @property
    def size(self) -> int:
        return len(self.slots_B)

    @property
    def chunks_B(self) -> Tensor:
        return torch.full_like(self.slots_B, self.chunk)

    @property
    def host(self) -> Sequence[Row]:
        rows = zip(self.slots_B.tolist(), self.steps_B.tolist(), self.state_slots_B.tolist(), strict=True)
        return [Row(self.streams[slot - 1], self.chunk, step, slot, state_slot) for slot, step, state_slot in rows if slot]

    def get(self, name: str) -> Tensor:
        value = self._arenas[name][self.slots_B]
        if name in self._cut:
            axis, bucket = self._cut[name]
            value = value.narrow(axis + 1, 0, self._lengths[bucket])
        return value

    def put(self, name: str, value: Tensor) -> None:
        arena = self._arenas[name]
        assert value.shape == (self.size, *arena.shape[1:]), (
            f"{name}: got {list(value.shape)}, declared {list(arena.shape[1:])}"
        )
        assert value.dtype == arena.dtype, f"{name}: got {value.dtype}, declared {arena.dtype}"
        arena[self.slots_B] = value

    def arena(self, name: str) -> Tensor:
        return self._arenas[name]

    def length(self, axis: str) -> int:
        return self._lengths[axis]

    def condition(self, row: int, name: str) -> tuple[int, Tensor]:
        spec = self.model.conditions[name]
        return 1, torch.randn(spec.shape, generator=torch.Generator().manual_seed(self.streams[row])).to(
            getattr(torch, spec.dtype)
        )


def zeros(slots: int, spec: TensorSpec) -> Tensor:
    return torch.zeros(slots, *spec.shape, dtype=getattr(torch, spec.dtype))


def inputs_for(model: Model, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Return the model's own example inputs, or random ones by declared shape and dtype."""
    if hasattr(model, "example_inputs"):
        inputs: dict[str, Tensor] = model.example_inputs(batch, seed)
        return inputs
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in model.route.inputs:
        value = zeros(batch, model.values[name])
        made[name] = torch.randn(value.shape, generator=generator).to(value.dtype) if value.is_floating_point() else value
    return made


def run_route(
    model: Model,
    inputs: Mapping[str, Tensor],
    *,
    padding: int = 0,
    lengths: Mapping[str, int] | None = None,
    streams: Sequence[int] | None = None,
) -> DictRows:
    """Run every visit of the route and return the rows, whose arenas hold all values."""
    rows = DictRows(model, inputs, padding=padding, lengths=lengths, streams=streams)
    for visit in model.route.visits:
        rows.enter(visit)
        model.stages[visit.stage].run(rows)
    return rows


def outputs(
    model: Model,
    inputs: Mapping[str, Tensor],
    *,
    padding: int = 0,
    lengths: Mapping[str, int] | None = None,
    streams: Sequence[int] | None = None,
) -> Tensor:
    """Return the route's first output for every real row."""
    rows = run_route(model, inputs, padding=padding, lengths=lengths, streams=streams)
    return rows.arena(model.route.outputs[0])[1:]
