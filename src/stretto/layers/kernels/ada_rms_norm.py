"""RMSNorm whose scale and shift come from a condition (adaRMS), alone and fused with the gated residual before it.

Shape legend: B rows, T tokens, D width, S rows of a modulation table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, overlaps


class Modulation(NamedTuple):
    """Scale, shift and gate of one norm, each D wide, side by side in the last axis.

    `table` is [S, 3 D], of which batch row b uses line `rows[b]` (int64 [B], on the device), or token (b, t) uses line
    `rows[b, t]` (int64 [B, T]). Without `rows` the table is direct: [B, 3 D], or [B, T, 3 D] for one line a token.
    Lines may be strided (a slice of a wider table); the last axis must be dense. With `scale_only` a line is D wide: its
    shift is 0 and its gate 1, and a direct table of one line serves every row, as the weight of a plain norm does.
    """

    table: Tensor
    rows: Tensor | None = None
    scale_only: bool = False

    @property
    def per_token(self) -> bool:
        return self.table.dim() == 3 if self.rows is None else self.rows.dim() == 2

    def lines(self) -> Tensor:
        """Return the lines in use in fp32, as [B or 1, 1, 3 D] or [B, T, 3 D]."""
        lines = self.table if self.rows is None else self.table[self.rows]
        return (lines[:, None] if lines.dim() == 2 else lines).float()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, shift and gate in fp32, each [B or 1, 1 or T, D]; shift and gate of scales alone are scalars."""
        if self.scale_only:
            lines = self.lines()
            return lines, lines.new_zeros(()), lines.new_ones(())
        scale, shift, gate = self.lines().chunk(3, dim=-1)
        return scale, shift, gate

    def addressing(self) -> Addressing:
        """Return how a kernel finds the line of a token."""
        table = self.table if self.table.stride(-1) == 1 else self.table.contiguous()
        if self.rows is not None:
            return Addressing(table, table.stride(0), self.rows.contiguous(), True, self.per_token)
        lines = table.reshape(-1, table.shape[-1])
        one_for_all = self.scale_only and lines.shape[0] == 1
        return Addressing(lines, 0 if one_for_all else lines.stride(0), lines, False, self.per_token)


class Addressing(NamedTuple):
    """A modulation for kernels: line `rows[i]` (or i itself) of a table whose lines are `stride` apart; i is a row or token."""

    table: Tensor
    stride: int
    rows: Tensor
    """A stand-in that is not read if lines are not indexed."""
    indexed: bool
    per_token: bool


def ada_rms_norm_reference(x_BTD: Tensor, modulation: Modulation, eps: float) -> Tensor:
    """Return rms(x) * (1 + scale) + shift, computed in fp32, in x's dtype."""
    scale, shift, _ = modulation.parts()
    x32 = x_BTD.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + scale) + shift).to(x_BTD.dtype)


