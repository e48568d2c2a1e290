"""A linear layer, the gated residual after it, and the next norm folded (fold.py): nothing is rounded but the norm's rows.

The product reaches the norm in fp32: as parts of a split inner width, or whole from cuBLAS, which a pass reads; or in the
kernel that multiplies (`layers.cuda.added`), which then leaves sums of squares instead of factors. Which at a shape is a
measured choice. That kernel looks up lines of tables before the kernel ahead of it is complete: tables, and the numbers of
lines, must be there before the chain of kernels that a call is part of. They are: a step begins with torch's own kernels.

Shape legend: as in linear_ada_rms_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.cuda import added
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm, linear_ada_rms_norm
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm_reference, launch
from stretto.layers.kernels.fold import Factor, RowSquares, chosen_product_fp32, folded_norm_reference, product_fp32
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.overlap import overlaps
from stretto.layers.tuning import Config, Key, Tunable, tuned

OP = "linear_add_folded_norm"
SPLIT_ROWS = 300
"""Below, without a measured choice, a product is split: measured for the norm that is not folded, whose parts are the same."""


def linear_add_folded_norm_reference(
    x_BTK: Tensor,
    weight_DK: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
    fold: bool = True,
) -> tuple[Tensor, Factor, Tensor]:
    """Return (s (1 + scale) in `dtype`, 1 / rms(s) in fp32 [B, T] or its makings, s) for s = residual + gate * (x @ weight.T).

    Without `fold` the first is the finished norm, and the second is empty.
    """
    total = residual_BTD + gated_by.parts()[2] * product_fp32(x_BTK, weight_DK)
    if not fold:
        return ada_rms_norm_reference(total, normed_by, eps).to(dtype), total.new_empty(0), total
    return *folded_norm_reference(total, normed_by, eps, dtype), total


def linear_add_folded_norm_triton(
    x_BTK: Tensor,
    weight_DK: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
    fold: bool = True,
) -> tuple[Tensor, Factor, Tensor]:
    key = (x_BTK.numel() // x_BTK.shape[-1], x_BTK.shape[-1], weight_DK.shape[0])
    choice = tuned(OP, key, x_BTK.dtype, x_BTK.device) if gemm.takes(x_BTK, weight_DK) else {"impl": "cublas"}
    return run(choice, x_BTK, weight_DK, residual_BTD, gated_by, normed_by, eps, dtype, fold)


def run(
    choice: Config | None,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
    fold: bool = True,
) -> tuple[Tensor, Factor, Tensor]:
    """Run one choice; None is the rule."""
    residual = residual.contiguous()
    cut = added.chosen(choice, x.shape[:2].numel()) if fold and dtype == x.dtype else None
    product = added.product_for(x, weight, residual, gated_by, normed_by) if cut is not None else None
    if product is not None and cut is not None:
        scaled, squares, total = product.run(x, weight, residual, gated_by, normed_by, cut, early=overlaps(x))
        return scaled, RowSquares(squares, weight.shape[0], eps), total
    if choice is None or choice["impl"] == "cuda":
        choice = _rule(x, weight)
    if choice["impl"] == "triton":
        y = gemm.split_gemm(x, weight, Tiling.of(choice), int(choice["splits"]))
    else:
        y = chosen_product_fp32(choice, x, weight)
    out, total = torch.empty(residual.shape, dtype=dtype, device=x.device), torch.empty_like(residual)
    factor = torch.empty(residual.shape[:2] if fold else (0,), dtype=torch.float32, device=x.device)
    launch(residual, y, out, total, gated_by, normed_by, eps, add=True, factor_BT=factor if fold else None)
    return out, factor, total


def _rule(x: Tensor, weight: Tensor) -> Config:
    """Choose where there are no launches in CUDA C++."""
    rows, inner = x.numel() // x.shape[-1], x.shape[-1]
    if rows >= SPLIT_ROWS or inner < 1024 or not gemm.on_hopper(x) or not gemm.takes(x, weight):
        return {"impl": "cublas"}
    return {**Tiling(64, 128, 64, 4, 4, 8, 0).config, "splits": 4}


def _candidates(key: Key) -> list[Config]:
    return linear_ada_rms_norm.candidates(key) + [{"impl": "cuda", "cut": c.name} for c in added.CUTS if c.suits(key[0])]


linear_add_folded_norm = FusedOp(linear_add_folded_norm_reference, linear_add_folded_norm_triton)
FIELDS = {**linear_ada_rms_norm.FIELDS, "impl": ("cublas", "lt", "triton", "cuda"), "cut": tuple(c.name for c in added.CUTS)}
TUNABLES = (Tunable(OP, FIELDS, _candidates, linear_ada_rms_norm.inputs, run),)
