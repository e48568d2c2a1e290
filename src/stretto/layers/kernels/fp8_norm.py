"""Norms of a residual stream that write e4m3, with what is added to the stream before them.

One kernel serves RMSNorm, LayerNorm and adaRMS. Multiplier and range as in fp8_activation.

Shape legend: ... any leading axes, B rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Addressing, Modulation, ada_rms_norm_reference, line_of
from stretto.layers.kernels.fp8_activation import E4M3, on_fp8_chip, store_fp8, to_fp8_reference
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.layer_norm import layer_norm_reference
from stretto.layers.kernels.overlap import await_inputs, passes_early
from stretto.layers.kernels.rms_norm import rms_norm_reference


def rms_norm_fp8_reference(
    residual: Tensor, y: Tensor | None, weight_D: Tensor, multiplier: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(residual + y) with factor 1 + w in e4m3, residual + y in the residual's dtype)."""
    total = residual if y is None else (residual.float() + y.float()).to(residual.dtype)
    return to_fp8_reference(rms_norm_reference(total.float(), weight_D, eps), multiplier), total


def layer_norm_fp8_reference(
    residual: Tensor, y: Tensor | None, weight_D: Tensor, bias_D: Tensor, multiplier: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(residual + y) in e4m3, residual + y in the residual's dtype)."""
    total = residual if y is None else (residual.float() + y.float()).to(residual.dtype)
    return to_fp8_reference(layer_norm_reference(total.float(), weight_D, bias_D, eps), multiplier), total


def ada_rms_norm_fp8_reference(
    residual_BTD: Tensor,
    y_BTD: Tensor | None,
    gated_by: Modulation | None,
    normed_by: Modulation,
    multiplier: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (adaRMS of s by `normed_by` in e4m3, s) for s = residual + gate * y, its gate from `gated_by`."""
    total = residual_BTD
    if y_BTD is not None and gated_by is not None:
        total = (residual_BTD.float() + gated_by.parts()[2] * y_BTD.float()).to(residual_BTD.dtype)
    return to_fp8_reference(ada_rms_norm_reference(total.float(), normed_by, eps), multiplier), total


@jit
def _kernel(
    residual: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    multiplier: tl.tensor,
    gate_table: tl.tensor,
    gate_stride: tl.tensor,
    gate_rows: tl.tensor,
    norm_table: tl.tensor,
    norm_stride: tl.tensor,
    norm_rows: tl.tensor,
    shift_table: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GATE_INDEXED: tl.constexpr,
    GATE_PER_TOKEN: tl.constexpr,
    NORM_INDEXED: tl.constexpr,
    NORM_PER_TOKEN: tl.constexpr,
    CENTRED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            line = line_of(gate_table, gate_stride, gate_rows, tokens, GATE_INDEXED, GATE_PER_TOKEN)
            added *= tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
        stored = (value + added).to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    factor = tl.load(
        line_of(norm_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN) + column, mask=inside, other=0.0
    ).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor
    if SHIFTED:
        line = line_of(shift_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN)
        normed += tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8(out + at, normed, multiplier, inside)


def rms_norm_fp8_triton(
    residual: Tensor, y: Tensor | None, weight_D: Tensor, multiplier: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _launch(residual, y, multiplier, eps, factor=weight_D, unit_offset=True)


def layer_norm_fp8_triton(
    residual: Tensor, y: Tensor | None, weight_D: Tensor, bias_D: Tensor, multiplier: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _launch(residual, y, multiplier, eps, factor=weight_D, shift=bias_D, centred=True)


def ada_rms_norm_fp8_triton(
    residual_BTD: Tensor,
    y_BTD: Tensor | None,
    gated_by: Modulation | None,
    normed_by: Modulation,
    multiplier: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    width, lines = residual_BTD.shape[-1], normed_by.addressing()
    shift = None if normed_by.scale_only else lines.table[..., width : 2 * width]
    gate = None
    if gated_by is not None and not gated_by.scale_only:
        gate = gated_by.addressing()
        gate = gate._replace(table=gate.table[..., 2 * width :])
    return _launch(residual_BTD, y_BTD, multiplier, eps, factor=lines, shift=shift, gate=gate, unit_offset=True)


def _launch(
    residual: Tensor,
    y: Tensor | None,
    multiplier: Tensor,
    eps: float,
    *,
    factor: Addressing | Tensor,
    shift: Tensor | None = None,
    gate: Addressing | None = None,
    centred: bool = False,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the kernel; a factor that is a tensor [D] is one for all. Shifts are addressed as factors are."""
    residual = residual.contiguous()
    width, tokens = residual.shape[-1], residual.shape[-2] if residual.dim() > 1 else 1
    out = torch.empty(residual.shape, dtype=E4M3, device=residual.device)
    total = residual if y is None else torch.empty_like(residual)
    if isinstance(factor, Tensor):
        factor = Addressing(factor, 0, factor, False, False)
    gate_of = gate or factor
    block, overlap = block_of(width), passes_early(residual, residual.numel() // width)
    _kernel[(residual.numel() // width,)](
        residual, residual if y is None else y.contiguous(), out, total, multiplier,
        gate_of.table, gate_of.stride, gate_of.rows, factor.table, factor.stride, factor.rows,
        factor.table if shift is None else shift, tokens, width, eps,
        ADD=y is not None, GATED=gate is not None, GATE_INDEXED=gate_of.indexed, GATE_PER_TOKEN=gate_of.per_token,
        NORM_INDEXED=factor.indexed, NORM_PER_TOKEN=factor.per_token, CENTRED=centred, UNIT_OFFSET=unit_offset,
        SHIFTED=shift is not None, BLOCK=block, OVERLAP=overlap,
        num_warps=max(warps_of(block) // 2, 1), launch_pdl=overlap,
    )  # fmt: skip
    return out, total


rms_norm_fp8 = FusedOp(rms_norm_fp8_reference, rms_norm_fp8_triton, on_fp8_chip)
layer_norm_fp8 = FusedOp(layer_norm_fp8_reference, layer_norm_fp8_triton, on_fp8_chip)
ada_rms_norm_fp8 = FusedOp(ada_rms_norm_fp8_reference, ada_rms_norm_fp8_triton, on_fp8_chip)
