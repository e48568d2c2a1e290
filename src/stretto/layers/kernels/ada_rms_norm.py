"""RMSNorm whose scale and shift come from a condition (adaRMS), alone and fused with the gated residual before it.

Shape legend: B rows, T tokens, D width, S rows of a modulation table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of


class Modulation(NamedTuple):
    """Scale, shift and gate of one norm, each D wide, side by side in the last axis.

    `table` is [S, 3 D], of which batch row b uses line `rows[b]` (int64 [B], on the device), or token (b, t) uses line
    `rows[b, t]` (int64 [B, T]). Without `rows` the table is direct: [B, 3 D], or [B, T, 3 D] for one line a token.
    Lines may be strided (a slice of a wider table); the last axis must be dense.
    """

    table: Tensor
    rows: Tensor | None = None

    def lines(self) -> Tensor:
        """Return the lines in use in fp32, as [B, 1, 3 D] or [B, T, 3 D]."""
        lines = self.table if self.rows is None else self.table[self.rows]
        return (lines[:, None] if lines.dim() == 2 else lines).float()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, shift and gate in fp32, each [B, 1 or T, D]."""
        scale, shift, gate = self.lines().chunk(3, dim=-1)
        return scale, shift, gate


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
def _line(
    table: tl.tensor, stride: tl.tensor, rows: tl.tensor, tokens: tl.tensor, INDEXED: tl.constexpr, PER_TOKEN: tl.constexpr
) -> tl.tensor:
    """Return the address of the modulation line of this program's token."""
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
    NORM_INDEXED: tl.constexpr,
    NORM_PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        line = _line(gate_table, gate_stride, gate_rows, tokens, GATE_INDEXED, GATE_PER_TOKEN)
        gate = tl.load(line + 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        value += gate * tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    line = _line(norm_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN)
    scale = tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(line + width + column, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + at, (normed * (1.0 + scale) + shift).to(out.dtype.element_ty), mask=inside)


def ada_rms_norm_triton(x_BTD: Tensor, modulation: Modulation, eps: float) -> Tensor:
    x = x_BTD.contiguous()
    out = torch.empty_like(x)
    _launch(x, x, out, out, modulation, modulation, eps, add=False)
    return out


def gated_add_ada_rms_norm_triton(
    x_BTD: Tensor, y_BTD: Tensor, gated_by: Modulation, normed_by: Modulation, eps: float
) -> tuple[Tensor, Tensor]:
    x, y = x_BTD.contiguous(), y_BTD.contiguous()
    out, total = torch.empty_like(y), torch.empty_like(x)
    _launch(x, y, out, total, gated_by, normed_by, eps, add=True)
    return out, total


def _launch(
    x: Tensor, y: Tensor, out: Tensor, total: Tensor, gated_by: Modulation, normed_by: Modulation, eps: float, *, add: bool
) -> None:
    batch, tokens, width = x.shape
    gate_table, gate_rows, gate_per_token = _addressing(gated_by)
    norm_table, norm_rows, norm_per_token = _addressing(normed_by)
    block = block_of(width)
    _ada_rms_norm_kernel[(batch * tokens,)](
        x, y, out, total,
        gate_table, gate_table.stride(0), gate_rows,
        norm_table, norm_table.stride(0), norm_rows,
        tokens, width, eps,
        ADD=add,
        GATE_INDEXED=gated_by.rows is not None, GATE_PER_TOKEN=gate_per_token,
        NORM_INDEXED=normed_by.rows is not None, NORM_PER_TOKEN=norm_per_token,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def _addressing(modulation: Modulation) -> tuple[Tensor, Tensor, bool]:
    """Return the table as [lines, 3 D], the row indices (or a stand-in that is not read), and whether lines go by token."""
    table, rows = modulation
    if table.stride(-1) != 1:
        table = table.contiguous()
    if rows is not None:
        return table, rows.contiguous(), rows.dim() == 2
    return table.reshape(-1, table.shape[-1]), table, table.dim() == 3


ada_rms_norm = FusedOp(ada_rms_norm_reference, ada_rms_norm_triton)
gated_add_ada_rms_norm = FusedOp(gated_add_ada_rms_norm_reference, gated_add_ada_rms_norm_triton)
