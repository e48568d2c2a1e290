"""LayerNorm with affine weights or with scale and shift from a condition, fused with the residual before it.

Shape legend: B rows, T tokens, D width, G groups of T / G consecutive tokens that share one modulation: 1 (one a row),
the number of latent frames, or T (one a token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


def layer_norm_reference(
    x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Normalise x [..., D] in fp32; the result is in `dtype`, x's own by default."""
    normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight_D.float(), bias_D.float(), eps)
    return normed.to(dtype or x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual) in x's dtype, x + residual in the residual's dtype)."""
    total = (x.float() + residual.float()).to(residual.dtype)
    return layer_norm_reference(total, weight_D, bias_D, eps, dtype=x.dtype), total


def modulated_layer_norm_reference(
    x_BTD: Tensor, scale_BGD: Tensor, shift_BGD: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return layer_norm(x) * (1 + scale) + shift, without affine weights; in `dtype`, x's own by default."""
    tokens = x_BTD.shape[1]
    normed = torch.nn.functional.layer_norm(x_BTD.float(), x_BTD.shape[-1:], eps=eps)
    out = normed * (1.0 + per_token(scale_BGD, tokens)) + per_token(shift_BGD, tokens)
    return out.to(dtype or x_BTD.dtype)


def gated_add_reference(x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor) -> Tensor:
    """Return x + gate * y, computed in fp32, in x's dtype."""
    return (x_BTD.float() + per_token(gate_BGD, x_BTD.shape[1]) * y_BTD.float()).to(x_BTD.dtype)


def gated_add_layer_norm_reference(
    x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(s) in y's dtype, s) for s = x + gate * y in x's dtype."""
    total = gated_add_reference(x_BTD, y_BTD, gate_BGD)
    return layer_norm_reference(total, weight_D, bias_D, eps, dtype=y_BTD.dtype), total


def gated_add_modulated_layer_norm_reference(
    x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor | None, scale_BGD: Tensor, shift_BGD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (modulated_layer_norm(s) in y's dtype, s) for s = x + gate * y in x's dtype; no gate means a gate of 1."""
    if gate_BGD is None:
        total = (x_BTD.float() + y_BTD.float()).to(x_BTD.dtype)
    else:
        total = gated_add_reference(x_BTD, y_BTD, gate_BGD)
    return modulated_layer_norm_reference(total, scale_BGD, shift_BGD, eps, dtype=y_BTD.dtype), total


def per_token(modulation_BGD: Tensor, tokens: int) -> Tensor:
    """Return the modulation in fp32 as [B, 1 or T, D], ready to broadcast over tokens."""
    groups = modulation_BGD.shape[1]
    if groups in (1, tokens):
        return modulation_BGD.float()
    return modulation_BGD.float().repeat_interleave(tokens // groups, dim=1)


layer_norm = FusedOp(layer_norm_reference)
add_layer_norm = FusedOp(add_layer_norm_reference)
modulated_layer_norm = FusedOp(modulated_layer_norm_reference)
gated_add = FusedOp(gated_add_reference)
gated_add_layer_norm = FusedOp(gated_add_layer_norm_reference)
gated_add_modulated_layer_norm = FusedOp(gated_add_modulated_layer_norm_reference)
