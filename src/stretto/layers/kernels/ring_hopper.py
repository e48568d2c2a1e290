"""Attention over full rings for Hopper, with the products and the softmax side by side.

Two groups of four warps have 64 queries each (hopper_parts.py says how they work); one hands the tensor cores to the other and
works on its softmax meanwhile.

Shape legend: B rows, N query tokens, H heads, d head size, S state slots, P arena tokens, Z splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.kernels import hopper_parts
from stretto.layers.kernels.hopper_parts import QUERIES, gl, jit, mbarrier, runs_on, tma
from stretto.layers.kernels.language import cdiv
from stretto.layers.kernels.ring_attention import RingTiling, join_splits
from stretto.layers.kernels.split_attention import LOG2_E

__all__ = ["HEAD_DIM", "ring_hopper", "runs_on", "takes"]

HEAD_DIM = 128


@jit
def _bring_block(
    desc: gl.tensor,
    buf: gl.tensor,
    full: gl.tensor,
    free: gl.tensor,
    slot: gl.tensor,
    block: gl.tensor,
    channel: gl.tensor,
    stage: gl.tensor,
    turn: gl.tensor,
    KEYS: gl.constexpr,
) -> None:
    hopper_parts.make_room(desc, full, free, stage, turn)
    tma.async_copy_global_to_shared(desc, [slot, block * KEYS, channel], full.index(stage), buf.index(stage))


@jit
def _bring(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    pipe: gl.tensor,
    q_line: gl.tensor,
    slot: gl.tensor,
    channel: gl.tensor,
    first: gl.tensor,
    count: gl.tensor,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Bring queries once, and blocks of keys and values in the order in which they are used: the last one first."""
    _, k_buf, v_buf, _, k_full, k_free, v_full, v_free = pipe
    hopper_parts.bring_queries(q_desc, pipe, q_line, channel)
    for i in range(count):
        block = gl.where(i == 0, first + count - 1, first + i - 1)
        stage, turn = i % STAGES, i // STAGES
        _bring_block(k_desc, k_buf, k_full, k_free, slot, block, channel, stage, turn, KEYS)
        _bring_block(v_desc, v_buf, v_full, v_free, slot, block, channel, stage, turn, KEYS)


@jit
def _look(left: gl.tensor, i: gl.tensor, layout: gl.constexpr, KEYS: gl.constexpr) -> gl.tensor:
    """Pass on how many keys of the first block count; of others all do."""
    return left


@jit
def _soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, left: gl.tensor, FIRST: gl.constexpr) -> gl.tensor:
    if FIRST:
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where((column < left)[None, :], s, -1.0e30)
    return hopper_parts.soften(s, top, scale, False)


@jit
def _group(
    pipe: gl.tensor,
    order: gl.tensor,
    task: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """Attend a group's queries to `count` blocks of keys, of whose first only `left` keys count, and store the result.

    The second group may have no query: it lets every block pass.
    """
    out, lse, row, tokens, line_stride, count, left, scale = task
    if GROUP == 0 or row < tokens:
        mbarrier.wait(pipe[3], 0)
        acc, total, top = hopper_parts.attend_blocks(
            pipe, order, left, count, scale, HEAD_DIM, QUERIES, KEYS, STAGES, GROUP, _look, _soften
        )
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None]
        hopper_parts.store_rows(out, acc, row, tokens, line_stride)
        if SPLIT:
            line = row + gl.arange(0, QUERIES, layout=top.type.layout)
            gl.store(lse + line, (top + gl.log2(total)) * 0.6931471805599453, mask=line < tokens)
    else:
        for i in range(count):
            if i > 0:
                mbarrier.wait(order.index(1), (i & 1) ^ 1)
                mbarrier.arrive(order.index(0))
            hopper_parts.pass_block(pipe, i, STAGES)


@jit
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

    pipe = hopper_parts.allocate(q_desc, k_desc, v_desc, HEAD_DIM, QUERIES, KEYS, STAGES)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    hopper_parts.start_barriers(pipe, order, STAGES)

    line_stride = heads * HEAD_DIM
    part = out + ((b * splits + split) * tokens).to(gl.int64) * line_stride + channel
    sums = lse + ((b * splits + split) * heads + head) * tokens
    gl.warp_specialize(
        [
            (_group, (
                hopper_parts.group_pipe(pipe, 0), order, (part, sums, row, tokens, line_stride, count, left, scale),
                HEAD_DIM, QUERIES, KEYS, STAGES, SPLIT, 0,
            )),
            (_group, (
                hopper_parts.group_pipe(pipe, 1), order, (part, sums, row + QUERIES, tokens, line_stride, count, left, scale),
                HEAD_DIM, QUERIES, KEYS, STAGES, SPLIT, 1,
            )),
            (_bring, (
                q_desc, k_desc, v_desc, pipe,
                b * tokens + row, slot, channel, first, count, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


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
        hopper_parts.described(q_BNHd.contiguous().view(batch * tokens, heads * head_dim), [QUERIES, head_dim]),
        hopper_parts.described(k_SPHd.view(*k_SPHd.shape[:2], heads * head_dim), [1, tiling.block_n, head_dim]),
        hopper_parts.described(v_SPHd.view(*v_SPHd.shape[:2], heads * head_dim), [1, tiling.block_n, head_dim]),
        slots_B, part, lse, tokens, arena_tokens, head_dim**-0.5 * LOG2_E, heads,
        HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=tiling.block_n, STAGES=tiling.stages, SPLIT=splits > 1,
        num_warps=4,
    )  # fmt: skip
    return part[:, 0] if splits == 1 else join_splits(part, lse)
