"""The kernels of the Wan stages against their references: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels.channel_norm import channel_norm_silu
from stretto.layers.kernels.level_norm import (
    add_level_layer_norm,
    add_level_layer_norm_coded,
    level_gated_add,
    level_gated_add_layer_norm,
    level_gated_add_layer_norm_coded,
    level_layer_norm,
    level_layer_norm_coded,
)
from stretto.layers.kernels.renoise import renoise
from stretto.layers.kernels.ring_attention import RingTiling, join_splits, ring_attention
from stretto.layers.kernels.row_codes import code_rows, gelu_code_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")
# The interpreter multiplies bf16 matrices as raw bits; on a GPU bf16 is what counts.
MATRIX = torch.float16 if INTERPRETED else torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def agree(got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    gots, wants = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    tolerances = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    for a, b in zip(gots, wants, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerances[b.dtype], atol=tolerances[b.dtype])


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [33, 64])
def test_norms_take_their_modulation_at_the_level_of_each_frame(width: int, dtype: torch.dtype) -> None:
    x, y = normal(2, 6, width, dtype=dtype), normal(2, 6, width, dtype=dtype, seed=1)
    table, levels = normal(5, 6, width, dtype=torch.float32, seed=2), integers(5, 2, 3)
    weight, bias = normal(width, dtype=dtype, seed=3), normal(width, dtype=dtype, seed=4)
    args = table, levels, 1e-6
    agree(level_layer_norm.kernel(x, *args, shift=0, scale=1), level_layer_norm.reference(x, *args, shift=0, scale=1))
    got = add_level_layer_norm.kernel(x, y, *args, shift=3, scale=4)
    agree(got, add_level_layer_norm.reference(x, y, *args, shift=3, scale=4))
    got_sum = level_gated_add.kernel(x, y, table, levels, gate=5)
    agree(got_sum, level_gated_add.reference(x, y, table, levels, gate=5))
    affine = x, y, table, levels, weight, bias, 1e-6
    agree(level_gated_add_layer_norm.kernel(*affine, gate=2), level_gated_add_layer_norm.reference(*affine, gate=2))


def agree_coded(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Compare what codes stand for; where they are within a rounding of each other they may fall to neighbours."""
    assert got[0].dtype == want[0].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0.0)
    a, b = got[0].float(), want[0].float()
    if INTERPRETED:  # it forgets the carry where rounding reaches the next power of two, and halves such values
        a = torch.where((a * 2 == b) & (b.abs().log2() % 1 == 0), b, a)
    torch.testing.assert_close(a, b, rtol=0.13, atol=2.0**-9)
    assert (a != b).float().mean() < 0.02
    agree(got[2:], want[2:])


@kernel_test
@pytest.mark.parametrize("width", [33, 64])
def test_norms_coded_for_fp8_have_a_scale_for_every_row(width: int) -> None:
    # The interpreter cuts bf16 off where the chip rounds.
    x, y = normal(2, 6, width, dtype=torch.float32 if INTERPRETED else torch.bfloat16), normal(2, 6, width, seed=1)
    x[0, 0] *= 1e4
    table, levels = normal(5, 6, width, dtype=torch.float32, seed=2), integers(5, 2, 3)
    weight, bias = normal(width, seed=3), normal(width, seed=4)
    args, lines = (table, levels, 1e-6), {"shift": 3, "scale": 4}
    agree_coded(level_layer_norm_coded.kernel(x, *args, **lines), level_layer_norm_coded.reference(x, *args, **lines))
    got = add_level_layer_norm_coded.kernel(x, y, *args, **lines)
    agree_coded(got, add_level_layer_norm_coded.reference(x, y, *args, **lines))
    affine = x, y, table, levels, weight, bias, 1e-6
    got = level_gated_add_layer_norm_coded.kernel(*affine, gate=2)
    agree_coded(got, level_gated_add_layer_norm_coded.reference(*affine, gate=2))


@kernel_test
def test_rows_are_coded_plain_and_through_gelu_and_a_row_of_zeros_stays_zeros() -> None:
    x = normal(3, 4, 72)
    x[0, 0], x[1, 1] = 0.0, x[1, 1] * 1e5
    agree_coded(code_rows.kernel(x), code_rows.reference(x))
    agree_coded(gelu_code_rows.kernel(x), gelu_code_rows.reference(x))
    codes, scales = code_rows.kernel(x)
    assert not codes[0, 0].float().any()
    error = (codes.float() * scales - x.float()).norm() / x.float().norm()
    assert error < 0.04


