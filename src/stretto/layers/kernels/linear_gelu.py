"""A linear layer followed by GELU (tanh form): in the epilogue of the product where that is faster, or as a pass of its own.

Shape legend: ... any leading axes, M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers.kernels.activation import gelu_tanh
from stretto.layers.tuning import Config, Key, Tunable, tuned


def linear_gelu(x: Tensor, weight_NK: Tensor, bias_N: Tensor, how: Config | None = None) -> Tensor:
    """Return gelu(x weight^T + bias) [..., N] in x's dtype. `how` overrides the table.

    In an epilogue GELU sees the sum before it is rounded to x's dtype.
    """
    if not x.is_cuda or (torch.is_grad_enabled() and (x.requires_grad or weight_NK.requires_grad)):
        return gelu_tanh(linear(x, weight_NK, bias_N))
    rows = x.numel() // x.shape[-1]
    choice = how or tuned("linear_gelu", (rows, *weight_NK.shape), x.dtype, x.device) or {"gelu": "epilogue"}
    if choice["gelu"] == "apart":
        return gelu_tanh(linear(x, weight_NK, bias_N))
    flat = torch._addmm_activation(bias_N, x.reshape(rows, -1), weight_NK.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], -1)


def candidates(key: Key) -> list[Config]:
    return [{"gelu": "epilogue"}, {"gelu": "apart"}]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows, outputs, inputs = key
    generator = torch.Generator(device=device).manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    return x, weight * inputs**-0.5, bias


def _run(choice: Config | None, x: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, choice)


TUNABLES = (Tunable("linear_gelu", {"gelu": ("epilogue", "apart")}, candidates, _inputs, _run),)
