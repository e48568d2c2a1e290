"""Programmatic dependent launch: a kernel starts while its predecessor still runs, and fetches its weights meanwhile.

Every kernel that takes part calls `await_inputs` before it touches anything that another kernel wrote or reads: once it
returns, all earlier kernels of the stream are complete. That holds through a chain only because each of them waits too.
Weights are written by no kernel of a chain, so they may be fetched before.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stretto.core.env import OVERLAP
from stretto.layers.kernels.language import jit, tl

PASS_ROWS = 600
"""From these rows on a pass waits for its launch."""


@functools.cache
def _can_overlap(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def overlaps(x: Tensor) -> bool:
    """Tell whether kernels on x's device are launched this way; never where they are interpreted."""
    return x.is_cuda and _can_overlap(x.device.index) and OVERLAP.read()


def passes_early(x: Tensor, rows: int) -> bool:
    """Tell whether a pass over so many rows starts before the kernel ahead ends."""
    return rows < PASS_ROWS and overlaps(x)


@jit
def await_inputs(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start, then wait until all earlier kernels are complete."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def prefetch_rows(rows: tl.tensor, ROWS: tl.constexpr, bytes: tl.tensor, OVERLAP: tl.constexpr) -> None:
    """Ask for `bytes` (a multiple of 16) from each address of `rows` [ROWS], at most 128, to be brought to L2."""
    if OVERLAP:
        # A tensor shorter than a block of threads is held several times over: its first holder asks.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [rows.to(tl.int64), tl.full((ROWS,), 0, tl.int32) + bytes, tl.full((ROWS,), ROWS, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def prefetch_span(start: tl.tensor, bytes: tl.tensor, OVERLAP: tl.constexpr) -> None:
    """Ask for `bytes` (a multiple of 16) from an address on to be brought to L2."""
    prefetch_rows(start + tl.arange(0, 1), 1, bytes, OVERLAP)
