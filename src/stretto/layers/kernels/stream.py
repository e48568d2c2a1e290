"""A residual stream as products read it: what a norm needs is left by the kernel that wrote the stream.

The norm of a row is r (x (1 + scale)) + shift with r = 1 / rms(x). Who writes x also writes x (1 + scale), rounded for the
product, and the sums of squares of its part of each row; who reads multiplies by r after its product. Where all tokens of
a batch row share one line, shift is appended as one more row: its product comes out of the same tile, and is added to all.

Shape legend: B rows, T tokens, M = B T, R = T or T + 1 rows with the shift, D width, P parts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.language import block_of, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps


class Stream(NamedTuple):
    """A residual stream, and what the product behind the next norm reads of it."""

    residual_BTD: Tensor
    scaled_BRD: Tensor
    squares_MP: Tensor


def carries_shift(modulation: Modulation) -> bool:
    """Tell whether shift goes along as one more row: it does if there is one, the same for all tokens of a batch row."""
    return not modulation.scale_only and not modulation.per_token


def open_stream_reference(residual_BTD: Tensor, normed_by: Modulation, dtype: torch.dtype) -> Stream:
    """Make a stream of an fp32 residual, for a product in `dtype` behind the norm `normed_by`."""
    return stream_of(residual_BTD, normed_by, dtype, 1)


def stream_of(residual_BTD: Tensor, normed_by: Modulation, dtype: torch.dtype, parts: int) -> Stream:
    scale, shift, _ = normed_by.parts()
    scaled = residual_BTD * (1.0 + scale)
    if carries_shift(normed_by):
        scaled = torch.cat((scaled, shift.expand(scaled.shape[0], 1, -1)), dim=1)
    squares = residual_BTD.square().view(-1, parts, residual_BTD.shape[-1] // parts).sum(-1)
    return Stream(residual_BTD, scaled.to(dtype), squares)


def normed_reference(scaled_BRD: Tensor, squares_MP: Tensor, normed_by: Modulation, eps: float) -> Tensor:
    """Return the norm that a stream stands for, in fp32, [B, T, D]."""
    batch, width = scaled_BRD.shape[0], scaled_BRD.shape[-1]
    factor_BT1 = torch.rsqrt(squares_MP.sum(-1) / width + eps).view(batch, -1, 1)
    tokens = factor_BT1.shape[1]
    if carries_shift(normed_by):
        return scaled_BRD[:, :tokens].float() * factor_BT1 + scaled_BRD[:, tokens:].float()
    return scaled_BRD.float() * factor_BT1 + normed_by.parts()[1]


@jit
def line_at(
    rows: tl.tensor, b: tl.tensor, t: tl.tensor, tokens: tl.tensor, INDEXED: tl.constexpr, PER_TOKEN: tl.constexpr
) -> tl.tensor:
    """Return which lines of a modulation's table tokens (b, t) use."""
    at = b
    if PER_TOKEN:
        at = b * tokens + t
    if INDEXED:
        return tl.load(rows + at).to(tl.int64)
    return at.to(tl.int64)


@jit
def _open_kernel(
    residual: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    table: tl.tensor,
    line_stride: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    INDEXED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    b, t = row // tokens, row % tokens
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    line = table + line_at(rows, b, t, tokens, INDEXED, PER_TOKEN) * line_stride
    value = tl.load(residual + row.to(tl.int64) * WIDTH + column, mask=inside, other=0.0)
    scale = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(squares + row, tl.sum(value * value, 0))
    out = row
    if SHIFT:
        out = row + b
    at = scaled + out.to(tl.int64) * WIDTH + column
    tl.store(at, (value * (1.0 + scale)).to(scaled.dtype.element_ty), mask=inside)
    if SHIFT:
        last = inside & (t == tokens - 1)
        shift = tl.load(line + WIDTH + column, mask=last, other=0.0).to(tl.float32)
        tl.store(at + WIDTH, shift.to(scaled.dtype.element_ty), mask=last)


def open_stream_triton(residual_BTD: Tensor, normed_by: Modulation, dtype: torch.dtype) -> Stream:
    residual = residual_BTD.contiguous()
    batch, tokens, width = residual.shape
    shift = carries_shift(normed_by)
    scaled = torch.empty(batch, tokens + shift, width, dtype=dtype, device=residual.device)
    squares = torch.empty(batch * tokens, 1, dtype=torch.float32, device=residual.device)
    lines, overlap, block = normed_by.addressing(), overlaps(residual), block_of(width)
    _open_kernel[(batch * tokens,)](
        residual, scaled, squares, lines.table, lines.stride, lines.rows, tokens,
        WIDTH=width, INDEXED=lines.indexed, PER_TOKEN=lines.per_token, SHIFT=shift, BLOCK=block,
        OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return Stream(residual, scaled, squares)


open_stream = FusedOp(open_stream_reference, open_stream_triton)


def sample_stream(batch: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Stream, Modulation]:
    """Return a random stream and its norm: one line of a table for each batch row."""
    norm = Modulation(torch.randn(11, 3 * width, device=device) * 0.1, torch.randint(11, (batch,), device=device))
    return stream_of(torch.randn(batch, tokens, width, device=device), norm, dtype, min(32, width)), norm
