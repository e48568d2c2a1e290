"""LayerNorm with affine weights or with scale and shift from a condition, fused with the residual before it.

Shape legend: B rows, T tokens, D width, G groups of T / G consecutive tokens that share one modulation: 1 (one a row),
the number of latent frames, or T (one a token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, cdiv, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, passes_early
from stretto.layers.tuning import Config, Key, Tunable, tuned


def layer_norm_reference(
    x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Normalise x [..., D] in fp32; the result is in `dtype`, x's own by default."""
    normed = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight_D.float(), bias_D.float(), eps)
    return normed.to(dtype or x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual) in x's dtype, x + residual in the residual's dtype).

    A residual of fewer axes than x is added to every group of that many rows.
    """
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


@jit
def _affine_layer_norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    y_bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    period: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    column = tl.arange(0, BLOCK)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (column < width) & (row < rows)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    at = row * width + column
    value = tl.load(x + row % period * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            added += tl.load(y + split * rows.to(tl.int64) * width + at, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            added += tl.load(y_bias + column, mask=column < width, other=0.0).to(tl.float32)
        stored = (value + added).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    centred = tl.where(column < width, value - (tl.sum(value, 1) / width)[:, None], 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)[:, None]
    tl.store(out + at, (normed * factor + offset).to(out.dtype.element_ty), mask=inside)


def layer_norm_triton(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    launch_affine(None, x, None, weight_D, bias_D, eps, out, None)
    return out


def add_layer_norm_triton(x: Tensor, residual: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = _empty(x), torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    launch_affine(None, residual, x, weight_D, bias_D, eps, out, total)
    return out, total


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


def launch_affine(
    choice: Config | None,
    x: Tensor,
    y: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
    y_bias_D: Tensor | None = None,
) -> None:
    """Run the kernel by one choice, by default the measured one. y may be parts [S, M, D] that are summed first."""
    x, width = x.contiguous(), x.shape[-1]
    rows, period = out.numel() // width, x.numel() // width
    splits = 1 if y is None else y.numel() // out.numel()
    choice = choice or tuned("affine_layer_norm", (rows, width, int(y is not None)), out.dtype, x.device) or _rule(width)
    early = passes_early(x, rows)
    _affine_layer_norm_kernel[(cdiv(rows, int(choice["rows"])),)](
        x, out if y is None else y.contiguous(), out if y_bias_D is None else y_bias_D, out, out if total is None else total,
        weight_D, bias_D, rows, period, width, eps,
        ADD=y is not None, SPLITS=splits, BIASED=y_bias_D is not None, ROWS=int(choice["rows"]), BLOCK=block_of(width),
        OVERLAP=early, num_warps=int(choice["warps"]), launch_pdl=early,
    )  # fmt: skip


def _rule(width: int) -> Config:
    return {"rows": 1, "warps": max(warps_of(block_of(width)) // 2, 1)}


def _candidates(key: Key) -> list[Config]:
    found: list[Config] = [_rule(key[1])]
    return found + [
        {"rows": rows, "warps": warps}
        for rows in (1, 2, 4)
        for warps in (2, 4, 8)
        if found[0] != {"rows": rows, "warps": warps}
    ]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width, _ = key
    weights = torch.randn(2, width, device=device)
    x = torch.randn(rows, width, device=device)
    return x, torch.randn(rows, width, device=device).to(dtype), weights[0], weights[1]


def _run(choice: Config | None, residual: Tensor, x: Tensor, weight_D: Tensor, bias_D: Tensor) -> tuple[Tensor, Tensor]:
    out, total = _empty(x), _empty(residual)
    launch_affine(choice or _rule(x.shape[-1]), residual, x, weight_D, bias_D, 1e-6, out, total)
    return out, total


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
add_layer_norm = FusedOp(add_layer_norm_reference, add_layer_norm_triton)
modulated_layer_norm = FusedOp(modulated_layer_norm_reference, modulated_layer_norm_triton)
gated_add = FusedOp(gated_add_reference, gated_add_triton)
gated_add_layer_norm = FusedOp(gated_add_layer_norm_reference, gated_add_layer_norm_triton)
gated_add_modulated_layer_norm = FusedOp(gated_add_modulated_layer_norm_reference, gated_add_modulated_layer_norm_triton)
TUNABLES = (Tunable("affine_layer_norm", {"rows": (1, 2, 4, 8), "warps": (1, 2, 4, 8, 16)}, _candidates, _inputs, _run),)
