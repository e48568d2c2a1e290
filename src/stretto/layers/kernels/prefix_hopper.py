"""Attention of a prefix to itself for Hopper, with the products and the softmax side by side.

One warp brings keys and values through shared memory; two groups of four warps have 64 packed query rows each. A group asks
for the scores of the next keys, then for the weighted values of the last ones, and works on the softmax while the tensor cores
have the second product; the other group fills what is left. Triton's own compiler waits for the scores first, so this is
written in Gluon, which leaves the waits to the author.

Shape legend: B rows, T query tokens, P keys, S slots, H query heads that share one key/value head, d head size,
R = T H packed query rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import triton_runs_on
from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.language import cdiv
from stretto.layers.kernels.tma_attention import LOG2_E
from stretto.layers.tuning import Config

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
HEAD_DIMS = (128, 256)


class Tiling(NamedTuple):
    """How one call is cut."""

    block_n: int
    stages: int

    @staticmethod
    def of(config: Config) -> Tiling:
        return Tiling(int(config["block_n"]), int(config["stages"]))


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
    count: gl.tensor,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Bring queries once, and blocks of keys and values in their order."""
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [q_line + group * q_buf.shape[1], 0], q_full.index(group), q_buf.index(group))
    for i in range(count):
        stage, turn = i % STAGES, i // STAGES
        mbarrier.wait(k_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [slot, i * KEYS, 0], k_full.index(stage), k_buf.index(stage))
        mbarrier.wait(v_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [slot, i * KEYS, 0], v_full.index(stage), v_buf.index(stage))


@_jit
def _valid(mask: gl.tensor, first: gl.tensor, keys: gl.tensor, KEYS: gl.constexpr, layout: gl.constexpr) -> gl.tensor:
    column = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    return gl.load(mask + column, mask=column < keys, other=0) != 0


