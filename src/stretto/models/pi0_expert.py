"""The expert of pi0 and pi0.5: a Gemma transformer over suffix tokens that also reads the prefix's keys and values.

Small batches run as five kernels a layer: the norm is folded into the product behind it, sum and gate into the one before.
Large ones run as products with fused kernels between them, which round where those do, so that a robot's actions do not depend
on its neighbours but for the order of sums. Calls at flow times that no table holds round ahead of their products.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from stretto.layers.cuda.chain import Coded, Weights
from stretto.layers.dispatch import implementation
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm, gated_add_ada_rms_norm
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.expert_layers import Shape, chain_of, expert_layers
from stretto.layers.kernels.fold import Factor, ShiftLines, folded_norm
from stretto.layers.kernels.folded_linear import folded_geglu, folded_rope_write
from stretto.layers.kernels.linear_activation import linear_geglu
from stretto.layers.kernels.linear_ada_rms_norm import linear_add_ada_rms_norm
from stretto.layers.kernels.linear_folded_norm import linear_add_folded_norm
from stretto.layers.kernels.linear_rope import linear_rope_write, rotary_table
from stretto.layers.kernels.norm_linear import fits_few_rows, norm_qkv
from stretto.layers.kernels.rope import rope
from stretto.layers.kernels.stream import Stream
from stretto.layers.linear import FusedLinear
from stretto.models.pi0_config import GemmaDims, Pi0Config


class Rotary(TypedDict):
    heads: int
    kv_heads: int
    head_dim: int
    theta: float


class GemmaBlock(nn.Module):
    """Projections of one layer. With `kv_only`, those of a layer of which nothing but keys and values is used."""

    def __init__(self, dims: GemmaDims, theta: float, dtype: torch.dtype, kv_only: bool = False) -> None:
        super().__init__()
        self.heads, self.dims, self.theta = 0 if kv_only else dims.heads, dims, theta
        kv = dims.kv_heads * dims.head_dim
        parts = {"q_proj": self.heads * dims.head_dim, "k_proj": kv, "v_proj": kv}
        self.qkv = FusedLinear(dims.width, {n: w for n, w in parts.items() if w}, dtype=dtype)
        if not kv_only:
            self.out = nn.Linear(dims.heads * dims.head_dim, dims.width, bias=False, dtype=dtype)
            self.gate_up = FusedLinear(dims.width, {"gate_proj": dims.mlp, "up_proj": dims.mlp}, dtype=dtype)
            self.down = nn.Linear(dims.mlp, dims.width, bias=False, dtype=dtype)

    @property
    def rotary(self) -> Rotary:
        return {"heads": self.heads, "kv_heads": self.dims.kv_heads, "head_dim": self.dims.head_dim, "theta": self.theta}

    def rotated(self, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rope(self.qkv(x), positions_BT, **self.rotary)

    def turned(self, x_BTD: Tensor, table: tuple[Tensor, Tensor], rows_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `rotated` does, by the table of the tokens' angles; without gradients. `rows_B` counts the rows."""
        (batch, tokens), dims = x_BTD.shape[:2], self.dims
        k, v = x_BTD.new_empty(2, batch, tokens, dims.kv_heads, dims.head_dim)
        return linear_rope_write(x_BTD, self.qkv.weight, table, k, v, rows_B, heads=self.heads), k, v


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """The 2 depth + 1 norms of the expert's residual stream, in the order in which a forward meets them.

    pi0.5's have scale and shift from flow time, pi0's a weight.
    """

    lines: Callable[[int], Modulation]
    """Scale, shift and gate of each norm; the gate is that of what is added after it."""
    eps: float
    shifts: Sequence[ShiftLines | None] | None = None
    """What each norm's shift adds to the product behind it, of all norms but the last; None is nothing, or no table at all."""

    def add(self, index: int, residual: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add y to the residual; return (norm `index` of the sum in y's dtype, the sum)."""
        return gated_add_ada_rms_norm(residual, y, self.lines(index - 1), self.lines(index), self.eps)

    def after(self, index: int, residual: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Do what `add` does to the product of x with a weight; the norm is in `dtype`."""
        return linear_add_ada_rms_norm(x, weight, residual, self.lines(index - 1), self.lines(index), self.eps, dtype)


RunExpert = Callable[[Tensor, ExpertNorms, PrefixKV], Tensor]


class Expert(nn.Module):
    """The transformer over suffix tokens; each layer also reads the prefix's keys and values of that layer."""

    few_rows = 64
    """Up to this many suffix tokens in all, layers run as five kernels around products of few rows."""

    def __init__(self, config: Pi0Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # The state token comes first and does not see the actions.
        self.lead = config.suffix_tokens - config.action_horizon
        self.blocks = nn.ModuleList(GemmaBlock(config.expert, config.rope_theta, dtype) for _ in range(config.expert.depth))

    def forward(self, residual_BSD: Tensor, norms: ExpertNorms, prefix: PrefixKV) -> Tensor:
        """Return the normed last hidden states in fp32, [B, S, D]."""
        tokens = torch.arange(residual_BSD.shape[1], device=residual_BSD.device)
        positions_BS = prefix.suffix_start_B[:, None] + tokens
        residual, blocks = residual_BSD, self.layers()
        if norms.shifts is not None:
            return self._folded(residual, norms, norms.shifts, prefix, positions_BS)
        x = ada_rms_norm(residual, norms.lines(0), norms.eps).to(self.dtype)
        table = rotary_table(positions_BS, blocks[0].dims.head_dim, blocks[0].theta)
        rows_B = torch.arange(residual_BSD.shape[0], device=residual_BSD.device)
        for i, block in enumerate(blocks):
            q, k, v = block.rotated(x, positions_BS) if torch.is_grad_enabled() else block.turned(x, table, rows_B)
            attended = prefix.attend(i, q, k, v, self.lead)
            x, residual = norms.after(2 * i + 1, residual, attended, block.out.weight, self.dtype)
            hidden, last = linear_geglu(x, block.gate_up.weight), i == len(blocks) - 1
            x, residual = norms.after(2 * i + 2, residual, hidden, block.down.weight, torch.float32 if last else self.dtype)
        return x

    def _folded(
        self,
        residual: Tensor,
        norms: ExpertNorms,
        shifts: Sequence[ShiftLines | None],
        prefix: PrefixKV,
        positions_BS: Tensor,
    ) -> Tensor:
        """Run the layers with norms folded as `streamed` does, so that a row is rounded where it is when it is alone."""
        blocks, eps, lines = self.layers(), norms.eps, norms.lines
        (batch, tokens), dims = residual.shape[:2], blocks[0].dims
        table = rotary_table(positions_BS, dims.head_dim, blocks[0].theta)
        rows_B = torch.arange(batch, device=residual.device)
        factor: Factor
        x, factor = folded_norm(residual, lines(0), eps, self.dtype)
        for i, block in enumerate(blocks):
            n = 2 * i
            k, v = (x.new_empty(batch, tokens, dims.kv_heads, dims.head_dim) for _ in range(2))
            q = folded_rope_write(x, factor, block.qkv.weight, shifts[n], table, k, v, rows_B, heads=block.heads)
            y = prefix.attend(i, q, k, v, self.lead)
            norm = lines(n), lines(n + 1), eps, self.dtype
            x, factor, residual = linear_add_folded_norm(y, block.out.weight, residual, *norm)
            y, last = folded_geglu(x, factor, block.gate_up.weight, shifts[n + 1]), i == len(blocks) - 1
            norm = lines(n + 1), lines(n + 2), eps, torch.float32 if last else self.dtype
            x, factor, residual = linear_add_folded_norm(y, block.down.weight, residual, *norm, not last)
        return x

    def streamed(self, stream: Stream, norms: ExpertNorms, prefix: PrefixKV, coded: Coded | None = None) -> Stream:
        """Run the same layers with norms folded into the products behind them, and sums into those before.

        The result's scaled rows are in fp32, for what comes after the last norm. `coded` are the products in e4m3, for where
        there are launches that take them.
        """
        lines = [norms.lines(i) for i in range(2 * len(self.blocks) + 1)]
        return expert_layers(stream, self._weights(), lines, prefix, self._shape(norms), norms.shifts, coded)

    def streams(self, x_BSA: Tensor, norms: ExpertNorms, prefix: PrefixKV) -> bool:
        """Tell whether `streamed` runs a call on these suffix tokens: few, or where it has launches that pay; no gradients."""
        (batch, tokens), dims = x_BSA.shape[:2], self.layers()[0].dims
        few = batch * tokens <= self.few_rows and fits_few_rows(tokens, dims.width, dims.mlp, dims.head_dim)
        runs = implementation(norm_qkv, x_BSA.device) == "triton" and self.dtype.itemsize == 2
        if not runs or torch.is_grad_enabled():
            return False
        size = batch, tokens, dims.width
        return few or chain_of(size, self.dtype, self._weights(), norms.lines(0), prefix, self._shape(norms))[0] is not None

    def _weights(self) -> list[Weights]:
        return [Weights(b.qkv.weight, b.out.weight, b.gate_up.weight, b.down.weight) for b in self.layers()]

    def _shape(self, norms: ExpertNorms) -> Shape:
        return Shape(**self.layers()[0].rotary, eps=norms.eps, lead=self.lead)

    def layers(self) -> list[GemmaBlock]:
        return [b for b in self.blocks if isinstance(b, GemmaBlock)]