def gated_add_ada_rms_norm_reference(
    x_BTD: Tensor, y_BTD: Tensor, gated_by: Modulation, normed_by: Modulation, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (ada_rms_norm(s, normed_by) in y's dtype, s) for s = x + gate * y in x's dtype; gate from `gated_by`."""
    gate = gated_by.parts()[2]
    total = (x_BTD.float() + gate * y_BTD.float()).to(x_BTD.dtype)
    return ada_rms_norm_reference(total, normed_by, eps).to(y_BTD.dtype), total


@jit
def line_of(
    table: tl.tensor, stride: tl.tensor, rows: tl.tensor, tokens: tl.tensor, INDEXED: tl.constexpr, PER_TOKEN: tl.constexpr
) -> tl.tensor:
    """Return the address of the line of a table that this program's token uses."""
    at = tl.program_id(0)
    if not PER_TOKEN:
        at = at // tokens
    line = at.to(tl.int64)
    if INDEXED:
        line = tl.load(rows + at).to(tl.int64)
    return table + line * stride


@jit
def _ada_rms_norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    factor: tl.tensor,
    before: tl.tensor,
    gate_table: tl.tensor,
    gate_stride: tl.tensor,
    gate_rows: tl.tensor,
    norm_table: tl.tensor,
    norm_stride: tl.tensor,
    norm_rows: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    GATE_INDEXED: tl.constexpr,
    GATE_PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    NORM_INDEXED: tl.constexpr,
    NORM_PER_TOKEN: tl.constexpr,
    SHIFTED: tl.constexpr,
    FOLDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    CODED: tl.constexpr,
    BEFORE_PARTS: tl.constexpr,
    BEFORE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            part = y + split * tl.num_programs(0).to(tl.int64) * width
            added += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            line = line_of(gate_table, gate_stride, gate_rows, tokens, GATE_INDEXED, GATE_PER_TOKEN)
            added *= tl.load(line + 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        value += added
        stored = value.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    line = line_of(norm_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN)
    scale = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(value * value, 0)
    inverse = tl.rsqrt(squares / width + eps)
    if FOLDED:
        tl.store(factor + tl.program_id(0), squares if SQUARES else inverse)
        normed = value * (1.0 + scale)
        if CODED:
            over = inverse
            if BEFORE_PARTS > 0:
                part = tl.arange(0, BEFORE_BLOCK)
                its = tl.load(before + tl.program_id(0) * BEFORE_PARTS + part, mask=part < BEFORE_PARTS, other=0.0)
                over = tl.rsqrt(tl.sum(its, 0) / width + eps)
            normed *= over
            # Two selects instead of min and max, which would lose a NaN.
            normed = tl.where(normed > 448.0, 448.0, normed)
            normed = tl.where(normed < -448.0, -448.0, normed)
    else:
        normed = value * inverse * (1.0 + scale)
        if SHIFTED:
            normed += tl.load(line + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


def ada_rms_norm_triton(x_BTD: Tensor, modulation: Modulation, eps: float) -> Tensor:
    x = x_BTD.contiguous()
    out = torch.empty_like(x)
    launch(x, x, out, out, modulation, modulation, eps, add=False)
    return out


def gated_add_ada_rms_norm_triton(
    x_BTD: Tensor, y_BTD: Tensor, gated_by: Modulation, normed_by: Modulation, eps: float
) -> tuple[Tensor, Tensor]:
    x, y = x_BTD.contiguous(), y_BTD.contiguous()
    out, total = torch.empty_like(y), torch.empty_like(x)
    launch(x, y, out, total, gated_by, normed_by, eps, add=True)
    return out, total


def launch(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    total: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    *,
    add: bool,
    factor_BT: Tensor | None = None,
    squares_BT1: Tensor | None = None,
    before_BTP: Tensor | None = None,
) -> None:
    """Run the kernel; y may be parts [S, M, D] that are summed first, in their order.

    With `factor_BT` the norm is folded: rows are scaled only, and 1 / rms goes there; or sums of squares go to `squares_BT1`.
    Folded rows in e4m3 are divided by a root mean square, their own or that of the sums of squares `before_BTP`.
    """
    batch, tokens, width = x.shape
    gate, norm, block, overlap = gated_by.addressing(), normed_by.addressing(), block_of(width), overlaps(x)
    folded = factor_BT if squares_BT1 is None else squares_BT1
    parts = 0 if before_BTP is None else before_BTP.shape[-1]
    _ada_rms_norm_kernel[(batch * tokens,)](
        x, y, out, total, total if folded is None else folded, total if before_BTP is None else before_BTP,
        gate.table, gate.stride, gate.rows,
        norm.table, norm.stride, norm.rows,
        tokens, width, eps,
        ADD=add,
        GATE_INDEXED=gate.indexed, GATE_PER_TOKEN=gate.per_token, GATED=not gated_by.scale_only,
        NORM_INDEXED=norm.indexed, NORM_PER_TOKEN=norm.per_token, SHIFTED=not normed_by.scale_only,
        FOLDED=folded is not None, SPLITS=y.numel() // x.numel(), SQUARES=squares_BT1 is not None,
        CODED=out.dtype == torch.float8_e4m3fn, BEFORE_PARTS=parts, BEFORE_BLOCK=block_of(max(parts, 1)), BLOCK=block,
        OVERLAP=overlap,
        num_warps=warps_of(block), launch_pdl=overlap,
    )  # fmt: skip


ada_rms_norm = FusedOp(ada_rms_norm_reference, ada_rms_norm_triton)
gated_add_ada_rms_norm = FusedOp(gated_add_ada_rms_norm_reference, gated_add_ada_rms_norm_triton)
