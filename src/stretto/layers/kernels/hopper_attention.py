"""Attention to the keys of a slot for Hopper, with the products and the softmax side by side.

One warp brings keys and values through shared memory; two groups of four warps have 64 packed query rows each. A group asks
for the scores of the next keys, then for the weighted values of the last ones, and works on the softmax while the tensor cores
have the second product; the other group fills what is left. Triton's own compiler waits for the scores first, so this is
written in Gluon, which leaves the waits to the author.

Keys are those of a slot of an arena, then fresh ones of a suffix if there are any. Split ones are joined in their order.

Shape legend: B rows, T query tokens, P arena tokens, N suffix tokens, S slots, H query heads that share one key/value head,
d head size, R = T H packed query rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import triton_runs_on
from stretto.layers.kernels.attention_parts import join_kernel
from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.language import block_of, cdiv
from stretto.layers.kernels.overlap import overlaps
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

LOG2_E = 1.4426950408889634
QUERIES = 64
"""Of a group of warps, of which there are two."""
HEAD_DIMS = (128, 256)


class Tiling(NamedTuple):
    """How one call is cut: keys a block, blocks in flight, splits of the keys."""

    block_n: int
    stages: int
    splits: int = 1

    @staticmethod
    def of(config: Config) -> Tiling:
        return Tiling(int(config["block_n"]), int(config["stages"]), int(config.get("splits", 1)))

    @property
    def config(self) -> Config:
        return {"impl": "hopper", **self._asdict()}


def _jit(fn: Any) -> Any:
    return fn if gluon is None else gluon.jit(fn)


@_jit
def _bring(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    k_fresh: gl.tensor,
    v_fresh: gl.tensor,
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
    b: gl.tensor,
    first: gl.tensor,
    count: gl.tensor,
    arena_blocks: gl.tensor,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SUFFIX: gl.constexpr,
) -> None:
    """Bring queries once, and blocks of keys and values in their order."""
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [q_line + group * q_buf.shape[1], 0], q_full.index(group), q_buf.index(group))
    for i in range(count):
        stage, turn = i % STAGES, i // STAGES
        at, fresh_at = (first + i) * KEYS, (first + i - arena_blocks) * KEYS
        mbarrier.wait(k_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        if SUFFIX:
            if fresh_at >= 0:
                tma.async_copy_global_to_shared(k_fresh, [b, fresh_at, 0], k_full.index(stage), k_buf.index(stage))
            else:
                tma.async_copy_global_to_shared(k_desc, [slot, at, 0], k_full.index(stage), k_buf.index(stage))
        else:
            tma.async_copy_global_to_shared(k_desc, [slot, at, 0], k_full.index(stage), k_buf.index(stage))
        mbarrier.wait(v_free.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        if SUFFIX:
            if fresh_at >= 0:
                tma.async_copy_global_to_shared(v_fresh, [b, fresh_at, 0], v_full.index(stage), v_buf.index(stage))
            else:
                tma.async_copy_global_to_shared(v_desc, [slot, at, 0], v_full.index(stage), v_buf.index(stage))
        else:
            tma.async_copy_global_to_shared(v_desc, [slot, at, 0], v_full.index(stage), v_buf.index(stage))


@_jit
def _valid(
    mask: gl.tensor,
    block: gl.tensor,
    arena_blocks: gl.tensor,
    bound: gl.tensor,
    suffix_tokens: gl.tensor,
    KEYS: gl.constexpr,
    SUFFIX: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tensor:
    """Tell which keys of a block count: masked ones of the slot below its bound, or those that a suffix has."""
    column = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    seen = gl.load(mask + column, mask=column < bound, other=0) != 0
    if SUFFIX:
        fresh = column - arena_blocks * KEYS
        seen = gl.where(fresh >= 0, fresh < suffix_tokens, seen)
    return seen


@_jit
def _soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, valid: gl.tensor) -> gl.tensor:
    """Return weights, their sums, the new maxima and by how much older sums shrink; in base 2."""
    # Infinite, so that a row whose first keys are all masked weighs them with 0 exactly.
    s = gl.where(valid[None, :], s, float("-inf"))
    # A whole number: weights rounded under different tops then differ by powers of two alone, so results of all tilings agree.
    new_top = gl.maximum(top, gl.ceil(gl.max(s, 1) * scale))
    weights = gl.exp2(s * scale - new_top[:, None])
    return weights, gl.sum(weights, 1), new_top, gl.exp2(top - new_top)


@_jit
def _attend(
    q_buf: gl.tensor,
    k_buf: gl.tensor,
    v_buf: gl.tensor,
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    out: gl.tensor,
    tops: gl.tensor,
    totals: gl.tensor,
    mask: gl.tensor,
    multiplier: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    first: gl.tensor,
    count: gl.tensor,
    arena_blocks: gl.tensor,
    bound: gl.tensor,
    suffix_tokens: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
    SUFFIX: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    """Attend QUERIES queries to `count` blocks of keys, and store the result, or with SPLIT a part of it."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=result, k_width=2)
    empty = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    acc = gl.zeros([QUERIES, HEAD_DIM], gl.float32, result)
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, scores))

    valid = _valid(mask, first, arena_blocks, bound, suffix_tokens, KEYS, SUFFIX, scores)
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
        valid = _valid(mask, first + i, arena_blocks, bound, suffix_tokens, KEYS, SUFFIX, scores)
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
    if not SPLIT:
        # A row without any valid key gives zeros.
        share = 1.0 / gl.where(total > 0.0, total, 1.0)
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
    if SPLIT:
        line = row + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, scores))
        gl.store(tops + line, top, mask=line < rows)
        gl.store(totals + line, total, mask=line < rows)


