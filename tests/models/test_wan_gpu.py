"""On a GPU: graphs stay right as a stream goes on, chunks say how they ran, and bf16 stays near fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from wan_world import Member, StreamRows, Streams, prompt

from stretto.core.chunk import Chunk
from stretto.core.plan import Device, Placement, Plan
from stretto.deploy.profile import ProfileOptions, profile_world
from stretto.deploy.world_plans import SEVERAL, plan_of
from stretto.deploy.worlds import RandomWorld
from stretto.models.wan import WanModel
from stretto.models.wan_config import Precision, WanConfig, tiny_config
from stretto.runtime.engine import Engine

pytestmark = pytest.mark.gpu

STEP = ("embed", "block.0", "block.1", "head")


def config_of(dtype: str) -> WanConfig:
    return replace(tiny_config(), width=384, heads=3, frames_per_chunk=2, window_frames=7, dtype=dtype)


def model_of(dtype: str, precision: Precision = "dtype") -> WanModel:
    model = WanModel(replace(config_of(dtype), precision=precision), "cuda")
    model.randomize(seed=3)
    return model


def after_chunks(model: WanModel, chunks: int) -> Streams:
    streams = Streams(model, 2)
    for chunk in range(chunks):
        for stream in range(2):
            streams.chunk(stream, chunk, model.inputs(9, stream, chunk))
    return streams


def run_step(streams: Streams, rows: StreamRows) -> None:
    for stage in STEP:
        streams.model.stages[stage].run(rows)


def test_one_graph_serves_chunk_after_chunk_once_the_rings_are_full() -> None:
    model = model_of("bfloat16")
    with torch.inference_mode():
        eager, replayed = after_chunks(model, 5), after_chunks(model, 5)
        members = [Member(stream, 5, 1) for stream in range(2)]
        warm = after_chunks(model, 5)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run_step(warm, StreamRows(warm, "block.0", members, padding=0))
        torch.cuda.synchronize()
        for stream in range(2):
            replayed.admit(stream, model.inputs(9, stream, 5))
        rows = StreamRows(replayed, "block.0", members, padding=0)
        for stage in ("block.0", "block.1"):
            model.stages[stage].prepare(rows)  # type: ignore[attr-defined]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_step(replayed, rows)
        for chunk in range(5, 12):
            for stream in range(2):
                for streams in (eager, replayed):
                    streams.admit(stream, model.inputs(9, stream, chunk))
            run_step(eager, StreamRows(eager, "block.0", [Member(u, chunk, 1) for u in range(2)], padding=0))
            graph.replay()
            torch.cuda.synchronize()
            for name in ("x", "block.0.k", "block.1.v"):
                assert torch.equal(eager.arenas[name][1:], replayed.arenas[name][1:]), (chunk, name)


def test_bf16_stays_near_fp32_on_the_same_weights() -> None:
    low, high = model_of("bfloat16"), model_of("float32")
    with torch.inference_mode():
        for name, view in high.weight_map().views.items():
            view.copy_(low.weight_map().views[name])
        high.refresh()
        outputs: list[Tensor] = []
        for model in (low, high):
            streams = Streams(model)
            outputs.append(torch.cat([streams.chunk(0, c, model.inputs(9, 0, c)) for c in range(4)]).flatten())
    assert torch.nn.functional.cosine_similarity(*outputs, dim=0) > 0.995


def test_fp8_stays_near_bf16_and_its_codes_give_what_they_give_without_the_chips_product() -> None:
    with torch.inference_mode():
        outputs = []
        for precision in ("dtype", "fp8", "fp8-emulated"):
            model = model_of("bfloat16", precision)  # type: ignore[arg-type]
            if precision == "fp8-emulated":
                for i in range(model.config.blocks):
                    for layer in model.stages[f"block.{i}"].products.layers.values():  # type: ignore[attr-defined]
                        layer.native = False
            streams = Streams(model)
            outputs.append(torch.cat([streams.chunk(0, c, model.inputs(9, 0, c)) for c in range(4)]).flatten())
    plain, coded, emulated = outputs
    assert 0.0 < (coded - plain).norm() / plain.norm() < 0.1
    assert (coded - emulated).norm() / plain.norm() < 0.05


def streamed(model: WanModel, plan: Plan, chunks: int, streams: int) -> tuple[list[list[Chunk]], list[int]]:
    """Run streams to their end; returns their chunks, and the count of captures after every round of chunks."""
    engine = Engine(model, plan, slots=8, streams=streams)
    engine.warm()
    try:
        opened = [engine.open(seed=5) for _ in range(streams)]
        made: list[list[Chunk]] = [[] for _ in opened]
        captures = []
        for stream in opened:
            stream.set_condition("context", prompt(model, stream.id))
        for c in range(chunks):
            futures = []
            for stream in opened:
                inputs = model.inputs(5, stream.id, c)
                futures.append(stream.submit({name: value.cpu().numpy() for name, value in inputs.items()}))
            for row, future in zip(made, futures, strict=True):
                row.append(future.result(60))
            captures.append(engine.captures)
        return made, captures
    finally:
        engine.close()


@pytest.mark.multigpu
@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "by_block_batched"])  # other shapes, other roundings
def test_two_devices_of_one_process_give_what_one_gives_eagerly(name: str) -> None:
    config = replace(config_of("bfloat16"), window_frames=4)
    world = RandomWorld(config)
    devices = ("cuda:0", "cuda:1")
    profile = profile_world(config, torch.device("cuda:0"), "eager", ProfileOptions(config.name, batches=(1, 4), n=3))
    one = plan_of("serial", profile, devices, "eager")
    several = plan_of(name, profile, devices, "graph")
    model: Any = world.on(devices)
    (want,), _ = streamed(model.first, one, 10, streams=1)
    engine = Engine(model, several, slots=16, streams=1)
    engine.warm()
    try:
        stream = engine.open(seed=5)
        stream.set_condition("context", prompt(model.first, stream.id))
        inputs = [model.first.inputs(5, stream.id, c) for c in range(10)]
        futures = [stream.submit({name: value.cpu().numpy() for name, value in some.items()}) for some in inputs]
        got = [future.result(60) for future in futures]
    finally:
        engine.close()
    for a, b in zip(want, got, strict=True):
        assert (a.outputs["x"] == b.outputs["x"]).all(), a.index
    assert got[-1].mode == "graph"


@pytest.mark.parametrize(
    ("cuts", "precision"), [((), "dtype"), ((4, 8, 12), "dtype"), ((1, 2, 3), "dtype"), ((4, 8, 12), "fp8")]
)
def test_a_stream_under_graphs_equals_the_eager_one_and_says_how_each_chunk_ran(
    cuts: tuple[int, ...], precision: Precision
) -> None:
    model = model_of("bfloat16", precision)
    device = "cuda:0"
    placements = tuple(Placement(segment, device) for segment in model.route.cut(cuts))
    eager = Plan("test", (Device(device),), {"default": placements}, {device: 1})
    want, _ = streamed(model, eager, 12, streams=2)
    got, captures = streamed(model, replace(eager, mode="graph"), 12, streams=2)
    for graph_row, eager_row in zip(got, want, strict=True):
        assert all((a.outputs["x"] == b.outputs["x"]).all() for a, b in zip(graph_row, eager_row, strict=True))
    full = -(-model.config.window_frames // model.config.frames_per_chunk) - 1
    assert [chunk.mode for chunk in got[0]] == ["eager"] * full + ["graph"] * (12 - full)
    assert captures[0] > 0
    assert len(set(captures)) == 1  # all of them before the first chunk
