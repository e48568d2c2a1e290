"""A norm of which the product behind it does a part: rows are scaled before it, and multiplied and shifted after it.

The norm of a row is f (x (1 + scale)) + shift with f = 1 / rms(x). Its product with W is f (x (1 + scale)) W + shift W. Only
x (1 + scale) is rounded for the product; shift W is a table where shifts come from one. So a row is rounded where it is when
its norm is folded into a stream (stream.py), and only the order of sums differs.

Shape legend: B rows, T tokens, M = B T, D width, N columns of a product, S lines of a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation, launch
from stretto.layers.kernels.language import jit, tl
from stretto.layers.tuning import Config


class ShiftLines(NamedTuple):
    """What shifts add to a product: row b adds line `rows[b]` (int64 [B]) of a table, or token (b, t) line `rows[b, t]`.

    The table is fp32 [S, N]; its lines may be strided, its last axis is dense.
    """

    table: Tensor
    rows: Tensor

    def lines(self) -> Tensor:
        """Return the lines in use, [B, 1 or T, N]."""
        lines = self.table[self.rows]
        return lines[:, None] if lines.dim() == 2 else lines


class Fold(NamedTuple):
    """What is left of a norm behind its product: multiply by the row's factor (fp32 [B, T]), add its line, if any."""

    factor_BT: Tensor
    shift: ShiftLines | None = None

    def on(self, product_BTN: Tensor) -> Tensor:
        """Return the product of the whole norm, in fp32."""
        scaled = product_BTN.float() * self.factor_BT[..., None]
        return scaled if self.shift is None else scaled + self.shift.lines()

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return factors, table, lines and their distance, for a kernel; stand-ins where there is no shift."""
        factor = self.factor_BT
        if self.shift is None:
            return factor, factor, factor, 0
        return factor, self.shift.table, self.shift.rows.contiguous(), self.shift.table.stride(0)

    @property
    def kind(self) -> int:
        """What a kernel adds: NO_SHIFT, or a line for each ROW or TOKEN."""
        return NO_SHIFT if self.shift is None else (ROW if self.shift.rows.dim() == 1 else TOKEN)


NOT_FOLDED, NO_SHIFT, ROW, TOKEN = range(4)
"""What a kernel does with the accumulator of a product before all else: nothing; a factor; a factor and a line."""


def arguments_of(fold: Fold | None, stand_in: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    return (stand_in, stand_in, stand_in, 0) if fold is None else fold.arguments()


def kind_of(fold: Fold | None) -> int:
    return NOT_FOLDED if fold is None else fold.kind


def product_fp32(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight.T for x [..., K] in fp32, without a rounding to x's dtype on the way."""
    if x.element_size() > 2:
        return linear(x.float(), weight_NK.float())
    rows = x.flatten(0, -2)
    wants = torch.is_grad_enabled() and (x.requires_grad or weight_NK.requires_grad)
    out: Tensor = _Product.apply(rows, weight_NK) if wants else _multiplied(rows, weight_NK)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


def chosen_product_fp32(choice: Config, x: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the same by an algorithm of cuBLASLt, where the choice names one."""
    if choice["impl"] == "lt":
        return cublas_lt.matmul(x, weight_NK, int(choice["algo"]), dtype=torch.float32)
    return product_fp32(x, weight_NK)


def _multiplied(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    if x_MK.is_cuda:
        out: Tensor = torch.mm(x_MK, weight_NK.t(), out_dtype=torch.float32)
        return out
    return linear(x_MK.float(), weight_NK.float())


class _Product(torch.autograd.Function):
    """A product of 16-bit matrices in fp32, whose gradients are products of 16-bit matrices too."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return _multiplied(x_MK, weight_NK)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        grad, (for_x, for_weight) = grad_MN.to(x_MK.dtype), ctx.needs_input_grad
        return grad @ weight_NK if for_x else None, grad.t() @ x_MK if for_weight else None


def folded_norm_reference(x_BTD: Tensor, normed_by: Modulation, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x (1 + scale) in `dtype`, for a product, and 1 / rms(x), fp32 [B, T], for behind it."""
    x32, (scale, _, _) = x_BTD.float(), normed_by.parts()
    return (x32 * (1.0 + scale)).to(dtype), torch.rsqrt(x32.square().mean(-1) + eps)


def folded_norm_triton(x_BTD: Tensor, normed_by: Modulation, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x_BTD.contiguous()
    out, factor = torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(x.shape[:2], dtype=torch.float32)
    launch(x, x, out, out, normed_by, normed_by, eps, add=False, factor_BT=factor)
    return out, factor


def shifted_products(shift_SD: Tensor, weight_NK: Tensor) -> Tensor:
    """Return shift @ weight.T in fp32, [S, N]: a table for `ShiftLines`. Shifts are rounded as the product's rows are."""
    return linear(shift_SD.to(weight_NK.dtype).float(), weight_NK.float())


@jit
def fold_line(
    table: tl.tensor, lines: tl.tensor, stride: tl.tensor, row: tl.tensor, tokens: tl.tensor, FOLD: tl.constexpr
) -> tl.tensor:
    """Return the address of the line that a row of B T adds; FOLD is ROW or TOKEN."""
    at = row
    if FOLD == 2:
        at = row // tokens
    return table + tl.load(lines + at).to(tl.int64) * stride


folded_norm = FusedOp(folded_norm_reference, folded_norm_triton)
