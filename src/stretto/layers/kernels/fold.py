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
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps
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


class RowSquares(NamedTuple):
    """What rows' factors are made of, where the kernel that reads them does it: sums of squares of P parts of each row.

    A factor is 1 / rms. Codes of e4m3 were divided by a root mean square of their own, `before`, for which that makes up, and
    their product is multiplied by `by`, too.
    """

    squares_BTP: Tensor
    width: int
    eps: float
    before_BTP: Tensor | None = None
    by: Tensor | None = None
    """One element."""

    def factor_BT(self) -> Tensor:
        return row_factors(self.squares_BTP, self.before_BTP, self.by, self.width, self.eps)


Factor = Tensor | RowSquares
"""Of a row, fp32 [B, T], or what it is made of."""


class Fold(NamedTuple):
    """What is left of a norm behind its product: multiply by the row's factor, add its line, if any."""

    factor: Factor
    shift: ShiftLines | None = None

    @property
    def factor_BT(self) -> Tensor:
        """The rows' factors, for a kernel that takes no squares: a launch makes them if need be."""
        return self.factor.factor_BT() if isinstance(self.factor, RowSquares) else self.factor

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


def row_factors_reference(squares_BTP: Tensor, before_BTP: Tensor | None, by: Tensor | None, width: int, eps: float) -> Tensor:
    """Return the factors [B, T] that `RowSquares` stands for."""
    mean = squares_BTP.sum(-1) / width + eps
    if before_BTP is not None:
        mean = mean / (before_BTP.sum(-1) / width + eps)
    factor = torch.rsqrt(mean)
    return factor if by is None else factor * by


@jit
def _row_factors_kernel(
    squares: tl.tensor,
    before: tl.tensor,
    by: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    PARTS: tl.constexpr,
    BEFORE_PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None]
    its = tl.load(squares + row[:, None] * PARTS + part, mask=inside & (part < PARTS), other=0.0)
    mean = tl.sum(its, 1) / width + eps
    if BEFORE_PARTS > 0:
        its = tl.load(before + row[:, None] * BEFORE_PARTS + part, mask=inside & (part < BEFORE_PARTS), other=0.0)
        mean /= tl.sum(its, 1) / width + eps
    factor = tl.rsqrt(mean)
    if SCALED:
        factor *= tl.load(by)
    tl.store(out + row, factor, mask=row < rows)


def row_factors_triton(squares_BTP: Tensor, before_BTP: Tensor | None, by: Tensor | None, width: int, eps: float) -> Tensor:
    squares, before = squares_BTP.contiguous(), squares_BTP if before_BTP is None else before_BTP.contiguous()
    out = torch.empty(squares.shape[:2], dtype=torch.float32, device=squares.device)
    parts, before_parts, overlap = squares.shape[-1], 0 if before_BTP is None else before.shape[-1], overlaps(squares)
    _row_factors_kernel[(cdiv(out.numel(), ROWS),)](
        squares, before, squares if by is None else by, out, out.numel(), width, eps,
        PARTS=parts, BEFORE_PARTS=before_parts, SCALED=by is not None, ROWS=ROWS,
        BLOCK=block_of(max(parts, before_parts)), OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
    return out


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


ROWS = 32
"""Of a program that makes factors."""
row_factors = FusedOp(row_factors_reference, row_factors_triton)
folded_norm = FusedOp(folded_norm_reference, folded_norm_triton)
