"""The Wan diffusion transformer as modules: weights and the arithmetic on one chunk; no caches, no loops.

Shape legend: B rows, F frames of a chunk, T tokens of a frame, N = F T tokens, D width, H heads, d head size,
L noise levels, X text tokens.

Source: Wan2.1 and Wan2.2 (`wan/modules/model.py`), diffusers 0.42 `WanTransformer3DModel`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from stretto.layers.kernels import gelu_tanh, rms_norm
from stretto.layers.kernels.level_norm import level_layer_norm
from stretto.layers.kernels.renoise import unpatchify
from stretto.layers.linear import FusedLinear
from stretto.models.wan_config import WanConfig

SHIFT1, SCALE1, GATE1, SHIFT2, SCALE2, GATE2 = range(6)
"""The lines of a block's modulation."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Norm(nn.Module):
    """The weight of an RMSNorm over the full width, taken before heads are split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class SelfAttention(nn.Module):
    """Projections of the attention over the ring. What lies between them needs the ring, so it is in the stage."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.width
        self.qkv = FusedLinear(width, {"q": width, "k": width, "v": width}, bias=True)
        self.o = nn.Linear(width, width)
        self.norm_q, self.norm_k = Norm(width), Norm(width)


class CrossAttention(nn.Module):
    """Projections of the attention over the prompt; its keys and values are made once per prompt."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.eps = config.heads, config.eps
        self.q = nn.Linear(width, width)
        self.kv = FusedLinear(width, {"k": width, "v": width}, bias=True)
        self.o = nn.Linear(width, width)
        self.norm_q, self.norm_k = Norm(width), Norm(width)

    def keys_values(self, text_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompt's keys and values as [X, H, d]."""
        k, v = self.kv(text_XD).chunk(2, dim=-1)
        k = rms_norm(k, self.norm_k.weight, self.eps, unit_offset=False)
        return torch.unflatten(k, -1, (self.heads, -1)), torch.unflatten(v, -1, (self.heads, -1))


class ActionAdapter(nn.Module):
    """Scale and shift of the hidden state from an embedded action; at zero weights it does nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BND: Tensor, action_BFD: Tensor) -> Tensor:
        frames = action_BFD.shape[1]
        x = torch.unflatten(x_BND, 1, (frames, -1))
        scale, shift = self.scale(action_BFD)[:, :, None], self.shift(action_BFD)[:, :, None]
        return torch.addcmul(x + shift, x, scale).flatten(1, 2)


class Block(nn.Module):
    """One transformer block's weights. `table_L6D` holds its modulation at every noise level of the stream."""

    table_L6D: Tensor

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.width
        self.eps = config.eps
        self.self_attn, self.cross_attn = SelfAttention(config), CrossAttention(config)
        self.norm3 = nn.LayerNorm(width, eps=config.eps)
        self.ffn = nn.ModuleDict({"0": nn.Linear(width, config.ffn_width), "2": nn.Linear(config.ffn_width, width)})
        self.modulation = nn.Parameter(torch.randn(1, 6, width) / width**0.5)
        self.actions = nn.ModuleDict({track.name: ActionAdapter(width) for track in config.actions})
        self.register_buffer("table_L6D", torch.zeros(len(config.levels) + 2, 6, width), persistent=False)


class Head(nn.Module):
    """Final norm and projection back to latent patches. `table_L2D` is its modulation at every level."""

    table_L2D: Tensor

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.width, config.channels * config.patch**2)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.width) / config.width**0.5)
        self.register_buffer("table_L2D", torch.zeros(len(config.levels) + 2, 2, config.width), persistent=False)

    def forward(self, h_BND: Tensor, levels_BF: Tensor) -> Tensor:
        """Return the patches of the predicted velocity, [B, N, patch * patch * channels]."""
        out: Tensor = self.head(level_layer_norm(h_BND, self.table_L2D, levels_BF, self.eps, shift=0, scale=1))
        return out


class WanNet(nn.Module):
    """All weights of one network. Names are those of the original checkpoints, apart from fused storage."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width, patch = config.width, config.patch
        self.config = config
        self.patch_embedding = nn.Linear(config.channels * patch * patch, width)
        self.text_embedding = nn.ModuleDict({"0": nn.Linear(config.text_width, width), "2": nn.Linear(width, width)})
        self.time_embedding = nn.ModuleDict({"0": nn.Linear(config.freq_width, width), "2": nn.Linear(width, width)})
        self.time_projection = nn.ModuleDict({"1": nn.Linear(width, 6 * width)})
        self.actions = nn.ModuleDict({track.name: nn.Linear(track.dim, width) for track in config.actions})
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.head = Head(config)

    def patchify(self, x_BFChw: Tensor) -> Tensor:
        """Return [B, N, C p p] in the network's dtype, tokens in frame, row, column order."""
        p = self.config.patch
        cut = torch.unflatten(torch.unflatten(x_BFChw, 4, (-1, p)), 3, (-1, p)).permute(0, 1, 3, 5, 2, 4, 6)
        # Order and dtype in one pass.
        out = torch.empty(cut.shape, dtype=self.patch_embedding.weight.dtype, device=cut.device)
        return out.copy_(cut).flatten(4).flatten(1, 3)

    def unpatchify(self, patches_BNP: Tensor) -> Tensor:
        """Return [B, F, C, h, w] from patches whose channel is the fastest axis."""
        return unpatchify(patches_BNP, self.config.grid, self.config.patch)

    def embed_text(self, context_XE: Tensor) -> Tensor:
        """Return the prompt at the network's width; rows past the prompt are zeros and stay in the attention."""
        dtype = self.text_embedding["0"].get_parameter("weight").dtype
        out: Tensor = self.text_embedding["2"](gelu_tanh(self.text_embedding["0"](context_XE.to(dtype))))
        return out

    def embed_action(self, name: str, action_BFA: Tensor) -> Tensor:
        layer = self.actions[name]
        return silu(layer(action_BFA.to(layer.get_parameter("weight").dtype)))

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute, in place, the modulation tables of every level from the weights. Computed in fp32."""
        config = self.config
        steps = [level.timestep for level in config.levels]
        timesteps = torch.tensor([*steps, config.context_level.timestep, 0.0], dtype=torch.float64)
        first = self.time_embedding["0"]
        device = first.get_parameter("weight").device
        e = _linear32(sinusoid(timesteps.to(device), config.freq_width), first)
        e_LD = _linear32(silu(e), self.time_embedding["2"])
        e0_L6D = torch.unflatten(_linear32(silu(e_LD), self.time_projection["1"]), 1, (6, -1))
        for block in self.blocks:
            if isinstance(block, Block) and not block.modulation.is_meta:
                block.table_L6D.copy_(block.modulation.float() + e0_L6D)
        if not self.head.modulation.is_meta:
            self.head.table_L2D.copy_(self.head.modulation.float() + e_LD[:, None])


def sinusoid(timesteps_L: Tensor, width: int) -> Tensor:
    """Return [L, width] in fp32: cosines, then sines. Timesteps are fractional, so the angle is taken in float64."""
    half = width // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=timesteps_L.device) / half)
    angles = timesteps_L.double()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def _linear32(x: Tensor, layer: nn.Module) -> Tensor:
    bias = layer.get_parameter("bias")
    return linear(x, layer.get_parameter("weight").float(), bias.float())
