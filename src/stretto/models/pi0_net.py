"""The network of pi0 and pi0.5: an image tower (pi0_vision), a Gemma prefix whose keys and values are kept, an expert.

One device, no state. Weights of norms, of the action, state and time projections, all residual streams, and actions
themselves are fp32; the rest is in the compute dtype.

Shape legend: B rows, C cameras, R pixels, I image tokens of all cameras, L prompt tokens, P = I + L prefix tokens,
H action horizon, A action width, S suffix tokens, D width, K key/value heads, d head size, N norms of the expert.
Source: pi0 (arXiv 2410.24164), pi0.5 (arXiv 2504.16054); checked against LeRobot 0.6.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from stretto.layers.cuda.chain import Coded
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import PrefixKV, attention, prefix_attention
from stretto.layers.kernels.fold import ShiftLines, shifted_products
from stretto.layers.kernels.linear_activation import linear_geglu
from stretto.layers.kernels.linear_rms_norm import linear_add_rms_norm
from stretto.layers.kernels.linear_rope import linear_rope_write, rotary_table
from stretto.layers.kernels.prefix_layout import PrefixLayout, prefix_layout
from stretto.layers.kernels.prefix_stream import prefix_stream
from stretto.layers.kernels.rms_norm import sum_rms_norm
from stretto.layers.kernels.stream import open_stream
from stretto.layers.kernels.stream_ends import enter_stream, leave_stream
from stretto.layers.kernels.sum_norm import Stream
from stretto.layers.linear import FusedLinear
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_expert import Expert, ExpertNorms, GemmaBlock, RunExpert
from stretto.models.pi0_vision import VisionTower

__all__ = ["Condition", "Expert", "ExpertNorms", "GemmaBlock", "Pi0Net", "Prefix", "PrefixArena", "PrefixKV", "euler_schedule"]


@dataclass(frozen=True, slots=True)
class Condition:
    """What the expert knows of flow time: lines of a table, by row or token (`rows`), or given directly."""

    table: Tensor  # pi0.5 [..., N, 3 D]: scale, shift, gate of every norm; pi0 [..., D]: share of the time in the time MLP
    rows: Tensor | None = None
    shifts: tuple[Tensor, ...] = ()
    """pi0.5, beside a table: what its shifts add to the expert's two products behind norms, each fp32 [lines, layers, N]."""


