"""Streams of a world model driven by hand: arenas in a dict, any (stream, chunk) rows in one batch, visit by visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.core.model import Row
from stretto.core.route import Route, TensorSpec, Visit
from stretto.models.wan import WanModel


@dataclass(frozen=True)
class Member:
    """One row: a stream's chunk at a step."""

    stream: int
    chunk: int
    step: int


class Streams:
    """Storage of some streams, numbered from 0; stream u has value slot u + 1."""

    def __init__(self, model: WanModel, count: int = 1, *, conditions: Sequence[Mapping[str, tuple[int, Tensor]]] = ()) -> None:
        self.model, self.count = model, count
        self.rings = model.config.policy.states
        self.arenas = {n: zeros(count + 1, spec, model.device) for n, spec in model.values.items()}
        self.arenas |= {n: zeros(count * self.rings + 1, spec, model.device) for n, spec in model.state.items()}
        self.conditions = [dict(c) for c in conditions] or [{"context": (1, prompt(model, u))} for u in range(count)]

    def state_slot(self, stream: int, visit: Visit) -> int:
        key = self.model.state_key(visit)
        return 1 + stream * self.rings + key.index if key else 0

    def admit(self, stream: int, inputs: Mapping[str, Tensor]) -> None:
        for name, value in inputs.items():
            self.arenas[name][stream + 1] = value

    def run(self, stage: str, members: Sequence[Member], padding: int = 0) -> None:
        self.model.stages[stage].run(StreamRows(self, stage, members, padding))

    def chunk(self, stream: int, chunk: int, inputs: Mapping[str, Tensor], route: Route | None = None) -> Tensor:
        """Run one chunk's whole route alone and return its latent."""
        self.admit(stream, inputs)
        for visit in (route or self.model.route).visits:
            self.run(visit.stage, [Member(stream, chunk, visit.step)])
        return self.arenas["x"][stream + 1].clone()


class StreamRows:
    """One batch of a stage; padded rows are in slot 0."""

    def __init__(self, streams: Streams, stage: str, members: Sequence[Member], padding: int) -> None:
        self.streams = streams
        slots = [streams.state_slot(m.stream, Visit(stage, m.step)) for m in members]
        self.host = [Row(m.stream, m.chunk, m.step, m.stream + 1, s) for m, s in zip(members, slots, strict=True)]
        pad = [0] * padding
        device = streams.model.device
        self.slots_B = torch.tensor([row.slot for row in self.host] + pad, device=device)
        self.steps_B = torch.tensor([row.step for row in self.host] + pad, device=device)
        self.state_slots_B = torch.tensor(slots + pad, device=device)

    @property
    def size(self) -> int:
        return len(self.slots_B)

    def get(self, name: str) -> Tensor:
        return self.streams.arenas[name][self.slots_B]

    def put(self, name: str, value: Tensor) -> None:
        self.streams.arenas[name][self.slots_B] = value

    def arena(self, name: str) -> Tensor:
        return self.streams.arenas[name]

    def length(self, axis: str) -> int:
        raise KeyError(axis)

    def condition(self, row: int, name: str) -> tuple[int, Tensor]:
        return self.streams.conditions[self.host[row].stream][name]


def zeros(slots: int, spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.zeros(slots, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def prompt(model: WanModel, seed: int = 0, tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return model.context(torch.randn(tokens, model.config.text_width, generator=generator))
