"""A two-stage toy model with the real contracts: cheap, exact, and easy to reason about."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from stretto.core.model import Buckets, Rows, Stage, StateKey
from stretto.core.route import Route, StageSpec, TensorSpec, Visit


class Encode:
    """Sums the first `count` items of a bucketed list."""

    spec = StageSpec("encode", ("items", "count"), ("code",))

    def run(self, rows: Rows) -> None:
        items = rows.get("items")
        valid = torch.arange(rows.length("items"))[None] < rows.get("count")[:, None]
        rows.put("code", (items * valid).sum(1, dtype=torch.float64))


class Refine:
    """x <- x + code * (step + 1): needs the right step for every row of a mixed batch."""

    spec = StageSpec("refine", ("x", "code"), ("x",))

    def run(self, rows: Rows) -> None:
        rows.put("x", rows.get("x") + rows.get("code")[:, None] * (rows.steps_B + 1)[:, None])


class ToyModel:
    name = "toy"

    def __init__(self, steps: int = 4, width: int = 3) -> None:
        self.module = nn.Identity()
        self.steps, self.width = steps, width
        self.stages: Mapping[str, Stage] = {"encode": Encode(), "refine": Refine()}
        visits = (Visit("encode"), *(Visit("refine", s) for s in range(steps)))
        self.route = Route({n: s.spec for n, s in self.stages.items()}, visits, ("items", "count", "x"), ("x",))
        self.values = {
            "items": TensorSpec((8,), "float32"),
            "count": TensorSpec((), "int32"),
            "x": TensorSpec((width,), "float64"),
            "code": TensorSpec((), "float64"),
        }
        self.state: Mapping[str, TensorSpec] = {}
        self.conditions: Mapping[str, TensorSpec] = {}
        self.buckets = (Buckets("items", (2, 4, 8), {"items": 0}, ("encode",)),)

    def state_key(self, visit: Visit) -> StateKey | None:
        return None

    def carry(self, visit: Visit) -> Visit | None:
        return None

    def expected(self, items: list[float], x: float) -> float:
        return x + sum(items) * sum(s + 1 for s in range(self.steps))


class Carry:
    """y = x + 10 * (what the previous chunk had here at this step), plus the prompt: a ring of length one."""

    def __init__(self, index: int) -> None:
        self.state = f"left.{index}"
        self.spec = StageSpec(f"carry.{index}", ("x",), ("x",), (self.state,))

    def run(self, rows: Rows) -> None:
        x = rows.get("x")
        left = rows.arena(self.state)
        before = left[rows.state_slots_B]
        first = torch.tensor([row.chunk == 0 for row in rows.host])
        prompt = torch.stack([rows.condition(i, "prompt")[1] for i in range(len(rows.host))])
        y = x * 2 + torch.where(first, 0.0, 10 * before) + prompt
        left[rows.state_slots_B] = x
        rows.put("x", y)


class CarryModel:
    """`steps` times through `blocks` stages that each keep state; chunks may overlap."""

    name = "carry"

    def __init__(self, steps: int = 2, blocks: int = 2) -> None:
        self.module = nn.Identity()
        stages = [Carry(i) for i in range(blocks)]
        self.stages: Mapping[str, Stage] = {s.spec.name: s for s in stages}
        visits = tuple(Visit(s.spec.name, step) for step in range(steps) for s in stages)
        self.route = Route({n: s.spec for n, s in self.stages.items()}, visits, ("x",), ("x",))
        self.values = {"x": TensorSpec((), "float64")}
        self.state = {s.state: TensorSpec((), "float64") for s in stages}
        self.conditions = {"prompt": TensorSpec((), "float64")}
        self.buckets: tuple[Buckets, ...] = ()

    def state_key(self, visit: Visit) -> StateKey | None:
        return StateKey("left", visit.step)

    def carry(self, visit: Visit) -> Visit | None:
        return visit

    def serial(self, inputs: list[float], prompts: list[float]) -> list[float]:
        """The oracle: one chunk after the other, in plain Python."""
        left: dict[Visit, float] = {}
        outputs = []
        for x, prompt in zip(inputs, prompts, strict=True):
            for visit in self.route.visits:
                y = x * 2 + 10 * left.get(visit, 0.0) + prompt
                left[visit] = x
                x = y
            outputs.append(x)
        return outputs
