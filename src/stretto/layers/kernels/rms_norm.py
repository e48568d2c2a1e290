"""RMSNorm, alone and of a residual stream with what is added to it.

Shape legend: ... any leading axes, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.fp8_activation import to_fp8_reference
from stretto.layers.kernels.sum_norm import Stream, norm, takes


def rms_norm_reference(
    x: Tensor, weight_D: Tensor, eps: float, *, unit_offset: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    """Normalise x [..., D] by its root mean square in fp32; the factor is 1 + w, or w without `unit_offset`.

    The result is in `dtype`, x's own by default.
    """
    x32 = x.float()
    w32 = weight_D.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + w32 if unit_offset else w32)).to(dtype or x.dtype)


def sum_rms_norm_reference(
    stored: Tensor,
    added: tuple[Tensor, ...],
    weight_D: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    multiplier: Tensor | None = None,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Return (norm with factor 1 + w of stored + added, the stream); the first two arguments are a `Stream`.

    The norm is taken of the sum as it would be stored. It is in `dtype`, or with a multiplier in e4m3. With `store` the stream
    that is returned has the sum, else it is as it was.
    """
    stream = Stream(stored, added)
    total = stream.total()
    left = Stream(total) if store and added else stream
    if multiplier is None:
        return rms_norm_reference(total, weight_D, eps, dtype=dtype), left
    return to_fp8_reference(rms_norm_reference(total.float(), weight_D, eps), multiplier), left


def rms_norm_triton(
    x: Tensor, weight_D: Tensor, eps: float, *, unit_offset: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    return norm(Stream(x), weight_D, None, eps, dtype or x.dtype, unit_offset=unit_offset)[0]


def sum_rms_norm_triton(
    stored: Tensor,
    added: tuple[Tensor, ...],
    weight_D: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    multiplier: Tensor | None = None,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    return norm(Stream(stored, added), weight_D, None, eps, dtype, multiplier=multiplier, unit_offset=True, store=store)


rms_norm = FusedOp(rms_norm_reference, rms_norm_triton)
sum_rms_norm = FusedOp(sum_rms_norm_reference, sum_rms_norm_triton, takes)
