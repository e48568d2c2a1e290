"""The Triton kernel under `attention` and `prefix_attention`: split over keys, joined in a fixed order.

The G = H / K query heads of one KV head are packed as rows, so one tile of K and V serves all of them. Keys are cut
into blocks, and each split takes a run of consecutive blocks; a second kernel joins the splits in order, without
atomics, so equal inputs give equal bits. Key counts are read on the device: one capture serves every prompt length.

Launches overlap (overlap.py): slots, lengths and masks must be there before the chain of kernels that a call is part of.

Shape legend: B rows, T query tokens, M = T G packed query rows, P arena tokens, N suffix tokens, K key/value heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.layers.kernels.attention_parts import join_kernel, keep_part
from stretto.layers.kernels.language import block_of, cdiv, jit, multiprocessors, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps, prefetch_span

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

LOG2_E = 1.4426950408889634
FIELDS: Mapping[str, tuple[int | str, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128),
    "splits": tuple(range(1, 33)),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4, 5),
    "described": (0, 1),
}


class Tiling(NamedTuple):
    """How one shape is cut; with `splits` 1 there is nothing to join."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    described: int = 0
    """1: tiles of K and V come by descriptor (TMA)."""


class Keys(NamedTuple):
    """Keys and values of one call. Suffix tensors, mask, length and slots may be absent."""

    k_SPKd: Tensor
    v_SPKd: Tensor
    slots_B: Tensor | None = None
    mask_BP: Tensor | None = None
    length_B: Tensor | None = None
    k_suffix_BNKd: Tensor | None = None
    v_suffix_BNKd: Tensor | None = None
    suffix_lead: int = 0


