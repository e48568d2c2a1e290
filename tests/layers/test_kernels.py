"""Each Triton kernel against its reference: on a GPU where there is one, else in the interpreter (own process)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.layers.dispatch import implementation
from stretto.layers.kernels import (
    Modulation,
    ada_rms_norm,
    attention,
    gated_add,
    gated_add_ada_rms_norm,
    gated_add_layer_norm,
    gated_add_modulated_layer_norm,
    geglu,
    gelu_tanh,
    layer_norm,
    modulated_layer_norm,
    patchify,
    prefix_attention,
    qk_norm_rope_write,
    rms_norm,
    rope,
    rope_3d,
    rope_write,
    sum_layer_norm,
    sum_rms_norm,
)
from stretto.layers.kernels.rope_3d import rope_3d_turns
from stretto.layers.kernels.split_attention import Keys, Tiling, choose_tiling, split_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
# No shrinking: the interpreter is slow, and the shapes are small as they are.
few = settings(max_examples=5, deadline=None, derandomize=True, phases=(Phase.generate,))

batches = st.integers(1, 3)
token_counts = st.integers(1, 7)
widths = st.sampled_from([8, 33, 72, 256])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**16)
# The interpreter multiplies bf16 matrices as raw bits; on a GPU bf16 is what counts.
attention_dtypes = st.sampled_from([torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16])


class Draw:
    """Random tensors of one seed, on the device under test."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype or self.dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(DEVICE, dtype)

    def slots(self, batch: int, slots: int) -> Tensor:
        return torch.randperm(slots, generator=self.generator)[:batch].to(DEVICE)


