"""Writes rows in e4m3, each with a scale of its own that is measured as the row is written.

A row's largest value becomes the largest that e4m3 holds; the product multiplies the scale back in. Nothing is calibrated.

Shape legend: ... any leading axes, K width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.activation import gelu_tanh_reference
from stretto.layers.kernels.fp8_activation import E4M3, E4M3_MAX, on_fp8_chip
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, overlaps

SMALLEST = 1e-12
"""Of a scale: a row of zeros has one too."""


def code_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes in e4m3, scales [..., 1] in fp32) with x = codes * scales."""
    scales = (x.float().abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(SMALLEST)
    return (x.float() / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


def gelu_code_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu(x) in its tanh form, computed in fp32, as `code_rows` writes it."""
    return code_rows_reference(gelu_tanh_reference(x.float()))


@jit
def scale_of(peaks: tl.tensor) -> tl.tensor:
    """Return the scale of a row from absolute values of which the largest counts."""
    return tl.maximum(tl.max(peaks, 0) / 448.0, 1.0e-12)


@jit
def coded(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    value = value / scale
    # Two selects instead of min and max, which would lose a NaN.
    value = tl.where(value > 448.0, 448.0, value)
    value = tl.where(value < -448.0, -448.0, value)
    return value.to(tl.float8e4nv)


@jit
def _code_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Work on one row, held in registers block by block."""
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    at = row.to(tl.int64) * WIDTH
    values = ()
    peaks = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if GELU:
            # (1 + tanh(u)) / 2 = sigmoid(2 u), kept from overflow where it is zero anyway.
            u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
            value = value / (1.0 + tl.exp(tl.minimum(-2.0 * u, 80.0)))
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        peaks = tl.maximum(peaks, tl.abs(value))
    scale = scale_of(peaks)
    tl.store(scales + row, scale)
    for block in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
        column = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(codes + at + column, coded(values[block], scale), mask=column < WIDTH)


def _launch(x: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    codes, scales = coded_like(x)
    width = x.shape[-1]
    # At most eight blocks, so that a row fits in the registers of its threads.
    block = min(max(block_of(width) // 8, 1024), block_of(width))
    _code_kernel[(x.numel() // width,)](
        x, codes, scales, WIDTH=width, GELU=gelu, BLOCK=block, OVERLAP=overlaps(x), num_warps=warps_of(block),
        launch_pdl=overlaps(x),
    )  # fmt: skip
    return codes, scales


def coded_like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty codes and scales for a tensor of x's shape."""
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return codes, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


def code_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, gelu=False)


def gelu_code_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, gelu=True)


code_rows = FusedOp(code_rows_reference, code_rows_triton, on_fp8_chip)
gelu_code_rows = FusedOp(gelu_code_rows_reference, gelu_code_rows_triton, on_fp8_chip)