def choose_tiling(rows: int, groups: int, keys: int, head_dim: int, processors: int) -> Tiling:
    """Pick a tiling for `groups` (row, KV head) pairs of `rows` packed queries: fill the chip, then split over keys."""
    large = head_dim > 128
    if groups * cdiv(rows, 128) * 10 >= 9 * processors:
        # A third stage hides the loads; at head size 256 it fits with short blocks only.
        return Tiling(128, 32, 1, 8, 3) if large else Tiling(128, 64, 1, 8, 3)
    block_m = 64 if rows > 32 else max(16, block_of(rows))
    tiles = groups * cdiv(rows, block_m)
    # A suffix starts a block of its own. One block a split costs more in parts to join than its loop saves.
    blocks = cdiv(keys, 64) + 1
    each = max(2, cdiv(blocks, max(processors // tiles, 1)))
    # With 4 warps a 64 x 256 fp32 accumulator spills; with 8 it does not.
    return Tiling(block_m, 64, cdiv(blocks, each), 8 if large and block_m == 64 else 4, 3)


@jit
def _attend(
    q: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    page: tl.tensor,
    kv_head: tl.tensor,
    key: tl.tensor,
    block: tl.tensor,
    present: tl.tensor,
    valid: tl.tensor,
    dim: tl.tensor,
    scale: tl.tensor,
    DESCRIBED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Take in one block of keys by the online softmax, in base 2. `valid` broadcasts to [rows, keys]."""
    if DESCRIBED:
        k_tile = k.load([page.to(tl.int32), kv_head, block * BLOCK_N, 0]).reshape(BLOCK_N, HEAD_DIM)
    else:
        k_tile = tl.load(k + key[:, None] * k_stride + dim[None, :], mask=present[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale
    scores = tl.where(valid, scores, -1.0e30)
    # A whole number: weights rounded under different tops then differ by powers of two alone, so results of all tilings agree.
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    weights = tl.where(valid, tl.exp2(scores - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    if DESCRIBED:
        v_tile = v.load([page.to(tl.int32), kv_head, block * BLOCK_N, 0]).reshape(BLOCK_N, HEAD_DIM)
    else:
        v_tile = tl.load(v + key[:, None] * v_stride + dim[None, :], mask=present[:, None], other=0.0)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@jit
def _attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_suffix: tl.tensor,
    v_suffix: tl.tensor,
    slots: tl.tensor,
    mask: tl.tensor,
    length: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_top: tl.tensor,
    part_total: tl.tensor,
    q_b: tl.tensor,
    q_t: tl.tensor,
    q_h: tl.tensor,
    k_b: tl.tensor,
    k_t: tl.tensor,
    k_h: tl.tensor,
    v_b: tl.tensor,
    v_t: tl.tensor,
    v_h: tl.tensor,
    ks_b: tl.tensor,
    ks_t: tl.tensor,
    ks_h: tl.tensor,
    vs_b: tl.tensor,
    vs_t: tl.tensor,
    vs_h: tl.tensor,
    mask_b: tl.tensor,
    tokens: tl.tensor,
    arena_tokens: tl.tensor,
    suffix_tokens: tl.tensor,
    suffix_lead: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INDEXED: tl.constexpr,
    MASKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SUFFIX: tl.constexpr,
    SPLITS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    split = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    b = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    rows = tokens * GROUP
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, BLOCK_N)
    here = row < rows

    page = b
    if INDEXED:
        page = tl.load(slots + b).to(tl.int64)
    bound = arena_tokens
    if BOUNDED:
        bound = tl.minimum(tl.load(length + b).to(tl.int32), arena_tokens)
    arena_blocks = tl.cdiv(bound, BLOCK_N)
    blocks = arena_blocks + tl.cdiv(suffix_tokens, BLOCK_N)
    each = tl.cdiv(blocks, SPLITS)
    first, last = split * each, (split + 1) * each
    k_at, v_at = k, v
    if not DESCRIBED:
        k_at, v_at = k + page * k_b + kv_head * k_h, v + page * v_b + kv_head * v_h
        if SPLITS > 1:
            # Two blocks of a split, as one stretch where tokens lie side by side.
            begin = tl.minimum(first * BLOCK_N, bound)
            keys = tl.minimum(tl.minimum(last, first + 2) * BLOCK_N, bound) - begin
            if k_t == HEAD_DIM and v_t == HEAD_DIM and keys > 0:
                prefetch_span(k_at + begin * HEAD_DIM, keys * HEAD_DIM * 2, OVERLAP)
                prefetch_span(v_at + begin * HEAD_DIM, keys * HEAD_DIM * 2, OVERLAP)
    await_inputs(OVERLAP)

    q_tile = tl.load(q + b * q_b + (token * q_t + head * q_h)[:, None] + dim[None, :], mask=here[:, None], other=0.0)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mask_at = mask + b * mask_b + lane
    end = tl.minimum(last, arena_blocks)
    # The mask of a block is asked for one block ahead.
    seen = lane < bound
    if MASKED:
        seen = tl.load(mask_at + first * BLOCK_N, mask=first * BLOCK_N + lane < bound, other=0) != 0
    for block in range(first, end):
        key = block * BLOCK_N + lane
        present = key < bound
        valid = present
        if MASKED:
            valid = seen
            seen = tl.load(mask_at + (block + 1) * BLOCK_N, mask=key + BLOCK_N < bound, other=0) != 0
        acc, top, total = _attend(
            q_tile, acc, top, total, k_at, v_at, k_t, v_t, page, kv_head, key, block, present, valid[None, :], dim, scale,
            DESCRIBED, BLOCK_N, HEAD_DIM,
        )  # fmt: skip
    if SUFFIX:
        k_at, v_at = k_suffix, v_suffix
        if not DESCRIBED:
            k_at, v_at = k_suffix + b * ks_b + kv_head * ks_h, v_suffix + b * vs_b + kv_head * vs_h
        suffix_blocks = tl.cdiv(suffix_tokens, BLOCK_N)
        for block in range(tl.maximum(first - arena_blocks, 0), tl.minimum(last - arena_blocks, suffix_blocks)):
            key = block * BLOCK_N + lane
            present = key < suffix_tokens
            valid = present[None, :] & ((token >= suffix_lead)[:, None] | (key < suffix_lead)[None, :])
            acc, top, total = _attend(
                q_tile, acc, top, total, k_at, v_at, ks_t, vs_t, b, kv_head, key, block, present, valid, dim, scale,
                DESCRIBED, BLOCK_N, HEAD_DIM,
            )  # fmt: skip

    out_at = out + ((b * tokens + token) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=here[:, None])
    else:
        at = (tl.program_id(2) * SPLITS + split).to(tl.int64) * rows + row
        keep_part(part, part_top, part_total, at, acc, top, total, (split == 0) | (first < blocks), here, HEAD_DIM)


def split_attention(q_BTHd: Tensor, keys: Keys, scale: float | None, tiling: Tiling | None = None) -> Tensor:
    """Run the kernel; all tensors have a dense last axis and d is a power of two, 16 or more. Returns [B, T, H, d]."""
    batch, tokens, heads, head_dim = q_BTHd.shape
    kv_heads = keys.k_SPKd.shape[2]
    group, pairs = heads // kv_heads, batch * kv_heads
    rows = tokens * group
    suffix = keys.k_suffix_BNKd is not None
    k_suffix = keys.k_SPKd if keys.k_suffix_BNKd is None else keys.k_suffix_BNKd
    v_suffix = keys.v_SPKd if keys.v_suffix_BNKd is None else keys.v_suffix_BNKd
    arena_tokens, suffix_tokens = keys.k_SPKd.shape[1], k_suffix.shape[1] if suffix else 0
    cut = tiling or choose_tiling(rows, pairs, arena_tokens + suffix_tokens, head_dim, multiprocessors(q_BTHd))
    out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype, device=q_BTHd.device)
    kept = pairs * cut.splits * rows if cut.splits > 1 else 0
    part = torch.empty(kept * (head_dim + 2), dtype=torch.float32, device=q_BTHd.device)
    parts = torch.split(part, [kept * head_dim, kept, kept])
    mask = _as_bytes(keys.mask_BP) if keys.mask_BP is not None else q_BTHd
    sources: list[Any] = [keys.k_SPKd, keys.v_SPKd, k_suffix, v_suffix]
    strides = [n for x in (q_BTHd, *sources) for n in x.stride()[:3]]
    if cut.described:
        sources = [_described(x, cut.block_n) for x in sources]
    overlap = overlaps(q_BTHd)
    where = q_BTHd if keys.slots_B is None else keys.slots_B, mask, q_BTHd if keys.length_B is None else keys.length_B
    sizes = tokens, arena_tokens, suffix_tokens, keys.suffix_lead, (head_dim**-0.5 if scale is None else scale) * LOG2_E
    constants: dict[str, Any] = {
        "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "INDEXED": keys.slots_B is not None,
        "MASKED": keys.mask_BP is not None, "BOUNDED": keys.length_B is not None, "SUFFIX": suffix, "SPLITS": cut.splits,
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "OVERLAP": overlap,
        "num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": overlap,
    }  # fmt: skip
    _attention_kernel[cdiv(rows, cut.block_m), cut.splits, pairs](
        q_BTHd, *sources, *where, out, *parts, *strides, mask.stride(0), *sizes, DESCRIBED=bool(cut.described), **constants
    )
    if kept:
        block = block_of(cut.splits)
        join_kernel[(rows, pairs)](
            *parts, out, tokens,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, SPLITS=cut.splits, BLOCK_SPLITS=block,
            OVERLAP=overlap, num_warps=2 if block <= 8 else 4, launch_pdl=overlap,
        )  # fmt: skip
    return out


def _described(x_BNKd: Tensor, block: int) -> Any:
    view = x_BNKd.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, block, x_BNKd.shape[-1]])


def fits(q_BTHd: Tensor, *others: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: 16-bit, dense head axis, head size a power of two from 16 to 256."""
    head_dim = q_BTHd.shape[-1]
    dense = all(x.stride(-1) == 1 and x.dtype == q_BTHd.dtype for x in (q_BTHd, *others))
    return (
        dense and q_BTHd.dtype in (torch.bfloat16, torch.float16) and 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    )


def _as_bytes(mask_BP: Tensor) -> Tensor:
    mask = mask_BP.view(torch.uint8) if mask_BP.dtype == torch.bool else mask_BP
    return mask if mask.stride(-1) == 1 else mask.contiguous()
