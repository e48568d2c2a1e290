"""SigLIP and its projection into the language model: the image tower of pi0 and pi0.5.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from stretto.layers.kernels.attention import attention
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.linear_activation import dense, linear_gelu
from stretto.layers.kernels.linear_layer_norm import linear_add_layer_norm
from stretto.layers.kernels.patchify import patchify
from stretto.layers.linear import FusedLinear
from stretto.models.pi0_config import Pi0Config


class VisionBlock(nn.Module):
    wide_biases: Tensor

    def __init__(self, width: int, mlp: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = FusedLinear(width, {"q_proj": width, "k_proj": width, "v_proj": width}, bias=True, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.up = nn.Linear(width, mlp, dtype=dtype)
        self.down = nn.Linear(mlp, width, dtype=dtype)
        # The biases of `out` and `down` in fp32, for products that add them to the residual stream.
        self.register_buffer("wide_biases", torch.empty(2, width), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow a change of the weights, in place."""
        self.wide_biases.copy_(torch.stack((self.out.bias, self.down.bias)))

    def attend(self, x: Tensor) -> Tensor:
        """Return what the output projection reads."""
        qkv = dense(x, self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.view(*qkv.shape[:-1], 3, self.heads, -1).unbind(2)
        return attention(q, k, v).flatten(2)

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the MLP's second layer reads."""
        return linear_gelu(x, self.up.weight, self.up.bias)


class VisionTower(nn.Module):
    """SigLIP and the projection into the language model; all cameras of all rows are one batch."""

    wide_embed: Tensor

    def __init__(self, config: Pi0Config, dtype: torch.dtype) -> None:
        super().__init__()
        dims = config.vision
        self.patch, self.eps, self.dtype = dims.patch, config.norm_eps, dtype
        self.embed = nn.Linear(3 * dims.patch**2, dims.width, dtype=dtype)
        # Its weight in rows of a multiple of 16 bytes, as fast products want them.
        columns = 3 * dims.patch**2 + -(3 * dims.patch**2) % 8
        self.register_buffer("wide_embed", torch.empty(dims.width, columns, dtype=dtype), persistent=False)
        self.position = nn.Parameter(torch.empty(config.tokens_per_camera, dims.width))
        self.blocks = nn.ModuleList(VisionBlock(dims.width, dims.mlp, dims.heads, dtype) for _ in range(dims.depth))
        self.norm = nn.LayerNorm(dims.width)
        self.project = nn.Linear(dims.width, config.language.width, dtype=dtype)

    def refresh(self) -> None:
        """Recompute what is derived from the weights, in place."""
        with torch.no_grad():
            self.wide_embed.copy_(pad(self.embed.weight, (0, self.wide_embed.shape[1] - self.embed.in_features)))
        for block in self.blocks:
            if isinstance(block, VisionBlock):
                block.refresh()

    def patches(self, images_BCRR3: Tensor) -> Tensor:
        """Return the embedded patches without their positions, [B C, T, D]."""
        columns = self.wide_embed.shape[1]
        rows = patchify(images_BCRR3.flatten(0, 1), self.patch, dtype=self.dtype, columns=columns)
        weight = self.wide_embed
        if torch.is_grad_enabled():
            weight = pad(self.embed.weight, (0, columns - self.embed.in_features))
        return linear(rows, weight, self.embed.bias)

    def forward(self, images_BCRR3: Tensor) -> Tensor:
        """Return image tokens [B, I, D] of uint8 pixels, or of float pixels in [-1, 1]."""
        batch = images_BCRR3.shape[0]
        blocks = [b for b in self.blocks if isinstance(b, VisionBlock)]
        first = blocks[0].norm1
        # Positions are a stream of fewer axes: of every camera.
        patches = self.patches(images_BCRR3)
        x, stream = sum_layer_norm(self.position, (patches,), first.weight, first.bias, self.eps, dtype=self.dtype)
        following = [*(b.norm1 for b in blocks[1:]), self.norm]
        for block, after in zip(blocks, following, strict=True):
            out, down, norm, wide = block.out, block.down, block.norm2, block.wide_biases
            x, stream = linear_add_layer_norm(
                block.attend(x), out.weight, out.bias, *stream, norm.weight, norm.bias, self.eps, wide[0], store=False
            )
            x, stream = linear_add_layer_norm(
                block.hidden(x), down.weight, down.bias, *stream, after.weight, after.bias, self.eps, wide[1]
            )
        tokens: Tensor = self.project(x)
        return tokens.reshape(batch, -1, tokens.shape[-1])
