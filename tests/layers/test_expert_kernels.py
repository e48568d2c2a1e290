"""The kernels of few rows against their references: on a GPU where there is one, else in the interpreter (own process)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import prefix_attention
from stretto.layers.kernels.fold import ShiftLines, shifted_products
from stretto.layers.kernels.gated_linear import SplitTiling, counters_needed, gated_linear
from stretto.layers.kernels.norm_linear import PairTiling, norm_geglu, norm_qkv
from stretto.layers.kernels.split_attention import Keys, Tiling, split_attention
from stretto.layers.kernels.stream import Stream, normed_reference, open_stream
from stretto.layers.kernels.stream_ends import enter_stream, leave_stream

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies bf16 matrices as raw bits; on a GPU bf16 is what counts.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = 4e-3 if INTERPRETED else 2e-2
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
KINDS = ["row", "table", "token", "table by token", "scale"]
EPS = 1e-6


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def modulation(kind: str, seed: int, b: int, t: int, width: int) -> Modulation:
    """Make a modulation of any kind; tables are slices of wider ones, and batch rows use different lines."""
    g = torch.Generator().manual_seed(seed)
    match kind:
        case "row":
            return Modulation(normal(seed, b, 3 * width))
        case "token":
            return Modulation(normal(seed, b, t, 3 * width))
        case "table":
            return Modulation(
                normal(seed, 5, 9 * width)[:, 3 * width : 6 * width], torch.randperm(5, generator=g)[:b].to(DEVICE)
            )
        case "scale":
            return Modulation(normal(seed, 1, width), scale_only=True)
        case _:
            return Modulation(normal(seed, 5, 3 * width), torch.randint(5, (b, t), generator=g).to(DEVICE))


def agree(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6)
    assert error < (1e-5 if want.dtype == torch.float32 and INTERPRETED else TOLERANCE)


def same_stream(got: Stream, want: Stream) -> None:
    agree(got.residual_BTD, want.residual_BTD)
    agree(got.scaled_BRD, want.scaled_BRD)
    agree(got.squares_MP.sum(-1), want.squares_MP.sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_opens_as_the_norm_it_stands_for(kind: str) -> None:
    b, t, width = 3, 5, 48
    residual, norm = normal(0, b, t, width), modulation(kind, 1, b, t, width)
    got = open_stream.kernel(residual, norm, torch.float32)
    same_stream(got, open_stream.reference(residual, norm, torch.float32))
    want = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + EPS) * (1 + norm.parts()[0]) + norm.parts()[1]
    agree(normed_reference(got.scaled_BRD, got.squares_MP, norm, EPS), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("b", "t", "width"), [(3, 5, 256), (2, 70, 64)])
def test_a_stream_is_entered_and_left_through_small_projections(kind: str, b: int, t: int, width: int) -> None:
    channels = 11
    x, weight, bias = normal(0, b, t, channels), normal(1, width, channels), normal(2, width)
    norm = modulation(kind, 3, b, t, width)
    got = enter_stream.kernel(x, weight, bias, norm, torch.float32)
    same_stream(got, enter_stream.reference(x, weight, bias, norm, torch.float32))
    read = got.scaled_BRD, got.squares_MP
    out = normal(4, channels, width), normal(5, channels)
    agree(leave_stream.kernel(*read, norm, *out, EPS), leave_stream.reference(*read, norm, *out, EPS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("b", "t", "segments"), [(1, 5, 1), (3, 5, 2), (2, 15, 1), (3, 17, 4)])
def test_norm_qkv_rotates_queries_and_keys_and_leaves_values(kind: str, b: int, t: int, segments: int) -> None:
    width, heads, d = 64, 2, 32
    norm = modulation(kind, 1, b, t, width)
    stream = open_stream.reference(normal(0, b, t, width), norm, DTYPE)
    weight = normal(2, (heads + 2) * d, width, dtype=DTYPE)
    starts = torch.arange(b, device=DEVICE, dtype=torch.int32) * 300
    args = stream.scaled_BRD, stream.squares_MP, weight, norm, starts
    named = {"heads": heads, "kv_heads": 1, "head_dim": d, "theta": 1e4, "eps": EPS}
    agree(norm_qkv.kernel(*args, **named, tiling=PairTiling(segments, 16, 32, 4, 2)), norm_qkv.reference(*args, **named))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("b", "t", "segments"), [(1, 5, 1), (3, 17, 2)])
def test_norm_geglu(kind: str, b: int, t: int, segments: int) -> None:
    width, hidden = 64, 96
    norm = modulation(kind, 1, b, t, width)
    # Sums of squares arrive in as many parts as the writer had tiles.
    stream = open_stream.reference(normal(0, b, t, width), norm, DTYPE)
    squares = torch.cat((stream.squares_MP * 0.25, stream.squares_MP * 0.75), dim=1)
    args = stream.scaled_BRD, squares, normal(2, 2 * hidden, width, dtype=DTYPE), norm, EPS
    agree(norm_geglu.kernel(*args, tiling=PairTiling(segments, 32, 64, 4, 2)), norm_geglu.reference(*args))


@pytest.mark.parametrize("kind", ["table", "table by token"])
def test_shifts_that_a_stream_does_not_carry_are_added_from_a_table_of_their_products(kind: str) -> None:
    b, t, width, hidden, d = 3, 17, 64, 96, 32
    norm = modulation(kind, 1, b, t, width)
    assert norm.rows is not None
    stream = open_stream.reference(normal(0, b, t, width), norm, DTYPE)
    up, qkv = normal(2, 2 * hidden, width, dtype=DTYPE), normal(3, 6 * d, width, dtype=DTYPE)
    shifts = [ShiftLines(shifted_products(norm.table[:, width : 2 * width], w), norm.rows) for w in (up, qkv)]
    args = stream.scaled_BRD, stream.squares_MP, up, norm, EPS
    got = norm_geglu.kernel(*args, shifts[0], tiling=PairTiling(2, 32, 64, 4, 2))
    agree(got, norm_geglu.reference(*args, shifts[0]))
    agree(got, norm_geglu.reference(*args))
    starts = torch.arange(b, device=DEVICE, dtype=torch.int32) * 300
    args = stream.scaled_BRD, stream.squares_MP, qkv, norm, starts
    named = {"heads": 4, "kv_heads": 1, "head_dim": d, "theta": 1e4, "eps": EPS, "shift": shifts[1]}
    agree(norm_qkv.kernel(*args, **named, tiling=PairTiling(2, 16, 32, 4, 2)), norm_qkv.reference(*args, **named))


@pytest.mark.parametrize("gate", KINDS)
@pytest.mark.parametrize("norm", KINDS)
def test_gated_linear_adds_to_the_stream_and_prepares_the_next_norm(gate: str, norm: str) -> None:
    b, t, width, inner = 3, 7, 64, 128
    args = (
        normal(0, b, t, inner, dtype=DTYPE),
        normal(1, width, inner, dtype=DTYPE),
        normal(2, b, t, width),
        modulation(gate, 3, b, t, width),
        modulation(norm, 4, b, t, width),
        DTYPE,
    )
    got = gated_linear.kernel(*args, tiling=SplitTiling(16, 32, 32, 2, 4, 2))
    same_stream(got, gated_linear.reference(*args))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_gated_linear_gives_the_same_bits_twice_and_leaves_its_counters_at_zero(splits: int) -> None:
    b, t, width, inner = 1, 5, 32, 128
    norm = modulation("scale", 4, b, t, width)
    args = normal(0, b, t, inner, dtype=DTYPE), normal(1, width, inner, dtype=DTYPE), normal(2, b, t, width), norm, norm
    counters = torch.zeros(counters_needed(b * t, width), dtype=torch.int32, device=DEVICE)
    cut = SplitTiling(16, 16, 32, splits, 4, 2)
    first = gated_linear.kernel(*args, torch.float32, counters, tiling=cut)
    assert not counters.any()
    second = gated_linear.kernel(*args, torch.float32, counters, tiling=cut)
    assert all(torch.equal(a, c) for a, c in zip(first, second, strict=True))
    same_stream(first, gated_linear.reference(*args, torch.float32))


@pytest.mark.parametrize("length", [0, 64, 65, 130])
@pytest.mark.parametrize("cut", [Tiling(64, 64, 1, 4, 2, 1), Tiling(64, 64, 5, 4, 2, 1), Tiling(16, 32, 3, 4, 2, 1)])
def test_attention_by_descriptors(length: int, cut: Tiling) -> None:
    b, t, prefix, d = 2, 5, 130, 16
    q, arena = normal(0, b, t, 8, d, dtype=DTYPE), normal(1, 4, 2, prefix, 1, d, dtype=DTYPE)
    # As the product hands them over: slices of one buffer.
    k_suffix, v_suffix = normal(2, b, t, 10, d, dtype=DTYPE)[:, :, 8:].chunk(2, dim=2)
    slots, mask = torch.tensor([3, 1], device=DEVICE), normal(3, b, prefix) > 0
    lengths = torch.tensor([length, prefix - length], device=DEVICE, dtype=torch.int32)
    got = split_attention(q, Keys(arena[:, 0], arena[:, 1], slots, mask, lengths, k_suffix, v_suffix, 1), None, Tiling(*cut))
    named = {"key_mask_BP": mask, "length_B": lengths, "k_suffix_BTKd": k_suffix, "v_suffix_BTKd": v_suffix}
    agree(got, prefix_attention.reference(q, arena[:, 0], arena[:, 1], slots, **named, suffix_lead=1))
