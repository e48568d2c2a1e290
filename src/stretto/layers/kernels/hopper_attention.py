"""Attention to the keys of a slot for Hopper, with the products and the softmax side by side.

Two groups of four warps have 64 packed query rows each (hopper_parts.py says how they work); while one is at its softmax, the
other fills the tensor cores. Where rows are too few for that, a program has one group: twice as many programs.

Keys are those of a slot of an arena, then fresh ones of a suffix if there are any. Split ones are joined in their order.

Shape legend: B rows, T query tokens, P arena tokens, N suffix tokens, S slots, H query heads that share one key/value head,
d head size, R = T H packed query rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.kernels import hopper_parts
from stretto.layers.kernels.attention_parts import join_kernel
from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.hopper_parts import QUERIES, gl, jit, mbarrier, runs_on, tma
from stretto.layers.kernels.language import block_of, cdiv
from stretto.layers.kernels.overlap import overlaps
from stretto.layers.tuning import Config

LOG2_E = 1.4426950408889634
HEAD_DIMS = (128, 256)
HELD = 128
"""Channels that a group may hold in registers, of wider heads."""
FIELDS: dict[str, tuple[int | str, ...]] = {"groups": (1, 2), "held": (0, HELD)}


class Tiling(NamedTuple):
    """How one call is cut: keys a block, blocks in flight, splits of the keys, groups of a program, channels in registers."""

    block_n: int
    stages: int
    splits: int = 1
    groups: int = 2
    held: int = 0

    @staticmethod
    def of(config: Config) -> Tiling:
        named = {name: int(value) for name, value in config.items() if name in Tiling._fields}
        return Tiling(**named)

    @property
    def config(self) -> Config:
        return {"impl": "hopper", **self._asdict()}


@jit
def _bring_block(
    desc: gl.tensor,
    fresh: gl.tensor,
    buf: gl.tensor,
    full: gl.tensor,
    free: gl.tensor,
    slot: gl.tensor,
    b: gl.tensor,
    at: gl.tensor,
    fresh_at: gl.tensor,
    stage: gl.tensor,
    turn: gl.tensor,
    SUFFIX: gl.constexpr,
) -> None:
    """Bring a block: of the slot from `at`, or where the suffix has begun of that from `fresh_at`."""
    hopper_parts.make_room(desc, full, free, stage, turn)
    if SUFFIX:
        if fresh_at >= 0:
            tma.async_copy_global_to_shared(fresh, [b, fresh_at, 0], full.index(stage), buf.index(stage))
        else:
            tma.async_copy_global_to_shared(desc, [slot, at, 0], full.index(stage), buf.index(stage))
    else:
        tma.async_copy_global_to_shared(desc, [slot, at, 0], full.index(stage), buf.index(stage))


@jit
def _bring(
    tensors: gl.tensor,
    pipe: gl.tensor,
    where: gl.tensor,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SUFFIX: gl.constexpr,
    GROUPS: gl.constexpr,
) -> None:
    """Bring queries once, and blocks of keys and values in their order."""
    q_desc, k_desc, v_desc, k_fresh, v_fresh = tensors
    q_line, slot, b, first, count, arena_blocks = where
    _, k_buf, v_buf, _, k_full, k_free, v_full, v_free = pipe
    hopper_parts.bring_queries(q_desc, pipe, q_line, 0, GROUPS)
    for i in range(count):
        stage, turn = i % STAGES, i // STAGES
        at, fresh_at = (first + i) * KEYS, (first + i - arena_blocks) * KEYS
        _bring_block(k_desc, k_fresh, k_buf, k_full, k_free, slot, b, at, fresh_at, stage, turn, SUFFIX)
        _bring_block(v_desc, v_fresh, v_buf, v_full, v_free, slot, b, at, fresh_at, stage, turn, SUFFIX)


@jit
def _look(told: gl.tensor, i: gl.tensor, layout: gl.constexpr, KEYS: gl.constexpr) -> gl.tensor:
    """Tell which keys of a block count: masked ones of the slot below its bound, or those that a suffix has."""
    mask, first, arena_blocks, bound, suffix_tokens = told[0], told[1], told[2], told[3], told[4]
    SUFFIX: gl.constexpr = told[5]
    column = (first + i) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    seen = gl.load(mask + column, mask=column < bound, other=0) != 0
    if SUFFIX:
        fresh = column - arena_blocks * KEYS
        seen = gl.where(fresh >= 0, fresh < suffix_tokens, seen)
    return seen


@jit
def _soften(s: gl.tensor, top: gl.tensor, scale: gl.tensor, seen: gl.tensor, FIRST: gl.constexpr) -> gl.tensor:
    # Infinite, so that a row whose first keys are all masked weighs them with 0 exactly.
    return hopper_parts.soften(gl.where(seen[None, :], s, float("-inf")), top, scale, True)


@jit
def _store_parts(tops: gl.tensor, totals: gl.tensor, top: gl.tensor, total: gl.tensor, row: gl.tensor, rows: gl.tensor) -> None:
    line = row + gl.arange(0, top.shape[0], layout=top.type.layout)
    gl.store(tops + line, top, mask=line < rows)
    gl.store(totals + line, total, mask=line < rows)


@jit
def _store(
    task: gl.tensor,
    acc: gl.tensor,
    total: gl.tensor,
    top: gl.tensor,
    dtype: gl.constexpr,
    CODED: gl.constexpr,
    SPLIT: gl.constexpr,
) -> None:
    """Store a result, or with SPLIT a part of it."""
    out, tops, totals, _, multiplier, row, rows, _, _, _, _, _, _ = task
    if not SPLIT:
        # A row without any valid key gives zeros.
        acc = hopper_parts.scaled_rows(acc, 1.0 / gl.where(total > 0.0, total, 1.0))
    if CODED:
        acc = hopper_parts.coded(acc, dtype, multiplier)
    hopper_parts.store_rows(out, acc, row, rows, acc.shape[1])
    if SPLIT:
        _store_parts(tops, totals, top, total, row, rows)


@jit
def _group(
    pipe: gl.tensor,
    task: gl.tensor,
    HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CODED: gl.constexpr,
    SUFFIX: gl.constexpr,
    SPLIT: gl.constexpr,
    HELD: gl.constexpr,
) -> None:
    """Attend a group's queries to `count` blocks of keys: none if it has no query, and only say so if its split has no keys."""
    _, tops, totals, mask, _, row, rows, first, count, arena_blocks, bound, suffix_tokens, scale = task
    # Whatever is on its way to shared memory has to arrive before the program ends.
    mbarrier.wait(pipe[3], 0)
    if row < rows:
        if count > 0:
            acc, total, top = hopper_parts.attend_blocks(
                pipe, None, (mask, first, arena_blocks, bound, suffix_tokens, SUFFIX), count, scale,
                HEAD_DIM, QUERIES, KEYS, STAGES, None, _look, _soften, HELD,
            )  # fmt: skip
            _store(task, acc, total, top, pipe[1].dtype, CODED, SPLIT)
        elif SPLIT:
            spread: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            none = gl.full([QUERIES], -2.0e30, gl.float32, spread)
            _store_parts(tops, totals, none, gl.zeros([QUERIES], gl.float32, spread), row, rows)
    else:
        for i in range(count):
            hopper_parts.pass_block(pipe, i, STAGES)


