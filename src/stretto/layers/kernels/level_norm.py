"""LayerNorms and gated additions whose modulation is a line of a table, at the noise level of the token's frame.

The level is read inside the kernel, so nothing gathers lines of the table beforehand. What a norm writes goes to a product:
in its dtype, or coded for one in FP8 (`row_codes`).

Shape legend: B rows, F frames, N = F T tokens, D width, L noise levels, M lines a level (scales, shifts, gates).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.fp8_activation import on_fp8_chip
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.layer_norm import (
    gated_add_layer_norm_reference,
    gated_add_modulated_layer_norm_reference,
    gated_add_reference,
    modulated_layer_norm_reference,
)
from stretto.layers.kernels.overlap import await_inputs, overlaps
from stretto.layers.kernels.row_codes import code_rows_reference, coded, coded_like, scale_of


def level_layer_norm_reference(
    x_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> Tensor:
    """Return layer_norm(x) * (1 + scale) + shift; `shift` and `scale` say which lines of a level they are."""
    lines = table_LMD[levels_BF]
    return modulated_layer_norm_reference(x_BND, lines[:, :, scale], lines[:, :, shift], eps)


def add_level_layer_norm_reference(
    x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor]:
    """Return (level_layer_norm(s) in y's dtype, s) for s = x + y in x's dtype."""
    lines = table_LMD[levels_BF]
    return gated_add_modulated_layer_norm_reference(x_BND, y_BND, None, lines[:, :, scale], lines[:, :, shift], eps)


def level_gated_add_reference(x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, *, gate: int) -> Tensor:
    """Return x + gate * y, computed in fp32, in x's dtype."""
    return gated_add_reference(x_BND, y_BND, table_LMD[levels_BF][:, :, gate])


def level_gated_add_layer_norm_reference(
    x_BND: Tensor,
    y_BND: Tensor,
    table_LMD: Tensor,
    levels_BF: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    gate: int,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(s) in y's dtype, s) for s = x + gate * y in x's dtype."""
    return gated_add_layer_norm_reference(x_BND, y_BND, table_LMD[levels_BF][:, :, gate], weight_D, bias_D, eps)


def level_layer_norm_coded_reference(
    x_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor]:
    """Return `level_layer_norm` as (codes, scales)."""
    return code_rows_reference(level_layer_norm_reference(x_BND.float(), table_LMD, levels_BF, eps, shift=shift, scale=scale))


def add_level_layer_norm_coded_reference(
    x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `add_level_layer_norm` as (codes, scales, sum)."""
    normed, total = add_level_layer_norm_reference(x_BND, y_BND.float(), table_LMD, levels_BF, eps, shift=shift, scale=scale)
    return *code_rows_reference(normed), total


def level_gated_add_layer_norm_coded_reference(
    x_BND: Tensor,
    y_BND: Tensor,
    table_LMD: Tensor,
    levels_BF: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    gate: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `level_gated_add_layer_norm` as (codes, scales, sum)."""
    normed, total = level_gated_add_layer_norm_reference(
        x_BND, y_BND.float(), table_LMD, levels_BF, weight_D, bias_D, eps, gate=gate
    )
    return *code_rows_reference(normed), total


@jit
def _level_kernel(
    x: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    total: tl.tensor,
    table: tl.tensor,
    levels: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    frame_tokens: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    GATE: tl.constexpr,
    SHIFT: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Work on one token, held in registers block by block.

    A line below 0 is not used; NORM without SCALE takes affine weights.
    """
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    at = row.to(tl.int64) * WIDTH
    line = table + tl.load(levels + row // frame_tokens).to(tl.int64) * (LINES * WIDTH)
    values = ()
    folded = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            added = tl.load(y + at + column, mask=inside, other=0.0).to(tl.float32)
            if GATE >= 0:
                added *= tl.load(line + GATE * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            stored = (value + added).to(total.dtype.element_ty)
            tl.store(total + at + column, stored, mask=inside)
            value = stored.to(tl.float32)
        if NORM:
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
            folded += value
    if NORM:
        mean = tl.sum(folded, 0) / WIDTH
        squares = tl.zeros((BLOCK,), tl.float32)
        for block in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
            inside = block * BLOCK + tl.arange(0, BLOCK) < WIDTH
            centred = tl.where(inside, values[block] - mean, 0.0)
            squares += centred * centred
        inverse = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        normed = ()
        peaks = tl.zeros((BLOCK,), tl.float32)
        for block in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < WIDTH
            if SCALE >= 0:
                factor = 1.0 + tl.load(line + SCALE * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
                offset = tl.load(line + SHIFT * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            else:
                factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
                offset = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(inside, (values[block] - mean) * inverse * factor + offset, 0.0)
            if CODED:
                normed = normed + (value,)  # type: ignore[assignment]  # noqa: RUF005
                peaks = tl.maximum(peaks, tl.abs(value))
            else:
                tl.store(out + at + column, value.to(out.dtype.element_ty), mask=inside)
        if CODED:
            scale = scale_of(peaks)
            tl.store(scales + row, scale)
            for block in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
                column = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(out + at + column, coded(normed[block], scale), mask=column < WIDTH)


def level_layer_norm_triton(
    x_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> Tensor:
    out = _empty(x_BND)
    _launch(x_BND, None, out, None, table_LMD, levels_BF, None, eps, shift=shift, scale=scale)
    return out


def add_level_layer_norm_triton(
    x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor]:
    out, total = _empty(y_BND), _empty(x_BND)
    _launch(x_BND, y_BND, out, total, table_LMD, levels_BF, None, eps, shift=shift, scale=scale)
    return out, total


def level_gated_add_triton(x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, *, gate: int) -> Tensor:
    total = _empty(x_BND)
    _launch(x_BND, y_BND, None, total, table_LMD, levels_BF, None, 0.0, gate=gate)
    return total


def level_gated_add_layer_norm_triton(
    x_BND: Tensor,
    y_BND: Tensor,
    table_LMD: Tensor,
    levels_BF: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    gate: int,
) -> tuple[Tensor, Tensor]:
    out, total = _empty(y_BND), _empty(x_BND)
    _launch(x_BND, y_BND, out, total, table_LMD, levels_BF, (weight_D, bias_D), eps, gate=gate)
    return out, total


def level_layer_norm_coded_triton(
    x_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor]:
    codes, scales = coded_like(x_BND)
    _launch(x_BND, None, codes, None, table_LMD, levels_BF, None, eps, shift=shift, scale=scale, scales=scales)
    return codes, scales


def add_level_layer_norm_coded_triton(
    x_BND: Tensor, y_BND: Tensor, table_LMD: Tensor, levels_BF: Tensor, eps: float, *, shift: int, scale: int
) -> tuple[Tensor, Tensor, Tensor]:
    (codes, scales), total = coded_like(x_BND), _empty(x_BND)
    _launch(x_BND, y_BND, codes, total, table_LMD, levels_BF, None, eps, shift=shift, scale=scale, scales=scales)
    return codes, scales, total


def level_gated_add_layer_norm_coded_triton(
    x_BND: Tensor,
    y_BND: Tensor,
    table_LMD: Tensor,
    levels_BF: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    *,
    gate: int,
) -> tuple[Tensor, Tensor, Tensor]:
    (codes, scales), total = coded_like(x_BND), _empty(x_BND)
    _launch(x_BND, y_BND, codes, total, table_LMD, levels_BF, (weight_D, bias_D), eps, gate=gate, scales=scales)
    return codes, scales, total


def _launch(
    x: Tensor,
    y: Tensor | None,
    out: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    levels_BF: Tensor,
    affine: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    gate: int = -1,
    shift: int = -1,
    scale: int = -1,
    scales: Tensor | None = None,
    cut: tuple[int, int] | None = None,
) -> None:
    x, y = x.contiguous(), None if y is None else y.contiguous()
    batch, tokens, width = x.shape
    weight, bias = affine or (table, table)
    block, warps = cut or cut_of(width)
    _level_kernel[(batch * tokens,)](
        x, x if y is None else y, x if out is None else out, table if scales is None else scales, x if total is None else total,
        table.contiguous(), levels_BF.contiguous(), weight, bias, tokens // levels_BF.shape[1], eps,
        WIDTH=width, LINES=table.shape[1], GATE=gate, SHIFT=shift, SCALE=scale,
        ADD=y is not None, NORM=out is not None, CODED=scales is not None, BLOCK=block, OVERLAP=overlaps(x), num_warps=warps,
        launch_pdl=overlaps(x),
    )  # fmt: skip


def cut_of(width: int) -> tuple[int, int]:
    """Return the channels that a token is worked on at a time, and its warps.

    Few warps a token keep many tokens in flight; blocks that divide the width leave no thread idle.
    """
    block = next((n for n in (1024, 512, 256) if width % n == 0), block_of(width))
    return block, warps_of(block)


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


level_layer_norm = FusedOp(level_layer_norm_reference, level_layer_norm_triton)
add_level_layer_norm = FusedOp(add_level_layer_norm_reference, add_level_layer_norm_triton)
level_gated_add = FusedOp(level_gated_add_reference, level_gated_add_triton)
level_gated_add_layer_norm = FusedOp(level_gated_add_layer_norm_reference, level_gated_add_layer_norm_triton)
level_layer_norm_coded = FusedOp(level_layer_norm_coded_reference, level_layer_norm_coded_triton, on_fp8_chip)
add_level_layer_norm_coded = FusedOp(add_level_layer_norm_coded_reference, add_level_layer_norm_coded_triton, on_fp8_chip)
level_gated_add_layer_norm_coded = FusedOp(
    level_gated_add_layer_norm_coded_reference, level_gated_add_layer_norm_coded_triton, on_fp8_chip
)
