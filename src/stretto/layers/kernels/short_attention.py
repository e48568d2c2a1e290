"""Attention of few keys for Hopper: a program has all scores of its queries at once, so its softmax is one pass.

Programs of 64 queries fit a multiprocessor twice: while one is at its softmax, the other has the tensor cores. Programs of 128
bring keys half as often. A head is cut into a part of 64
channels and what is left of it, so that little is multiplied by zeros: 72 channels take as long as 80.

Written in Gluon, as hopper_parts.py says why. Shape legend: B rows, T query tokens, N keys, H heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.kernels import hopper_parts
from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.hopper_parts import (
    async_copy,
    fence_async_shared,
    gl,
    jit,
    runs_on,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stretto.layers.kernels.language import block_of, cdiv

LOG2_E = 1.4426950408889634
WIDE = 64
MOST_KEYS = 256
MOST_HEAD = 128


@jit
def _brought(
    x: gl.tensor,
    step: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    channel: gl.tensor,
    channels: gl.tensor,
    HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
) -> gl.tensor:
    """Ask for a tile of 16-bit rows `step` apart, zeros where there are none, and return where it will be."""
    # Threads copy: rows of an odd number of 16 bytes are slow to come by descriptor.
    ACROSS: gl.constexpr = WIDTH // 8
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * WIDTH), element_bitwidth=16, rank=2)
    line = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, threads))
    column = channel + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, threads))
    tile = gl.allocate_shared_memory(x.dtype.element_ty, [HEIGHT, WIDTH], swizzled)
    there = (line < rows)[:, None] & (column < channels)[None, :]
    async_copy.async_copy_global_to_shared(tile, x + line[:, None] * step + column[None, :], mask=there)
    return tile


@jit
def _store(
    out: gl.tensor,
    acc: gl.tensor,
    share: gl.tensor,
    multiplier: gl.tensor,
    row: gl.tensor,
    tokens: gl.tensor,
    stride: gl.tensor,
    channel: gl.tensor,
    channels: gl.tensor,
    dtype: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    value = hopper_parts.scaled_rows(acc, share)
    if CODED:
        value = hopper_parts.coded(value, dtype, multiplier)
    line = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    column = channel + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    at = out + line.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(at, value.to(out.dtype.element_ty), mask=(line < tokens)[:, None] & (column < channels)[None, :])


@jit
def _short_attention_kernel(
    q: gl.tensor,
    k: gl.tensor,
    v: gl.tensor,
    q_b: gl.tensor,
    q_t: gl.tensor,
    q_h: gl.tensor,
    k_b: gl.tensor,
    k_t: gl.tensor,
    k_h: gl.tensor,
    v_b: gl.tensor,
    v_t: gl.tensor,
    v_h: gl.tensor,
    out: gl.tensor,
    multiplier: gl.tensor,
    tokens: gl.tensor,
    keys: gl.tensor,
    heads: gl.tensor,
    eights: gl.tensor,
    scale: gl.tensor,
    WARPS: gl.constexpr,
    KEYS: gl.constexpr,
    WIDE: gl.constexpr,
    REST: gl.constexpr,
    EVEN: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    QUERIES: gl.constexpr = 16 * WARPS
    row, head, b = gl.program_id(0) * QUERIES, gl.program_id(1), gl.program_id(2)
    dtype: gl.constexpr = q.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDE, 16])
    rest: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, REST, 16])

    # Steps and channels come in eights, which the compiler is to know: a thread copies eight numbers.
    q += (b.to(gl.int64) * q_b + head * q_h) * 8
    k += (b.to(gl.int64) * k_b + head * k_h) * 8
    v += (b.to(gl.int64) * v_b + head * v_h) * 8
    channels = eights * 8
    q_tile = _brought(q, q_t * 8, row, tokens, 0, channels, QUERIES, WIDE, WARPS)
    q_end = _brought(q, q_t * 8, row, tokens, WIDE, channels, QUERIES, REST, WARPS)
    k_tile = _brought(k, k_t * 8, 0, keys, 0, channels, KEYS, WIDE, WARPS)
    k_end = _brought(k, k_t * 8, 0, keys, WIDE, channels, KEYS, REST, WARPS)
    async_copy.commit_group()
    v_tile = _brought(v, v_t * 8, 0, keys, 0, channels, KEYS, WIDE, WARPS)
    v_end = _brought(v, v_t * 8, 0, keys, WIDE, channels, KEYS, REST, WARPS)
    async_copy.commit_group()

    async_copy.wait_group(1)
    fence_async_shared()
    s = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_end, k_end.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if not EVEN:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores))
        s = gl.where((column < keys)[None, :], s, float("-inf"))
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, scores))
    weights, total, _, _ = hopper_parts.soften(s, top, scale, True)

    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2))
    p_end = gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=rest, k_width=2))
    async_copy.wait_group(0)
    fence_async_shared()
    acc = gl.zeros([QUERIES, WIDE], gl.float32, wide)
    acc_end = gl.zeros([QUERIES, REST], gl.float32, rest)
    acc = warpgroup_mma(p, v_tile, acc, use_acc=False, is_async=True)
    acc_end = warpgroup_mma(p_end, v_end, acc_end, use_acc=False, is_async=True)
    acc, acc_end = warpgroup_mma_wait(0, deps=(acc, acc_end))

    stride = heads * channels
    mine = out + b.to(gl.int64) * tokens * stride + head * channels
    _store(mine, acc, 1.0 / total, multiplier, row, tokens, stride, 0, channels, dtype, CODED)
    _store(mine, acc_end, 1.0 / total, multiplier, row, tokens, stride, WIDE, channels, dtype, CODED)


def takes(q_BTHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: 16-bit, a key/value head for each query head, few keys, on Hopper.

    Heads are wider than 64; tensors start and lie apart by multiples of 16 bytes, their last axis is dense.
    """
    tensors = (q_BTHd, k_BNHd, v_BNHd)
    alike = all(x.dtype == q_BTHd.dtype and x.shape[2:] == q_BTHd.shape[2:] and x.stride(-1) == 1 for x in tensors)
    apart = all(x.storage_offset() % 8 == 0 and all(n % 8 == 0 for n in x.stride()[:-1]) for x in tensors)
    fits = WIDE < q_BTHd.shape[-1] <= MOST_HEAD and q_BTHd.shape[-1] % 8 == 0 and 1 <= k_BNHd.shape[1] <= MOST_KEYS
    return alike and apart and fits and q_BTHd.element_size() == 2 and runs_on(q_BTHd.device.type, q_BTHd.device.index)


def short_attention(
    q_BTHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    warps: int = 4,
    *,
    scale: float | None = None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Attend every query to all keys of its row; [B, T, H, d], with a multiplier in e4m3 (as `to_fp8` writes it).

    A program has 16 queries a warp, of four or eight warps; which decides no bit.
    """
    batch, tokens, heads, head_dim = q_BTHd.shape
    keys = k_BNHd.shape[1]
    block, rest = max(block_of(keys), 16), max(block_of(head_dim - WIDE), 16)
    out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype if multiplier is None else E4M3, device=q_BTHd.device)
    steps = [n // 8 for x in (q_BTHd, k_BNHd, v_BNHd) for n in x.stride()[:3]]
    _short_attention_kernel[(cdiv(tokens, 16 * warps), heads, batch)](
        q_BTHd, k_BNHd, v_BNHd, *steps, out, out if multiplier is None else multiplier, tokens, keys, heads, head_dim // 8,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        WARPS=warps, KEYS=block, WIDE=WIDE, REST=rest, EVEN=keys == block, CODED=multiplier is not None, num_warps=warps,
    )  # fmt: skip
    return out
