"""On a GPU: a captured step stays right as the stream goes on, and bf16 stays near fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wan_world import Member, StreamRows, Streams

from stretto.models.wan import WanModel
from stretto.models.wan_config import WanConfig, tiny_config

pytestmark = pytest.mark.gpu

STEP = ("embed", "block.0", "block.1", "head")


def config_of(dtype: str) -> WanConfig:
    return replace(tiny_config(), width=384, heads=3, frames_per_chunk=2, window_frames=7, dtype=dtype)


def model_of(dtype: str) -> WanModel:
    model = WanModel(config_of(dtype), "cuda")
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
