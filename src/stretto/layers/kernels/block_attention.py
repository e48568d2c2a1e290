"""Attention of few queries where every program takes one block of keys: there is nothing to wait for but the queries.

Keys and values of the arena are asked for before the kernel ahead ends (overlap.py), which wrote the queries and the suffix.
Parts are kept and joined as in attention_parts.py.

Shape legend: as in split_attention.py.
"""

from __future__ import annotations

from stretto.layers.kernels.attention_parts import keep_part, page_and_bound
from stretto.layers.kernels.language import jit, tl
from stretto.layers.kernels.overlap import await_inputs


@jit
def block_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_suffix: tl.tensor,
    v_suffix: tl.tensor,
    slots: tl.tensor,
    mask: tl.tensor,
    length: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    block = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    b = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    rows = tokens * GROUP
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    dim, lane = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, BLOCK_N)
    here = row < rows
    page, bound = page_and_bound(b, slots, length, arena_tokens, INDEXED, BOUNDED)
    key = block * BLOCK_N + lane
    present = key < bound
    k_at = k + page * k_b + kv_head * k_h + key[:, None] * k_t + dim
    v_at = v + page * v_b + kv_head * v_h + key[:, None] * v_t + dim
    k_tile = tl.load(k_at, mask=present[:, None], other=0.0)
    v_tile = tl.load(v_at, mask=present[:, None], other=0.0)
    valid = present
    if MASKED:
        valid = tl.load(mask + b * mask_b + key, mask=present, other=0) != 0
    await_inputs(OVERLAP)

    q_at = q + b * q_b + (token * q_t + head * q_h)[:, None] + dim
    q_tile = tl.load(q_at, mask=here[:, None], other=0.0)
    sees = valid[None, :] & here[:, None]
    arena_blocks = tl.cdiv(bound, BLOCK_N)
    blocks = arena_blocks
    if SUFFIX:
        # A block holds keys of the arena or of the suffix, never of both.
        fresh = (block - arena_blocks) * BLOCK_N + lane
        late = (block >= arena_blocks) & (fresh < suffix_tokens)
        ks_at = k_suffix + b * ks_b + kv_head * ks_h + fresh[:, None] * ks_t + dim
        vs_at = v_suffix + b * vs_b + kv_head * vs_h + fresh[:, None] * vs_t + dim
        k_late = tl.load(ks_at, mask=late[:, None], other=0.0)
        v_late = tl.load(vs_at, mask=late[:, None], other=0.0)
        k_tile, v_tile = tl.where(late[:, None], k_late, k_tile), tl.where(late[:, None], v_late, v_tile)
        sees |= late[None, :] & ((token >= suffix_lead)[:, None] | (fresh < suffix_lead)[None, :])
        blocks += tl.cdiv(suffix_tokens, BLOCK_N)
    scores = tl.where(sees, tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale, -1.0e30)
    top = tl.max(scores, 1)
    weights = tl.where(sees, tl.exp2(scores - top[:, None]), 0.0)
    total = tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")

    at = (tl.program_id(2) * SPLITS + block).to(tl.int64) * rows + row
    keep_part(part, part_top, part_total, at, acc, top, total, (block == 0) | (block < blocks), here, HEAD_DIM)
