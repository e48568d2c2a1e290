"""An FP8 product, the gated residual after it, and the next norm folded (fold.py), whose rows are written in e4m3.

Rows are coded as x (1 + scale) / r, where r is their root mean square one norm ago: whoever writes a row in pieces does not
know that of the row itself yet. A row of D columns is at most sqrt(D) times its own, so codes hold it unless a row becomes
many times larger from one norm to the next; what does not fit is cut. The product behind makes up for r by its factor.

`scales` as in fp8_linear. Shape legend: as in fold.py; K inner width, P parts of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.layers import cublas_lt
from stretto.layers.cuda import added, gated, rope
from stretto.layers.cuda.added import CodedRows
from stretto.layers.cuda.build import index_of
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation, launch
from stretto.layers.kernels.fold import RowSquares
from stretto.layers.kernels.fp8_activation import E4M3, fp8_chip, on_fp8_chip, to_fp8_reference
from stretto.layers.kernels.fp8_linear import Scales, fp8_linear_reference, run_dense
from stretto.layers.kernels.overlap import overlaps
from stretto.layers.tuning import Config, Key, Tunable, tuned

OP = "fp8_linear_add_folded_norm"


class CodedNorm(NamedTuple):
    """A residual stream as FP8 products read it."""

    codes_BTD: Tensor
    squares: RowSquares
    residual_BTD: Tensor


def fp8_folded_norm_reference(x_BTD: Tensor, normed_by: Modulation, eps: float) -> CodedNorm:
    """Code x (1 + scale) / rms(x); x is fp32."""
    squares_BT1 = x_BTD.square().sum(-1, keepdim=True)
    return _coded(x_BTD, squares_BT1, RowSquares(squares_BT1, x_BTD.shape[-1], eps), normed_by)


def fp8_linear_add_folded_norm_reference(
    x_BTK: Tensor,
    codes_DK: Tensor,
    scales: Scales,
    residual_BTD: Tensor,
    before: RowSquares,
    gated_by: Modulation,
    normed_by: Modulation,
) -> CodedNorm:
    """Code s (1 + scale) / r for s = residual + gate * (x @ codes.T times both scales); r is by the squares of `before`."""
    product = fp8_linear_reference(x_BTK, codes_DK, None, scales, torch.float32)
    total = residual_BTD + gated_by.parts()[2] * product
    return _coded(total, total.square().sum(-1, keepdim=True), before, normed_by)


def _coded(total_BTD: Tensor, squares_BT1: Tensor, before: RowSquares, normed_by: Modulation) -> CodedNorm:
    mean = before.squares_BTP.sum(-1, keepdim=True) / before.width
    codes = to_fp8_reference(total_BTD * (1.0 + normed_by.parts()[0]), torch.rsqrt(mean + before.eps))
    return CodedNorm(codes, RowSquares(squares_BT1, before.width, before.eps, before.squares_BTP), total_BTD)


def fp8_folded_norm_triton(x_BTD: Tensor, normed_by: Modulation, eps: float) -> CodedNorm:
    x = x_BTD.contiguous()
    codes, squares = torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty(*x.shape[:2], 1)
    launch(x, x, codes, x, normed_by, normed_by, eps, add=False, squares_BT1=squares)
    return CodedNorm(codes, RowSquares(squares, x.shape[-1], eps, squares), x)


def fp8_linear_add_folded_norm_triton(
    x_BTK: Tensor,
    codes_DK: Tensor,
    scales: Scales,
    residual_BTD: Tensor,
    before: RowSquares,
    gated_by: Modulation,
    normed_by: Modulation,
) -> CodedNorm:
    key = (x_BTK.shape[:2].numel(), x_BTK.shape[-1], codes_DK.shape[0])
    choice = tuned(OP, key, E4M3, x_BTK.device) if cublas_lt.takes(x_BTK, codes_DK) else None
    return run(choice, x_BTK, codes_DK, scales, residual_BTD, before, gated_by, normed_by)


def run(
    choice: Config | None,
    x: Tensor,
    codes_DK: Tensor,
    scales: Scales,
    residual: Tensor,
    before: RowSquares,
    gated_by: Modulation,
    normed_by: Modulation,
) -> CodedNorm:
    """Run one choice; None is the rule."""
    residual, (squares, width, eps, _, _) = residual.contiguous(), before
    cut = added.chosen(choice, x.shape[:2].numel(), coded=True)
    product = added.product_for(x, codes_DK, residual, gated_by, normed_by) if cut is not None else None
    if product is not None and cut is not None:
        coded = CodedRows(*scales, squares)
        args = x, codes_DK, residual, gated_by, normed_by, cut
        found = product.run(*args, coded=coded, eps=eps, early=overlaps(x))
        return CodedNorm(found.scaled_BTD, RowSquares(found.squares_BTP, width, eps, squares), found.total_BTD)
    if choice is None or choice["impl"] == "cuda":
        choice = {"impl": "cublas"}
    y = run_dense(choice, x, codes_DK, None, scales, torch.float32)
    codes, total = torch.empty(residual.shape, dtype=E4M3, device=x.device), torch.empty_like(residual)
    own = residual.new_empty(*residual.shape[:2], 1)
    launch(residual, y, codes, total, gated_by, normed_by, eps, add=True, squares_BT1=own, before_BTP=squares)
    return CodedNorm(codes, RowSquares(own, width, eps, squares), total)


def folded_launches(device: torch.device) -> bool:
    """Tell whether FP8 products of folded norms have launches of their own, or are emulated; passes cost what FP8 gains."""
    if not fp8_chip(device):
        return True
    return all(of(index_of(device))[0] is not None for of in (added.added_product, rope.rope_product, gated.gated_product))


def _candidates(key: Key) -> list[Config]:
    ours = [{"impl": "cuda", "cut": c.name} for c in added.CUTS if c.suits(key[0])]
    return [{"impl": "cublas"}, *cublas_lt.candidates(8), *ours]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, width = key
    tokens = 50 if rows % 50 == 0 else rows
    shape = rows // tokens, tokens
    x = (torch.randn(*shape, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    codes = (torch.randn(width, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    scales = torch.tensor(1 / 60, device=device), torch.tensor(inner**-0.5 / 60, device=device)
    residual, lines = torch.randn(*shape, width, device=device), torch.randn(2, shape[0], 3 * width, device=device) * 0.5
    before = RowSquares(residual.square().view(*shape, -1, 64).sum(-1), width, 1e-6)
    return x, codes, scales, residual, before, Modulation(lines[0]), Modulation(lines[1])


FIELDS = {"impl": ("cublas", "lt", "cuda"), "algo": cublas_lt.CHOICES, "cut": tuple(c.name for c in added.CUTS)}
fp8_folded_norm = FusedOp(fp8_folded_norm_reference, fp8_folded_norm_triton, on_fp8_chip)
fp8_linear_add_folded_norm = FusedOp(fp8_linear_add_folded_norm_reference, fp8_linear_add_folded_norm_triton, on_fp8_chip)
TUNABLES = (Tunable(OP, FIELDS, _candidates, _inputs, run),)
