"""RMSNorm, alone and fused with the residual addition before it.

Shape legend: ... any leading axes, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, passes_early
from stretto.layers.tuning import Config, Key, Tunable, tuned


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


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual) in x's dtype, x + residual in the residual's dtype), with factor 1 + w.

    The norm is taken of the sum as stored.
    """
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm_reference(total, weight_D, eps).to(x.dtype), total


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = stored.to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + at, (normed * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(
    x: Tensor, weight_D: Tensor, eps: float, *, unit_offset: bool = True, dtype: torch.dtype | None = None
) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(x, x, weight_D, out, out, eps, add=False, unit_offset=unit_offset)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(residual)
    key = (x.numel() // x.shape[-1], x.shape[-1])
    choice = tuned("add_rms_norm", key, x.dtype, x.device)
    _launch(x, residual, weight_D, out, total, eps, add=True, unit_offset=True, choice=choice)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor,
    weight_D: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    add: bool,
    unit_offset: bool,
    choice: Config | None = None,
) -> None:
    width = x.shape[-1]
    block, rows = block_of(width), x.numel() // width
    early = passes_early(x, rows)
    _rms_norm_kernel[(rows,)](
        x, residual, weight_D, out, total, width, eps, ADD=add, UNIT_OFFSET=unit_offset, BLOCK=block,
        OVERLAP=early, num_warps=_warps(width) if choice is None else int(choice["warps"]), launch_pdl=early,
    )  # fmt: skip


def _warps(width: int) -> int:
    """Return the warps of a row where no table knows better: 32 bytes of bf16 a thread."""
    return max(warps_of(block_of(width)) // 2, 1)


def _candidates(key: Key) -> list[Config]:
    return [{"warps": warps} for warps in dict.fromkeys((_warps(key[1]), 2, 4, 8, 16))]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = torch.randn(2, *key, device=device)
    return x.to(dtype), residual, torch.randn(key[1], device=device)


def _run(choice: Config | None, x: Tensor, residual: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(residual)
    _launch(x, residual, weight_D, out, total, 1e-6, add=True, unit_offset=True, choice=choice)
    return out, total


rms_norm = FusedOp(rms_norm_reference, rms_norm_triton)
add_rms_norm = FusedOp(add_rms_norm_reference, add_rms_norm_triton)
TUNABLES = (Tunable("add_rms_norm", {"warps": (1, 2, 4, 8, 16)}, _candidates, _inputs, _run),)