@kernel_test
@pytest.mark.parametrize("shape", [(1, 4, 4, 6), (3, 3, 2, 4)])
def test_renoise_gives_the_next_level_and_keeps_given_frames(shape: tuple[int, ...]) -> None:
    frames, channels, height, width = shape
    patches = normal(2, frames * height * width // 4, 4 * channels)
    x = normal(2, *shape, dtype=torch.float32)
    place = torch.tensor([[3, -(1 << 62) + 12345, 0], [0, 99, frames - 1]], device=DEVICE)
    steps, sigmas = (
        torch.tensor([0, 2], device=DEVICE),
        torch.tensor([[1.0, 0.9, 0.6], [0.9, 0.6, 0.0]], device=DEVICE).double(),
    )
    args = patches, x, place, steps, sigmas, 2
    got, want = renoise.kernel(*args), renoise.reference(*args)
    agree(got, want)
    assert torch.equal(got[1, : frames - 1], x[1, : frames - 1])


@kernel_test
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_ring_attention_reads_each_row_up_to_its_length_in_its_own_slot(splits: int) -> None:
    q, k = normal(3, 40, 3, 32, dtype=MATRIX), normal(4, 60, 3, 32, dtype=MATRIX, seed=1)
    v = normal(4, 60, 3, 32, dtype=MATRIX, seed=2)
    slots, length = torch.tensor([3, 2, 0], device=DEVICE), torch.tensor([60, 37, 0], device=DEVICE)
    want = ring_attention.reference(q, k, v, slots, length)
    # What is past the end was never written.
    v[2, 37:], k[2, 37:] = float("nan"), float("nan")
    cut = RingTiling(splits, 16, 16, 4, 2)
    got = ring_attention.kernel(q, k, v, slots, length, cut)
    agree(got, want)
    assert not got[2].any()
    assert torch.equal(got, ring_attention.kernel(q, k, v, slots, length, cut))


@kernel_test
@pytest.mark.parametrize("heads_first", [False, True])
def test_joined_splits_are_attention_over_all_keys(heads_first: bool) -> None:
    q, k, v = (normal(2, n, 3, 16, dtype=torch.float32, seed=n) for n in (20, 24, 25))
    v = v[:, :24]
    scores = torch.einsum("bnhd,bxhd->bhnx", q, k) / 4.0
    want = torch.einsum("bhnx,bxhd->bnhd", scores.softmax(-1), v)
    parts = [(s.softmax(-1), w) for s, w in zip(scores.split(8, -1), v.split(8, 1), strict=True)]
    part = torch.stack([torch.einsum("bhnx,bxhd->bnhd", p, w) for p, w in parts], 1)
    if heads_first:  # as cuDNN may lay it out
        part = part.transpose(2, 3).contiguous().transpose(2, 3)
    lse = torch.stack([s.logsumexp(-1) for s in scores.split(8, -1)], 1)
    agree(join_splits.reference(part, lse), want)
    agree(join_splits.kernel(part, lse), want)


@kernel_test
def test_a_split_without_keys_does_not_count() -> None:
    part = torch.stack([normal(1, 20, 2, 16), torch.full((1, 20, 2, 16), float("nan"), device=DEVICE, dtype=torch.bfloat16)], 1)
    lse = torch.stack([normal(1, 2, 20, dtype=torch.float32), torch.full((1, 2, 20), float("-inf"), device=DEVICE)], 1)
    for made in (join_splits.kernel(part, lse), join_splits.reference(part, lse)):
        agree(made, part[:, 0])


@kernel_test
@pytest.mark.parametrize("by_pixel", [False, True])
@pytest.mark.parametrize("shape", [(1, 40, 2, 5, 7), (2, 96, 1, 4, 9), (1, 16, 3, 5)])
def test_the_norm_over_channels_is_the_same_however_they_lie(shape: tuple[int, ...], by_pixel: bool) -> None:
    x, gamma = normal(*shape, dtype=torch.float32), normal(shape[1], dtype=torch.float32, seed=1)
    if by_pixel:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    got = channel_norm_silu.kernel(x, gamma)
    assert got.stride() == x.stride()
    agree(got, channel_norm_silu.reference(x, gamma))
