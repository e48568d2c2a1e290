"""RMSNorm whose scale and shift come from a condition (adaRMS), alone and fused with the gated residual before it.

Shape legend: B rows, T tokens, D width, S rows of a modulation table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


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


ada_rms_norm = FusedOp(ada_rms_norm_reference)
gated_add_ada_rms_norm = FusedOp(gated_add_ada_rms_norm_reference)
