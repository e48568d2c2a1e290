"""Attention over full rings for Hopper, with the products and the softmax side by side.

One warp brings keys and values through shared memory; two groups of four warps have 64 queries each. A group asks for the
scores of the next keys, then for the weighted values of the last ones, hands the tensor cores to the other group and works on
the softmax meanwhile. Triton's own compiler waits for the scores first, so this is written in Gluon, which leaves the waits to
the author.

Shape legend: B rows, N query tokens, H heads, d head size, S state slots, P arena tokens, Z splits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stretto.layers.dispatch import triton_runs_on
from stretto.layers.kernels.language import cdiv
from stretto.layers.kernels.ring_attention import RingTiling, join_splits
from stretto.layers.kernels.split_attention import LOG2_E

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # without Triton, or one whose Gluon is another
    gluon = None

QUERIES = 64
"""Of a group of warps, of which there are two."""
HEAD_DIM = 128


def _jit(fn: Any) -> Any:
    return fn if gluon is None else gluon.jit(fn)


@_jit
def _bring(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    q_buf: gl.tensor,
    k_buf: gl.tensor,
    v_buf: gl.tensor,
    q_full: gl.tensor,
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    q_line: gl.tensor,
    slot: gl.tensor,
    channel: gl.tensor,
    first: gl.tensor,
    count: gl.tensor,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Bring queries once, and blocks of keys and values in the order in which they are used: the last one first."""
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [q_line + group * q_buf.shape[1], channel], q_full.index(group), q_buf.index(group)
        )
    for i in range(count):
        block = gl.where(i == 0, first + count - 1, first + i - 1)
        stage, turn = i % STAGES, i // STAGES
        mbarrier.wait(k_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [slot, block * KEYS, channel], k_full.index(stage), k_buf.index(stage))
        mbarrier.wait(v_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [slot, block * KEYS, channel], v_full.index(stage), v_buf.index(stage))


@_jit
def _soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, MASKED: gl.constexpr, left: gl.tensor) -> gl.tensor:
    """Return weights, their sums, the new maxima and by how much older sums shrink; in base 2."""
    if MASKED:
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where((column < left)[None, :], s, -1.0e30)
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    weights = gl.exp2(s * scale - new_top[:, None])
    return weights, gl.sum(weights, 1), new_top, gl.exp2(top - new_top)


