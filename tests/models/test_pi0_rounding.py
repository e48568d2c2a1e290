"""A robot's velocity alone and in a batch differ by the order of sums only: both round the same values in the same places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.models import pi0
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_config import GemmaDims
from stretto.models.pi0_net import Condition, Pi0Net, PrefixKV

BATCH, STEPS = 6, 10


def rounded(family: str) -> Pi0Model:
    """Return a small policy in bf16 whose expert is deep enough for roundings to add up."""
    config = next(m.config for m in pi0.tiny() if m.name == family)
    dims = GemmaDims(width=64, depth=6, mlp=128, heads=4, kv_heads=1, head_dim=16)
    model = pi0.build(
        replace(config, denoise_steps=STEPS, expert=dims, language=replace(dims, width=32, mlp=48)), dtype=torch.bfloat16
    )
    model.randomize(seed=0)
    return model


def prefix_of(model: Pi0Model, g: torch.Generator) -> PrefixKV:
    c = model.config
    shape = (BATCH, c.language.depth, c.prefix_tokens, c.language.kv_heads, c.language.head_dim)
    mask = torch.rand(BATCH, c.prefix_tokens, generator=g) < 0.7
    k, v = (torch.randn(shape, generator=g).bfloat16() for _ in range(2))
    length = torch.full((BATCH,), c.prefix_tokens, dtype=torch.int32)
    return PrefixKV(k, v, torch.randperm(BATCH, generator=g), mask, length, mask.sum(-1, dtype=torch.int32))


def of_row(prefix: PrefixKV, b: int) -> PrefixKV:
    one = slice(b, b + 1)
    rest = prefix.slots_B[one], prefix.mask_BP[one], prefix.length_B[one], prefix.suffix_start_B[one]
    return PrefixKV(prefix.k_SNPKd, prefix.v_SNPKd, *rest)


def alone(net: Pi0Net, x: Tensor, steps: Tensor, prefix: PrefixKV, state: Tensor) -> Tensor:
    """Run each row by itself, as the layers of few rows do."""
    out = []
    for b in range(BATCH):
        one = slice(b, b + 1)
        condition = net.tabled(steps[one])
        out.append(net._streamed_velocity(x[one], condition, net.norms_of(condition), of_row(prefix, b), state[one]))
    return torch.cat(out)


def median_row(difference_BHA: Tensor) -> float:
    """Return the root mean square of the middle row: where a sum falls to another side of a rounding, one row moves."""
    return float(difference_BHA.square().mean((1, 2)).sqrt().median())


@pytest.mark.parametrize("family", ["pi05", "pi0"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_batched_row_is_rounded_where_it_is_rounded_alone(family: str, per_token: bool) -> None:
    model = rounded(family)
    g = torch.Generator().manual_seed(0)
    c, net, prefix = model.config, model.module, prefix_of(model, g)
    x, state = torch.randn(BATCH, c.action_horizon, c.action_dim, generator=g), torch.randn(BATCH, c.state_dim, generator=g)
    steps = torch.randint(STEPS + 1, (BATCH, c.action_horizon) if per_token else (BATCH,), generator=g)
    with torch.no_grad():
        want = alone(net, x, steps, prefix, state)
        condition = net.tabled(steps)
        batched = net.velocity(x, condition, prefix, state)
        elsewhere = net.velocity(x, Condition(condition.table[steps]), prefix, state)  # rounds ahead of its products
    assert median_row(batched - want) < median_row(elsewhere - want) / 100
    assert (batched - want).square().mean() < (elsewhere - want).square().mean() / 9
