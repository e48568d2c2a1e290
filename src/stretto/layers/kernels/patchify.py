"""Cut images into the rows of a patch-embedding product, straight from uint8 pixels.

Shape legend: N images, H height, W width, p patch size, T = (H / p) (W / p) patches in row order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl


def patchify_reference(images_NHWC: Tensor, patch: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [N, T, 3 p p] in `dtype`, in the order of a conv weight [D, 3, p, p] flattened to [D, 3 p p].

    uint8 pixels are mapped to [-1, 1]; float pixels are taken as they are. Any strides (a permuted NCHW tensor) will do.
    """
    n, height, width, channels = images_NHWC.shape
    pixels = images_NHWC.reshape(n, height // patch, patch, width // patch, patch, channels)
    rows = pixels.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * patch * patch)
    if images_NHWC.dtype == torch.uint8:
        return (rows.float() / 127.5 - 1.0).to(dtype)
    return rows.to(dtype)


@jit
def _patchify_kernel(
    images: tl.tensor,
    out: tl.tensor,
    patches_down: tl.tensor,
    patches_across: tl.tensor,
    stride_n: tl.tensor,
    stride_h: tl.tensor,
    stride_w: tl.tensor,
    stride_c: tl.tensor,
    CHANNELS: tl.constexpr,
    PATCH: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    across = row % patches_across
    down = row // patches_across % patches_down
    n = (row // (patches_across * patches_down)).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < CHANNELS * PATCH * PATCH
    channel = element // (PATCH * PATCH)
    y = down * PATCH + element // PATCH % PATCH
    x = across * PATCH + element % PATCH
    at = images + n * stride_n + y * stride_h + x * stride_w + channel * stride_c
    pixel = tl.load(at, mask=inside, other=0).to(tl.float32)
    if BYTES:
        pixel = tl.div_rn(pixel, 127.5) - 1.0
    out_at = out + row.to(tl.int64) * (CHANNELS * PATCH * PATCH) + element
    tl.store(out_at, pixel.to(out.dtype.element_ty), mask=inside)


def patchify_triton(images_NHWC: Tensor, patch: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    n, height, width, channels = images_NHWC.shape
    down, across = height // patch, width // patch
    size = channels * patch * patch
    out = torch.empty(n, down * across, size, dtype=dtype, device=images_NHWC.device)
    _patchify_kernel[(n * down * across,)](
        images_NHWC, out, down, across, *images_NHWC.stride(),
        CHANNELS=channels, PATCH=patch, BYTES=images_NHWC.dtype == torch.uint8, BLOCK=block_of(size), num_warps=4,
    )  # fmt: skip
    return out


patchify = FusedOp(patchify_reference, patchify_triton)
