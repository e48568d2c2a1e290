"""A linear layer, the gated residual after it, and the adaRMS norm after that.

A product of few rows is split over its inner width to fill the chip; the norm, which reads it anyway, sums the parts in their
order. Otherwise cuBLAS makes the product. Which of them at a shape is a measured choice.

Shape legend: B rows, T tokens, M = B T, K inner width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.ada_rms_norm import (
    Modulation,
    gated_add_ada_rms_norm,
    gated_add_ada_rms_norm_reference,
    launch,
)
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_add_ada_rms_norm_reference(
    x_BTK: Tensor,
    weight_DK: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return (adaRMS of s by `normed_by` in `dtype`, s) for s = residual + gate * (x @ weight.T), its gate from `gated_by`."""
    y = linear(x_BTK, weight_DK).to(dtype)
    return gated_add_ada_rms_norm_reference(residual_BTD, y, gated_by, normed_by, eps)


def linear_add_ada_rms_norm_triton(
    x_BTK: Tensor,
    weight_DK: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    key = (x_BTK.numel() // x_BTK.shape[-1], x_BTK.shape[-1], weight_DK.shape[0])
    choice = tuned("linear_add_ada_rms_norm", key, x_BTK.dtype, x_BTK.device) if gemm.takes(x_BTK, weight_DK) else None
    return run(choice, x_BTK, weight_DK, residual_BTD, gated_by, normed_by, eps, dtype)


def run(
    choice: Config | None,
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run one choice; None is the rule."""
    if choice is None or choice["impl"] == "cublas":
        return gated_add_ada_rms_norm(residual, linear(x, weight).to(dtype), gated_by, normed_by, eps)
    if choice["impl"] == "lt":
        y = cublas_lt.matmul(x, weight, int(choice["algo"])).to(dtype)
        return gated_add_ada_rms_norm(residual, y, gated_by, normed_by, eps)
    residual = residual.contiguous()
    parts_SMD = gemm.split_gemm(x, weight, Tiling.of(choice), int(choice["splits"]))
    out, total = torch.empty(residual.shape, dtype=dtype, device=x.device), torch.empty_like(residual)
    launch(residual, parts_SMD, out, total, gated_by, normed_by, eps, add=True)
    return out, total


def candidates(key: Key) -> list[Config]:
    found: list[Config] = [{"impl": "cublas"}, *cublas_lt.candidates(10)]
    if key[0] >= 2000:  # the chip is full without
        return found
    blocks = ((64, 64, 128, 3, 4), (64, 128, 64, 4, 4), (64, 128, 64, 3, 4), (128, 64, 64, 3, 4), (128, 128, 64, 3, 8))
    return found + [
        {**Tiling(m, n, k, stages, warps, 8, 0).config, "splits": splits}
        for m, n, k, stages, warps in blocks
        for splits in SPLITS
        if key[1] >= 256 * splits and 60 <= -(-key[0] // m) * (key[2] // n) * splits <= 300
    ]


def inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, width = key
    tokens = 50 if rows % 50 == 0 else rows
    x = torch.randn(rows // tokens, tokens, inner, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * inner**-0.5).to(dtype)
    residual = torch.randn(rows // tokens, tokens, width, device=device)
    lines = torch.randn(2, rows // tokens, 3 * width, device=device) * 0.5
    return x, weight, residual, Modulation(lines[0]), Modulation(lines[1]), 1e-6, dtype


SPLITS = (1, 2, 3, 4, 6, 8)
linear_add_ada_rms_norm = FusedOp(linear_add_ada_rms_norm_reference, linear_add_ada_rms_norm_triton)
FIELDS = {**gemm.FIELDS, "splits": SPLITS}
TUNABLES = (Tunable("linear_add_ada_rms_norm", FIELDS, candidates, inputs, run),)