@_jit
def _attend(
    q_buf: gl.tensor,
    k_buf: gl.tensor,
    v_buf: gl.tensor,
    q_full: gl.tensor,
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    order: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    row: gl.tensor,
    tokens: gl.tensor,
    line_stride: gl.tensor,
    count: gl.tensor,
    left: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """Attend QUERIES queries to `count` blocks of keys, of whose first only `left` keys count, and store the result."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=result, k_width=2)
    empty = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, result)
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, scores))

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_buf.index(0).reshape([KEYS, HEAD_DIM]).permute((1, 0))
    s = warpgroup_mma(q_buf, k, empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(0))
    weights, total, top, shrink = _soften(s, top, scale, True, left)
    p = gl.convert_layout(weights.to(k_buf.dtype), operand)
    mbarrier.wait(v_full.index(0), 0)
    for i in range(1, count):
        stage, turn = i % STAGES, i // STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(stage), turn & 1)
        # The tensor cores go to one group after the other, so that the softmax of one runs beside the products of both.
        mbarrier.wait(order.index(GROUP), (i & 1) ^ GROUP)
        k = k_buf.index(stage).reshape([KEYS, HEAD_DIM]).permute((1, 0))
        s = warpgroup_mma(q_buf, k, empty, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_buf.index(before).reshape([KEYS, HEAD_DIM]), acc, is_async=True)
        mbarrier.arrive(order.index(1 - GROUP))
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(stage))
        weights, added, top, shrink = _soften(s, top, scale, False, left)
        total = total * shrink + added
        # The assembler moves a softmax behind the wait for the product unless a loop stands between them: this one, for values
        # that the next turn needs. Weights take the registers of the last ones, so they are converted behind it.
        mbarrier.wait(v_full.index(stage), turn & 1)
        acc, p, weights, total = warpgroup_mma_wait(0, deps=(acc, p, weights, total))
        mbarrier.arrive(v_free.index(before))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, result))[:, None]
        p = gl.convert_layout(weights.to(k_buf.dtype), operand)
    last = (count - 1) % STAGES
    acc = warpgroup_mma(p, v_buf.index(last).reshape([KEYS, HEAD_DIM]), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, result))[:, None]

    line = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, result))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, result))
    at = out + line.to(gl.int64)[:, None] * line_stride + column[None, :]
    gl.store(at, acc.to(out.dtype.element_ty), mask=(line < tokens)[:, None])
    if SPLIT:
        line = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, scores))
        gl.store(lse + line, (top + gl.log2(total)) * 0.6931471805599453, mask=line < tokens)


@_jit
def _skip(
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    order: gl.tensor,
    count: gl.tensor,
    STAGES: gl.constexpr,
) -> None:
    """Let every block pass: no query of this group is there."""
    for i in range(count):
        stage, turn = i % STAGES, i // STAGES
        if i > 0:
            mbarrier.wait(order.index(1), (i & 1) ^ 1)
            mbarrier.arrive(order.index(0))
        mbarrier.wait(k_full.index(stage), turn & 1)
        mbarrier.arrive(k_free.index(stage))
        mbarrier.wait(v_full.index(stage), turn & 1)
        mbarrier.arrive(v_free.index(stage))


@_jit
def _second(
    q_buf: gl.tensor,
    k_buf: gl.tensor,
    v_buf: gl.tensor,
    q_full: gl.tensor,
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    order: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    row: gl.tensor,
    tokens: gl.tensor,
    line_stride: gl.tensor,
    count: gl.tensor,
    left: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    if row < tokens:
        _attend(
            q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free, order,
            out, lse, row, tokens, line_stride, count, left, scale, HEAD_DIM, QUERIES, KEYS, STAGES, SPLIT, 1,
        )  # fmt: skip
    else:
        _skip(k_full, k_free, v_full, v_free, order, count, STAGES)


@_jit
def _ring_hopper_kernel(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    slots: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    tokens: gl.tensor,
    arena_tokens: gl.tensor,
    scale: gl.tensor,
    heads: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    # Tiles of queries come first in the grid, so that those that run at once read the same keys.
    tile, split, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    b, head = gl.program_id(2) // heads, gl.program_id(2) % heads
    channel = head * HEAD_DIM
    blocks = gl.cdiv(arena_tokens, KEYS)
    first, stop = blocks * split // splits, blocks * (split + 1) // splits
    count = stop - first
    left = arena_tokens - (stop - 1) * KEYS
    slot = gl.load(slots + b).to(gl.int32)
    row = tile * (2 * QUERIES)

    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2, QUERIES, HEAD_DIM], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(order.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()

    line_stride = heads * HEAD_DIM
    part = out + ((b * splits + split) * tokens).to(gl.int64) * line_stride + channel
    sums = lse + ((b * splits + split) * heads + head) * tokens
    gl.warp_specialize(
        [
            (_attend, (
                q_buf.index(0), k_buf, v_buf, q_full.index(0), k_full, k_free, v_full, v_free, order,
                part, sums, row, tokens, line_stride, count, left, scale, HEAD_DIM, QUERIES, KEYS, STAGES, SPLIT, 0,
            )),
            (_second, (
                q_buf.index(1), k_buf, v_buf, q_full.index(1), k_full, k_free, v_full, v_free, order,
                part, sums, row + QUERIES, tokens, line_stride, count, left, scale,
                HEAD_DIM, QUERIES, KEYS, STAGES, SPLIT,
            )),
            (_bring, (
                q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free,
                b * tokens + row, slot, channel, first, count, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@functools.cache
def runs_on(device_type: str, index: int | None) -> bool:
    """Tell whether the kernel runs on a device; the answer is kept for the process."""
    return gluon is not None and triton_runs_on(device_type, index) and torch.cuda.get_device_capability(index) == (9, 0)


def takes(q_BNHd: Tensor, k_SPHd: Tensor, v_SPHd: Tensor) -> bool:
    """Tell whether the kernel can attend these: 16-bit, heads of 128, arenas in one piece, on Hopper."""
    dense = k_SPHd.is_contiguous() and v_SPHd.is_contiguous()
    alike = q_BNHd.dtype == k_SPHd.dtype == v_SPHd.dtype and q_BNHd.dtype in (torch.bfloat16, torch.float16)
    return dense and alike and q_BNHd.shape[-1] == HEAD_DIM and runs_on(q_BNHd.device.type, q_BNHd.device.index)


def ring_hopper(q_BNHd: Tensor, k_SPHd: Tensor, v_SPHd: Tensor, slots_B: Tensor, tiling: RingTiling) -> Tensor:
    """Attend row b to all P tokens of slot slots_B[b] (int64); the call must be one that the kernel takes.

    Of the tiling `splits`, `block_n` and `stages` count. The splits need not be even. Returns [B, N, H, d].
    """
    (batch, tokens, heads, head_dim), arena_tokens, splits = q_BNHd.shape, k_SPHd.shape[1], tiling.splits
    part = torch.empty(batch, splits, tokens, heads, head_dim, dtype=q_BNHd.dtype, device=q_BNHd.device)
    lse = torch.empty(batch, splits, heads, tokens if splits > 1 else 0, dtype=torch.float32, device=q_BNHd.device)
    _ring_hopper_kernel[(cdiv(tokens, 2 * QUERIES), splits, batch * heads)](
        _described(q_BNHd.contiguous().view(batch * tokens, heads * head_dim), [QUERIES, head_dim]),
        _described(k_SPHd.view(*k_SPHd.shape[:2], heads * head_dim), [1, tiling.block_n, head_dim]),
        _described(v_SPHd.view(*v_SPHd.shape[:2], heads * head_dim), [1, tiling.block_n, head_dim]),
        slots_B, part, lse, tokens, arena_tokens, head_dim**-0.5 * LOG2_E, heads,
        HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=tiling.block_n, STAGES=tiling.stages, SPLIT=splits > 1,
        num_warps=4,
    )  # fmt: skip
    return part[:, 0] if splits == 1 else join_splits(part, lse)


def _described(x: Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
