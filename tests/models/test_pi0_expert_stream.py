"""The expert as products around a stream gives what its plain layers give, for both families and every kind of row."""

from __future__ import annotations

import pytest
import torch

from stretto.layers.kernels.stream import normed_reference, open_stream
from stretto.models import pi0
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_net import PrefixKV

BATCH, DENOISE_STEPS = 3, 3


def prefix_of(model: Pi0Model, g: torch.Generator) -> PrefixKV:
    c = model.config
    shape = (BATCH + 2, c.language.depth, c.prefix_tokens, c.language.kv_heads, c.language.head_dim)
    length = torch.tensor([c.prefix_tokens, 9, 10], dtype=torch.int32)
    mask = torch.rand(BATCH, c.prefix_tokens, generator=g) < 0.7
    k, v = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return PrefixKV(k, v, torch.tensor([4, 1, 2]), mask, length, mask.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("model", pi0.tiny(), ids=lambda m: m.name)
@pytest.mark.parametrize("per_token", [False, True])
def test_the_expert_around_a_stream_equals_its_plain_layers(model: Pi0Model, per_token: bool) -> None:
    g = torch.Generator().manual_seed(0)
    c = model.config
    steps = torch.randint(DENOISE_STEPS + 1, (BATCH, c.action_horizon) if per_token else (BATCH,), generator=g)
    norms, prefix = model.module.norms_of(model.module.tabled(steps)), prefix_of(model, g)
    residual = torch.randn(BATCH, c.suffix_tokens, c.expert.width, generator=g)
    with torch.no_grad():
        want = model.module.expert(residual, norms, prefix)
        stream = open_stream(residual, norms.lines(0), torch.float32)
        stream = model.module.expert.streamed(stream, norms, prefix)
        got = normed_reference(stream.scaled_BRD, stream.squares_MP, norms.lines(2 * c.expert.depth), norms.eps)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("model", pi0.tiny(), ids=lambda m: m.name)
def test_the_streamed_velocity_equals_the_plain_one(model: Pi0Model) -> None:
    g = torch.Generator().manual_seed(0)
    c, net, prefix = model.config, model.module, prefix_of(model, g)
    x, state = torch.randn(BATCH, c.action_horizon, c.action_dim, generator=g), torch.randn(BATCH, c.state_dim, generator=g)
    condition = net.tabled(torch.tensor([0, 2, 1]))
    with torch.no_grad():
        want = net.velocity(x, condition, prefix, state)
        got = net._streamed_velocity(x, condition, net.norms_of(condition), prefix, state)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
