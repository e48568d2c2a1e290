"""The real engine runs the Wan route: whole or cut over devices, streams together or alone, the numbers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wan_world import Streams, prompt

from stretto.core.plan import Device, Placement, Plan, whole
from stretto.models.wan import WanModel
from stretto.models.wan_config import PolicyName, tiny_config
from stretto.runtime.engine import Engine

CHUNKS = 7


def model_of(policy: PolicyName) -> WanModel:
    model = WanModel(replace(tiny_config(), kv_policy=policy, window_frames=3, levels=tiny_config().levels[::2]))
    model.randomize(seed=3)
    return model


def by_step(model: WanModel) -> Plan:
    edges = model.route.cut([i for i, v in enumerate(model.route.visits) if v.stage == "embed" and i])
    names = [f"cpu:{i}" for i in range(len(edges))]
    placements = tuple(Placement(segment, name) for segment, name in zip(edges, names, strict=True))
    return Plan("by_step", tuple(map(Device, names)), {"default": placements}, in_flight=len(names))


def served(model: WanModel, plan: Plan, streams: int) -> list[list[Tensor]]:
    engine = Engine(model, plan, slots=2 * CHUNKS, streams=streams)
    engine.warm()
    try:
        opened = [engine.open(seed=5) for _ in range(streams)]
        for u, stream in enumerate(opened):
            stream.set_condition("context", prompt(model, u))
        inputs = [[model.inputs(5, s.id, c) for c in range(CHUNKS)] for s in opened]
        futures = [[] for _ in opened]
        for c in range(CHUNKS):
            for u, stream in enumerate(opened):
                futures[u].append(stream.submit({name: value.numpy() for name, value in inputs[u][c].items()}))
        return [[torch.from_numpy(f.result(60).outputs["x"]) for f in row] for row in futures]
    finally:
        engine.close()


@pytest.mark.parametrize("policy", ["same_step", "last_step", "clean"])
def test_an_engine_gives_what_the_visits_give_one_by_one(policy: PolicyName) -> None:
    model = model_of(policy)
    by_hand = Streams(model, 2)
    want = [[by_hand.chunk(u, c, model.inputs(5, u, c)) for c in range(CHUNKS)] for u in range(2)]
    got = served(model, whole(model.route, "cpu"), streams=2)
    assert all(torch.equal(g, w) for rows in zip(got, want, strict=True) for g, w in zip(*rows, strict=True))


def test_a_pipeline_with_a_step_a_device_equals_the_serial_run_bit_for_bit() -> None:
    model = model_of("same_step")
    serial = served(model, whole(model.route, "cpu"), streams=2)
    pipelined = served(model, by_step(model), streams=2)
    assert all(torch.equal(a, b) for rows in zip(serial, pipelined, strict=True) for a, b in zip(*rows, strict=True))
