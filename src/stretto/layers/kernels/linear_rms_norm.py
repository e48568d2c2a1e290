"""A linear layer, the residual after it, and the RMSNorm after that.

cuBLAS makes the product; where it also adds the residual, the sum is written once, in fp32, and the norm only reads it. Which
of them at a shape is a measured choice.

Shape legend: ... any leading axes, M rows in all of them, K inner width, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_add_rms_norm_reference(
    x: Tensor, weight_DK: Tensor, residual: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s) in x's dtype, s in the residual's dtype) for s = x @ weight.T + residual [..., D]."""
    return add_rms_norm_reference(linear(x, weight_DK), residual, norm_weight_D, eps)


def linear_add_rms_norm_triton(
    x: Tensor, weight_DK: Tensor, residual: Tensor, norm_weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    key = (x.numel() // x.shape[-1], x.shape[-1], weight_DK.shape[0])
    choice = tuned("linear_add_rms_norm", key, x.dtype, x.device) if gemm.takes(x, weight_DK) else None
    return run(choice, x, weight_DK, residual, norm_weight_D, eps)


def run(
    choice: Config | None, x: Tensor, weight_DK: Tensor, residual: Tensor, norm_weight_D: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Run one choice; None is the rule."""
    choice = choice or _rule(x, weight_DK)
    if choice["impl"] == "cublas":
        return add_rms_norm(linear(x, weight_DK), residual, norm_weight_D, eps)
    if choice["impl"] == "lt":
        return add_rms_norm(cublas_lt.matmul(x, weight_DK, int(choice["algo"])), residual, norm_weight_D, eps)
    if choice["impl"] == "lt_sum":
        total = cublas_lt.matmul(x, weight_DK, int(choice["algo"]), residual=residual)
        return rms_norm(total, norm_weight_D, eps, dtype=x.dtype), total
    return add_rms_norm(gemm.gemm(x, weight_DK, None, Tiling.of(choice)), residual, norm_weight_D, eps)


def _rule(x: Tensor, weight_DK: Tensor) -> Config:
    """Take a whole product on Hopper: torch's own choice may be a split one, whose bits depend on the rows."""
    whole = gemm.on_hopper(x) and cublas_lt.takes(x, weight_DK)
    return {"impl": "lt", "algo": 0} if whole else {"impl": "cublas"}


def _candidates(key: Key) -> list[Config]:
    summed: list[Config] = [{**choice, "impl": "lt_sum"} for choice in cublas_lt.candidates(8)]
    found: list[Config] = [{"impl": "cublas"}, *cublas_lt.candidates(24), *summed]
    if key[0] > 1024:
        return found
    blocks = ((128, 128, 64, 4, 8), (64, 256, 64, 4, 8), (64, 128, 64, 4, 4))
    return found + [Tiling(m, n, k, stages, warps, 8, 0).config for m, n, k, stages, warps in blocks]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, inner, width = key
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * inner**-0.5).to(dtype)
    return x, weight, torch.randn(rows, width, device=device), torch.randn(width, device=device)


linear_add_rms_norm = FusedOp(linear_add_rms_norm_reference, linear_add_rms_norm_triton)
_FIELDS = {**gemm.FIELDS, "impl": ("cublas", "lt", "lt_sum", "triton")}
TUNABLES = (Tunable("linear_add_rms_norm", _FIELDS, _candidates, _inputs, run),)
