"""The QKV product of a prefix with what follows it: heads are rotated, keys and values go straight to their arena.

Cosines and sines are a table of the call's tokens, which all layers share. Either one kernel does it all on the accumulator,
or cuBLAS makes the product and a pass rotates and writes; which of them at a shape is a measured choice.

Shape legend: B rows, T tokens, M = B T, D inner width, C = (H + 2 K) d columns of q, k and v side by side, H query heads,
K key/value heads, d head size, h = d / 2, S arena slots, P arena tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.fold import Fold, arguments_of, fold_line, kind_of
from stretto.layers.kernels.gemm import Tiling, halves, place_of
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, passes_early, prefetch_rows
from stretto.layers.kernels.rope import rotary_angles, rotate, split_qkv
from stretto.layers.tuning import Config, Key, Tunable, tuned

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None


def rotary_table_reference(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the tokens, each [B, T, h] in fp32 and dense."""
    cos, sin = rotary_angles(positions_BT, head_dim, theta)
    return cos.squeeze(2).contiguous(), sin.squeeze(2).contiguous()


def linear_rope_write_reference(
    x_BTD: Tensor,
    weight_CD: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Return rotated queries [B, T, H, d] of x @ weight.T; rotated keys, and values, are written to the first T tokens.

    Rows that share a slot (padding) leave it with undefined contents. `table` is of `rotary_table`.
    """
    return rotate_and_write_reference(linear(x_BTD, weight_CD), table, k_arena_SPKd, v_arena_SPKd, slots_B, heads)


def rotate_and_write_reference(
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    heads: int,
) -> Tensor:
    """Return rotated queries of a product in its dtype; its keys and values are written in the arenas'."""
    kv_heads, head_dim = k_arena_SPKd.shape[-2:]
    q, k, v = split_qkv(qkv_BTC, heads, kv_heads, head_dim)
    cos, sin = (x[:, :, None] for x in table)
    tokens = qkv_BTC.shape[1]
    k_arena_SPKd[slots_B, :tokens] = rotate(k, cos, sin).to(k_arena_SPKd.dtype)
    v_arena_SPKd[slots_B, :tokens] = v.to(v_arena_SPKd.dtype)
    return rotate(q, cos, sin)


@jit
def _rotary_table_kernel(
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    log2_theta: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    angle = tl.load(positions + row).to(tl.float32) * tl.exp2(pair.to(tl.float32) * (-log2_theta / HALF))
    tl.store(cos + row * HALF + pair, tl.cos(angle), mask=pair < HALF)
    tl.store(sin + row * HALF + pair, tl.sin(angle), mask=pair < HALF)


def rotary_table_triton(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    half = head_dim // 2
    cos, sin = torch.empty(2, *positions_BT.shape, half, dtype=torch.float32, device=positions_BT.device)
    _rotary_table_kernel[(positions_BT.numel(),)](
        positions_BT.contiguous(), cos, sin, math.log2(theta), HALF=half, BLOCK=block_of(half), num_warps=4
    )
    return cos, sin


@jit
def _rotate_write_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    tokens: tl.tensor,
    k_slot: tl.tensor,
    k_t: tl.tensor,
    v_slot: tl.tensor,
    v_t: tl.tensor,
    factor: tl.tensor,
    table: tl.tensor,
    lines: tl.tensor,
    line_stride: tl.tensor,
    FOLD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    column = pair < HALF
    inside = (head < HEADS + 2 * KV_HEADS) & column
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + pair
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if FOLD:
        inverse = tl.load(factor + row)
        low, high = low * inverse, high * inverse
    if FOLD > 1:
        line = fold_line(table, lines, line_stride, row, tokens, FOLD) + head * (2 * HALF) + pair
        low += tl.load(line, mask=inside, other=0.0)
        high += tl.load(line + HALF, mask=inside, other=0.0)
    turned = head < HEADS + KV_HEADS
    c = tl.where(turned, tl.load(cos + row * HALF + pair, mask=column, other=1.0), 1.0)
    s = tl.where(turned, tl.load(sin + row * HALF + pair, mask=column, other=0.0), 0.0)
    new_low, new_high = (low * c - high * s).to(q_out.dtype.element_ty), (high * c + low * s).to(q_out.dtype.element_ty)
    q_at = q_out + (row * HEADS + head) * (2 * HALF) + pair
    tl.store(q_at, new_low, mask=inside & (head < HEADS))
    tl.store(q_at + HALF, new_high, mask=inside & (head < HEADS))
    page, t = tl.load(slots + row // tokens).to(tl.int64), row % tokens
    is_k, is_v = turned & (head >= HEADS), head >= HEADS + KV_HEADS
    k_at = k_out + page * k_slot + t * k_t + (head - HEADS) * (2 * HALF) + pair
    tl.store(k_at, new_low, mask=inside & is_k)
    tl.store(k_at + HALF, new_high, mask=inside & is_k)
    v_at = v_out + page * v_slot + t * v_t + (head - HEADS - KV_HEADS) * (2 * HALF) + pair
    tl.store(v_at, new_low, mask=inside & is_v)
    tl.store(v_at + HALF, new_high, mask=inside & is_v)


@jit
def _linear_rope_kernel(
    x: tl.tensor,
    w: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    inner: tl.tensor,
    k_slot: tl.tensor,
    k_t: tl.tensor,
    v_slot: tl.tensor,
    v_t: tl.tensor,
    factor: tl.tensor,
    table: tl.tensor,
    lines: tl.tensor,
    line_stride: tl.tensor,
    FOLD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    PARTS: tl.constexpr = HALF // BLOCK_N
    across: tl.constexpr = (HEADS + 2 * KV_HEADS) * PARTS
    down = tl.cdiv(rows, BLOCK_M)
    steps = tl.cdiv(inner, BLOCK_K)
    tile_m, tile_n = place_of(tl.program_id(0), down, across, GROUP)
    m, head, part = tile_m * BLOCK_M, tile_n // PARTS, tile_n % PARTS
    low_row = weight + (head * 2 * HALF + part * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64) * inner
    prefetch_rows(low_row, BLOCK_N, inner * 2, OVERLAP)
    prefetch_rows(low_row + HALF * inner, BLOCK_N, inner * 2, OVERLAP)
    await_inputs(OVERLAP)
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for step in range(steps):
        w_tile = w.load([2 * head, part * BLOCK_N, step * BLOCK_K]).reshape(2 * BLOCK_N, BLOCK_K)
        acc = tl.dot(x.load([m, step * BLOCK_K]), w_tile.T, acc)
    low, high = halves(acc)
    row = (m + tl.arange(0, BLOCK_M)).to(tl.int64)
    pair = part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < rows)[:, None]
    if FOLD:
        held = tl.minimum(row, rows - 1)
        inverse = tl.load(factor + held)[:, None]
        low, high = low * inverse, high * inverse
    if FOLD > 1:
        line = fold_line(table, lines, line_stride, held, tokens, FOLD)[:, None] + head * 2 * HALF + pair
        low += tl.load(line)
        high += tl.load(line + HALF)
    at = row[:, None] * HALF + pair
    turned = inside & (head < HEADS + KV_HEADS)
    c = tl.load(cos + at, mask=turned, other=1.0)
    s = tl.load(sin + at, mask=turned, other=0.0)
    new_low = (low * c - high * s).to(q_out.dtype.element_ty)
    new_high = (high * c + low * s).to(q_out.dtype.element_ty)
    if head < HEADS:
        q_at = q_out + (row * HEADS + head)[:, None] * (2 * HALF) + pair
        tl.store(q_at, new_low, mask=inside)
        tl.store(q_at + HALF, new_high, mask=inside)
    else:
        page, t = tl.load(slots + row // tokens, mask=row < rows, other=0).to(tl.int64), row % tokens
        kept = head - HEADS
        if kept < KV_HEADS:
            k_at = k_out + (page * k_slot + t * k_t + kept * 2 * HALF)[:, None] + pair
            tl.store(k_at, new_low, mask=inside)
            tl.store(k_at + HALF, new_high, mask=inside)
        else:
            v_at = v_out + (page * v_slot + t * v_t + (kept - KV_HEADS) * 2 * HALF)[:, None] + pair
            tl.store(v_at, new_low, mask=inside)
            tl.store(v_at + HALF, new_high, mask=inside)


def linear_rope_write_triton(
    x_BTD: Tensor,
    weight_CD: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
) -> Tensor:
    rows = x_BTD.shape[0] * x_BTD.shape[1]
    key = (rows, x_BTD.shape[2], heads, *k_arena_SPKd.shape[-2:])
    choice = tuned("linear_rope_write", key, x_BTD.dtype, x_BTD.device) if gemm.takes(x_BTD, weight_CD) else None
    return run(choice, x_BTD, weight_CD, *table, k_arena_SPKd, v_arena_SPKd, slots_B, heads)


def run(choice: Config | None, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Run one choice; None is the rule. `rest` is cosines, sines, arenas, slots and the number of query heads."""
    if choice is None or choice["impl"] == "cublas":
        return rotate_and_write(linear(x, weight), *rest)
    if choice["impl"] == "lt":
        return rotate_and_write(cublas_lt.matmul(x, weight, int(choice["algo"])), *rest)
    return fused(Tiling.of(choice), x, weight, *rest)


def rotate_and_write(
    qkv_BTC: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    heads: int,
    fold: Fold | None = None,
) -> Tensor:
    """Rotate and write a product; an fp32 one is rounded to the arena's dtype afterwards."""
    (batch, tokens), (kv_heads, head_dim) = qkv_BTC.shape[:2], k_arena_SPKd.shape[-2:]
    q = torch.empty(batch, tokens, heads, head_dim, dtype=k_arena_SPKd.dtype, device=qkv_BTC.device)
    early = passes_early(q, batch * tokens)
    _rotate_write_kernel[(batch * tokens,)](
        qkv_BTC, cos, sin, slots_B, q, k_arena_SPKd, v_arena_SPKd, tokens,
        *k_arena_SPKd.stride()[:2], *v_arena_SPKd.stride()[:2], *arguments_of(fold, q), FOLD=kind_of(fold),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_HEADS=block_of(heads + 2 * kv_heads),
        BLOCK_HALF=block_of(head_dim // 2), OVERLAP=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return q


def fused(
    t: Tiling,
    x_BTD: Tensor,
    weight_CD: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    heads: int,
    fold: Fold | None = None,
) -> Tensor:
    (batch, tokens, inner), (kv_heads, head_dim) = x_BTD.shape, k_arena_SPKd.shape[-2:]
    rows = batch * tokens
    q = torch.empty(batch, tokens, heads, head_dim, dtype=x_BTD.dtype, device=x_BTD.device)
    tiles = cdiv(rows, t.block_m) * (weight_CD.shape[0] // (2 * t.block_n))
    early = gemm.starts_early(q, rows)
    _linear_rope_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x_BTD.view(rows, inner), [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(weight_CD.view(-1, head_dim // 2, inner), [2, t.block_n, t.block_k]),
        weight_CD, cos, sin, slots_B, q, k_arena_SPKd, v_arena_SPKd, rows, tokens, inner,
        *k_arena_SPKd.stride()[:2], *v_arena_SPKd.stride()[:2], *arguments_of(fold, q), FOLD=kind_of(fold),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k,
        GROUP=t.group, OVERLAP=early, num_warps=t.warps, num_stages=t.stages, launch_pdl=early,
    )  # fmt: skip
    return q


def _supports(
    x_BTD: Tensor, weight_CD: Tensor, table: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots_B: Tensor, **_: int
) -> bool:
    """The kernels take heads that lie side by side in one token, all in one dtype."""
    dense = all(a.stride(-1) == 1 and a.stride(-2) == a.shape[-1] and a.dtype == x_BTD.dtype for a in (k, v))
    return dense and x_BTD.is_contiguous() and all(a.is_contiguous() for a in table)


def _candidates(key: Key) -> list[Config]:
    half = key[4] // 2
    found: list[Config] = [{"impl": "cublas"}, *cublas_lt.candidates(24)]
    # The kernel rotates what the product has not rounded, so its bits are others: one way for all sizes of a prefix, and for
    # many rows that is cuBLAS.
    few = ((64, 32, 64, 4, 4), (64, 64, 64, 3, 4), (64, 64, 64, 5, 4), (128, 32, 64, 3, 4), (128, 64, 64, 3, 4))
    blocks = few if key[0] < gemm.FEW_ROWS or key[1] < 2048 else ()
    return found + [Tiling(m, n, k, s, w, 8, 0).config for m, n, k, s, w in blocks if half % n == 0]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, heads, kv_heads, head_dim = key
    columns = (heads + 2 * kv_heads) * head_dim
    arenas = torch.zeros(2, 1, 4, rows, kv_heads, head_dim, dtype=dtype, device=device)
    positions = torch.arange(rows, device=device)[None] % 1000
    x = torch.randn(1, rows, inner, dtype=dtype, device=device)
    weight = torch.randn(columns, inner, dtype=dtype, device=device) * inner**-0.5
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    return x, weight, *rotary_table(positions, head_dim, 1e4), arenas[0][:, 1], arenas[1][:, 1], slots, heads


rotary_table = FusedOp(rotary_table_reference, rotary_table_triton)
linear_rope_write = FusedOp(linear_rope_write_reference, linear_rope_write_triton, supports=_supports)
TUNABLES = (Tunable("linear_rope_write", gemm.FIELDS, _candidates, _inputs, run),)
