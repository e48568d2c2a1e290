"""adaRMS of a residual stream that writes e4m3, with what is added to the stream before it.

Multiplier and range as in fp8_activation.

Shape legend: B rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm_reference, line_of
from stretto.layers.kernels.fp8_activation import E4M3, on_fp8_chip, store_fp8, to_fp8_reference
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, passes_early


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
    factor = tl.load(
        line_of(norm_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN) + column, mask=inside, other=0.0
    ).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * (1.0 + factor)
    if SHIFTED:
        line = line_of(shift_table, norm_stride, norm_rows, tokens, NORM_INDEXED, NORM_PER_TOKEN)
        normed += tl.load(line + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8(out + at, normed, multiplier, inside)


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
    residual, tokens = residual_BTD.contiguous(), residual_BTD.shape[-2]
    out = torch.empty(residual.shape, dtype=E4M3, device=residual.device)
    total = residual if y_BTD is None else torch.empty_like(residual)
    gate_of, rows, block = gate or lines, residual.numel() // width, block_of(width)
    overlap = passes_early(residual, rows)
    _kernel[(rows,)](
        residual, residual if y_BTD is None else y_BTD.contiguous(), out, total, multiplier,
        gate_of.table, gate_of.stride, gate_of.rows, lines.table, lines.stride, lines.rows,
        lines.table if shift is None else shift, tokens, width, eps,
        ADD=y_BTD is not None, GATED=gate is not None, GATE_INDEXED=gate_of.indexed, GATE_PER_TOKEN=gate_of.per_token,
        NORM_INDEXED=lines.indexed, NORM_PER_TOKEN=lines.per_token, SHIFTED=shift is not None, BLOCK=block, OVERLAP=overlap,
        num_warps=max(warps_of(block) // 2, 1), launch_pdl=overlap,
    )  # fmt: skip
    return out, total


ada_rms_norm_fp8 = FusedOp(ada_rms_norm_fp8_reference, ada_rms_norm_fp8_triton, on_fp8_chip)
