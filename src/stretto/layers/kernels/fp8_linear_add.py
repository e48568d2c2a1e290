"""An FP8 product that is added to a residual stream, which a norm in e4m3 reads next.

cuBLASLt can add an fp32 residual as it writes: the norm then reads one stream and writes none. Or the product is written in
bf16 and the norm adds it. Which of them at a shape is a measured choice, of product and norm together.

`scales` as in fp8_linear. Shape legend: ... any leading axes, M rows in all of them, K inner width, N columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers import cublas_lt
from stretto.layers.kernels.fp8_activation import E4M3, fp8_chip
from stretto.layers.kernels.fp8_linear import Scales, fp8_linear, run_dense
from stretto.layers.kernels.fp8_norm import layer_norm_fp8, rms_norm_fp8
from stretto.layers.tuning import Config, Key, Tunable, tuned

FIELDS: dict[str, tuple[int | str, ...]] = {"impl": ("cublas", "lt", "lt_sum"), "algo": cublas_lt.CHOICES}


def fp8_linear_add(
    x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, residual: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return (total, None), or (residual, y) whose sum is the total: residual + x @ codes.T times both scales + bias.

    A y is in `dtype`; the residual stays as it is either way.
    """
    takes = fp8_chip(x.device) and residual.dtype == torch.float32 and residual.is_contiguous()
    if not takes or not cublas_lt.takes(x, codes_NK):
        return residual, fp8_linear(x, codes_NK, bias_N, scales, dtype)
    key = (x.numel() // x.shape[-1], x.shape[-1], codes_NK.shape[0], int(bias_N is not None))
    return run(tuned("fp8_linear_add", key, E4M3, x.device), x, codes_NK, bias_N, scales, residual, dtype)


def run(
    choice: Config | None,
    x: Tensor,
    codes_NK: Tensor,
    bias_N: Tensor | None,
    scales: Scales,
    residual: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Run one choice; None is the rule."""
    choice = choice or _rule(codes_NK, bias_N)
    if choice["impl"] != "lt_sum":
        return residual, run_dense(choice, x, codes_NK, bias_N, scales, dtype)
    return cublas_lt.matmul(x, codes_NK, int(choice["algo"]), bias_N=bias_N, scales=scales, residual=residual), None


def _rule(codes_NK: Tensor, bias_N: Tensor | None) -> Config:
    """Add as it is written where a product is short, but not in a prefix, where 31,000 rows lose 20 % by it."""
    columns, inner = codes_NK.shape
    return {"impl": "lt_sum" if inner <= columns and bias_N is not None else "lt", "algo": 0}


def _run_with_norm(
    choice: Config | None, x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, residual: Tensor, *norm: Any
) -> tuple[Tensor, Tensor]:
    total, y = run(choice, x, codes_NK, bias_N, scales, residual, torch.bfloat16)
    weight_D, multiplier = norm
    if bias_N is None:
        return rms_norm_fp8(total, y, weight_D, multiplier, 1e-6)
    return layer_norm_fp8(total, y, weight_D, weight_D, multiplier, 1e-6)


def _candidates(key: Key) -> list[Config]:
    listed = cublas_lt.candidates(24)
    return [{"impl": "cublas"}, *listed, *({**choice, "impl": "lt_sum"} for choice in listed)]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, columns, biased = key
    x = (torch.randn(rows, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    codes = (torch.randn(columns, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    scales = (torch.tensor(1 / 60, device=device), torch.tensor(inner**-0.5 / 60, device=device))
    bias = torch.randn(columns, dtype=torch.bfloat16, device=device) if biased else None
    residual, weight = torch.randn(rows, columns, device=device), torch.randn(columns, device=device)
    return x, codes, bias, scales, residual, weight, torch.full((1,), 40.0, device=device)


TUNABLES = (Tunable("fp8_linear_add", FIELDS, _candidates, _inputs, _run_with_norm),)
