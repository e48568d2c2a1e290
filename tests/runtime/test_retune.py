"""An engine that goes on by another plan with the same placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy import CarryModel

from stretto.core.errors import ConfigError, PlanError
from stretto.core.plan import Plan, whole
from stretto.runtime.engine import Engine, Stream


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = CarryModel(steps=2, blocks=2)
    made = Engine(model, whole(model.route, "cpu:0", batch_cap=3), streams=3)
    made.warm()
    yield made
    made.close()


def batches(engine: Engine, streams: list[Stream]) -> list[int]:
    with engine.together():
        futures = [stream.submit({"x": np.asarray(1.0)}) for stream in streams]
    return [max(future.result(30).batch_sizes.values()) for future in futures]


def capped(plan: Plan, cap: int) -> Plan:
    return replace(plan, batch_caps={"cpu:0": cap}, dispatch="oldest_chunk_first", ahead=0)


def test_open_streams_go_on_under_the_caps_of_another_plan(engine: Engine) -> None:
    streams = [engine.open() for _ in range(3)]
    for stream in streams:
        stream.set_condition("prompt", torch.tensor(1.0, dtype=torch.float64))
    found = [batches(engine, streams)]
    for cap in (1, 2, 3):
        engine.retune(capped(engine.plan, cap))
        found.append(batches(engine, streams))
    assert found == [[3, 3, 3], [1, 1, 1], [2, 2, 1], [3, 3, 3]]


def test_a_plan_that_places_otherwise_or_asks_for_larger_batches_is_refused(engine: Engine) -> None:
    before = engine.plan
    with pytest.raises(PlanError, match="plan: got"):
        engine.retune(replace(before, classes={"other": before.placements("default")}))
    with pytest.raises(PlanError, match=r"batch_caps\[cpu:0\]: got 4, expected at most 3"):
        engine.retune(capped(before, 4))
    with pytest.raises(ConfigError, match="dispatch"):
        engine.retune(before.with_dispatch("by_name"))
    assert engine.plan == before
