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
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.rms_norm import sum_rms_norm
from stretto.layers.kernels.sum_norm import Stream, stores, stream_inputs
from stretto.layers.tuning import Config, Key, Tunable, tuned

FIELDS: dict[str, tuple[int | str, ...]] = {"impl": ("cublas", "lt", "lt_sum"), "algo": cublas_lt.CHOICES}


def fp8_linear_add(
    x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, stream: Stream, dtype: torch.dtype
) -> Stream:
    """Return the stream with x @ codes.T times both scales + bias: added to what is stored, or beside it in `dtype`."""
    if not fp8_chip(x.device) or not cublas_lt.takes(x, codes_NK):
        return stream.plus(fp8_linear(x, codes_NK, bias_N, scales, dtype))
    key = (x.numel() // x.shape[-1], x.shape[-1], codes_NK.shape[0], int(bias_N is not None))
    return run(tuned("fp8_linear_add", key, E4M3, x.device), x, codes_NK, bias_N, scales, stream, dtype)


def run(
    choice: Config | None,
    x: Tensor,
    codes_NK: Tensor,
    bias_N: Tensor | None,
    scales: Scales,
    stream: Stream,
    dtype: torch.dtype,
) -> Stream:
    """Run one choice; None is the rule."""
    choice = choice or _rule(codes_NK, bias_N)
    choice = {**choice, "impl": stream.way_onto(choice["impl"], x)}
    if choice["impl"] != "lt_sum":
        return stream.plus(run_dense(choice, x, codes_NK, bias_N, scales, dtype))
    total = cublas_lt.matmul(x, codes_NK, int(choice["algo"]), bias_N=bias_N, scales=scales, residual=stream.stored)
    return Stream(total, stream.added)


def _rule(codes_NK: Tensor, bias_N: Tensor | None) -> Config:
    """Add as it is written where a product is short, but not in a prefix, where 31,000 rows lose 20 % by it."""
    columns, inner = codes_NK.shape
    return {"impl": "lt_sum" if inner <= columns and bias_N is not None else "lt", "algo": 0}


def _run_with_norm(
    choice: Config | None, x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, *others: Any
) -> tuple[Tensor, Stream]:
    stored, added, weight_D, multiplier = others
    stream = run(choice, x, codes_NK, bias_N, scales, Stream(stored, added), torch.bfloat16)
    store = stores(x.shape[-1], codes_NK.shape[0])
    if bias_N is None:
        return sum_rms_norm(*stream, weight_D, 1e-6, multiplier=multiplier, store=store)
    return sum_layer_norm(*stream, weight_D, weight_D, 1e-6, multiplier=multiplier, store=store)


def _candidates(key: Key) -> list[Config]:
    listed = cublas_lt.candidates(24)
    return [{"impl": "cublas"}, *listed, *({**choice, "impl": "lt_sum"} for choice in listed)]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, inner, columns, biased = key
    x = (torch.randn(rows, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    codes = (torch.randn(columns, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    scales = (torch.tensor(1 / 60, device=device), torch.tensor(inner**-0.5 / 60, device=device))
    bias = torch.randn(columns, dtype=torch.bfloat16, device=device) if biased else None
    stream, weight = stream_inputs(rows, inner, columns, torch.bfloat16, device), torch.randn(columns, device=device)
    return x, codes, bias, scales, *stream, weight, torch.full((1,), 40.0, device=device)


TUNABLES = (Tunable("fp8_linear_add", FIELDS, _candidates, _inputs, _run_with_norm),)
