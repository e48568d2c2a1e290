"""Rings of frame pages against plain lists of keys and values, and the steps that share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from wan_world import Member, Streams

from stretto.layers.kernels.chunk_attention import Places, chunk_attention
from stretto.models.wan import WanModel
from stretto.models.wan_config import tiny_config
from stretto.models.wan_ring import Ring

TOKENS, HEADS, SIZE = 3, 2, 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)


@pytest.mark.parametrize("chunk_frames", [1, 2, 3])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("window", [6, 7])
def test_a_ring_sees_what_a_rolling_list_sees_over_three_windows(chunk_frames: int, sinks: int, window: int) -> None:
    ring = Ring(window, sinks, chunk_frames)
    generator = torch.Generator().manual_seed(0)
    arenas = [torch.zeros(3, window, TOKENS, HEADS, SIZE) for _ in range(2)]
    listed: list[tuple[Tensor, Tensor]] = []
    for chunk in range(3 * window // chunk_frames + 1):
        q, k, v = (torch.randn(1, chunk_frames * TOKENS, HEADS, SIZE, generator=generator) for _ in range(3))
        frames = torch.arange(chunk * chunk_frames, (chunk + 1) * chunk_frames)
        pages = ring.pages(frames)
        assert pages.tolist() == [ring.page(f) for f in frames.tolist()]
        for arena, x in zip(arenas, (k, v), strict=True):
            arena[2, pages] = x.view(chunk_frames, TOKENS, HEADS, SIZE)
        listed += zip(k[0].split(TOKENS), v[0].split(TOKENS), strict=True)
        if len(listed) > window:
            listed = listed[:sinks] + listed[len(listed) - (window - sinks) :]
        tokens = ring.valid(chunk) * TOKENS
        places = Places((2,), (tokens,), torch.tensor([2]), torch.tensor([tokens]))
        got = chunk_attention(q, arenas[0].flatten(1, 2), arenas[1].flatten(1, 2), places)
        want = attend(q[0], torch.cat([k for k, _ in listed]), torch.cat([v for _, v in listed]))
        torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-5)
    assert not arenas[0][:2].any()


def test_rows_in_neighbouring_slots_share_a_call_and_get_what_they_get_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, 4, TOKENS, HEADS, SIZE, generator=generator) for _ in range(2))
    q = torch.randn(6, 5, HEADS, SIZE, generator=generator)
    slots, tokens = (2, 3, 4, 1, 2), tuple(n * TOKENS for n in (4, 4, 3, 3, 3))
    places = Places(slots, tokens, torch.tensor([*slots, 0]), torch.tensor([*tokens, 0]))
    k, v = k.flatten(1, 2), v.flatten(1, 2)
    got = chunk_attention(q, k, v, places)
    for i, (slot, n) in enumerate(zip(slots, tokens, strict=True)):
        torch.testing.assert_close(got[i], attend(q[i], k[slot, :n], v[slot, :n]))
    assert not got[5].any()


def test_rows_of_other_streams_steps_and_chunks_in_a_batch_equal_the_rows_alone() -> None:
    model = WanModel(replace(tiny_config(), frames_per_chunk=2))
    model.randomize(seed=4)
    alone, together = Streams(model, 3), Streams(model, 3)
    for stream in range(3):
        for chunk in range(stream + 1):
            for streams in (alone, together):
                streams.chunk(stream, chunk, model.inputs(9, stream, chunk))
    members = [Member(0, 1, 2), Member(1, 2, 0), Member(2, 3, 3)]
    for streams in (alone, together):
        for member in members:
            streams.admit(member.stream, model.inputs(9, member.stream, member.chunk))
    for stage in ("embed", "block.0", "block.1", "head"):
        together.run(stage, members, padding=1)
        for member in members:
            alone.run(stage, [member])
    for name in ("x", "block.0.k", "block.1.v"):
        torch.testing.assert_close(together.arenas[name][1:], alone.arenas[name][1:], atol=1e-5, rtol=1e-5)


def test_same_step_rings_keep_each_steps_own_noisy_keys_and_chunks_may_overlap() -> None:
    model = WanModel(replace(tiny_config(), frames_per_chunk=2))
    model.randomize(seed=4)
    serial, pipelined = Streams(model), Streams(model)
    chunks = 12
    inputs = [model.inputs(9, 0, chunk) for chunk in range(chunks)]
    want = [serial.chunk(0, c, inputs[c]) for c in range(chunks)]
    # As many chunks in flight as there are steps: at each tick chunk c is one step behind chunk c - 1.
    steps = model.config.denoise_steps
    flying: dict[int, Tensor] = {}
    got: dict[int, Tensor] = {}
    for tick in range(chunks + steps - 1):
        for chunk in range(max(0, tick - steps + 1), min(tick, chunks - 1) + 1):
            step = tick - chunk
            pipelined.admit(0, {**inputs[chunk], "x": flying.pop(chunk, inputs[chunk]["x"])})
            for stage in ("embed", "block.0", "block.1", "head"):
                pipelined.run(stage, [Member(0, chunk, step)])
            done = got if step == steps - 1 else flying
            done[chunk] = pipelined.arenas["x"][1].clone()
    assert all(torch.equal(got[c], want[c]) for c in range(chunks))
    rings = serial.arenas["block.0.k"][1:]
    assert len(rings) == steps
    assert all(not torch.equal(rings[0], ring) for ring in rings[1:])


def test_seeding_fills_every_ring_alike_and_changes_what_follows() -> None:
    model = WanModel(replace(tiny_config(), frames_per_chunk=2))
    model.randomize(seed=4)
    given = torch.randn(4, *model.config.latent_shape[1:], generator=torch.Generator().manual_seed(6))
    seeded, other = Streams(model), Streams(model)
    for streams, latents in ((seeded, given), (other, -given)):
        for chunk, x in enumerate(model.seed_chunks(latents)):
            out = streams.chunk(0, chunk, {**model.inputs(9, 0, chunk), "x": x}, model.seed_route)
            assert torch.equal(out, x)
    rings = seeded.arenas["block.1.k"][1:]
    assert rings[:, :4].abs().amin(dim=(2, 3, 4)).shape == (model.config.denoise_steps, 4)
    assert rings[0, :4].any()
    assert not rings[0, 4:].any()
    assert all(torch.equal(ring, rings[0]) for ring in rings)
    inputs = model.inputs(9, 0, 2)
    assert (seeded.chunk(0, 2, inputs) - other.chunk(0, 2, inputs)).abs().max() > 1e-3


def test_the_policies_say_which_ring_a_step_uses_and_what_it_waits_for() -> None:
    clean, last, same = (replace(tiny_config(), kv_policy=name).policy for name in ("clean", "last_step", "same_step"))
    assert (clean.states, last.states, same.states) == (1, 1, 4)
    assert [clean.carry(s) for s in range(5)] == [4] * 5
    assert [last.carry(s) for s in range(4)] == [3] * 4
    assert [same.carry(s) for s in range(4)] == [same.state(s) for s in range(4)] == [0, 1, 2, 3]
    assert [same.state(same.seed_step + k) for k in range(4)] == [0, 1, 2, 3]
    visits = {name: len(WanModel(replace(tiny_config(), kv_policy=name)).route) for name in ("clean", "last_step", "same_step")}
    assert visits == {"same_step": 16, "last_step": 16, "clean": 19}


def test_a_new_prompt_reaches_the_chunks_admitted_with_it_and_no_earlier_ring_slot() -> None:
    model = WanModel(tiny_config())
    model.randomize(seed=4)
    streams = Streams(model, 2)
    first = streams.chunk(0, 0, model.inputs(9, 0, 0))
    before = streams.arenas["block.0.cross_k"].clone()
    streams.conditions[0]["context"] = (2, streams.conditions[1]["context"][1])
    streams.admit(0, model.inputs(9, 0, 1))
    for stage in ("embed", "block.0"):
        streams.run(stage, [Member(0, 1, 0)])
    after = streams.arenas["block.0.cross_k"]
    assert not torch.equal(after[1], before[1])
    assert torch.equal(after[2:], before[2:])
    again = Streams(model, 2)
    again.conditions[0] = {"context": (1, again.conditions[1]["context"][1])}
    assert (again.chunk(0, 0, model.inputs(9, 0, 0)) - first).abs().max() > 1e-4
