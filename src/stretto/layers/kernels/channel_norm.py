"""RMSNorm over the channels of an image or a video with the SiLU behind it, in one pass.

Channels may lie apart, a picture each, or side by side for every pixel; the result lies as the input does.

Shape legend: B rows, C channels, ... frames, rows and columns, P pixels in all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, cdiv, jit, tl


def channel_norm_silu_reference(x: Tensor, gamma_C: Tensor) -> Tensor:
    """Return silu(x / rms(x) * gamma) for x [B, C, ...], with the root mean square taken over C, in fp32."""
    channels = x.shape[1]
    gamma = gamma_C.float().view(channels, *[1] * (x.dim() - 2))
    return silu(normalize(x.float(), dim=1) * channels**0.5 * gamma).to(x.dtype)


@jit
def _channel_norm_kernel(
    x: tl.tensor,
    gamma: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    pixels: tl.tensor,
    x_b: tl.tensor,
    x_c: tl.tensor,
    x_p: tl.tensor,
    root: tl.tensor,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Work on BLOCK_P pixels; what is read twice is still in the first-level cache the second time."""
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    here = pixel < pixels
    base = tl.program_id(1).to(tl.int64) * x_b + pixel[None, :] * x_p
    squares = tl.zeros((BLOCK_P,), tl.float32)
    for first in range(0, channels, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        inside = (channel < channels)[:, None] & here[None, :]
        value = tl.load(x + base + channel.to(tl.int64)[:, None] * x_c, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(value * value, 0)
    factor = root / tl.maximum(tl.sqrt(squares), 1.0e-12)
    for first in range(0, channels, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        inside = (channel < channels)[:, None] & here[None, :]
        at = base + channel.to(tl.int64)[:, None] * x_c
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(gamma + channel, mask=channel < channels, other=0.0).to(tl.float32)
        normed = value * factor[None, :] * weight[:, None]
        tl.store(out + at, (normed / (1.0 + tl.exp(-normed))).to(out.dtype.element_ty), mask=inside)


def channel_norm_silu_triton(x: Tensor, gamma_C: Tensor) -> Tensor:
    batch, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    apart = x.is_contiguous()
    out = torch.empty_like(x)
    x_c, x_p = (pixels, 1) if apart else (1, channels)
    block_c, block_p = (32, 128) if apart else (min(block_of(channels), 512), 16)
    _channel_norm_kernel[(cdiv(pixels, block_p), batch)](
        x, gamma_C.reshape(-1).contiguous(), out, channels, pixels, channels * pixels, x_c, x_p, channels**0.5,
        BLOCK_C=block_c, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out


def _in_one_piece(x: Tensor, gamma_C: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    by_pixel = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    return gamma_C.numel() == x.shape[1] and (x.is_contiguous() or by_pixel)


channel_norm_silu = FusedOp(channel_norm_silu_reference, channel_norm_silu_triton, supports=_in_one_piece)
