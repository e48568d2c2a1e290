"""What a robot alone and the same robot in a batch have in common, on a GPU with its measured kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels.fp8_activation import fp8_chip
from stretto.models import pi0
from stretto.models.pi0_fp8 import Fp8Net, quantised
from stretto.models.pi0_net import Condition, Pi0Net, PrefixArena, PrefixKV


def shallow() -> pi0.Pi0Model:
    """Return pi0.5 at its true widths, which are what kernels are chosen by, with few layers."""
    spec = pi0.SPECS["pi05"]
    vision, language, expert = (replace(part, depth=3) for part in (spec.vision, spec.language, spec.expert))
    model = pi0.build(replace(spec, vision=vision, language=language, expert=expert, vocab_size=512), device="cuda")
    model.randomize(seed=0)
    return model


@torch.inference_mode()
def keys_and_values(net: Pi0Net | Fp8Net, inputs: dict[str, Tensor], count: int, prompt: int) -> Tensor:
    """Return what the first `count` robots keep of their prefix."""
    images, image_mask, tokens, lengths = (inputs[n][:count] for n in ("images", "image_mask", "tokens", "token_count"))
    language = net.config.language
    layout = net.prefix_layout(image_mask, lengths, prompt)
    shape = (count, language.depth, layout.mask_BP.shape[1], language.kv_heads, language.head_dim)
    arenas = torch.zeros(2, *shape, dtype=net.dtype, device="cuda")
    arena = PrefixArena(arenas[0], arenas[1], torch.arange(count, device="cuda"))
    net.prefix(net.vision(images), tokens[:, :prompt], layout, arena)
    return arenas


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [16, 200])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_robot_keeps_the_same_bits_of_its_prefix_alone_and_in_a_batch(fp8: bool, prompt: int) -> None:
    if fp8 and not fp8_chip(torch.device("cuda:0")):
        pytest.skip("needs a GPU with FP8")
    model = shallow()
    net: Pi0Net | Fp8Net = model.module
    if fp8:
        net = quantised(model.module, dict.fromkeys(quantised_names(model.module), 20.0))
    inputs = {name: x.to("cuda") for name, x in model.example_inputs(32).items()}
    inputs["token_count"] = inputs["token_count"].clamp(max=prompt)
    alone = keys_and_values(net, inputs, 1, prompt)
    assert alone.isfinite().all()
    for count in (4, 8, 32):
        assert torch.equal(keys_and_values(net, inputs, count, prompt)[:, :1], alone), f"{count} robots"


@pytest.mark.gpu
@pytest.mark.parametrize("per_token", [False, True])
def test_a_robot_in_a_batch_is_nearer_to_itself_alone_than_layers_that_round_elsewhere(per_token: bool) -> None:
    count, model = 8, shallow()
    c, net = model.config, model.module
    g = torch.Generator("cuda").manual_seed(0)
    shape = (count, c.language.depth, c.prefix_tokens, c.language.kv_heads, c.language.head_dim)
    k, v = (torch.randn(shape, generator=g, device="cuda", dtype=net.dtype) for _ in range(2))
    x = torch.randn(count, c.action_horizon, c.action_dim, generator=g, device="cuda")
    steps = torch.randint(c.denoise_steps + 1, (count, c.action_horizon) if per_token else (count,), generator=g, device="cuda")
    mask = torch.ones(shape[0], c.prefix_tokens, dtype=torch.bool, device="cuda")
    length = torch.full((count,), c.prefix_tokens, dtype=torch.int32, device="cuda")

    def velocity(rows: slice, tabled: bool = True) -> Tensor:
        slots = torch.arange(count, device="cuda")[rows]
        prefix = PrefixKV(k, v, slots, mask[rows], length[rows], length[rows])
        condition = net.tabled(steps[rows])
        return net.velocity(x[rows], condition if tabled else Condition(condition.table[steps[rows]]), prefix)

    with torch.inference_mode():
        alone = torch.cat([velocity(slice(b, b + 1)) for b in range(count)])
        batched, elsewhere = velocity(slice(count)), velocity(slice(count), tabled=False)
    assert alone.isfinite().all()
    near, far = ((y - alone).square().mean().sqrt().item() for y in (batched, elsewhere))
    assert near < 0.8 * far, (near, far)


def quantised_names(net: Pi0Net) -> list[str]:
    fields = ("qkv", "out", "up", "down")
    parts = (("vision", net.vision.blocks), ("prefix", net.prefix.blocks), ("expert", net.expert.blocks))
    names = [f"{part}.{i}.{field}" for part, blocks in parts for i in range(len(blocks)) for field in fields]
    last = len(net.prefix.blocks) - 1
    return [n for n in names if not n.startswith(f"prefix.{last}.") or n.endswith("qkv")]