@jit
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
    GROUPS: gl.constexpr,
    HELD: gl.constexpr,
) -> None:
    SPLIT: gl.constexpr = SPLITS > 1
    # Tiles of queries come first in the grid, so that those that run at once read the same keys.
    row, split, b = gl.program_id(0) * (GROUPS * QUERIES), gl.program_id(1), gl.program_id(2)
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

    pipe = hopper_parts.allocate(q_desc, k_desc, v_desc, HEAD_DIM, QUERIES, KEYS, STAGES, GROUPS)
    hopper_parts.start_barriers(pipe, None, STAGES, GROUPS)

    start = ((b * SPLITS + split) * rows).to(gl.int64)
    mine, my_tops, my_totals = out + start * HEAD_DIM, tops + start, totals + start
    line = mask + b.to(gl.int64) * mask_b
    cut = (first, count, arena_blocks, bound, suffix_tokens, scale)
    upper = (mine, my_tops, my_totals, line, multiplier, row, rows) + cut  # noqa: RUF005
    lower = (mine, my_tops, my_totals, line, multiplier, row + QUERIES, rows) + cut  # noqa: RUF005
    tensors = (q_desc, k_desc, v_desc, k_fresh, v_fresh)
    where = (b * rows + row, slot, b, first, count, arena_blocks)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    _group,
                    (hopper_parts.group_pipe(pipe, 0), upper, HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT, HELD),
                ),
                (_bring, (tensors, pipe, where, KEYS, STAGES, SUFFIX, GROUPS)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _group,
                    (hopper_parts.group_pipe(pipe, 0), upper, HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT, HELD),
                ),
                (
                    _group,
                    (hopper_parts.group_pipe(pipe, 1), lower, HEAD_DIM, QUERIES, KEYS, STAGES, CODED, SUFFIX, SPLIT, HELD),
                ),
                (_bring, (tensors, pipe, where, KEYS, STAGES, SUFFIX, GROUPS)),
            ],
            [4, 1],
            [240, 24],
        )


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
    _hopper_attention_kernel[(cdiv(rows, t.groups * QUERIES), t.splits, batch)](
        hopper_parts.described(q_BTHd.view(batch * rows, head_dim), [QUERIES, head_dim]),
        *(hopper_parts.described(x.squeeze(2), [1, t.block_n, head_dim]) for x in (k_SPKd, v_SPKd, *fresh)),
        slots_B, mask, mask.stride(0), slots_B if length_B is None else length_B, out if multiplier is None else multiplier,
        *(parts if kept else (out, out, out)), rows, arena_tokens, 0 if suffix is None else suffix[0].shape[1],
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        HEAD_DIM=head_dim, QUERIES=QUERIES, KEYS=t.block_n, STAGES=t.stages, CODED=multiplier is not None,
        SUFFIX=suffix is not None, BOUNDED=length_B is not None, SPLITS=t.splits, GROUPS=t.groups,
        HELD=t.held, num_warps=4,
    )  # fmt: skip
    if kept:
        block, overlap = block_of(t.splits), overlaps(q_BTHd)
        join_kernel[(rows, batch)](
            *parts, out, tokens, KV_HEADS=1, GROUP=heads, HEAD_DIM=head_dim, SPLITS=t.splits, BLOCK_SPLITS=block,
            OVERLAP=overlap, num_warps=2 if block <= 8 else 4, launch_pdl=overlap,
        )  # fmt: skip
    return out
