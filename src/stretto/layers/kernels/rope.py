"""Half-split rotary embedding of a fused QKV product, optionally written straight into a KV arena.

Shape legend: B rows, T tokens, C = (H + 2 K) d channels of q, k and v side by side, H query heads, K key/value heads,
d head size, S arena slots, P arena tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


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
    q, k, v = qkv_BTC.unflatten(-1, (heads + 2 * kv_heads, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    return q, k, v


def rotary_angles(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin in fp32, each [B, T, 1, d / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32) / head_dim
    angles = positions_BT.float()[..., None, None] / theta**exponents
    return angles.cos(), angles.sin()


def rotate(x_BTHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BTHd.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHd.dtype)


rope = FusedOp(rope_reference)
rope_write = FusedOp(rope_write_reference)