@_jit
def _soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, valid: gl.tensor) -> gl.tensor:
    """Return weights, their sums, the new maxima and by how much older sums shrink; in base 2."""
    s = gl.where(valid[None, :], s, -1.0e30)
    # A whole number, as in split_attention.
    new_top = gl.maximum(top, gl.ceil(gl.max(s, 1) * scale))
    weights = gl.exp2(s * scale - new_top[:, None])
    # Until its first valid key a row sums up ones; that key's shrink of 0 clears them.
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
    out: gl.tensor,
    mask: gl.tensor,
    multiplier: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    keys: gl.tensor,
    count: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    """Attend QUERIES queries to `count` blocks of keys, and store the result."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=result, k_width=2)
    empty = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, result)
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, scores))

    valid = _valid(mask, 0, keys, KEYS, scores)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_buf.index(0).reshape([KEYS, HEAD_DIM]).permute((1, 0))
    s = warpgroup_mma(q_buf, k, empty, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(0))
    weights, total, top, shrink = _soften(s, top, scale, valid)
    p = gl.convert_layout(weights.to(k_buf.dtype), operand)
    mbarrier.wait(v_full.index(0), 0)
    for i in range(1, count):
        stage, turn = i % STAGES, i // STAGES
        before = (i - 1) % STAGES
        valid = _valid(mask, i * KEYS, keys, KEYS, scores)
        mbarrier.wait(k_full.index(stage), turn & 1)
        k = k_buf.index(stage).reshape([KEYS, HEAD_DIM]).permute((1, 0))
        s = warpgroup_mma(q_buf, k, empty, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_buf.index(before).reshape([KEYS, HEAD_DIM]), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(stage))
        weights, added, top, shrink = _soften(s, top, scale, valid)
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
    # A row without any valid key gives zeros.
    share = gl.where(top > -1.0e28, 1.0 / total, 0.0)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, result))[:, None]
    if CODED:
        # Rounded as a tensor in between would be, so that the code is the same.
        acc = acc.to(k_buf.dtype).to(gl.float32) * gl.load(multiplier)
        # Two selects instead of min and max, which would lose a NaN.
        acc = gl.where(acc > 448.0, 448.0, acc)
        acc = gl.where(acc < -448.0, -448.0, acc)
    line = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, result))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, result))
    at = out + line.to(gl.int64)[:, None] * HEAD_DIM + column[None, :]
    gl.store(at, acc.to(out.dtype.element_ty), mask=(line < rows)[:, None])


@_jit
def _skip(
    k_full: gl.tensor, k_free: gl.tensor, v_full: gl.tensor, v_free: gl.tensor, count: gl.tensor, STAGES: gl.constexpr
) -> None:
    """Let every block pass: no query of this group is there."""
    for i in range(count):
        stage, turn = i % STAGES, i // STAGES
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
    out: gl.tensor,
    mask: gl.tensor,
    multiplier: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    keys: gl.tensor,
    count: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    if row < rows:
        _attend(
            q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free,
            out, mask, multiplier, row, rows, keys, count, scale, HEAD_DIM, QUERIES, KEYS, STAGES, CODED,
        )  # fmt: skip
    else:
        _skip(k_full, k_free, v_full, v_free, count, STAGES)


@_jit
def _prefix_hopper_kernel(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    slots: gl.tensor,
    mask: gl.tensor,
    mask_b: gl.tensor,
    multiplier: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    keys: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    # Tiles of queries come first in the grid, so that those that run at once read the same keys.
    row, b = gl.program_id(0) * (2 * QUERIES), gl.program_id(1)
    count = gl.cdiv(keys, KEYS)
    slot = gl.load(slots + b).to(gl.int32)

    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2, QUERIES, HEAD_DIM], q_desc.layout)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], k_desc.layout)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, KEYS, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()

    part = out + (b * rows).to(gl.int64) * HEAD_DIM
    line = mask + b.to(gl.int64) * mask_b
    gl.warp_specialize(
        [
            (_attend, (
                q_buf.index(0), k_buf, v_buf, q_full.index(0), k_full, k_free, v_full, v_free,
                part, line, multiplier, row, rows, keys, count, scale, HEAD_DIM, QUERIES, KEYS, STAGES, CODED,
            )),
            (_second, (
                q_buf.index(1), k_buf, v_buf, q_full.index(1), k_full, k_free, v_full, v_free,
                part, line, multiplier, row + QUERIES, rows, keys, count, scale, HEAD_DIM, QUERIES, KEYS, STAGES, CODED,
            )),
            (_bring, (
                q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free,
                b * rows + row, slot, count, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@functools.cache
def runs_on(device_type: str, index: int | None) -> bool:
    """Tell whether the kernel runs on a device; the answer is kept for the process."""
    return gluon is not None and triton_runs_on(device_type, index) and torch.cuda.get_device_capability(index) == (9, 0)


def takes(q_BTHd: Tensor, k_SPKd: Tensor) -> bool:
    """Tell whether the kernel takes what `tma_attention` takes: one key/value head of a size that it knows, on Hopper."""
    known = k_SPKd.shape[2] == 1 and q_BTHd.shape[-1] in HEAD_DIMS
    return known and runs_on(q_BTHd.device.type, q_BTHd.device.index)


def prefix_hopper(
    q_BTHd: Tensor,
    k_SPKd: Tensor,
    v_SPKd: Tensor,
    slots_B: Tensor,
    mask_BP: Tensor,
    tiling: Tiling,
    *,
    scale: float | None = None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Attend every query to the keys of its row's slot whose mask is set; a row without any gives zeros.

    The mask is bool or uint8 and dense. Returns [B, T, H, d], with a multiplier in e4m3 (as `to_fp8` writes it).
    """
    (batch, tokens, heads, head_dim), keys = q_BTHd.shape, k_SPKd.shape[1]
    rows = tokens * heads
    out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype if multiplier is None else E4M3, device=q_BTHd.device)
    mask = mask_BP.view(torch.uint8) if mask_BP.dtype == torch.bool else mask_BP
    _prefix_hopper_kernel[(cdiv(rows, 2 * QUERIES), batch)](
        _described(q_BTHd.view(batch * rows, head_dim), [QUERIES, head_dim]),
        _described(k_SPKd.squeeze(2), [1, tiling.block_n, head_dim]),
        _described(v_SPKd.squeeze(2), [1, tiling.block_n, head_dim]),
        slots_B, mask, mask.stride(0), out if multiplier is None else multiplier, out, rows, keys,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=tiling.block_n, STAGES=tiling.stages,
        CODED=multiplier is not None, num_warps=4,
    )  # fmt: skip
    return out


def _described(x: Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
