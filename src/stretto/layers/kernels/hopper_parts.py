"""What attention kernels for Hopper share: the pipe through shared memory and the loop over blocks of keys.

One warp brings keys and values through the pipe; groups of four warps, one or two, have QUERIES queries each. A group asks
for the scores of the next keys, then for the weighted values of the last ones, and works on the softmax while the tensor cores
have the second product. Triton's own compiler waits for the scores first, so this is written in Gluon, which leaves the waits
to the author.

A pipe is (q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free): buffers, and barriers that say when one is full or
free.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stretto.layers.dispatch import triton_runs_on

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # without Triton, or one whose Gluon is another
    gluon = gl = async_copy = fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None

__all__ = [
    "QUERIES",
    "allocate",
    "async_copy",
    "attend_blocks",
    "bring_queries",
    "coded",
    "described",
    "fence_async_shared",
    "gl",
    "group_pipe",
    "jit",
    "make_room",
    "mbarrier",
    "pass_block",
    "runs_on",
    "scaled_rows",
    "soften",
    "start_barriers",
    "store_rows",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

QUERIES = 64
"""Of a group of warps."""


def jit(fn: Any) -> Any:
    """Compile `fn` with Gluon on first launch; without Gluon, leave it uncallable but importable."""
    return fn if gluon is None else gluon.jit(fn)


@functools.cache
def runs_on(device_type: str, index: int | None) -> bool:
    """Tell whether the kernels run on a device; the answer is kept for the process."""
    return gluon is not None and triton_runs_on(device_type, index) and torch.cuda.get_device_capability(index) == (9, 0)


def described(x: Tensor, block: list[int]) -> Any:
    """Describe 16-bit x for copies of blocks to shared memory, which swizzle 128 bytes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@jit
def allocate(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr = 2,
) -> gl.tensor:
    """Return a pipe whose barriers are not started yet."""
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, QUERIES, HEAD_DIM], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free


@jit
def start_barriers(pipe: gl.tensor, order: gl.tensor, STAGES: gl.constexpr, GROUPS: gl.constexpr = 2) -> None:
    """Start the barriers of a pipe, and those by which groups take turns if there are any."""
    _, _, _, q_full, k_full, k_free, v_full, v_free = pipe
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        if order is not None:
            mbarrier.init(order.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=GROUPS)
    fence_async_shared()


@jit
def group_pipe(pipe: gl.tensor, GROUP: gl.constexpr) -> gl.tensor:
    """Return the pipe as one group sees it: only its own queries are there."""
    q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free = pipe
    return q_buf.index(GROUP), k_buf, v_buf, q_full.index(GROUP), k_full, k_free, v_full, v_free


@jit
def bring_queries(q_desc: gl.tensor, pipe: gl.tensor, line: gl.tensor, channel: gl.tensor, GROUPS: gl.constexpr = 2) -> None:
    """Bring the queries of all groups."""
    q_buf, q_full = pipe[0], pipe[3]
    for group in gl.static_range(GROUPS):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [line + group * q_buf.shape[1], channel], q_full.index(group), q_buf.index(group)
        )


@jit
def make_room(desc: gl.tensor, full: gl.tensor, free: gl.tensor, stage: gl.tensor, turn: gl.tensor) -> None:
    """Wait until a place of the pipe is free for its next turn, and say what is to come there."""
    mbarrier.wait(free.index(stage), (turn & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)


@jit
def pass_block(pipe: gl.tensor, i: gl.tensor, STAGES: gl.constexpr) -> None:
    """Let block i pass a group that has no query."""
    _, _, _, _, k_full, k_free, v_full, v_free = pipe
    stage, turn = i % STAGES, i // STAGES
    mbarrier.wait(k_full.index(stage), turn & 1)
    mbarrier.arrive(k_free.index(stage))
    mbarrier.wait(v_full.index(stage), turn & 1)
    mbarrier.arrive(v_free.index(stage))


@jit
def soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, WHOLE: gl.constexpr) -> gl.tensor:
    """Return weights, their sums, the new maxima and by how much older sums shrink; in base 2.

    With WHOLE maxima are whole numbers: weights rounded under different ones then differ by powers of two alone.
    """
    best = gl.max(s, 1) * scale
    if WHOLE:
        best = gl.ceil(best)
    new_top = gl.maximum(top, best)
    weights = gl.exp2(s * scale - new_top[:, None])
    return weights, gl.sum(weights, 1), new_top, gl.exp2(top - new_top)


