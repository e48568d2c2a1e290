"""A linear layer, the gated residual after it, and the next norm folded (fold.py): nothing is rounded but the norm's rows.

The product reaches the norm in fp32: as parts of a split inner width, or whole from cuBLAS. Which at a shape is a measured
choice.

Shape legend: as in linear_ada_rms_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm, linear_ada_rms_norm
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm_reference, launch
from stretto.layers.kernels.fold import chosen_product_fp32, folded_norm_reference, product_fp32
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.tuning import Config, Tunable, tuned

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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (s (1 + scale) in `dtype`, 1 / rms(s) in fp32 [B, T], s) for s = residual + gate * (x @ weight.T).

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
) -> tuple[Tensor, Tensor, Tensor]:
    key = (x_BTK.numel() // x_BTK.shape[-1], x_BTK.shape[-1], weight_DK.shape[0])
    choice: Config = {"impl": "cublas"}
    if gemm.takes(x_BTK, weight_DK):
        choice = tuned(OP, key, x_BTK.dtype, x_BTK.device) or _rule(x_BTK, weight_DK)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one choice; None is the rule."""
    choice = choice or _rule(x, weight)
    residual = residual.contiguous()
    if choice["impl"] == "triton":
        y = gemm.split_gemm(x, weight, Tiling.of(choice), int(choice["splits"]))
    else:
        y = chosen_product_fp32(choice, x, weight)
    out, total = torch.empty(residual.shape, dtype=dtype, device=x.device), torch.empty_like(residual)
    factor = torch.empty(residual.shape[:2] if fold else (0,), dtype=torch.float32, device=x.device)
    launch(residual, y, out, total, gated_by, normed_by, eps, add=True, factor_BT=factor if fold else None)
    return out, factor, total


def _rule(x: Tensor, weight: Tensor) -> Config:
    rows, inner = x.numel() // x.shape[-1], x.shape[-1]
    if rows >= SPLIT_ROWS or inner < 1024 or not gemm.on_hopper(x):
        return {"impl": "cublas"}
    return {**Tiling(64, 128, 64, 4, 4, 8, 0).config, "splits": 4}


linear_add_folded_norm = FusedOp(linear_add_folded_norm_reference, linear_add_folded_norm_triton)
TUNABLES = (Tunable(OP, linear_ada_rms_norm.FIELDS, linear_ada_rms_norm.candidates, linear_ada_rms_norm.inputs, run),)
