"""Writes what an FP8 product reads: plain values, or a GELU with its gate, in e4m3.

A value goes to the chip as `x * multiplier`, kept within what e4m3 can hold; the product multiplies the inverse back in.
The multiplier is a tensor of one element, so that it can change under a captured graph.

Shape legend: ... any leading axes, F width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.activation import geglu_reference, gelu_tanh_of, gelu_tanh_reference
from stretto.layers.kernels.language import ON_CHIP, block_of, cdiv, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, passes_early

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FP8_CAPABILITY = (8, 9)
MAX_BLOCK = 2048


def fp8_chip(device: torch.device) -> bool:
    """Tell whether a device multiplies e4m3 matrices."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def on_fp8_chip(x: Tensor, *args: Any, **kwargs: Any) -> bool:
    return fp8_chip(x.device)


def to_fp8_reference(x: Tensor, multiplier: Tensor) -> Tensor:
    """Return x * multiplier in e4m3; what is out of range becomes the largest value, NaN stays NaN."""
    return (x.float() * multiplier).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def geglu_fp8_reference(gate_up: Tensor, multiplier: Tensor) -> Tensor:
    """Return gelu(gate) * up of gate_up [..., 2 F] (gate first), computed in fp32, as `to_fp8` writes it."""
    return to_fp8_reference(geglu_reference(gate_up.float()), multiplier)


def gelu_tanh_fp8_reference(x: Tensor, multiplier: Tensor) -> Tensor:
    """Return gelu(x), computed in fp32, as `to_fp8` writes it."""
    return to_fp8_reference(gelu_tanh_reference(x.float()), multiplier)


@jit
def to_codes(value: tl.tensor) -> tl.tensor:
    """Return fp32 values in e4m3; what is out of range becomes the largest value, as the chip's own rounding has it."""
    if not ON_CHIP:
        # Two selects instead of min and max, which would lose a NaN.
        value = tl.where(value > 448.0, 448.0, value)
        value = tl.where(value < -448.0, -448.0, value)
    return value.to(tl.float8e4nv)


@jit
def store_fp8(at: tl.tensor, value: tl.tensor, multiplier: tl.tensor, inside: tl.tensor) -> None:
    tl.store(at, to_codes(value * tl.load(multiplier)), mask=inside)


@jit
def _kernel(
    x: tl.tensor,
    out: tl.tensor,
    multiplier: tl.tensor,
    width: tl.tensor,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = x + (row * 2 * width if GATED else row * width)
    value = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        value = gelu_tanh_of(value)
    if GATED:
        value *= tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    store_fp8(out + row * width + column, value, multiplier, inside)


def activate_into(x: Tensor, multiplier: Tensor, out: Tensor | None, *, gelu: bool = True, gated: bool = False) -> Tensor:
    """Run the kernel; `out`, if given, is dense and has the result's shape."""
    x = x.contiguous()
    width = x.shape[-1] // (2 if gated else 1)
    out = torch.empty(*x.shape[:-1], width, dtype=E4M3, device=x.device) if out is None else out
    block, overlap = min(block_of(width), MAX_BLOCK), passes_early(x, out.numel() // width)
    _kernel[(out.numel() // width, cdiv(width, block))](
        x, out, multiplier, width, GELU=gelu, GATED=gated, BLOCK=block,
        OVERLAP=overlap, num_warps=warps_of(block), launch_pdl=overlap,
    )  # fmt: skip
    return out


def to_fp8_triton(x: Tensor, multiplier: Tensor) -> Tensor:
    return activate_into(x, multiplier, None, gelu=False)


def geglu_fp8_triton(gate_up: Tensor, multiplier: Tensor) -> Tensor:
    return activate_into(gate_up, multiplier, None, gated=True)


def gelu_tanh_fp8_triton(x: Tensor, multiplier: Tensor) -> Tensor:
    return activate_into(x, multiplier, None)


to_fp8 = FusedOp(to_fp8_reference, to_fp8_triton, on_fp8_chip)
geglu_fp8 = FusedOp(geglu_fp8_reference, geglu_fp8_triton, on_fp8_chip)
gelu_tanh_fp8 = FusedOp(gelu_tanh_fp8_reference, gelu_tanh_fp8_triton, on_fp8_chip)
