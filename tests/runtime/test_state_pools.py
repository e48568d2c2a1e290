"""A device holds state for the stages that a stream runs there, and for no others."""

import itertools
import time
from dataclasses import replace

import torch

from stretto.core.errors import CapacityError
from stretto.core.plan import Device, Placement, Plan
from stretto.core.route import Segment
from stretto.models.wan import WanModel
from stretto.models.wan_config import tiny_config
from stretto.runtime.engine import Engine, Stream
from stretto.runtime.layout import arenas_for, state_slots
from stretto.runtime.pools import StatePools

CPU = torch.device("cpu")


def model_of(blocks: int) -> WanModel:
    model = WanModel(replace(tiny_config(), blocks=blocks))
    model.randomize(seed=0)
    return model


def cut_in_other_ways(model: WanModel) -> Plan:
    """One stream on the first device alone, one whose later blocks are on the second."""
    visits = model.route.visits
    whole = (Placement(model.route.whole, "cpu:0"),)
    middle = [i for i, v in enumerate(visits) if v.stage == "block.1"]
    ends = [*[i for i, v in enumerate(visits) if v.stage == "embed"][1:], len(visits)]
    cuts = sorted({0, *middle, *ends})
    split = tuple(
        Placement(Segment(a, b), "cpu:1" if visits[a].stage == "block.1" else "cpu:0") for a, b in itertools.pairwise(cuts)
    )
    return Plan("test", (Device("cpu:0"), Device("cpu:1")), {"alone": whole, "spread": split}, {"cpu:0": 2, "cpu:1": 1})


def test_streams_that_are_cut_in_other_ways_hold_slots_of_their_own_stages_alone() -> None:
    model = model_of(2)
    plan, steps = cut_in_other_ways(model), model.config.denoise_steps
    each = {"alone": 1, "spread": 1}
    first = arenas_for(model, plan, "cpu:0", CPU, slots=2, streams=each)
    second = arenas_for(model, plan, "cpu:1", CPU, slots=2, streams=each)
    assert first["block.0.k"].shape[0] == 2 * steps
    assert first["block.1.k"].shape[0] == steps  # the spread stream's are on the other device
    assert second["block.1.k"].shape[0] == steps


def test_with_one_class_of_streams_the_pools_are_those_of_the_model() -> None:
    model = model_of(2)
    plan = replace(cut_in_other_ways(model), classes={"alone": (Placement(model.route.whole, "cpu:0"),)})
    pools = StatePools(model, plan.classes, "cpu:0")
    assert all(pools.key(v) == model.state_key(v) for v in model.route.visits)
    assert state_slots(model, plan, "cpu:0", 3) == {pool: 3 * n for pool, n in pools.counts("alone").items()}


def opened(engine: Engine, stream_class: str) -> Stream:
    """Open a stream as soon as those that were closed have given their slots back."""
    until_s = time.monotonic() + 10.0
    while True:
        try:
            return engine.open(stream_class=stream_class)
        except CapacityError:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_stream_that_leaves_frees_the_slots_of_every_pool() -> None:
    model = model_of(2)
    engine = Engine(model, cut_in_other_ways(model), slots=4, streams={"alone": 1, "spread": 1})
    engine.warm()
    try:
        for _ in range(3):
            for stream in [opened(engine, "alone"), opened(engine, "spread")]:
                stream.set_condition("context", model.context(torch.randn(3, model.config.text_width)))
                inputs = {name: value.numpy() for name, value in model.inputs(0, stream.id, 0, actions={}).items()}
                stream.submit(inputs).result(60)
                stream.close()
    finally:
        engine.close()