class KeepKV(Protocol):
    """Takes the keys and values [B, P, K, d] of one layer."""

    def __call__(self, layer: int, k_BPKd: Tensor, v_BPKd: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class PrefixArena:
    """Takes keys and values into slot `slots_B[b]` of row b. Kernels that know it write there and read from there."""

    k_SNPKd: Tensor  # [slots, layers, P, K, d]
    v_SNPKd: Tensor
    slots_B: Tensor

    def __call__(self, layer: int, k_BPKd: Tensor, v_BPKd: Tensor) -> None:
        tokens = k_BPKd.shape[1]
        self.k_SNPKd[:, layer, :tokens].index_copy_(0, self.slots_B, k_BPKd)
        self.v_SNPKd[:, layer, :tokens].index_copy_(0, self.slots_B, v_BPKd)

    def layer(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return one layer's [slots, P, K, d] of the first tokens."""
        return self.k_SNPKd[:, layer, :tokens], self.v_SNPKd[:, layer, :tokens]


class Prefix(nn.Module):
    """Gemma over image and prompt tokens. Only keys and values are wanted, so the last layer ends with them."""

    def __init__(self, config: Pi0Config, dtype: torch.dtype) -> None:
        super().__init__()
        dims = config.language
        self.eps = config.norm_eps
        self.embed = nn.Parameter(torch.empty(config.vocab_size, dims.width, dtype=dtype))
        self.blocks = nn.ModuleList(
            GemmaBlock(dims, config.rope_theta, dtype, kv_only=i == dims.depth - 1) for i in range(dims.depth)
        )
        self.attention_norms = nn.ParameterList(torch.empty(dims.width) for _ in range(dims.depth))
        self.mlp_norms = nn.ParameterList(torch.empty(dims.width) for _ in range(dims.depth - 1))

    def forward(self, image_tokens_BID: Tensor, tokens_BL: Tensor, layout: PrefixLayout, keep: KeepKV) -> None:
        # Sums over layers are in fp32: rounding them to bf16 is most of what would differ between batch sizes.
        stream = Stream(prefix_stream(image_tokens_BID, tokens_BL, self.embed))
        mask_BP, positions_BP = layout.mask_BP, layout.positions_BP
        blocks = [b for b in self.blocks if isinstance(b, GemmaBlock)]
        table = rotary_table(positions_BP, blocks[0].dims.head_dim, blocks[0].theta)
        x, _ = sum_rms_norm(*stream, self.attention_norms[0], self.eps, dtype=self.embed.dtype)
        for i, block in enumerate(blocks):
            last = i == len(blocks) - 1
            if isinstance(keep, PrefixArena):
                k, v = keep.layer(i, mask_BP.shape[1])
                q = linear_rope_write(x, block.qkv.weight, table, k, v, keep.slots_B, heads=block.heads)
                attended = q if last else prefix_attention(q, k, v, keep.slots_B, key_mask_BP=mask_BP)
            else:
                q, k, v = block.rotated(x, positions_BP)
                keep(i, k, v)
                attended = q if last else attention(q, k, v, key_mask_BN=mask_BP)
            if last:
                break
            attended, norm = attended.flatten(2), self.mlp_norms[i]
            x, stream = linear_add_rms_norm(attended, block.out.weight, *stream, norm, self.eps, store=False)
            y, norm = linear_geglu(x, block.gate_up.weight), self.attention_norms[i + 1]
            x, stream = linear_add_rms_norm(y, block.down.weight, *stream, norm, self.eps)


class TimeCondition(nn.Module):
    """Flow time as the expert takes it; differentiable, and tabled for the fixed denoise steps."""

    def __init__(self, config: Pi0Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, norms = config.expert.width, 2 * config.expert.depth + 1
        self.width, self.periods, self.ada = width, (config.min_period, config.max_period), config.family == "pi05"
        if self.ada:
            self.mlp_in, self.mlp_out = nn.Linear(width, width), nn.Linear(width, width)
            self.dense = FusedLinear(width, {str(i): 3 * width for i in range(norms)}, bias=True, dtype=dtype)
        else:
            self.mlp_in = nn.Linear(2 * width, width)

    def forward(self, t: Tensor) -> Condition:
        """Return the condition for t of any shape [...], fp32, 1 is noise."""
        code = self.code(t)
        if not self.ada:
            # The first layer of the action-time MLP is linear in (action, time): this is the time's share.
            return Condition(linear(code, self.mlp_in.weight[:, self.width :], self.mlp_in.bias))
        hidden = silu(self.mlp_out(silu(self.mlp_in(code))))
        views = self.dense.views()
        lines = [
            linear(hidden, views[f"{i}.weight"].float(), views[f"{i}.bias"].float())
            for i in range(len(self.dense.out_features))
        ]
        return Condition(torch.stack(lines, dim=-2))

    def code(self, t: Tensor) -> Tensor:
        """Return sine and cosine of t at geometrically spaced periods, [..., D] in fp32."""
        low, high = self.periods
        spread = torch.linspace(0.0, 1.0, self.width // 2, dtype=torch.float64, device=t.device)
        angles = t.double()[..., None] * (2 * math.pi / (low * (high / low) ** spread))
        return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class Pi0Net(nn.Module):
    """All weights of one policy, and the pure functions over them."""

    table: Tensor
    qkv_shifts: Tensor
    gate_up_shifts: Tensor

    def __init__(self, config: Pi0Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        width, norms = config.expert.width, 2 * config.expert.depth + 1
        self.vision = VisionTower(config, dtype)
        self.prefix = Prefix(config, dtype)
        self.expert = Expert(config, dtype)
        self.time = TimeCondition(config, dtype)
        self.action_in = nn.Linear(config.action_dim, width)
        self.action_out = nn.Linear(width, config.action_dim)
        if config.family == "pi0":
            self.state_in = nn.Linear(config.state_dim, width)
            self.time_mlp_out = nn.Linear(width, width)
            self.norms = nn.ParameterList(torch.empty(width) for _ in range(norms))
        line = (norms, 3 * width) if config.family == "pi05" else (width,)
        self.register_buffer("table", torch.empty(config.denoise_steps + 1, *line), persistent=False)
        if config.family == "pi05":
            for name, columns in self._shifted():
                shape = config.denoise_steps + 1, config.expert.depth, columns
                self.register_buffer(name, torch.empty(shape, dtype=torch.float32), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the time table in place: one line a denoise step, and a last one for t=0 (actions already known).

        So it does with what its shifts add to products, and with what the image tower derives from its weights.
        """
        self.vision.refresh()
        times = [t for t, _ in euler_schedule(self.config.denoise_steps)]
        self.table.copy_(self.time(torch.tensor([*times, 0.0], device=self.table.device)).table)
        if self.config.family == "pi05":
            width = self.config.expert.width
            for i, block in enumerate(self.expert.layers()):
                for j, (table, weight) in enumerate(zip(self._shifts(), (block.qkv.weight, block.gate_up.weight), strict=True)):
                    table[:, i] = shifted_products(self.table[:, 2 * i + j, width : 2 * width], weight)

    def _shifted(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Name and columns of the products behind the norms of one layer of the expert."""
        dims = self.config.expert
        return ("qkv_shifts", (dims.heads + 2 * dims.kv_heads) * dims.head_dim), ("gate_up_shifts", 2 * dims.mlp)

    def _shifts(self) -> tuple[Tensor, ...]:
        return (self.qkv_shifts, self.gate_up_shifts) if self.config.family == "pi05" else ()

    def prefix_layout(self, image_mask_BC: Tensor, token_count_B: Tensor, prompt: int) -> PrefixLayout:
        """Return where tokens of prompts padded to `prompt` tokens and of their images stand."""
        return prefix_layout(image_mask_BC, token_count_B, self.config.tokens_per_camera, prompt)

    def velocity(
        self,
        x_BHA: Tensor,
        condition: Condition,
        prefix: PrefixKV,
        state_BW: Tensor | None = None,
        expert: RunExpert | None = None,
        coded: Coded | None = None,
    ) -> Tensor:
        """Return the flow's velocity (noise minus actions) in fp32, [B, H, A].

        Args:
            condition: from the table by denoise step (`tabled`), or `self.time(t)` for t [B] or one t a token [B, H].
            state_BW: the robot's state, for pi0.
            expert: runs in place of `self.expert`.
            coded: the expert's products in e4m3, for few rows where there are launches that take them.
        """
        norms = self.norms_of(condition)
        if expert is None and self.expert.streams(x_BHA, norms, prefix):
            return self._streamed_velocity(x_BHA, condition, norms, prefix, state_BW, coded)
        ada = self.config.family == "pi05"
        x = self.action_in(x_BHA.float()) if ada else self._suffix(x_BHA, condition, state_BW)
        hidden_BSD = (expert or self.expert)(x, norms, prefix)
        out: Tensor = self.action_out(hidden_BSD[:, -self.config.action_horizon :])
        return out

    def norms_of(self, condition: Condition) -> ExpertNorms:
        """Return the norms of the expert at a flow time."""
        table, rows, eps = condition.table, condition.rows, self.config.norm_eps
        depth, shifts = self.config.expert.depth, None
        if self.config.family == "pi0":
            none = None if rows is None else [None] * (2 * depth)
            return ExpertNorms(lambda i: Modulation(self.norms[i][None], scale_only=True), eps, none)
        if rows is not None and condition.shifts:
            # Norm 2 i is ahead of layer i's queries, keys and values, norm 2 i + 1 ahead of its gate and up.
            shifts = [ShiftLines(of[:, i], rows) for i in range(depth) for of in condition.shifts]
        return ExpertNorms(lambda i: Modulation(table[..., i, :], rows), eps, shifts)

    def _suffix(self, x_BHA: Tensor, condition: Condition, state_BW: Tensor | None) -> Tensor:
        """Return the suffix tokens of pi0: the state, then actions mixed with flow time."""
        assert state_BW is not None, "pi0 reads the state in every denoise step"
        share = condition.table if condition.rows is None else condition.table[condition.rows]
        share = share[:, None] if share.dim() == 2 else share
        x = self.action_in(x_BHA.float())
        x = self.time_mlp_out(silu(linear(x, self.time.mlp_in.weight[:, : x.shape[-1]]) + share))
        return torch.cat((self.state_in(state_BW.float())[:, None], x), dim=1)

    def _streamed_velocity(
        self,
        x_BHA: Tensor,
        condition: Condition,
        norms: ExpertNorms,
        prefix: PrefixKV,
        state_BW: Tensor | None,
        coded: Coded | None = None,
    ) -> Tensor:
        first, last = norms.lines(0), norms.lines(2 * self.config.expert.depth)
        if self.config.family == "pi05":
            stream = enter_stream(x_BHA.float(), self.action_in.weight, self.action_in.bias, first, self.dtype)
        else:
            stream = open_stream(self._suffix(x_BHA, condition, state_BW), first, self.dtype)
        stream = self.expert.streamed(stream, norms, prefix, coded)
        out, read = self.action_out, (stream.scaled_BRD, stream.squares_MP)
        return leave_stream(*read, last, out.weight, out.bias, norms.eps)[:, -self.config.action_horizon :]

    def tabled(self, steps_B: Tensor) -> Condition:
        """Return the condition of each row's denoise step. A [B, H] index gives one a token; `denoise_steps` means t=0."""
        return Condition(self.table, steps_B, self._shifts())

    def train_forward(
        self,
        images_BCRR3: Tensor,
        image_mask_BC: Tensor,
        tokens_BL: Tensor,
        token_count_B: Tensor,
        x_BHA: Tensor,
        t: Tensor,
        state_BW: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity [B, H, A] with gradients to every weight in use.

        Args:
            t: flow time, [B], or [B, H] where some leading actions are given clean (t=0).
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def keep(layer: int, k_BPKd: Tensor, v_BPKd: Tensor) -> None:
            keys.append(k_BPKd)
            values.append(v_BPKd)

        layout = self.prefix_layout(image_mask_BC, token_count_B, tokens_BL.shape[1])
        self.prefix(self.vision(images_BCRR3), tokens_BL, layout, keep)
        slots_B = torch.arange(x_BHA.shape[0], device=x_BHA.device)
        prefix = PrefixKV(torch.stack(keys, 1), torch.stack(values, 1), slots_B, *layout[:3])
        return self.velocity(x_BHA, self.time(t), prefix, state_BW)


def euler_schedule(steps: int) -> tuple[tuple[float, float], ...]:
    """Return (t, dt) of each denoise step: from t=1 (noise) towards t=0 (actions), x += dt * velocity."""
    dt = -1.0 / steps
    return tuple((1.0 + i * dt, dt) for i in range(steps))