def agree(got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    gots, wants = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(gots) == len(wants)
    # Two units in the last place of the coarsest format, which an intermediate value may have been stored in: sums run
    # in another order, and the interpreter truncates.
    tolerance = max({torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[b.dtype] for b in wants)
    for a, b in zip(gots, wants, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@few
@given(batches, token_counts, widths, dtypes, st.booleans(), seeds)
def test_rms_norm(b: int, t: int, width: int, dtype: torch.dtype, unit_offset: bool, seed: int) -> None:
    draw = Draw(seed, dtype)
    x, w = draw.normal(b, t, width), draw.normal(width)
    agree(rms_norm.kernel(x, w, 1e-6, unit_offset=unit_offset), rms_norm.reference(x, w, 1e-6, unit_offset=unit_offset))


@few
@given(batches, token_counts, widths, dtypes, dtypes, st.integers(0, 2), st.booleans(), seeds)
def test_norms_of_a_stream_of_any_dtype_sum_it_in_fp32(
    b: int, t: int, width: int, dtype: torch.dtype, residual: torch.dtype, added: int, store: bool, seed: int
) -> None:
    draw = Draw(seed, dtype)
    stored, waiting = draw.normal(b, t, width, dtype=residual), tuple(draw.normal(b, t, width) for _ in range(added))
    w, bias = draw.normal(width), draw.normal(width)
    for op, weights in ((sum_rms_norm, (w,)), (sum_layer_norm, (w, bias))):
        got = op.kernel(stored, waiting, *weights, 1e-6, dtype=dtype, store=store)
        want = op.reference(stored, waiting, *weights, 1e-6, dtype=dtype, store=store)
        agree((got[0], got[1].total()), (want[0], want[1].total()))
        assert len(got[1].added) == (0 if store else added)
        assert got[1].stored.dtype == (torch.float32 if store and added else residual)


@pytest.mark.parametrize("width", [256, 1152, 3200])
def test_a_stream_that_takes_a_program_several_chunks_or_more_warps(width: int) -> None:
    draw = Draw(width, torch.bfloat16)
    args = draw.normal(3, width, dtype=torch.float32), (draw.normal(3, width),) * 2, draw.normal(width)
    for op, weights in ((sum_rms_norm, ()), (sum_layer_norm, (draw.normal(width),))):
        got, want = op.kernel(*args, *weights, 1e-6), op.reference(*args, *weights, 1e-6)
        agree((got[0], got[1].stored), (want[0], want[1].stored))


@few
@given(batches, token_counts, widths, seeds)
def test_a_stream_of_fewer_axes_is_of_every_group(b: int, t: int, width: int, seed: int) -> None:
    draw = Draw(seed, torch.bfloat16)
    args = draw.normal(t, width, dtype=torch.float32), (draw.normal(b, t, width),), draw.normal(width), draw.normal(width)
    got, want = sum_layer_norm.kernel(*args, 1e-6), sum_layer_norm.reference(*args, 1e-6)
    agree((got[0], got[1].stored), (want[0], want[1].stored))


def modulation_of(draw: Draw, kind: str, b: int, t: int, width: int) -> Modulation:
    """Make a modulation of any kind that the ops accept; tables are slices of wider ones."""
    match kind:
        case "row":
            return Modulation(draw.normal(b, 3 * width))
        case "token":
            return Modulation(draw.normal(b, t, 3 * width))
        case "table":
            return Modulation(draw.normal(5, 9 * width)[:, 3 * width : 6 * width], draw.integers(5, b))
        case _:
            return Modulation(draw.normal(5, 3 * width), draw.integers(5, b, t))


kinds = st.sampled_from(["row", "token", "table", "table by token"])


@few
@given(batches, token_counts, widths, dtypes, kinds, seeds)
def test_ada_rms_norm_takes_every_kind_of_modulation(
    b: int, t: int, width: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    draw = Draw(seed, dtype)
    args = draw.normal(b, t, width), modulation_of(draw, kind, b, t, width), 1e-6
    agree(ada_rms_norm.kernel(*args), ada_rms_norm.reference(*args))


@few
@given(batches, token_counts, widths, dtypes, kinds, kinds, seeds)
def test_gated_add_ada_rms_norm_takes_gate_and_scale_from_two_modulations(
    b: int, t: int, width: int, dtype: torch.dtype, gate: str, norm: str, seed: int
) -> None:
    draw = Draw(seed, dtype)
    modulations = modulation_of(draw, gate, b, t, width), modulation_of(draw, norm, b, t, width)
    args = draw.normal(b, t, width), draw.normal(b, t, width), *modulations, 1e-6
    agree(gated_add_ada_rms_norm.kernel(*args), gated_add_ada_rms_norm.reference(*args))


@few
@given(batches, token_counts, widths, dtypes, dtypes, seeds)
def test_layer_norms_with_weights(b: int, t: int, width: int, dtype: torch.dtype, other: torch.dtype, seed: int) -> None:
    draw = Draw(seed, dtype)
    x, residual, gate = draw.normal(b, t, width), draw.normal(b, t, width, dtype=other), draw.normal(b, 1, width)
    w, bias = draw.normal(width), draw.normal(width)
    agree(layer_norm.kernel(x, w, bias, 1e-6, dtype=other), layer_norm.reference(x, w, bias, 1e-6, dtype=other))
    args = residual, x, gate, w, bias, 1e-6
    agree(gated_add_layer_norm.kernel(*args), gated_add_layer_norm.reference(*args))


@few
@given(batches, st.integers(1, 3), token_counts, widths, dtypes, dtypes, seeds)
def test_layer_norms_modulated_by_frame(
    b: int, frames: int, t: int, width: int, dtype: torch.dtype, other: torch.dtype, seed: int
) -> None:
    draw = Draw(seed, dtype)
    x, y = draw.normal(b, frames * t, width), draw.normal(b, frames * t, width, dtype=other)
    # One [B, F, 3 D] product cut in three, as models hand it over: strided views.
    gate, scale, shift = draw.normal(b, frames, 3 * width, dtype=torch.float32).chunk(3, dim=-1)
    agree(modulated_layer_norm.kernel(x, scale, shift, 1e-6), modulated_layer_norm.reference(x, scale, shift, 1e-6))
    agree(gated_add.kernel(x, y, gate), gated_add.reference(x, y, gate))
    for g in (gate, None):
        args = x, y, g, scale, shift, 1e-6
        agree(gated_add_modulated_layer_norm.kernel(*args), gated_add_modulated_layer_norm.reference(*args))


@few
@given(batches, token_counts, st.sampled_from([5, 33, 1025]), dtypes, seeds)
def test_gelu_and_its_gated_form(b: int, t: int, width: int, dtype: torch.dtype, seed: int) -> None:
    draw = Draw(seed, dtype)
    # Far out on both sides, where exp would overflow.
    both = draw.normal(b, t, 2 * width) * torch.tensor([1.0, 40.0], device=DEVICE, dtype=dtype).repeat(width)
    agree(geglu.kernel(both), geglu.reference(both))
    bias = draw.normal(2 * width)
    agree(gelu_tanh.kernel(both, bias), gelu_tanh.reference(both, bias))
    agree(gelu_tanh.kernel(both), gelu_tanh.reference(both))


@few
@given(batches, token_counts, st.sampled_from([(0, 1), (8, 1), (3, 3)]), st.sampled_from([6, 16]), dtypes, seeds)
def test_rope(b: int, t: int, heads: tuple[int, int], d: int, dtype: torch.dtype, seed: int) -> None:
    draw = Draw(seed, dtype)
    qkv = draw.normal(b, t, (heads[0] + 2 * heads[1]) * d)
    positions = draw.integers(1000, 1, t, dtype=torch.int32).expand(b, t)
    shape = {"heads": heads[0], "kv_heads": heads[1], "head_dim": d, "theta": 1e4}
    agree(rope.kernel(qkv, positions, **shape), rope.reference(qkv, positions, **shape))


@few
@given(batches, token_counts, st.sampled_from([(8, 1), (3, 3)]), st.integers(0, 3), dtypes, seeds)
def test_rope_write_touches_only_its_own_part_of_the_arena(
    b: int, t: int, heads: tuple[int, int], offset: int, dtype: torch.dtype, seed: int
) -> None:
    draw, d = Draw(seed, dtype), 16
    qkv, positions = draw.normal(b, t, (heads[0] + 2 * heads[1]) * d), draw.integers(1000, b, t)
    slots = draw.slots(b, 4)
    # [slots, layers, k and v, P, K, d]: one layer of it is a strided view.
    arena = draw.normal(4, 2, 2, t + 3, heads[1], d)
    other = arena.clone()
    shape = {"heads": heads[0], "kv_heads": heads[1], "head_dim": d, "theta": 1e4, "offset": offset}
    got = rope_write.kernel(qkv, positions, arena[:, 1, 0], arena[:, 1, 1], slots, **shape)
    want = rope_write.reference(qkv, positions, other[:, 1, 0], other[:, 1, 1], slots, **shape)
    agree(got, want)
    agree(arena, other)
    assert torch.equal(arena[:, 0], other[:, 0])


@few
@given(batches, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 3, 14]), dtypes, st.booleans(), seeds)
def test_patchify_from_bytes_and_floats(
    n: int, down: int, across: int, patch: int, dtype: torch.dtype, channels_first: bool, seed: int
) -> None:
    draw = Draw(seed, dtype)
    image = draw.integers(256, n, down * patch, across * patch, 3, dtype=torch.uint8)
    if channels_first:
        image = image.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    agree(patchify.kernel(image, patch, dtype=dtype), patchify.reference(image, patch, dtype=dtype))
    wider = {"dtype": dtype, "columns": 3 * patch**2 + 5}
    agree(patchify.kernel(image, patch, **wider), patchify.reference(image, patch, **wider))
    pixels = image.to(dtype)
    assert torch.equal(patchify.kernel(pixels, patch, dtype=dtype), patchify.reference(pixels, patch, dtype=dtype))


video_grids = st.sampled_from([(1, 1, 1), (2, 1, 3), (1, 2, 2)])


@few
@given(batches, video_grids, st.sampled_from([1, 3]), st.sampled_from([16, 128]), dtypes, seeds)
def test_rope_3d_far_into_a_stream(
    b: int, grid: tuple[int, int, int], heads: int, d: int, dtype: torch.dtype, seed: int
) -> None:
    draw = Draw(seed, dtype)
    x, start = draw.normal(b, grid[0] * grid[1] * grid[2], heads, d), draw.integers(100_000, b)
    agree(rope_3d.kernel(x, start, grid), rope_3d.reference(x, start, grid))


@few
@given(batches, video_grids, st.sampled_from([1, 3]), dtypes, seeds)
def test_qk_norm_rope_write_touches_only_its_page_of_the_ring(
    b: int, grid: tuple[int, int, int], heads: int, dtype: torch.dtype, seed: int
) -> None:
    draw, d = Draw(seed, dtype), 16
    tokens = grid[0] * grid[1] * grid[2]
    qkv, start, offset = draw.normal(b, tokens, 3 * heads * d), draw.integers(900, b), draw.integers(3, b) * tokens
    weights = draw.normal(heads * d), draw.normal(heads * d)
    ring = draw.normal(4, 2, 3 * tokens, heads, d)
    other = ring.clone()
    places = draw.slots(b, 4), offset
    turns = rope_3d_turns.kernel(start, grid, d)
    agree(turns, rope_3d_turns.reference(start, grid, d))
    got = qk_norm_rope_write.kernel(qkv, *weights, turns, ring[:, 0], ring[:, 1], *places, eps=1e-6)
    want = qk_norm_rope_write.reference(qkv, *weights, turns, other[:, 0], other[:, 1], *places, eps=1e-6)
    agree(got, want)
    agree(ring, other)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("suffix", [False, True])
def test_prefix_attention_with_lengths_at_block_edges(length: int, splits: int, suffix: bool) -> None:
    draw = Draw(length, torch.float32 if INTERPRETED else torch.bfloat16)
    b, t, prefix, d = 2, 2, 130, 16
    q, k, v = draw.normal(b, t, 8, d), draw.normal(4, prefix, 1, d), draw.normal(4, prefix, 1, d)
    fresh = (draw.normal(b, t, 1, d), draw.normal(b, t, 1, d)) if suffix else (None, None)
    slots, mask = draw.slots(b, 4), draw.integers(2, b, prefix, dtype=torch.uint8)
    lengths = torch.tensor([length, prefix - length], device=DEVICE, dtype=torch.int32)
    got = split_attention(q, Keys(k, v, slots, mask, lengths, *fresh), None, Tiling(16, 64, splits, 4, 2))
    named = {"key_mask_BP": mask, "length_B": lengths, "k_suffix_BTKd": fresh[0], "v_suffix_BTKd": fresh[1]}
    agree(got, prefix_attention.reference(q, k, v, slots, **named))


@few
@given(batches, token_counts, st.sampled_from([(8, 1), (4, 2), (3, 3)]), st.integers(0, 3), attention_dtypes, seeds)
def test_prefix_attention_with_holes_in_its_mask_and_a_leading_suffix(
    b: int, t: int, heads: tuple[int, int], lead: int, dtype: torch.dtype, seed: int
) -> None:
    draw, prefix, d = Draw(seed, dtype), 70, 16
    qkv = draw.normal(b, t, (heads[0] + 2 * heads[1]), d)
    q, k_suffix, v_suffix = qkv.split([heads[0], heads[1], heads[1]], dim=2)
    arena = draw.normal(4, 2, prefix, heads[1], d)
    mask = draw.integers(3, b, prefix) == 0
    named = {"key_mask_BP": mask, "k_suffix_BTKd": k_suffix, "v_suffix_BTKd": v_suffix, "suffix_lead": lead}
    args = q, arena[:, 0], arena[:, 1], draw.slots(b, 4)
    agree(prefix_attention.kernel(*args, **named), prefix_attention.reference(*args, **named))


@few
@given(st.integers(1, 40), st.integers(1, 70), attention_dtypes, seeds)
def test_attention_gives_zeros_where_no_key_is_valid(t: int, keys: int, dtype: torch.dtype, seed: int) -> None:
    draw, d = Draw(seed, dtype), 32
    q, k, v = draw.normal(2, t, 4, d), draw.normal(2, keys, 2, d), draw.normal(2, keys, 2, d)
    mask = draw.integers(2, 2, keys).bool()
    mask[1] = False
    got = attention.kernel(q, k, v, key_mask_BN=mask, scale=0.2)
    agree(got, attention.reference(q, k, v, key_mask_BN=mask, scale=0.2))
    assert not got[1].any()


def test_splitting_does_not_depend_on_what_else_is_in_the_batch() -> None:
    """A split count is chosen per shape; with the same tiling a row gives the same bits alone and among others."""
    draw = Draw(3, torch.float32 if INTERPRETED else torch.bfloat16)
    q, k, v = draw.normal(3, 5, 8, 16), draw.normal(3, 130, 1, 16), draw.normal(3, 130, 1, 16)
    cut = Tiling(16, 64, 3, 4, 2)
    together = split_attention(q, Keys(k, v), None, cut)
    alone = split_attention(q[1:2], Keys(k[1:2], v[1:2]), None, cut)
    assert torch.equal(together[1:2], alone)


def test_a_small_batch_splits_its_keys_and_a_large_one_does_not() -> None:
    assert choose_tiling(400, 1, 1018, 256, 132).splits > 1
    assert choose_tiling(400, 32, 1018, 256, 132).splits == 1
    assert choose_tiling(8 * 968, 32, 968, 256, 132).splits == 1


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_call_equals_the_eager_one_and_follows_lengths_changed_after_capture() -> None:
    draw = Draw(5, torch.bfloat16)
    q, k, v = draw.normal(2, 50, 8, 256), draw.normal(3, 968, 1, 256), draw.normal(3, 968, 1, 256)
    slots, lengths = draw.slots(2, 3), torch.tensor([968, 900], device=DEVICE, dtype=torch.int32)
    assert implementation(prefix_attention, DEVICE) == "triton"
    with torch.no_grad():
        prefix_attention(q, k, v, slots, length_B=lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prefix_attention(q, k, v, slots, length_B=lengths)
        for new in ([968, 900], [1, 0], [64, 65]):
            lengths.copy_(torch.tensor(new))
            graph.replay()
            assert torch.equal(captured, prefix_attention(q, k, v, slots, length_B=lengths))
