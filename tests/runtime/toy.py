"""A two-stage toy model with the real contracts: cheap, exact, and easy to reason about."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from stretto.core.model import Buckets, Rows, Stage
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

    def state_key(self, visit: Visit) -> int:
        return 0

    def expected(self, items: list[float], x: float) -> float:
        return x + sum(items) * sum(s + 1 for s in range(self.steps))
