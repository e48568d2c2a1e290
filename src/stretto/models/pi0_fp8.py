"""pi0 and pi0.5 with the products of vision, prefix and expert in FP8: another way over the weights of a `Pi0Net`.

What stays as it is: residual streams, norms, attention, the patch embedding, the projection of image tokens, everything
round the actions and the flow time. Where gradients are asked for (`vjp` chunking) the expert runs as it is; so it does for
batches too small to gain from FP8, but where its chain of launches runs, which has a form in e4m3 (pi0.5 on sm_90, one robot).

Shape legend: as in pi0_net.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.core.errors import ConfigError
from stretto.layers.cuda.chain import Coded, Weights
from stretto.layers.fp8 import HEADROOM, Fp8Linear, Kept, ObservedLinear, Reader
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.coded_prefix import code_factors
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.linear_rope import rotary_table
from stretto.layers.kernels.prefix_layout import PrefixLayout
from stretto.layers.kernels.prefix_stream import prefix_stream
from stretto.layers.kernels.rotate_write import rotate_write
from stretto.layers.kernels.sum_norm import Stream
from stretto.layers.linear import FusedLinear
from stretto.models.pi0_expert import ExpertNorms, GemmaBlock
from stretto.models.pi0_net import Condition, Pi0Net, PrefixArena
from stretto.models.pi0_vision import VisionBlock

Make = Callable[[str, Tensor, Tensor | None], Reader]
EXPERT_ROWS = 400
"""From this many suffix tokens in a batch on, the expert runs in FP8. On an H200 ten steps of pi0.5 take 12.3 ms either way at
200 tokens, and 29.5 against 31.8 ms at 1,600: below, launches and reading weights take longer than to multiply."""


class Readers(NamedTuple):
    """The linear layers of one block."""

    qkv: Reader
    out: Reader
    up: Reader
    """Gate and up, in a Gemma block."""
    down: Reader


class Fp8Net:
    """Runs the stages of a policy with the layers that `make` puts in place of its products.

    Weights belong to `net`; call `refresh` after they have changed.
    """

    def __init__(self, net: Pi0Net, make: Make, *, expert_rows: int = EXPERT_ROWS, chain: bool = True) -> None:
        self.net, self.config, self.dtype = net, net.config, net.dtype
        self.expert_rows = expert_rows
        self.readers = {name: make(name, weight_NK, bias_N) for name, weight_NK, bias_N in _linears(net)}
        self._vision = [self._block(f"vision.{i}") for i in range(len(net.vision.blocks))]
        # Of the prefix's last layer only keys and values are wanted.
        self._prefix = [self._block(f"prefix.{i}") for i in range(len(net.prefix.blocks) - 1)]
        self._last_kv = self.readers[f"prefix.{len(self._prefix)}.qkv"]
        self._expert = [self._block(f"expert.{i}") for i in range(len(net.expert.blocks))]
        self._by_L3 = torch.ones(len(self._prefix), 3, device=net.prefix.embed.device)
        self.coded = _coded(net, self._expert) if chain else None
        self.refresh()

    def _block(self, at: str) -> Readers:
        return Readers(*(self.readers[f"{at}.{field}"] for field in Readers._fields))

    @property
    def table(self) -> Tensor:
        return self.net.table

    def refresh(self) -> None:
        for reader in self.readers.values():
            reader.refresh()
        for line, norm, block in zip(self._by_L3, self.net.prefix.attention_norms, self.net.prefix.blocks, strict=False):
            assert isinstance(block, GemmaBlock)
            dims = self.config.language
            line.copy_(code_factors(block.qkv.weight.detach(), 1.0 + norm.detach(), dims.heads, dims.kv_heads))
        if self.coded is not None:
            for line, its in zip(self.coded.scales_L6, self._expert, strict=True):
                line.copy_(torch.stack(_scales(its)))

    def prefix_layout(self, image_mask_BC: Tensor, token_count_B: Tensor, prompt: int) -> PrefixLayout:
        return self.net.prefix_layout(image_mask_BC, token_count_B, prompt)

    def tabled(self, steps_B: Tensor) -> Condition:
        return self.net.tabled(steps_B)

    def vision(self, images_BCRR3: Tensor) -> Tensor:
        """Return image tokens [B, I, D], as `VisionTower`."""
        tower, eps = self.net.vision, self.net.vision.eps
        blocks = [b for b in tower.blocks if isinstance(b, VisionBlock)]
        readers = self._vision
        first = blocks[0].norm1
        # Positions are a stream of fewer axes: of every camera.
        stream = Stream(tower.position, (tower.patches(images_BCRR3),))
        x, stream = readers[0].qkv.layer_normed(stream, first.weight, first.bias, eps)
        for i, (block, its) in enumerate(zip(blocks, readers, strict=True)):
            qkv = its.qkv(x)
            q, k, v = qkv.view(*qkv.shape[:-1], 3, block.heads, -1).unbind(2)
            stream = its.out.onto(stream, its.out.attended(q, k, v))
            x, stream = its.up.layer_normed(stream, block.norm2.weight, block.norm2.bias, eps, store=False)
            stream = its.down.onto(stream, its.down.gelu_of(its.up, x))
            if i + 1 < len(blocks):
                after = blocks[i + 1].norm1
                x, stream = readers[i + 1].qkv.layer_normed(stream, after.weight, after.bias, eps)
        x, _ = sum_layer_norm(*stream, tower.norm.weight, tower.norm.bias, eps, dtype=self.dtype, store=False)
        tokens: Tensor = tower.project(x)
        return tokens.reshape(images_BCRR3.shape[0], -1, tokens.shape[-1])

    def prefix(self, image_tokens_BID: Tensor, tokens_BL: Tensor, layout: PrefixLayout, arena: PrefixArena) -> None:
        """Write keys and values of every layer to the arena, as `Prefix`."""
        prefix, eps, dims = self.net.prefix, self.net.prefix.eps, self.config.language
        stream = Stream(prefix_stream(image_tokens_BID, tokens_BL, prefix.embed))
        mask_BP = layout.mask_BP
        table = rotary_table(layout.positions_BP, dims.head_dim, self.config.rope_theta)
        takers = [*(its.qkv for its in self._prefix), self._last_kv]
        x, stream = takers[0].rms_normed(stream, prefix.attention_norms[0], eps)
        for i, its in enumerate(self._prefix):
            k, v = arena.layer(i, mask_BP.shape[1])
            keep = Kept(table, k, v, arena.slots_B, self._by_L3[i])
            stream = its.out.onto(stream, its.out.prefix_attended(its.qkv(x), keep, mask_BP, dims.heads))
            x, stream = its.up.rms_normed(stream, prefix.mlp_norms[i], eps, store=False)
            stream = its.down.onto(stream, its.down.geglu_of(its.up, x))
            x, stream = takers[i + 1].rms_normed(stream, prefix.attention_norms[i + 1], eps)
        rotate_write(self._last_kv(x), table, *arena.layer(len(self._prefix), mask_BP.shape[1]), arena.slots_B, heads=0)

    def velocity(self, x_BHA: Tensor, condition: Condition, prefix: PrefixKV, state_BW: Tensor | None = None) -> Tensor:
        """Return the flow's velocity, as `Pi0Net.velocity`."""
        suffix_rows = x_BHA.shape[0] * self.config.suffix_tokens
        if torch.is_grad_enabled() or suffix_rows < self.expert_rows:
            return self.net.velocity(x_BHA, condition, prefix, state_BW, coded=self.coded)
        return self.net.velocity(x_BHA, condition, prefix, state_BW, self.expert)

    def expert(self, residual_BSD: Tensor, norms: ExpertNorms, prefix: PrefixKV) -> Tensor:
        """Return the normed last hidden states in fp32, as `Expert`."""
        dims, readers, norm, eps = self.config.expert, self._expert, norms.lines, norms.eps
        theta = self.config.rope_theta
        batch, tokens = residual_BSD.shape[:2]
        positions_BS = prefix.suffix_start_B[:, None] + torch.arange(tokens, device=residual_BSD.device)
        table, rows_B = rotary_table(positions_BS, dims.head_dim, theta), torch.arange(batch, device=residual_BSD.device)
        x, residual = readers[0].qkv.ada_normed(residual_BSD, None, None, norm(0), eps)
        for i, its in enumerate(readers):
            qkv = its.qkv(x)
            k, v = qkv.new_empty(2, batch, tokens, dims.kv_heads, dims.head_dim)
            q = rotate_write(qkv, table, k, v, rows_B, heads=dims.heads)
            y = its.out(its.out.suffix_attended(prefix, i, q, k, v, self.net.expert.lead))
            x, residual = its.up.ada_normed(residual, y, norm(2 * i), norm(2 * i + 1), eps)
            y = its.down(its.down.geglu_of(its.up, x))
            if i + 1 < len(readers):
                x, residual = readers[i + 1].qkv.ada_normed(residual, y, norm(2 * i + 1), norm(2 * i + 2), eps)
        return norms.add(2 * len(readers), residual, y.float())[0]


