"""Both ends of a residual stream of few channels outside: a small fp32 projection into it, and one out of its last norm.

Shape legend: as in stream.py; A channels outside.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps
from stretto.layers.kernels.stream import Stream, carries_shift, line_at, normed_reference, stream_of

MAX_CHANNELS = 64
BLOCK_N = 128
BLOCK_A = 8


def enter_stream_reference(
    x_BTA: Tensor, weight_DA: Tensor, bias_D: Tensor, normed_by: Modulation, dtype: torch.dtype
) -> Stream:
    """Make a stream of x W^T + bias, all in fp32, for a product in `dtype` behind the norm `normed_by`."""
    return stream_of(linear(x_BTA, weight_DA, bias_D), normed_by, dtype, 1)


def leave_stream_reference(
    scaled_BRD: Tensor, squares_MP: Tensor, normed_by: Modulation, weight_AD: Tensor, bias_A: Tensor, eps: float
) -> Tensor:
    """Return the last norm of a stream through a projection, norm(s) W^T + bias, in fp32, [B, T, A]."""
    return linear(normed_reference(scaled_BRD, squares_MP, normed_by, eps), weight_AD, bias_A)


@jit
def _enter_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    table: tl.tensor,
    line_stride: tl.tensor,
    lines: tl.tensor,
    all_rows: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    INDEXED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_A)
    given = channel < channels
    w = tl.load(weight + column[:, None] * channels + channel[None, :], mask=given[None, :], other=0.0)
    added = tl.load(bias + column)
    await_inputs(OVERLAP)
    first = tl.program_id(0) * ROWS
    for i in range(tl.minimum(ROWS, all_rows - first)):
        row = first + i
        b, t = row // tokens, row % tokens
        line = table + line_at(lines, b, t, tokens, INDEXED, PER_TOKEN) * line_stride
        scale = tl.load(line + column).to(tl.float32)
        value = tl.sum(w * tl.load(x + row * channels + channel, mask=given, other=0.0)[None, :], 1) + added
        tl.store(residual + row.to(tl.int64) * WIDTH + column, value)
        tl.store(squares + row * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value, 0))
        out = row
        if SHIFT:
            out = row + b
        at = scaled + out.to(tl.int64) * WIDTH + column
        tl.store(at, (value * (1.0 + scale)).to(scaled.dtype.element_ty))
        if SHIFT:
            ends = (column < WIDTH) & (t == tokens - 1)
            shift = tl.load(line + WIDTH + column, mask=ends, other=0.0).to(tl.float32)
            tl.store(at + WIDTH, shift.to(scaled.dtype.element_ty), mask=ends)


def enter_stream_triton(x_BTA: Tensor, weight_DA: Tensor, bias_D: Tensor, normed_by: Modulation, dtype: torch.dtype) -> Stream:
    batch, tokens, channels = x_BTA.shape
    width, device, shift = weight_DA.shape[0], x_BTA.device, carries_shift(normed_by)
    rows, block = batch * tokens, min(BLOCK_N, width & -width)
    each = _rows_each(rows)
    out = Stream(
        torch.empty(batch, tokens, width, dtype=torch.float32, device=device),
        torch.empty(batch, tokens + shift, width, dtype=dtype, device=device),
        torch.empty(rows, width // block, dtype=torch.float32, device=device),
    )
    lines, overlap = normed_by.addressing(), overlaps(x_BTA)
    _enter_kernel[(cdiv(rows, each), width // block)](
        x_BTA.contiguous(), weight_DA, bias_D, *out, lines.table, lines.stride, lines.rows, rows, tokens, channels,
        WIDTH=width, INDEXED=lines.indexed, PER_TOKEN=lines.per_token, SHIFT=shift, ROWS=each,
        BLOCK_N=block, BLOCK_A=block_of(channels), OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


@jit
def _leave_kernel(
    scaled: tl.tensor,
    squares: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    line_stride: tl.tensor,
    lines: tl.tensor,
    all_rows: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    INDEXED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CARRIED: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    channel = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    column = tl.arange(0, BLOCK_K)
    inside, there = column < WIDTH, channel < channels
    w_at = weight + channel[:, None] * WIDTH + column[None, :]
    w = tl.load(w_at, mask=there[:, None] & inside[None, :], other=0.0)
    added = tl.load(bias + channel, mask=there, other=0.0)
    await_inputs(OVERLAP)
    first = tl.program_id(0) * ROWS
    for i in range(tl.minimum(ROWS, all_rows - first)):
        row = first + i
        b, t = row // tokens, row % tokens
        total = tl.sum(tl.load(squares + row * PARTS + tl.arange(0, PARTS)), 0)
        source = row
        if CARRIED:
            source = row + b
        at = scaled + source.to(tl.int64) * WIDTH + column
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.rsqrt(total / WIDTH + eps)
        if CARRIED:
            value += tl.load(at + (tokens - t) * WIDTH, mask=inside, other=0.0).to(tl.float32)
        elif SHIFT:
            line = table + line_at(lines, b, t, tokens, INDEXED, PER_TOKEN) * line_stride
            value += tl.load(line + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * channels + channel, tl.sum(w * value[None, :], 1) + added, mask=there)


def leave_stream_triton(
    scaled_BRD: Tensor, squares_MP: Tensor, normed_by: Modulation, weight_AD: Tensor, bias_A: Tensor, eps: float
) -> Tensor:
    batch, _, width = scaled_BRD.shape
    (rows, parts), channels, device = squares_MP.shape, weight_AD.shape[0], scaled_BRD.device
    out = torch.empty(batch, rows // batch, channels, dtype=torch.float32, device=device)
    lines, overlap, each = normed_by.addressing(), overlaps(scaled_BRD), _rows_each(rows)
    _leave_kernel[(cdiv(rows, each), cdiv(channels, BLOCK_A))](
        scaled_BRD, squares_MP, weight_AD, bias_A, out, lines.table, lines.stride, lines.rows,
        rows, rows // batch, channels, eps,
        WIDTH=width, PARTS=parts, INDEXED=lines.indexed, PER_TOKEN=lines.per_token,
        CARRIED=carries_shift(normed_by), SHIFT=not normed_by.scale_only, ROWS=each,
        BLOCK_A=BLOCK_A, BLOCK_K=block_of(width), OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


def _rows_each(rows: int) -> int:
    """Rows a program takes in turn: its weights stay in registers meanwhile."""
    return 1 if rows <= 128 else 4


def _fits(x_BTA: Tensor, *_: object) -> bool:
    return x_BTA.shape[-1] <= MAX_CHANNELS


enter_stream = FusedOp(enter_stream_reference, enter_stream_triton, supports=_fits)
leave_stream = FusedOp(leave_stream_reference, leave_stream_triton)
