"""The network against diffusers' own, and the clean policy against one masked forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from wan_world import Member, StreamRows, Streams

from stretto.layers.kernels import gated_add, layer_norm, modulated_layer_norm, rope_3d
from stretto.models.wan import WanModel
from stretto.models.wan_config import Level, WanConfig, tiny_config
from stretto.models.wan_net import Block
from stretto.models.wan_products import PlainProducts
from stretto.models.wan_stages import HeadStage
from stretto.models.wan_weights import detect
from stretto.runtime.weights import update_weights

TI2V = {"channels": 12, "space_stride": 16, "pixel_height": 128, "pixel_width": 192}


def theirs(config: WanConfig, seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    module = WanTransformer3DModel(
        num_attention_heads=config.heads, attention_head_dim=config.head_dim, in_channels=config.channels,
        out_channels=config.channels, text_dim=config.text_width, freq_dim=config.freq_width, ffn_dim=config.ffn_width,
        num_layers=config.blocks, rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval().requires_grad_(False)


def ours(config: WanConfig, reference: WanTransformer3DModel) -> WanModel:
    model = WanModel(config)
    assert detect(reference.state_dict()) == "diffusers"
    update_weights(model, reference.state_dict().items(), complete=True)
    return model


def velocity(model: WanModel, streams: Streams, inputs: dict[str, Tensor]) -> Tensor:
    """Run all frames as the one chunk of a stream; leaves the next latent in `x`."""
    streams.admit(0, inputs)
    for stage in ("embed", *(f"block.{i}" for i in range(model.config.blocks))):
        streams.run(stage, [Member(0, 0, 0)])
    head = model.stages["head"]
    assert isinstance(head, HeadStage)
    v = head.velocity(StreamRows(streams, "head", [Member(0, 0, 0)], padding=0))[0]
    streams.run("head", [Member(0, 0, 0)])
    return v


@pytest.mark.parametrize("timestep", [1000.0, 937.5, 412.25])
def test_the_bidirectional_forward_equals_diffusers_for_wan21(timestep: float) -> None:
    config = replace(tiny_config(), frames_per_chunk=3, window_frames=3, sink_frames=0, levels=(Level(timestep, 0.9),))
    reference = theirs(config)
    model = ours(config, reference)
    streams = Streams(model)
    x = torch.randn(config.latent_shape, generator=torch.Generator().manual_seed(1))
    got = velocity(model, streams, {**model.inputs(0, 0, 0), "x": x})
    context = streams.conditions[0]["context"][1][None]
    want = reference(x.transpose(0, 1)[None], torch.tensor([timestep]), context).sample[0].transpose(0, 1)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_the_bidirectional_forward_equals_diffusers_for_ti2v_with_a_clean_first_frame() -> None:
    config = replace(tiny_config(), frames_per_chunk=3, window_frames=3, sink_frames=0, levels=(Level(800.0, 0.8),), **TI2V)
    reference = theirs(config)
    model = ours(config, reference)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(config.latent_shape, generator=generator)
    first = torch.randn(config.latent_shape[1:], generator=generator)
    streams = Streams(model)
    inputs = model.inputs(0, 0, 0, given_KChw=first[None])
    inputs["x"][1:] = x[1:]
    got = velocity(model, streams, inputs)
    timestep = torch.full((1, 3 * config.tokens_per_frame), 800.0)
    timestep[:, : config.tokens_per_frame] = 0.0
    seen = torch.cat((first[None], x[1:])).transpose(0, 1)[None]
    want = reference(seen, timestep, streams.conditions[0]["context"][1][None]).sample[0].transpose(0, 1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert torch.equal(streams.arenas["x"][1, 0], first)


def masked_forward(model: WanModel, copies: list[Tensor], levels_F: Tensor, context: Tensor, mask: Tensor) -> Tensor:
    """Run copies of the same frames in one sequence under a [tokens, tokens] mask; returns the velocity of all."""
    net, config = model.net, model.config
    levels = levels_F[None]
    start = torch.zeros(1, dtype=torch.int64)

    def roped(x: Tensor) -> Tensor:
        return torch.cat([rope_3d(c, start, (len(copies[0]), *config.grid)) for c in x.chunk(len(copies), dim=1)], dim=1)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = (part.transpose(1, 2) for part in (q, k, v))
        return scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(2)

    h = net.patch_embedding(net.patchify(torch.cat(copies)[None]))
    for block in net.blocks:
        assert isinstance(block, Block)
        shift1, scale1, gate1, shift2, scale2, gate2 = block.table_L6D[levels].unbind(2)
        attn, products = block.self_attn, PlainProducts(block)
        q, k, v = attn.qkv(modulated_layer_norm(h, scale1, shift1, config.eps)).chunk(3, dim=-1)
        q, k = (rms_norm(x, (config.width,), w.weight, config.eps) for x, w in ((q, attn.norm_q), (k, attn.norm_k)))
        q, k, v = (x.unflatten(-1, (config.heads, -1)) for x in (q, k, v))
        h = gated_add(h, block.self_attn.o(attention(roped(q), roped(k), v, mask)), gate1)
        y = layer_norm(h, block.norm3.weight, block.norm3.bias, config.eps)
        k, v = block.cross_attn.keys_values(net.embed_text(context))
        h = h + block.cross_attn.o(attention(products.query(y), k[None], v[None]))
        h = gated_add(h, products.feed_forward(modulated_layer_norm(h, scale2, shift2, config.eps)), gate2)
    return net.unpatchify(net.head(h, levels))[0]


@pytest.mark.parametrize("frames", [1, 2])
def test_the_clean_policy_over_four_chunks_equals_a_block_causal_masked_forward(frames: int) -> None:
    config = replace(
        tiny_config(), kv_policy="clean", frames_per_chunk=frames, window_frames=4 * frames, sink_frames=0,
        levels=(Level(900.0, 0.9),),
    )  # fmt: skip
    model = WanModel(config)
    model.randomize(seed=3)
    streams = Streams(model)
    context = streams.conditions[0]["context"][1]
    noisy, clean = [], []
    for chunk in range(4):
        inputs = model.inputs(5, 0, chunk)
        noisy.append(inputs["x"])
        clean.append(streams.chunk(0, chunk, inputs))
    # One sequence: all clean chunks, then all noisy ones. A clean chunk sees clean chunks up to itself, a noisy one sees
    # the clean chunks before it and itself.
    chunks = torch.arange(4).repeat_interleave(frames * config.tokens_per_frame)
    sees_clean = chunks[:, None] >= chunks
    upper = torch.cat((sees_clean, torch.zeros_like(sees_clean)), dim=1)
    lower = torch.cat((chunks[:, None] > chunks, chunks[:, None] == chunks), dim=1)
    mask = torch.cat((upper, lower))
    levels = torch.tensor([config.policy.clean_step] * 4 * frames + [0] * 4 * frames)
    v = masked_forward(model, [torch.cat(clean), torch.cat(noisy)], levels, context, mask)[4 * frames :]
    want = torch.cat(noisy) - 0.9 * v
    assert (torch.cat(clean)[frames:] - torch.cat(noisy)[frames:]).abs().max() > 0.1
    torch.testing.assert_close(torch.cat(clean), want, atol=1e-4, rtol=1e-4)
