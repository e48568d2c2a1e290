"""Half-split rotary embedding of a fused QKV product, optionally written straight into a KV arena.

Shape legend: B rows, T tokens, C = (H + 2 K) d channels of q, k and v side by side, H query heads, K key/value heads,
d head size, S arena slots, P arena tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps


def rope_reference(
    qkv_BTC: Tensor, positions_BT: Tensor, *, heads: int, kv_heads: int, head_dim: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split q, k, v and rotate q and k in fp32 by integer positions: (q_BTHd, k_BTKd, v_BTKd); v may be a view."""
    q, k, v = split_qkv(qkv_BTC, heads, kv_heads, head_dim)
    cos, sin = rotary_angles(positions_BT, head_dim, theta)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rope_write_reference(
    qkv_BTC: Tensor,
    positions_BT: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    offset: int = 0,
) -> Tensor:
    """Like `rope`, but write k and v into tokens [offset, offset + T) of slot `slots_B[b]`; return q_BTHd only.

    Rows that share a slot (padding) leave it with undefined contents.
    """
    q, k, v = rope_reference(qkv_BTC, positions_BT, heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=theta)
    tokens = qkv_BTC.shape[1]
    k_arena_SPKd[slots_B, offset : offset + tokens] = k.to(k_arena_SPKd.dtype)
    v_arena_SPKd[slots_B, offset : offset + tokens] = v.to(v_arena_SPKd.dtype)
    return q


def split_qkv(qkv_BTC: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_BTHd, k_BTKd and v_BTKd as views."""
    split = qkv_BTC.view(*qkv_BTC.shape[:2], heads + 2 * kv_heads, head_dim)
    return split[:, :, :heads], split[:, :, heads : heads + kv_heads], split[:, :, heads + kv_heads :]


def rotary_angles(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin in fp32, each [B, T, 1, d / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32) / head_dim
    angles = positions_BT.float()[..., None, None] / theta**exponents
    return angles.cos(), angles.sin()


def rotate(x_BTHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BTHd.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHd.dtype)


@jit
def _rope_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    tokens: tl.tensor,
    offset: tl.tensor,
    qkv_b: tl.tensor,
    qkv_t: tl.tensor,
    positions_b: tl.tensor,
    positions_t: tl.tensor,
    k_slot: tl.tensor,
    k_t: tl.tensor,
    v_slot: tl.tensor,
    v_t: tl.tensor,
    log2_theta: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0)
    b, t = (row // tokens).to(tl.int64), row % tokens
    source = qkv + b * qkv_b + t * qkv_t
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + KV_HEADS) & (pair < HALF)

    position = tl.load(positions + b * positions_b + t * positions_t).to(tl.float32)
    angle = position * tl.exp2(pair.to(tl.float32) * (-log2_theta / HALF))
    cos, sin = tl.cos(angle), tl.sin(angle)
    low = tl.load(source + head * HEAD_DIM + pair, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + head * HEAD_DIM + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    turned_low = (low * cos - high * sin).to(q_out.dtype.element_ty)
    turned_high = (high * cos + low * sin).to(q_out.dtype.element_ty)

    q_at = q_out + (row.to(tl.int64) * HEADS + head) * HEAD_DIM + pair
    tl.store(q_at, turned_low, mask=inside & (head < HEADS))
    tl.store(q_at + HALF, turned_high, mask=inside & (head < HEADS))
    page = b
    if WRITE:
        page = tl.load(slots + b).to(tl.int64)
    k_at = k_out + page * k_slot + (offset + t) * k_t + (head - HEADS) * HEAD_DIM + pair
    tl.store(k_at, turned_low.to(k_out.dtype.element_ty), mask=inside & (head >= HEADS))
    tl.store(k_at + HALF, turned_high.to(k_out.dtype.element_ty), mask=inside & (head >= HEADS))
    if WRITE:
        channel = tl.arange(0, BLOCK_V)
        value = tl.load(source + (HEADS + KV_HEADS) * HEAD_DIM + channel, mask=channel < KV_HEADS * HEAD_DIM, other=0.0)
        v_at = v_out + page * v_slot + (offset + t) * v_t + channel
        tl.store(v_at, value.to(v_out.dtype.element_ty), mask=channel < KV_HEADS * HEAD_DIM)


def rope_triton(
    qkv_BTC: Tensor, positions_BT: Tensor, *, heads: int, kv_heads: int, head_dim: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = qkv_BTC.shape
    k = torch.empty(batch, tokens, kv_heads, head_dim, dtype=qkv_BTC.dtype, device=qkv_BTC.device)
    q = _launch(qkv_BTC, positions_BT, k, k, None, heads, kv_heads, head_dim, theta, 0)
    return q, k, split_qkv(qkv_BTC, heads, kv_heads, head_dim)[2]


def rope_write_triton(
    qkv_BTC: Tensor,
    positions_BT: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    offset: int = 0,
) -> Tensor:
    return _launch(qkv_BTC, positions_BT, k_arena_SPKd, v_arena_SPKd, slots_B, heads, kv_heads, head_dim, theta, offset)


def _launch(
    qkv_BTC: Tensor,
    positions_BT: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    slots_B: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    offset: int,
) -> Tensor:
    batch, tokens, _ = qkv_BTC.shape
    overlap = overlaps(qkv_BTC)
    q = torch.empty(batch, tokens, heads, head_dim, dtype=qkv_BTC.dtype, device=qkv_BTC.device)
    _rope_kernel[(batch * tokens,)](
        qkv_BTC, positions_BT, positions_BT if slots_B is None else slots_B, q, k_out, v_out,
        tokens, offset,
        qkv_BTC.stride(0), qkv_BTC.stride(1), positions_BT.stride(0), positions_BT.stride(1),
        k_out.stride(0), k_out.stride(1), v_out.stride(0), v_out.stride(1), math.log2(theta),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, WRITE=slots_B is not None,
        BLOCK_HEADS=block_of(heads + kv_heads), BLOCK_HALF=block_of(head_dim // 2), BLOCK_V=block_of(kv_heads * head_dim),
        OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return q


def _dense(qkv_BTC: Tensor, positions_BT: Tensor, *arenas: Tensor, **sizes: float) -> bool:
    """The kernel takes heads that lie side by side in one token."""
    dense = all(x.dim() != 4 or (x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]) for x in arenas)
    return qkv_BTC.stride(-1) == 1 and dense


rope = FusedOp(rope_reference, rope_triton, supports=_dense)
rope_write = FusedOp(rope_write_reference, rope_write_triton, supports=_dense)
