"""Rotates the queries and keys of a product that was made elsewhere; keys and values go straight to their arena.

Shape legend: as in linear_rope.
"""

from __future__ import annotations

from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.linear_rope import rotate_and_write
from stretto.layers.kernels.rope import rotate, split_qkv


def rotate_write_reference(
    qkv_BTC: Tensor, table: tuple[Tensor, Tensor], k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, *, heads: int
) -> Tensor:
    """Return rotated queries [B, T, H, d]; rotated keys, and values, are written to the first T tokens of the rows' slots."""
    kv_heads, head_dim = k_arena_SPKd.shape[-2:]
    q, k, v = split_qkv(qkv_BTC, heads, kv_heads, head_dim)
    cos, sin = (x[:, :, None] for x in table)
    tokens = qkv_BTC.shape[1]
    k_arena_SPKd[slots_B, :tokens] = rotate(k, cos, sin).to(k_arena_SPKd.dtype)
    v_arena_SPKd[slots_B, :tokens] = v.to(v_arena_SPKd.dtype)
    return rotate(q, cos, sin)


def rotate_write_triton(
    qkv_BTC: Tensor, table: tuple[Tensor, Tensor], k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, *, heads: int
) -> Tensor:
    return rotate_and_write(qkv_BTC, *table, k_arena_SPKd, v_arena_SPKd, slots_B, heads)


def _supports(
    qkv_BTC: Tensor, table: tuple[Tensor, Tensor], k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, **_: int
) -> bool:
    arenas = (k_arena_SPKd, v_arena_SPKd)
    dense = all(a.stride(-1) == 1 and a.stride(-2) == a.shape[-1] and a.dtype == qkv_BTC.dtype for a in arenas)
    return dense and qkv_BTC.is_contiguous() and all(a.is_contiguous() for a in table)


rotate_write = FusedOp(rotate_write_reference, rotate_write_triton, _supports)