@_jit
def _group(
    q_buf: gl.tensor,
    k_buf: gl.tensor,
    v_buf: gl.tensor,
    q_full: gl.tensor,
    k_full: gl.tensor,
    k_free: gl.tensor,
    v_full: gl.tensor,
    v_free: gl.tensor,
    out: gl.tensor,
    tops: gl.tensor,
    totals: gl.tensor,
    mask: gl.tensor,
    multiplier: gl.tensor,
    row: gl.tensor,
    rows: gl.tensor,
    first: gl.tensor,
    count: gl.tensor,
    arena_blocks: gl.tensor,
    bound: gl.tensor,
    suffix_tokens: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
    SUFFIX: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    """Do the work of one group of warps: none if it has no query, and only say so if its split has no keys."""
    # Whatever is on its way to shared memory has to arrive before the program ends.
    mbarrier.wait(q_full, 0)
    if row < rows:
        if count > 0:
            _attend(
                q_buf, k_buf, v_buf, k_full, k_free, v_full, v_free, out, tops, totals, mask, multiplier, row, rows,
                first, count, arena_blocks, bound, suffix_tokens, scale,
                HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT,
            )  # fmt: skip
        elif SPLIT:
            spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            line = row + gl.arange(0, QUERIES, layout=spread)
            gl.store(tops + line, gl.full([QUERIES], -2.0e30, gl.float32, spread), mask=line < rows)
            gl.store(totals + line, gl.zeros([QUERIES], gl.float32, spread), mask=line < rows)
    else:
        for i in range(count):
            stage, turn = i % STAGES, i // STAGES
            mbarrier.wait(k_full.index(stage), turn & 1)
            mbarrier.arrive(k_free.index(stage))
            mbarrier.wait(v_full.index(stage), turn & 1)
            mbarrier.arrive(v_free.index(stage))


@_jit
def _hopper_attention_kernel(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    k_fresh: gl.tensor,
    v_fresh: gl.tensor,
    slots: gl.tensor,
    mask: gl.tensor,
    mask_b: gl.tensor,
    length: gl.tensor,
    multiplier: gl.tensor,
    out: gl.tensor,
    tops: gl.tensor,
    totals: gl.tensor,
    rows: gl.tensor,
    arena_tokens: gl.tensor,
    suffix_tokens: gl.tensor,
    scale: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
    SUFFIX: gl.constexpr,
    BOUNDED: gl.constexpr,
    SPLITS: gl.constexpr,
) -> None:
    SPLIT: gl.constexpr = SPLITS > 1
    # Tiles of queries come first in the grid, so that those that run at once read the same keys.
    row, split, b = gl.program_id(0) * (2 * QUERIES), gl.program_id(1), gl.program_id(2)
    slot = gl.load(slots + b).to(gl.int32)
    bound = arena_tokens
    if BOUNDED:
        bound = gl.minimum(gl.load(length + b).to(gl.int32), arena_tokens)
    arena_blocks = gl.cdiv(bound, KEYS)
    blocks = arena_blocks
    if SUFFIX:
        blocks = arena_blocks + gl.cdiv(suffix_tokens, KEYS)
    each = gl.cdiv(blocks, SPLITS)
    first = split * each
    count = gl.maximum(gl.minimum(each, blocks - first), 0)

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

    start = ((b * SPLITS + split) * rows).to(gl.int64)
    mine, my_tops, my_totals = out + start * HEAD_DIM, tops + start, totals + start
    line = mask + b.to(gl.int64) * mask_b
    gl.warp_specialize(
        [
            (_group, (
                q_buf.index(0), k_buf, v_buf, q_full.index(0), k_full, k_free, v_full, v_free,
                mine, my_tops, my_totals, line, multiplier, row, rows, first, count, arena_blocks, bound, suffix_tokens, scale,
                HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT,
            )),
            (_group, (
                q_buf.index(1), k_buf, v_buf, q_full.index(1), k_full, k_free, v_full, v_free,
                mine, my_tops, my_totals, line, multiplier, row + QUERIES, rows,
                first, count, arena_blocks, bound, suffix_tokens, scale,
                HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT,
            )),
            (_bring, (
                q_desc, k_desc, v_desc, k_fresh, v_fresh, q_buf, k_buf, v_buf, q_full, k_full, k_free, v_full, v_free,
                b * rows + row, slot, b, first, count, arena_blocks, KEYS, STAGES, SUFFIX,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@functools.cache
def runs_on(device_type: str, index: int | None) -> bool:
    """Tell whether the kernel runs on a device; the answer is kept for the process."""
    return gluon is not None and triton_runs_on(device_type, index) and torch.cuda.get_device_capability(index) == (9, 0)


def takes(q_BTHd: Tensor, *keys: Tensor) -> bool:
    """Tell whether the kernel takes these tensors: one key/value head of a size that it knows, 16-bit, on Hopper.

    Queries are dense; keys and values have dense tokens, and start and lie apart by multiples of 16 bytes.
    """
    known = q_BTHd.is_contiguous() and q_BTHd.shape[-1] in HEAD_DIMS and q_BTHd.element_size() == 2
    one = all(x.shape[2] == 1 and x.stride(-1) == 1 and x.dtype == q_BTHd.dtype for x in keys)
    apart = all(x.storage_offset() % 8 == 0 and all(n % 8 == 0 for n in x.stride()[:2]) for x in keys)
    return known and one and apart and runs_on(q_BTHd.device.type, q_BTHd.device.index)


def hopper_attention(
    q_BTHd: Tensor,
    k_SPKd: Tensor,
    v_SPKd: Tensor,
    slots_B: Tensor,
    mask_BP: Tensor,
    tiling: Tiling,
    *,
    length_B: Tensor | None = None,
    suffix: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Attend every query to the keys of its row's slot whose mask is set, and to its row of a suffix.

    The mask is bool or uint8 and dense; keys from `length_B` on are never valid. A row without any valid key gives zeros.
    Returns [B, T, H, d], with a multiplier in e4m3 (as `to_fp8` writes it; not where keys are split).
    """
    (batch, tokens, heads, head_dim), t = q_BTHd.shape, tiling
    rows, arena_tokens = tokens * heads, k_SPKd.shape[1]
    assert multiplier is None or t.splits == 1
    out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype if multiplier is None else E4M3, device=q_BTHd.device)
    kept = batch * t.splits * rows if t.splits > 1 else 0
    parts = torch.split(
        torch.empty(kept * (head_dim + 2), dtype=torch.float32, device=q_BTHd.device), [kept * head_dim, kept, kept]
    )
    mask = mask_BP.view(torch.uint8) if mask_BP.dtype == torch.bool else mask_BP
    fresh = (k_SPKd, v_SPKd) if suffix is None else suffix
    _hopper_attention_kernel[(cdiv(rows, 2 * QUERIES), t.splits, batch)](
        _described(q_BTHd.view(batch * rows, head_dim), [QUERIES, head_dim]),
        *(_described(x.squeeze(2), [1, t.block_n, head_dim]) for x in (k_SPKd, v_SPKd, *fresh)),
        slots_B, mask, mask.stride(0), slots_B if length_B is None else length_B, out if multiplier is None else multiplier,
        *(parts if kept else (out, out, out)), rows, arena_tokens, 0 if suffix is None else suffix[0].shape[1],
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=t.block_n, STAGES=t.stages, CODED=multiplier is not None,
        SUFFIX=suffix is not None, BOUNDED=length_B is not None, SPLITS=t.splits, num_warps=4,
    )  # fmt: skip
    if kept:
        block, overlap = block_of(t.splits), overlaps(q_BTHd)
        join_kernel[(rows, batch)](
            *parts, out, tokens, KV_HEADS=1, GROUP=heads, HEAD_DIM=head_dim, SPLITS=t.splits, BLOCK_SPLITS=block,
            OVERLAP=overlap, num_warps=2 if block <= 8 else 4, launch_pdl=overlap,
        )  # fmt: skip
    return out


def _described(x: Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
