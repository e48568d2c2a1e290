"""Fewer passes over the frames of a Wan VAE: norms with the activation behind them, and convolutions that pad by themselves.

The modules of diffusers stay what they are, with the names of their parameters; some of their children are replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv3d, pad

from stretto.layers.kernels.channel_norm import channel_norm_silu


class NormSilu(nn.Module):
    """The RMSNorm of a block together with the SiLU that follows it."""

    def __init__(self, gamma: nn.Parameter) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, x: Tensor) -> Tensor:
        return channel_norm_silu(x, self.gamma)


class PaddingConv(nn.Module):
    """A causal convolution that leaves the padding in space to the convolution itself. Shares the weights of the other."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.stride = conv.weight, conv.bias, conv.stride
        self.in_channels: int = conv.in_channels
        left, _, top, _, self.lead, _ = conv._padding
        self.space = (0, top, left)

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        lead = self.lead
        if cache_x is not None and lead:
            x, lead = torch.cat((cache_x, x), dim=2), lead - cache_x.shape[2]
        if lead:
            x = pad(x, (0, 0, 0, 0, lead, 0))
        return conv3d(x, self.weight, self.bias, self.stride, self.space)


def fuse(half: nn.Module) -> None:
    """Replace what can be fused in an encoder or decoder of diffusers' `AutoencoderKLWan`, in place; parameters are shared."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResidualBlock

    for module in list(half.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, WanCausalConv3d):
                setattr(module, name, PaddingConv(child))
    blocks: list[Any] = [m for m in half.modules() if isinstance(m, WanResidualBlock)]
    for block in blocks:
        block.norm1, block.norm2 = NormSilu(block.norm1.gamma), NormSilu(block.norm2.gamma)
        block.nonlinearity = nn.Identity()
    last: Any = half
    last.norm_out, last.nonlinearity = NormSilu(last.norm_out.gamma), nn.Identity()
