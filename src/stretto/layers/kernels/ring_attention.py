"""Attention of a chunk over the first tokens of its row's state slot, split over keys where the chip would be underfilled.

With h heads and t tiles of queries there are h t independent pieces of work; where they fill the last wave of
multiprocessors badly, keys are cut into splits as well. Splits are joined in a fixed order, without atomics. The rows'
slots and lengths are read on the device, and an arena is read in place through tensor descriptors.

Shape legend: B rows, N query tokens, H heads, d head size, S state slots, P arena tokens, Z splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps
from stretto.layers.kernels.split_attention import LOG2_E, fits

MIN_BLOCK = 16


class RingTiling(NamedTuple):
    """How one shape is cut; `splits` 1 means that no second kernel runs."""

    splits: int
    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 2


def ring_attention_reference(
    q_BNHd: Tensor,
    k_SPHd: Tensor,
    v_SPHd: Tensor,
    slots_B: Tensor,
    length_B: Tensor,
    tiling: RingTiling | None = None,
) -> Tensor:
    """Attend row b to the first length_B[b] tokens of slot slots_B[b], both int64; zeros where there are none.

    `tiling` is how the kernel cuts the work; by default one split. Returns [B, N, H, d].
    """
    k, v = k_SPHd[slots_B].transpose(1, 2), v_SPHd[slots_B].transpose(1, 2)
    valid = (torch.arange(k.shape[2], device=k.device) < length_B[:, None])[:, None, None]
    # A query without any key would give NaN: let it see everything, then zero it.
    some = length_B[:, None, None, None] > 0
    out = scaled_dot_product_attention(q_BNHd.transpose(1, 2), k, v, attn_mask=valid | ~some)
    return torch.where(some, out.transpose(1, 2), 0.0)


def join_splits_reference(part_BZNHd: Tensor, lse_BZHN: Tensor) -> Tensor:
    """Join normalised outputs over disjoint key sets by the natural logarithm of their softmax sums. Returns [B, N, H, d].

    A split without any key has -inf there; where no split has any, the result is zero.
    """
    share = torch.nan_to_num(torch.softmax(lse_BZHN.float(), dim=1)).transpose(2, 3)[..., None]
    # A split without keys is left out even where its output is not a number.
    part = torch.where(share > 0.0, part_BZNHd.float(), 0.0)
    return (part * share).sum(1).to(part_BZNHd.dtype)


@jit
def _take(
    q: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    line: tl.tensor,
    channel: tl.tensor,
    left: tl.tensor,
    scale: tl.tensor,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
) -> tl.tensor:
    """Take in one block of keys by the online softmax, in base 2; with TAIL only its first `left` keys count."""
    present = tl.arange(0, BLOCK_N) < left
    scores = tl.dot(q, tl.trans(k.load([line, channel])), input_precision="ieee")
    if TAIL:
        scores = tl.where(present[None, :], scores, -1.0e30)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    v_tile = v.load([line, channel])
    if TAIL:
        # What lies past the end was perhaps never written: zero times NaN is NaN.
        v_tile = tl.where(present[:, None], v_tile, 0.0)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@jit
def _ring_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    tokens: tl.tensor,
    arena_tokens: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    # Tiles of queries come first in the grid, so that those that run at once read the same keys.
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, head = tl.program_id(2) // heads, tl.program_id(2) % heads
    channel = head * HEAD_DIM
    q_tile = q.load([b * tokens + tile * BLOCK_M, channel])
    base = tl.load(slots + b).to(tl.int32) * arena_tokens
    bound = tl.minimum(tl.load(lengths + b).to(tl.int32), arena_tokens)
    each = tl.cdiv(tl.cdiv(bound, BLOCK_N), splits) * BLOCK_N
    first, last = split * each, tl.minimum((split + 1) * each, bound)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for key in tl.range(first, whole, BLOCK_N):
        acc, top, total = _take(q_tile, acc, top, total, k, v, base + key, channel, BLOCK_N, scale, BLOCK_N, False)
    if whole < last:
        acc, top, total = _take(q_tile, acc, top, total, k, v, base + whole, channel, last - whole, scale, BLOCK_N, True)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    here = row < tokens
    some = tl.where(total > 0.0, total, 1.0)
    acc = acc / some[:, None]
    line = ((b * splits + split) * tokens + row).to(tl.int64) * (heads * HEAD_DIM) + channel
    tl.store(out + line[:, None] + tl.arange(0, HEAD_DIM)[None, :], acc.to(out.dtype.element_ty), mask=here[:, None])
    if SPLIT:
        sums = tl.where(total > 0.0, (top + tl.log2(some)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + ((b * splits + split) * heads + head) * tokens + row, sums, mask=here)


@jit
def _join_kernel(
    part: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    part_b: tl.tensor,
    part_z: tl.tensor,
    part_n: tl.tensor,
    part_h: tl.tensor,
    tokens: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Join the splits of BLOCK tokens of one head."""
    await_inputs(OVERLAP)
    b, head = tl.program_id(2), tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_DIM)
    here = token < tokens
    sums = lse + (b * SPLITS * HEADS + head) * tokens + token
    top = tl.full((BLOCK,), -1.0e30, tl.float32)
    for z in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(sums + z * HEADS * tokens, mask=here, other=0.0))
    acc = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    at = part + b.to(tl.int64) * part_b + head * part_h + token[:, None].to(tl.int64) * part_n + dim[None, :]
    for z in tl.static_range(SPLITS):
        share = tl.exp(tl.load(sums + z * HEADS * tokens, mask=here, other=0.0) - top)
        total += share
        value = tl.load(at + z * part_z, mask=here[:, None], other=0.0).to(tl.float32)
        acc += tl.where((share > 0.0)[:, None], value * share[:, None], 0.0)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    line = (b * tokens + token).to(tl.int64) * HEADS + head
    tl.store(out + line[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=here[:, None])


def join_splits_triton(part_BZNHd: Tensor, lse_BZHN: Tensor) -> Tensor:
    batch, splits, tokens, heads, head_dim = part_BZNHd.shape
    lse = lse_BZHN.contiguous()
    out = torch.empty(batch, tokens, heads, head_dim, dtype=part_BZNHd.dtype, device=part_BZNHd.device)
    block = 16
    _join_kernel[(cdiv(tokens, block), heads, batch)](
        part_BZNHd, lse, out, *part_BZNHd.stride()[:4], tokens,
        HEADS=heads, HEAD_DIM=head_dim, SPLITS=splits, BLOCK=block,
        OVERLAP=overlaps(out), num_warps=4, launch_pdl=overlaps(out),
    )  # fmt: skip
    return out


def ring_attention_triton(
    q_BNHd: Tensor,
    k_SPHd: Tensor,
    v_SPHd: Tensor,
    slots_B: Tensor,
    length_B: Tensor,
    tiling: RingTiling | None = None,
) -> Tensor:
    cut = tiling or RingTiling(1)
    (batch, tokens, heads, head_dim), arena_tokens = q_BNHd.shape, k_SPHd.shape[1]
    q = _lines(q_BNHd.contiguous(), cut.block_m)
    part = torch.empty(batch, cut.splits, tokens, heads, head_dim, dtype=q_BNHd.dtype, device=q_BNHd.device)
    lse = torch.empty(batch, cut.splits, heads, tokens if cut.splits > 1 else 0, dtype=torch.float32, device=q_BNHd.device)
    _ring_kernel[(cdiv(tokens, cut.block_m), cut.splits, batch * heads)](
        q, _lines(k_SPHd, cut.block_n), _lines(v_SPHd, cut.block_n), slots_B, length_B, part, lse,
        tokens, arena_tokens, head_dim**-0.5 * LOG2_E, heads,
        HEAD_DIM=head_dim, SPLIT=cut.splits > 1, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return part[:, 0] if cut.splits == 1 else join_splits_triton(part, lse)


def _lines(x_STHd: Tensor, rows: int) -> Any:
    """Describe tokens of all slots as lines of one matrix, read a block of `rows` of one head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    head_dim = x_STHd.shape[-1]
    lines = x_STHd.view(-1, x_STHd.shape[2] * head_dim)
    return TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [rows, head_dim])


def _arenas_in_one_piece(
    q_BNHd: Tensor, k_SPHd: Tensor, v_SPHd: Tensor, slots_B: Tensor, length_B: Tensor, tiling: RingTiling | None = None
) -> bool:
    return fits(q_BNHd, k_SPHd, v_SPHd) and k_SPHd.is_contiguous() and v_SPHd.is_contiguous()


def _dense(part_BZNHd: Tensor, lse_BZHN: Tensor) -> bool:
    head_dim = part_BZNHd.shape[-1]
    return part_BZNHd.stride(-1) == 1 and head_dim >= MIN_BLOCK and head_dim & (head_dim - 1) == 0


ring_attention = FusedOp(ring_attention_reference, ring_attention_triton, supports=_arenas_in_one_piece)
join_splits = FusedOp(join_splits_reference, join_splits_triton, supports=_dense)
