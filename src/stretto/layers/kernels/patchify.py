"""Cut images into the rows of a patch-embedding product, straight from uint8 pixels.

Shape legend: N images, H height, W width, p patch size, T = (H / p) (W / p) patches in row order, K inputs of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl


def patchify_reference(
    images_NHWC: Tensor, patch: int, *, dtype: torch.dtype = torch.bfloat16, columns: int | None = None
) -> Tensor:
    """Return [N, T, K] in `dtype`, in the order of a conv weight [D, 3, p, p] flattened to [D, 3 p p].

    K is 3 p p, or `columns`, of which the rest is zeros. uint8 pixels are mapped to [-1, 1]; float pixels are taken as they
    are. Any strides (a permuted NCHW tensor) will do.
    """
    n, height, width, channels = images_NHWC.shape
    pixels = images_NHWC.reshape(n, height // patch, patch, width // patch, patch, channels)
    rows = pixels.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * patch * patch)
    rows = (rows.float() / 127.5 - 1.0 if images_NHWC.dtype == torch.uint8 else rows).to(dtype)
    return rows if columns is None else pad(rows, (0, columns - rows.shape[-1]))


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
    WIDTH: tl.constexpr,
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
    pixel = tl.where(inside, pixel, 0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + element, pixel.to(out.dtype.element_ty), mask=element < WIDTH)


def patchify_triton(
    images_NHWC: Tensor, patch: int, *, dtype: torch.dtype = torch.bfloat16, columns: int | None = None
) -> Tensor:
    n, height, width, channels = images_NHWC.shape
    down, across = height // patch, width // patch
    size = columns or channels * patch * patch
    out = torch.empty(n, down * across, size, dtype=dtype, device=images_NHWC.device)
    _patchify_kernel[(n * down * across,)](
        images_NHWC, out, down, across, *images_NHWC.stride(),
        CHANNELS=channels, PATCH=patch, WIDTH=size, BYTES=images_NHWC.dtype == torch.uint8, BLOCK=block_of(size), num_warps=4,
    )  # fmt: skip
    return out


patchify = FusedOp(patchify_reference, patchify_triton)
