"""A light decoder: a few convolutions with one frame of memory, in the place of the full VAE decoder.

The full decoder is the slowest stage once the rest is pipelined. This is the slot for a distilled one; it decodes the
network's normalised latents directly.

Shape legend: F latent frames, P pixel frames, C channels, h w latent size, H W pixel size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.core.errors import ConfigError
from stretto.core.route import TensorSpec
from stretto.models.wan_vae import to_bytes


class MemoryBlock(nn.Module):
    """A residual block that sees each frame beside the one before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.out = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_FChw: Tensor, before_1Chw: Tensor) -> Tensor:
        before = torch.cat((before_1Chw, x_FChw[:-1]))
        hidden = functional.relu(self.mix(torch.cat((x_FChw, before), dim=1)))
        return functional.relu(x_FChw + self.out(hidden))


class LightNet(nn.Module):
    """Memory blocks, each followed by an upsampling of 2 in space; the last two also double the frames."""

    def __init__(self, channels: int, widths: Sequence[int], shuffle: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.memory = nn.ModuleList(MemoryBlock(width) for width in widths)
        self.grow = nn.ModuleList(
            nn.Conv2d(width, following * (2 if self.doubles(i, len(widths)) else 1), 3, padding=1)
            for i, (width, following) in enumerate(zip(widths, (*widths[1:], widths[-1]), strict=True))
        )
        self.conv_out = nn.Conv2d(widths[-1], 3 * shuffle**2, 3, padding=1)
        self.shuffle = shuffle

    @staticmethod
    def doubles(level: int, levels: int) -> bool:
        return level >= levels - 2

    def forward(self, x_FChw: Tensor, caches: Sequence[Tensor]) -> Tensor:
        x = functional.relu(self.conv_in(torch.tanh(x_FChw / 3.0) * 3.0))
        for i, (memory, grow) in enumerate(zip(self.memory, self.grow, strict=True)):
            last = x[-1].clone()
            x = memory(x, caches[i][None])
            caches[i].copy_(last)
            x = functional.relu(grow(functional.interpolate(x, scale_factor=2.0, mode="nearest")))
            if self.doubles(i, len(self.memory)):
                x = torch.unflatten(x, 1, (2, -1)).flatten(0, 1)
        return functional.pixel_shuffle(self.conv_out(x), self.shuffle)


class LightDecoder:
    """A decoder for the `decode` stage with one cached frame for each level.

    Args:
        channels: of the latent.
        space_stride: pixels of a latent cell's side.
        widths: channels of each level; every level doubles the size, pixel shuffle does the rest.
        seed: of the random weights that it begins with.
    """

    def __init__(
        self,
        channels: int,
        space_stride: int,
        widths: Sequence[int] = (256, 128, 64),
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        shuffle, left = divmod(space_stride, 2 ** len(widths))
        if left or shuffle < 1 or len(widths) < 2:
            levels = f"2 to {int(math.log2(space_stride))} levels for a stride of {space_stride}"
            raise ConfigError("decoder.widths", got=tuple(widths), expected=levels)
        self.widths = tuple(widths)
        self.dtype = dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = LightNet(channels, self.widths, shuffle)
        self.module: nn.Module = net.to(device=device, dtype=dtype).requires_grad_(False)

    def caches(self, height: int, width: int) -> list[TensorSpec]:
        name = str(self.dtype).removeprefix("torch.")
        return [TensorSpec((c, height << i, width << i), name) for i, c in enumerate(self.widths)]

    @torch.no_grad()
    def decode(self, latents_FChw: Tensor, caches: Sequence[Tensor], *, first: bool) -> Tensor:
        frames: Tensor = self.module(latents_FChw.to(self.dtype), caches)
        # Of the four frames that the stream's first latent frame becomes, only the last is real.
        return to_bytes((frames[3:] if first else frames).clamp(-1.0, 1.0))
