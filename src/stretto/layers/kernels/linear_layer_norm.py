"""A linear layer, the residual after it, and the LayerNorm after that.

Who makes the product, and whether it adds the residual as it is written, is a measured choice at every shape.

Shape legend: ... any leading axes, M rows in all of them, K inner width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.layer_norm import sum_layer_norm, sum_layer_norm_reference
from stretto.layers.kernels.linear_activation import ONTO_FIELDS, onto_candidates, run_onto
from stretto.layers.kernels.sum_norm import Stream, stores, stream_inputs
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_add_layer_norm_reference(
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    wide_bias_D: Tensor | None = None,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Return (layer norm in x's dtype of the stream's sum with x @ weight.T + bias, the stream with it), as `sum_rms_norm`.

    `wide_bias_D` is the same bias in fp32, for kernels that want it so.
    """
    stream = Stream(stored, added).plus(linear(x, weight_DK, bias_D))
    return sum_layer_norm_reference(*stream, norm_weight_D, norm_bias_D, eps, dtype=x.dtype, store=store)


def linear_add_layer_norm_triton(
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
    wide_bias_D: Tensor | None = None,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    key = (x.numel() // x.shape[-1], x.shape[-1], weight_DK.shape[0])
    choice = tuned("linear_add_layer_norm", key, x.dtype, x.device) if gemm.takes(x, weight_DK) else None
    norm = (norm_weight_D, norm_bias_D, eps, wide_bias_D)
    return run(choice, x, weight_DK, bias_D, stored, added, *norm, store=store)


def run(
    choice: Config | None,
    x: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor,
    stored: Tensor,
    added: tuple[Tensor, ...],
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float = 1e-6,
    wide_bias_D: Tensor | None = None,
    *,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Run one choice; None is the rule."""
    stream = run_onto(choice, x, weight_DK, bias_D, Stream(stored, added), wide_bias_D)
    return sum_layer_norm(*stream, norm_weight_D, norm_bias_D, eps, dtype=x.dtype, store=store)


def _run_in_a_layer(choice: Config | None, x: Tensor, weight_DK: Tensor, *others: Any) -> tuple[Tensor, Stream]:
    return run(choice, x, weight_DK, *others, store=stores(x.shape[-1], weight_DK.shape[0]))


def _candidates(key: Key) -> list[Config]:
    return onto_candidates()


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, width = key
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * inner**-0.5).to(dtype)
    norm = torch.randn(2, width, device=device)
    bias = torch.randn(width, device=device).to(dtype)
    return x, weight, bias, *stream_inputs(rows, inner, width, dtype, device), norm[0], norm[1], 1e-6, bias.float()


linear_add_layer_norm = FusedOp(linear_add_layer_norm_reference, linear_add_layer_norm_triton)
TUNABLES = (Tunable("linear_add_layer_norm", ONTO_FIELDS, _candidates, _inputs, _run_in_a_layer),)
