"""The parts that attention split over keys keeps, and the kernel that joins them.

Shape legend: as in split_attention.py.
"""

from __future__ import annotations

from stretto.layers.kernels.language import jit, tl
from stretto.layers.kernels.overlap import await_inputs


@jit
def keep_part(
    part: tl.tensor,
    part_top: tl.tensor,
    part_total: tl.tensor,
    at: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    used: tl.tensor,
    here: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Write one split's unnormalised sum, largest score and total of packed query rows; the score of an unused one says so."""
    if used:
        tl.store(part + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, mask=here[:, None])
    tl.store(part_top + at, tl.where(used, top, -2.0e30), mask=here)
    tl.store(part_total + at, total, mask=here)


@jit
def join_kernel(
    part: tl.tensor,
    part_top: tl.tensor,
    part_total: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Join the splits of one packed query row."""
    await_inputs(OVERLAP)
    row, pair = tl.program_id(0), tl.program_id(1)
    rows = tokens * GROUP
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    here = split < SPLITS
    at = (pair * SPLITS + split).to(tl.int64) * rows + row
    top = tl.load(part_top + at, mask=here, other=-2.0e30)
    stored = top > -1.5e30
    acc = tl.load(part + at[:, None] * HEAD_DIM + dim[None, :], mask=stored[:, None], other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(part_total + at, mask=here, other=0.0) * share, 0)
    joined = tl.sum(acc * share[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    b, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS * GROUP + row % GROUP
    out_at = out + ((b * tokens + row // GROUP) * (KV_HEADS * GROUP) + head) * HEAD_DIM + dim
    tl.store(out_at, joined.to(out.dtype.element_ty))
