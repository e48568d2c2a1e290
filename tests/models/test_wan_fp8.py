"""FP8 in the blocks: how far from the network's own precision, what follows a change of weights, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wan_world import Member, StreamRows, Streams

from stretto.core.errors import ConfigError
from stretto.models.wan import WanModel
from stretto.models.wan_actions import ActionTrack
from stretto.models.wan_config import WanConfig, tiny_config

CONFIG = replace(tiny_config(), dtype="bfloat16", frames_per_chunk=2, window_frames=4)


def made(config: WanConfig, seed: int = 3) -> WanModel:
    model = WanModel(config)
    model.randomize(seed)
    return model


def block_output(model: WanModel, seed: int = 0) -> Tensor:
    """Return what the first block makes of random hidden tokens in a first chunk."""
    streams = Streams(model)
    streams.admit(0, {name: value[0] for name, value in model.example_inputs(1).items()})
    streams.run("embed", [Member(0, 0, 0)])
    rows = StreamRows(streams, "block.0", [Member(0, 0, 0)], padding=0)
    h = torch.randn(rows.get("h").shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    rows.put("h", h)
    model.stages["block.0"].run(rows)
    return rows.get("h").float() - h.float()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("tracks", [(), (ActionTrack("camera", 4),)])
def test_a_block_in_fp8_adds_nearly_what_the_block_adds(tracks: tuple[ActionTrack, ...]) -> None:
    config = replace(CONFIG, actions=tracks)
    want = block_output(made(config))
    error = relative(block_output(made(replace(config, precision="fp8-emulated"))), want)
    assert 0.002 < error < 0.06


def test_a_chunk_in_fp8_stays_near_the_chunk() -> None:
    chunks = []
    for precision in ("dtype", "fp8-emulated"):
        model = made(replace(CONFIG, precision=precision))
        streams = Streams(model)
        chunks.append(torch.cat([streams.chunk(0, c, model.inputs(9, 0, c)) for c in range(3)]).flatten())
    assert relative(chunks[1], chunks[0]) < 0.1
    assert not torch.equal(*chunks)


def test_codes_follow_a_change_of_weights_in_place() -> None:
    model, other = (made(replace(CONFIG, precision="fp8-emulated"), seed) for seed in (3, 4))
    before = block_output(model)
    layer = model.stages["block.0"].products.layers["down"]  # type: ignore[attr-defined]
    at = layer.codes_NK.data_ptr()
    for name, view in model.weight_map().views.items():
        view.copy_(other.weight_map().views[name])
    model.refresh()
    after = block_output(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, block_output(other))
    assert layer.codes_NK.data_ptr() == at


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"precision": "fp8"}, "precision"), ({"precision": "int4"}, "precision"), ({"dtype": "float32"}, "dtype")],
)
def test_what_fp8_cannot_run_on_is_refused_by_name(changes: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        WanModel(replace(CONFIG, **{"precision": "fp8-emulated", **changes}))
