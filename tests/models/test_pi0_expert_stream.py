"""The expert as products around a stream gives what its plain layers give, for both families and every kind of row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.models import pi0
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_net import AdaNorms, ExpertNorms, PlainNorms, PrefixKV

BATCH, DENOISE_STEPS = 3, 3


def prefix_of(model: Pi0Model, g: torch.Generator) -> PrefixKV:
    c = model.config
    shape = (BATCH + 2, c.language.depth, c.prefix_tokens, c.language.kv_heads, c.language.head_dim)
    length = torch.tensor([c.prefix_tokens, 9, 10], dtype=torch.int32)
    mask = torch.rand(BATCH, c.prefix_tokens, generator=g) < 0.7
    k, v = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return PrefixKV(k, v, torch.tensor([4, 1, 2]), mask, length, mask.sum(-1, dtype=torch.int32))


def norms_of(model: Pi0Model, steps: Tensor) -> ExpertNorms:
    net = model.module
    if model.config.family == "pi0":
        return PlainNorms(net.norms, model.config.norm_eps)
    return AdaNorms(net.tabled(steps), model.config.norm_eps)


@pytest.mark.parametrize("model", pi0.tiny(), ids=lambda m: m.name)
@pytest.mark.parametrize("per_token", [False, True])
def test_the_expert_around_a_stream_equals_its_plain_layers(model: Pi0Model, per_token: bool) -> None:
    g = torch.Generator().manual_seed(0)
    c = model.config
    steps = torch.randint(DENOISE_STEPS + 1, (BATCH, c.action_horizon) if per_token else (BATCH,), generator=g)
    norms, prefix = norms_of(model, steps), prefix_of(model, g)
    residual = torch.randn(BATCH, c.suffix_tokens, c.expert.width, generator=g)
    with torch.no_grad():
        want = model.module.expert(residual, norms, prefix)
        got = model.module.expert._streamed(residual, norms, prefix)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
