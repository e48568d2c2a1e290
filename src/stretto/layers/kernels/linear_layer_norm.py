"""A linear layer, the residual after it, and the LayerNorm after that.

A product whose tiles do not fill the chip is split over its inner width; the norm, which reads it anyway, sums the parts in
their order. Otherwise cuBLAS makes the product. Which of them at a shape is a measured choice.

Shape legend: ... any leading axes, M rows in all of them, K inner width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.layer_norm import add_layer_norm, add_layer_norm_reference, launch_affine, layer_norm
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_add_layer_norm_reference(
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    residual: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    wide_bias_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(s) in x's dtype, s in the residual's dtype) for s = x @ weight.T + bias + residual [..., D].

    `wide_bias_D` is the same bias in fp32, for kernels that want it so.
    """
    return add_layer_norm_reference(linear(x, weight_DK, bias_D), residual, norm_weight_D, norm_bias_D, eps)


def linear_add_layer_norm_triton(
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    residual: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    wide_bias_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    key = (x.numel() // x.shape[-1], x.shape[-1], weight_DK.shape[0])
    choice = tuned("linear_add_layer_norm", key, x.dtype, x.device) if gemm.takes(x, weight_DK) else None
    return run(choice, x, weight_DK, bias_D, residual, norm_weight_D, norm_bias_D, eps, wide_bias_D)


def run(
    choice: Config | None,
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    residual: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float = 1e-6,
    wide_bias_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one choice; None is the rule."""
    if choice is None or choice["impl"] == "cublas":
        return add_layer_norm(linear(x, weight_DK, bias_D), residual, norm_weight_D, norm_bias_D, eps)
    if choice["impl"] == "lt":
        y = cublas_lt.matmul(x, weight_DK, int(choice["algo"]), bias_N=bias_D)
        return add_layer_norm(y, residual, norm_weight_D, norm_bias_D, eps)
    if choice["impl"] == "lt_sum":
        wide = bias_D.float() if wide_bias_D is None else wide_bias_D
        total = cublas_lt.matmul(x, weight_DK, int(choice["algo"]), bias_N=wide, residual=residual)
        return layer_norm(total, norm_weight_D, norm_bias_D, eps, dtype=x.dtype), total
    parts_SMD = gemm.split_gemm(x, weight_DK, Tiling.of(choice), int(choice["splits"]))
    out, total = torch.empty(residual.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
    launch_affine(None, residual, parts_SMD, norm_weight_D, norm_bias_D, eps, out, total, bias_D)
    return out, total


def _candidates(key: Key) -> list[Config]:
    summed: list[Config] = [{**choice, "impl": "lt_sum"} for choice in cublas_lt.candidates(8)]
    return [{"impl": "cublas"}, *cublas_lt.candidates(24), *summed]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, width = key
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * inner**-0.5).to(dtype)
    norm = torch.randn(2, width, device=device)
    bias = torch.randn(width, device=device).to(dtype)
    return x, weight, bias, torch.randn(rows, width, device=device), norm[0], norm[1], 1e-6, bias.float()


linear_add_layer_norm = FusedOp(linear_add_layer_norm_reference, linear_add_layer_norm_triton)
_FIELDS = {**gemm.FIELDS, "impl": ("cublas", "lt", "lt_sum", "triton"), "splits": (1, 2, 3, 4)}
TUNABLES = (Tunable("linear_add_layer_norm", _FIELDS, _candidates, _inputs, run),)
