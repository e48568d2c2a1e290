"""RMSNorm, alone and fused with the residual addition before it.

Shape legend: ... any leading axes, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float, *, unit_offset: bool = True) -> Tensor:
    """Normalise x [..., D] by its root mean square in fp32; the factor is 1 + w, or w without `unit_offset`."""
    x32 = x.float()
    w32 = weight_D.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + w32 if unit_offset else w32)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual) in x's dtype, x + residual in the residual's dtype), with factor 1 + w.

    The norm is taken of the sum as stored.
    """
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm_reference(total, weight_D, eps).to(x.dtype), total


rms_norm = FusedOp(rms_norm_reference)
add_rms_norm = FusedOp(add_rms_norm_reference)
