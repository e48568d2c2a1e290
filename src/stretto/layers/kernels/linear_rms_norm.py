"""A linear layer, the residual after it, and the RMSNorm after that.

Who makes the product, and whether it adds the residual as it is written, is a measured choice at every shape.

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
from stretto.layers.kernels.linear_activation import ONTO_FIELDS, onto_candidates, run_onto
from stretto.layers.kernels.rms_norm import sum_rms_norm, sum_rms_norm_reference
from stretto.layers.kernels.sum_norm import Stream, stores, stream_inputs
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_add_rms_norm_reference(
    x: Tensor,
    weight_DK: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    eps: float,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Return (rms norm in x's dtype of the stream's sum with x @ weight.T, the stream with it), as `sum_rms_norm` does."""
    stream = Stream(stored, added).plus(linear(x, weight_DK))
    return sum_rms_norm_reference(*stream, norm_weight_D, eps, dtype=x.dtype, store=store)


def linear_add_rms_norm_triton(
    x: Tensor,
    weight_DK: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    eps: float,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    key = (x.numel() // x.shape[-1], x.shape[-1], weight_DK.shape[0])
    choice = tuned("linear_add_rms_norm", key, x.dtype, x.device) if gemm.takes(x, weight_DK) else None
    return run(choice, x, weight_DK, stored, added, norm_weight_D, eps, store=store)


def run(
    choice: Config | None,
    x: Tensor,
    weight_DK: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    eps: float = 1e-6,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Run one choice; None is the rule."""
    stream = run_onto(choice or _rule(x, weight_DK), x, weight_DK, None, Stream(stored, added))
    return sum_rms_norm(*stream, norm_weight_D, eps, dtype=x.dtype, store=store)


def _rule(x: Tensor, weight_DK: Tensor) -> Config:
    """Take a whole product on Hopper: torch's own choice may be a split one, whose bits depend on the rows."""
    whole = gemm.on_hopper(x) and cublas_lt.takes(x, weight_DK)
    return {"impl": "lt", "algo": 0} if whole else {"impl": "cublas"}


def _candidates(key: Key) -> list[Config]:
    found = onto_candidates()
    if key[0] > 1024:
        return found
    blocks = ((128, 128, 64, 4, 8), (64, 256, 64, 4, 8), (64, 128, 64, 4, 4))
    return found + [Tiling(m, n, k, stages, warps, 8, 0).config for m, n, k, stages, warps in blocks]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, width = key
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * inner**-0.5).to(dtype)
    return x, weight, *stream_inputs(rows, inner, width, dtype, device), torch.randn(width, device=device)


def _run_in_a_layer(choice: Config | None, x: Tensor, weight_DK: Tensor, *others: Any) -> tuple[Tensor, Stream]:
    return run(choice, x, weight_DK, *others, store=stores(x.shape[-1], weight_DK.shape[0]))


linear_add_rms_norm = FusedOp(linear_add_rms_norm_reference, linear_add_rms_norm_triton)
TUNABLES = (Tunable("linear_add_rms_norm", ONTO_FIELDS, _candidates, _inputs, _run_in_a_layer),)