@jit
def _ask_scores(
    q_buf: gl.tensor,
    held: gl.tensor,
    k_buf: gl.tensor,
    stage: gl.tensor,
    empty: gl.tensor,
    HEAD_DIM: gl.constexpr,
    HELD: gl.constexpr,
) -> gl.tensor:
    k = k_buf.index(stage).reshape([empty.shape[1], HEAD_DIM])
    if HELD == 0:
        s = warpgroup_mma(q_buf, k.permute((1, 0)), empty, use_acc=False, is_async=True)
    else:
        first, rest = k.slice(0, HELD, dim=1), k.slice(HELD, HEAD_DIM - HELD, dim=1)
        s = warpgroup_mma(held, first.permute((1, 0)), empty, use_acc=False, is_async=True)
        s = warpgroup_mma(q_buf.slice(HELD, HEAD_DIM - HELD, dim=1), rest.permute((1, 0)), s, is_async=True)
    return s


@jit
def _ask_values(p: gl.tensor, v_buf: gl.tensor, stage: gl.tensor, acc: gl.tensor, KEYS: gl.constexpr) -> gl.tensor:
    return warpgroup_mma(p, v_buf.index(stage).reshape([KEYS, acc.shape[1]]), acc, is_async=True)


@jit
def scaled_rows(values: gl.tensor, factor: gl.tensor) -> gl.tensor:
    """Return the rows of values times their factors, whose layout may be another."""
    return values * gl.convert_layout(factor, gl.SliceLayout(1, values.type.layout))[:, None]


@jit
def coded(value: gl.tensor, dtype: gl.constexpr, multiplier: gl.tensor) -> gl.tensor:
    """Return what e4m3 holds of value * multiplier, in fp32; rounded to dtype as a tensor in between would be."""
    value = value.to(dtype).to(gl.float32) * gl.load(multiplier)
    # Two selects instead of min and max, which would lose a NaN.
    value = gl.where(value > 448.0, 448.0, value)
    return gl.where(value < -448.0, -448.0, value)


@jit
def attend_blocks(
    pipe: gl.tensor,
    order: gl.tensor,
    told: gl.tensor,
    count: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    LOOK: gl.constexpr,
    SOFTEN: gl.constexpr,
    HELD: gl.constexpr = 0,
) -> gl.tensor:
    """Attend QUERIES queries to `count` blocks of keys: return weighted sums of values, totals of weights and maxima.

    LOOK(told, i, layout, KEYS) says before the scores of block i are asked for which of its keys count, and
    SOFTEN(s, top, scale, that, first) is its softmax. With `order` groups take turns. The first HELD channels of the queries
    are held in registers: scores of 64 keys take both factors from shared memory faster than that gives them.
    """
    q_buf, k_buf, v_buf, _, k_full, k_free, v_full, v_free = pipe
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=result, k_width=2)
    empty = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, result)
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, scores))

    held = empty
    if HELD:
        held = q_buf.slice(0, HELD, dim=1).load(gl.DotOperandLayout(operand_index=0, parent=scores, k_width=2))
    seen = LOOK(told, 0, scores, KEYS)
    mbarrier.wait(k_full.index(0), 0)
    s = _ask_scores(q_buf, held, k_buf, 0, empty, HEAD_DIM, HELD)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(0))
    weights, total, top, shrink = SOFTEN(s, top, scale, seen, True)
    p = gl.convert_layout(weights.to(k_buf.dtype), operand)
    mbarrier.wait(v_full.index(0), 0)
    for i in range(1, count):
        stage, turn = i % STAGES, i // STAGES
        before = (i - 1) % STAGES
        seen = LOOK(told, i, scores, KEYS)
        mbarrier.wait(k_full.index(stage), turn & 1)
        if order is not None:
            # The tensor cores go to one group after the other, so that the softmax of one runs beside the products of both.
            mbarrier.wait(order.index(GROUP), (i & 1) ^ GROUP)
        s = _ask_scores(q_buf, held, k_buf, stage, empty, HEAD_DIM, HELD)
        acc = _ask_values(p, v_buf, before, acc, KEYS)
        if order is not None:
            mbarrier.arrive(order.index(1 - GROUP))
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(stage))
        weights, added, top, shrink = SOFTEN(s, top, scale, seen, False)
        total = total * shrink + added
        # The assembler moves a softmax behind the wait for the product unless a loop stands between them: this one, for values
        # that the next turn needs. Weights take the registers of the last ones, so they are converted behind it.
        mbarrier.wait(v_full.index(stage), turn & 1)
        acc, p, weights, total = warpgroup_mma_wait(0, deps=(acc, p, weights, total))
        mbarrier.arrive(v_free.index(before))
        acc = scaled_rows(acc, shrink)
        p = gl.convert_layout(weights.to(k_buf.dtype), operand)
    acc = _ask_values(p, v_buf, (count - 1) % STAGES, acc, KEYS)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    return acc, total, top


@jit
def store_rows(out: gl.tensor, values: gl.tensor, row: gl.tensor, rows: gl.tensor, stride: gl.tensor) -> None:
    """Store rows of values from `row` on, those below `rows`; rows of `out` lie `stride` apart."""
    line = row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, values.type.layout))
    column = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, values.type.layout))
    at = out + line.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(at, values.to(out.dtype.element_ty), mask=(line < rows)[:, None])
