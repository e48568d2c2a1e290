"""LayerNorm with affine weights or with scale and shift from a condition, fused with the residual before it.

Shape legend: B rows, T tokens, D width, G groups of T / G consecutive tokens that share one modulation: 1 (one a row),
the number of latent frames, or T (one a token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.fp8_activation import to_fp8_reference
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.sum_norm import Stream, norm, takes


def layer_norm_reference(
    x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Normalise x [..., D] in fp32; the result is in `dtype`, x's own by default."""
    normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight_D.float(), bias_D.float(), eps)
    return normed.to(dtype or x.dtype)


def sum_layer_norm_reference(
    stored: Tensor,
    added: tuple[Tensor, ...],
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    multiplier: Tensor | None = None,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Return (layer norm of stored + added, the stream), as `sum_rms_norm` does."""
    stream = Stream(stored, added)
    total = stream.total()
    left = Stream(total) if store and added else stream
    if multiplier is None:
        return layer_norm_reference(total, weight_D, bias_D, eps, dtype=dtype), left
    return to_fp8_reference(layer_norm_reference(total.float(), weight_D, bias_D, eps), multiplier), left


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
    gated = y_BTD.float() if gate_BGD is None else y_BTD.float() * per_token(gate_BGD, x_BTD.shape[1])
    total = (x_BTD.float() + gated).to(x_BTD.dtype)
    return modulated_layer_norm_reference(total, scale_BGD, shift_BGD, eps, dtype=y_BTD.dtype), total


def per_token(modulation_BGD: Tensor, tokens: int) -> Tensor:
    """Return the modulation in fp32 as [B, 1 or T, D], ready to broadcast over tokens."""
    groups = modulation_BGD.shape[1]
    if groups in (1, tokens):
        return modulation_BGD.float()
    return modulation_BGD.float().repeat_interleave(tokens // groups, dim=1)


@jit
def _group(
    base: tl.tensor, batch_stride: tl.tensor, group_stride: tl.tensor, tokens: tl.tensor, groups: tl.tensor
) -> tl.tensor:
    """Return the address of the modulation that this program's token belongs to."""
    row = tl.program_id(0).to(tl.int64)
    return base + row // tokens * batch_stride + row % tokens // (tokens // groups) * group_stride


@jit
def _layer_norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    gate: tl.tensor,
    gate_b: tl.tensor,
    gate_g: tl.tensor,
    gate_groups: tl.tensor,
    scale: tl.tensor,
    scale_b: tl.tensor,
    scale_g: tl.tensor,
    shift: tl.tensor,
    shift_b: tl.tensor,
    shift_g: tl.tensor,
    norm_groups: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            line = _group(gate, gate_b, gate_g, tokens, gate_groups)
            added *= tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
        stored = (value + added).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    if NORM:
        factor = tl.load(_group(scale, scale_b, scale_g, tokens, norm_groups) + column, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(_group(shift, shift_b, shift_g, tokens, norm_groups) + column, mask=inside, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            factor += 1.0
        centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        tl.store(out + at, (normed * factor + offset).to(out.dtype.element_ty), mask=inside)


def layer_norm_triton(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    return norm(Stream(x), weight_D, bias_D, eps, dtype or x.dtype)[0]


def sum_layer_norm_triton(
    stored: Tensor,
    added: tuple[Tensor, ...],
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    multiplier: Tensor | None = None,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    return norm(Stream(stored, added), weight_D, bias_D, eps, dtype, multiplier=multiplier, store=store)


def modulated_layer_norm_triton(
    x_BTD: Tensor, scale_BGD: Tensor, shift_BGD: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    out = torch.empty(x_BTD.shape, dtype=dtype or x_BTD.dtype, device=x_BTD.device)
    _launch(x_BTD, None, None, scale_BGD, shift_BGD, eps, out, None)
    return out


def gated_add_triton(x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor) -> Tensor:
    total = _empty(x_BTD)
    _launch(x_BTD, y_BTD, gate_BGD, None, None, 0.0, None, total)
    return total


def gated_add_layer_norm_triton(
    x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out, total = _empty(y_BTD), _empty(x_BTD)
    _launch(x_BTD, y_BTD, gate_BGD, weight_D, bias_D, eps, out, total)
    return out, total


def gated_add_modulated_layer_norm_triton(
    x_BTD: Tensor, y_BTD: Tensor, gate_BGD: Tensor | None, scale_BGD: Tensor, shift_BGD: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out, total = _empty(y_BTD), _empty(x_BTD)
    _launch(x_BTD, y_BTD, gate_BGD, scale_BGD, shift_BGD, eps, out, total)
    return out, total


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    out: Tensor | None,
    total: Tensor | None,
) -> None:
    """Run the kernel; `scale` and `shift` are affine weights when they have one axis, a modulation when they have three."""
    x = x.contiguous()
    width = x.shape[-1]
    tokens = x.shape[-2] if x.dim() > 1 else 1
    gate_of, gate_b, gate_g, gate_groups = _addressing(gate, x)
    scale_of, scale_b, scale_g, norm_groups = _addressing(scale, x)
    shift_of, shift_b, shift_g, _ = _addressing(shift, x)
    block = block_of(width)
    _layer_norm_kernel[(x.numel() // width,)](
        x, x if y is None else y.contiguous(), x if out is None else out, x if total is None else total,
        gate_of, gate_b, gate_g, gate_groups,
        scale_of, scale_b, scale_g, shift_of, shift_b, shift_g, norm_groups,
        tokens, width, eps,
        ADD=y is not None, GATED=gate is not None, NORM=out is not None, UNIT_OFFSET=scale is not None and scale.dim() == 3,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def _addressing(modulation: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the tensor, its batch and group strides and its number of groups; the stand-in is never read."""
    if modulation is None:
        return stand_in, 0, 0, 1
    if modulation.stride(-1) != 1:
        modulation = modulation.contiguous()
    if modulation.dim() == 1:
        return modulation, 0, 0, 1
    return modulation, modulation.stride(0), modulation.stride(1), modulation.shape[1]


layer_norm = FusedOp(layer_norm_reference, layer_norm_triton)
sum_layer_norm = FusedOp(sum_layer_norm_reference, sum_layer_norm_triton, takes)
modulated_layer_norm = FusedOp(modulated_layer_norm_reference, modulated_layer_norm_triton)
gated_add = FusedOp(gated_add_reference, gated_add_triton)
gated_add_layer_norm = FusedOp(gated_add_layer_norm_reference, gated_add_layer_norm_triton)
gated_add_modulated_layer_norm = FusedOp(gated_add_modulated_layer_norm_reference, gated_add_modulated_layer_norm_triton)