def _coded(net: Pi0Net, expert: list[Readers]) -> Coded | None:
    """Return the expert's products as its chain of launches takes them, if all of them are in FP8 and shifts have tables."""
    if net.config.family != "pi05" or not all(isinstance(reader, Fp8Linear) for its in expert for reader in its):
        return None
    weights = [Weights(*(reader.codes_NK for reader in its if isinstance(reader, Fp8Linear))) for its in expert]
    scales = torch.empty(len(expert), 6, dtype=torch.float32, device=net.table.device)
    return Coded(weights, scales, net.qkv_shifts, net.gate_up_shifts)


def _scales(its: Readers) -> list[Tensor]:
    """A line of `Coded.scales_L6`. Rows of the stream are coded by their own size, not by a calibration."""
    qkv, out, up, down = (reader for reader in its if isinstance(reader, Fp8Linear))
    by_out, by_down = (reader.scales[0] * reader.scales[1] for reader in (out, down))
    return [qkv.scales[1], out.multiplier[0], by_out, up.scales[1], down.multiplier[0], by_down]


def observed(net: Pi0Net) -> tuple[Fp8Net, Mapping[str, ObservedLinear]]:
    """Return a network that runs as it is and notes the largest input of every layer that FP8 would take."""
    noted: dict[str, ObservedLinear] = {}

    def make(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        noted[name] = layer = ObservedLinear(name, weight_NK, bias_N)
        return layer

    return Fp8Net(net, make, expert_rows=0), noted


def quantised(
    net: Pi0Net,
    input_max: Mapping[str, float],
    *,
    headroom: float = HEADROOM,
    expert_rows: int = EXPERT_ROWS,
    chain: bool = True,
) -> Fp8Net:
    """Return a network whose products run in FP8, with input scales from a calibration.

    From `expert_rows` suffix tokens on the expert runs in FP8 as separate kernels; below, as a chain of launches, if `chain`.

    Raises:
        ConfigError: if a layer's largest input is missing, not of this network, or not a positive number.
    """
    wanted = {name for name, _, _ in _linears(net)}
    for name in sorted(wanted ^ set(input_max)):
        known = name in wanted
        expected = "the largest input of every layer" if known else "only layers of this network"
        raise ConfigError(f"fp8 scale of {name}", got="none" if known else input_max[name], expected=expected)

    def make(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        return Fp8Linear(name, weight_NK, bias_N, input_max[name], headroom)

    return Fp8Net(net, make, expert_rows=expert_rows, chain=chain)


def _linears(net: Pi0Net) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, weight and bias of every product that FP8 takes."""
    for part, blocks in (("vision", net.vision.blocks), ("prefix", net.prefix.blocks), ("expert", net.expert.blocks)):
        for i, block in enumerate(blocks):
            layers: dict[str, FusedLinear | nn.Linear] = {}
            if isinstance(block, VisionBlock):
                layers = {"qkv": block.qkv, "out": block.out, "up": block.up, "down": block.down}
            elif isinstance(block, GemmaBlock):
                layers = {"qkv": block.qkv}
                layers |= {"out": block.out, "up": block.gate_up, "down": block.down} if block.heads else {}
            for field, layer in layers.items():
                yield f"{part}.{i}.{field}", layer.weight, layer.bias
