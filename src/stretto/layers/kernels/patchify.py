"""Cut images into the rows of a patch-embedding product, straight from uint8 pixels.

Shape legend: N images, H height, W width, p patch size, T = (H / p) (W / p) patches in row order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


def patchify_reference(images_NHWC: Tensor, patch: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [N, T, 3 p p] in `dtype`, in the order of a conv weight [D, 3, p, p] flattened to [D, 3 p p].

    uint8 pixels are mapped to [-1, 1]; float pixels are taken as they are. Any strides (a permuted NCHW tensor) will do.
    """
    n, height, width, channels = images_NHWC.shape
    pixels = images_NHWC.unflatten(2, (width // patch, patch)).unflatten(1, (height // patch, patch))
    rows = pixels.permute(0, 1, 3, 5, 2, 4).reshape(n, -1, channels * patch * patch)
    if images_NHWC.dtype == torch.uint8:
        return (rows.float() / 127.5 - 1.0).to(dtype)
    return rows.to(dtype)


patchify = FusedOp(patchify_reference)
