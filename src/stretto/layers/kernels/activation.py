"""GELU (tanh form) with its gate or its bias.

Shape legend: ... any leading axes, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.fold import Fold, arguments_of, fold_line, kind_of
from stretto.layers.kernels.language import ON_CHIP, block_of, cdiv, jit, tl, warps_of

MAX_BLOCK = 1024


def geglu_reference(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up for gate_up [..., 2 F], gate first; computed in fp32, in the input's dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_tanh_reference(x: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return gelu(x + bias), computed in fp32, in x's dtype."""
    x32 = x.float() if bias_F is None else x.float() + bias_F.float()
    return gelu(x32, approximate="tanh").to(x.dtype)


@jit
def gelu_tanh_of(x: tl.tensor) -> tl.tensor:
    """Return gelu(x), by the tanh approximation, inside a kernel."""
    # (1 + tanh(u)) / 2 = sigmoid(2 u); the factor is -2 sqrt(2 / pi) log2(e), for a power of two.
    power = x * (-2.302208198 - 0.1029432397 * x * x)
    if ON_CHIP:
        # As it is written it would be some twenty instructions, which no product hides. An infinite power ends as 0.
        share = tl.inline_asm_elementwise(
            "{ ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }",
            "=&f,f",
            [power],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        share = 1.0 / (1.0 + tl.exp2(tl.minimum(power, 120.0)))
    return x * share


@jit
def gelu_for_codes(x: tl.tensor) -> tl.tensor:
    """Return gelu(x) within 0.0005 of |x|, which is far below a rounding to e4m3."""
    if ON_CHIP:
        u = x * (0.7978845608 + 0.0356774081 * x * x)
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
        half = 0.5 * x
        value = half * tanh + half
    else:
        value = gelu_tanh_of(x)
    return value


@jit
def _geglu_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    factor: tl.tensor,
    table: tl.tensor,
    lines: tl.tensor,
    line_stride: tl.tensor,
    tokens: tl.tensor,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if FOLD:
        inverse = tl.load(factor + row)
        gate, up = gate * inverse, up * inverse
    if FOLD > 1:
        line = fold_line(table, lines, line_stride, row, tokens, FOLD)
        gate += tl.load(line + column, mask=inside, other=0.0)
        up += tl.load(line + width + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, (gelu_tanh_of(gate) * up).to(out.dtype.element_ty), mask=inside)


@jit
def _gelu_kernel(
    x: tl.tensor, bias: tl.tensor, out: tl.tensor, width: tl.tensor, BIAS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gelu_tanh_of(value).to(out.dtype.element_ty), mask=inside)


def geglu_triton(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    geglu_into(gate_up, out)
    return out


def geglu_into(gate_up: Tensor, out: Tensor, fold: Fold | None = None) -> None:
    """Write the GeGLU of dense gate_up [..., 2 F] to dense out [..., F], by the kernel; with `fold`, of the norm's product."""
    width = out.shape[-1]
    block = min(block_of(width), MAX_BLOCK)
    tokens = 1 if fold is None else fold.factor_BT.shape[1]
    _geglu_kernel[(out.numel() // width, cdiv(width, block))](
        gate_up, out, width, *arguments_of(fold, out), tokens, FOLD=kind_of(fold), BLOCK=block, num_warps=warps_of(block)
    )


def gelu_tanh_triton(x: Tensor, bias_F: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    block = min(block_of(width), MAX_BLOCK)
    _gelu_kernel[(x.numel() // width, cdiv(width, block))](
        x, x if bias_F is None else bias_F, out, width, BIAS=bias_F is not None, BLOCK=block, num_warps=warps_of(block)
    )
    return out


geglu = FusedOp(geglu_reference, geglu_triton)
gelu_tanh = FusedOp(gelu_tanh_reference, gelu_tanh_triton)
