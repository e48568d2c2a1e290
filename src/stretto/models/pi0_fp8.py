"""pi0 and pi0.5 with the products of vision, prefix and expert in FP8: another way over the weights of a `Pi0Net`.

What stays as it is: residual streams, norms, attention, the patch embedding, the projection of image tokens, everything
round the actions and the flow time. Where gradients are asked for (`vjp` chunking) the expert runs as it is; so it does for
batches too small to gain from FP8. On sm_90 none of pi0.5 is: one robot's chain of launches has a form in e4m3, and batches
run kernels that round where it does.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.core.errors import ConfigError
from stretto.layers.cuda import added
from stretto.layers.cuda.chain import Coded, Weights
from stretto.layers.fp8 import HEADROOM, Fp8Linear, Kept, ObservedLinear, Reader
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.coded_prefix import code_factors
from stretto.layers.kernels.fold import ShiftLines
from stretto.layers.kernels.folded_linear import folded_geglu, folded_rope_write
from stretto.layers.kernels.fp8_folded_norm import folded_launches, fp8_folded_norm, fp8_linear_add_folded_norm
from stretto.layers.kernels.fp8_linear import fp8_linear
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.linear_rope import rotary_table
from stretto.layers.kernels.prefix_layout import PrefixLayout
from stretto.layers.kernels.prefix_stream import prefix_stream
from stretto.layers.kernels.rotate_write import rotate_write
from stretto.layers.kernels.sum_norm import Stream
from stretto.layers.linear import FusedLinear
from stretto.layers.part import part
from stretto.models.pi0_expert import ExpertNorms, GemmaBlock
from stretto.models.pi0_net import Condition, Pi0Net, PrefixArena
from stretto.models.pi0_vision import VisionBlock

Make = Callable[[str, Tensor, Tensor | None], Reader]
EXPERT_ROWS = 200
"""From this many suffix tokens in a batch on, the expert runs in FP8 by whole norms in e4m3. On an H200 ten steps of pi0.5 take
9.5 ms at 200 tokens, and 10.7 in bf16: below, launches and reading weights take longer than to multiply."""
FOLDED_ROWS = 51
"""The same by folded norms, where their products have launches of their own: all but one robot of pi0.5, which has a chain."""
MOST_FOLDED_ROWS = added.MOST_ROWS
"""Up to here folded norms are faster than whole ones, whose products are by cuBLAS."""


class Readers(NamedTuple):
    """The linear layers of one block."""

    qkv: Reader
    out: Reader
    up: Reader
    """Gate and up, in a Gemma block."""
    down: Reader


class CodedReaders(NamedTuple):
    """The same of a block of the expert whose products are all in FP8."""

    qkv: Fp8Linear
    out: Fp8Linear
    up: Fp8Linear
    down: Fp8Linear


class Turns(NamedTuple):
    """How queries and keys are rotated: a table of angles, and the rows that it is for."""

    table: tuple[Tensor, Tensor]
    rows_B: Tensor


class Fp8Net:
    """Runs the stages of a policy with the layers that `make` puts in place of its products.

    Weights belong to `net`; call `refresh` after they have changed.
    """

    def __init__(self, net: Pi0Net, make: Make, *, expert_rows: int | None = None, fold: bool = True) -> None:
        self.net, self.config, self.dtype = net, net.config, net.dtype
        self.readers = {name: make(name, weight_NK, bias_N) for name, weight_NK, bias_N in _linears(net)}
        self._vision = [self._block(f"vision.{i}") for i in range(len(net.vision.blocks))]
        # Of the prefix's last layer only keys and values are wanted.
        self._prefix = [self._block(f"prefix.{i}") for i in range(len(net.prefix.blocks) - 1)]
        self._last_kv = self.readers[f"prefix.{len(self._prefix)}.qkv"]
        self._expert = [self._block(f"expert.{i}") for i in range(len(net.expert.blocks))]
        self._by_L3 = torch.ones(len(self._prefix), 3, device=net.prefix.embed.device)
        self._coded_expert = _in_fp8(self._expert) if net.config.family == "pi05" and fold else []
        self.coded = _coded(net, self._coded_expert) if self._coded_expert else None
        self.folds = self.coded is not None and folded_launches(net.table.device)
        self.expert_rows = (FOLDED_ROWS if self.folds else EXPERT_ROWS) if expert_rows is None else expert_rows
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
            for line, its in zip(self.coded.scales_L6, self._coded_expert, strict=True):
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
        # The chain of one robot is made for a whole device.
        least = 1 if part() and self.expert_rows == FOLDED_ROWS else self.expert_rows
        if torch.is_grad_enabled() or suffix_rows < least:
            return self.net.velocity(x_BHA, condition, prefix, state_BW, coded=self.coded)
        return self.net.velocity(x_BHA, condition, prefix, state_BW, self.expert)

    def expert(self, residual_BSD: Tensor, norms: ExpertNorms, prefix: PrefixKV) -> Tensor:
        """Return the normed last hidden states in fp32, as `Expert`."""
        dims, theta, device = self.config.expert, self.config.rope_theta, residual_BSD.device
        batch, tokens = residual_BSD.shape[:2]
        positions_BS = prefix.suffix_start_B[:, None] + torch.arange(tokens, device=device)
        turns = Turns(rotary_table(positions_BS, dims.head_dim, theta), torch.arange(batch, device=device))
        if not self.folds or norms.shifts is None or batch * tokens > MOST_FOLDED_ROWS:
            return self._calibrated(residual_BSD, norms, prefix, turns)
        return self._folded(residual_BSD, norms, norms.shifts, prefix, turns)

    def _calibrated(self, residual: Tensor, norms: ExpertNorms, prefix: PrefixKV, turns: Turns) -> Tensor:
        """Run the layers with whole norms in e4m3, by their calibration: there is no table of shifts' products."""
        dims, readers, norm, eps = self.config.expert, self._expert, norms.lines, norms.eps
        x, residual = readers[0].qkv.ada_normed(residual, None, None, norm(0), eps)
        for i, its in enumerate(readers):
            qkv = its.qkv(x)
            k, v = qkv.new_empty(2, *qkv.shape[:2], dims.kv_heads, dims.head_dim)
            q = rotate_write(qkv, turns.table, k, v, turns.rows_B, heads=dims.heads)
            y = its.out(its.out.suffix_attended(prefix, i, q, k, v, self.net.expert.lead))
            x, residual = its.up.ada_normed(residual, y, norm(2 * i), norm(2 * i + 1), eps)
            y = its.down(its.down.geglu_of(its.up, x))
            if i + 1 < len(readers):
                x, residual = readers[i + 1].qkv.ada_normed(residual, y, norm(2 * i + 1), norm(2 * i + 2), eps)
        return norms.add(2 * len(readers), residual, y.float())[0]

    def _folded(
        self, residual: Tensor, norms: ExpertNorms, shifts: Sequence[ShiftLines | None], prefix: PrefixKV, turns: Turns
    ) -> Tensor:
        """Run the layers with norms folded as the chain does in e4m3, so that a row is rounded where it is when it is alone."""
        dims, norm, heads, last = self.config.expert, norms.lines, self.config.expert.heads, len(self._coded_expert) - 1
        x, factor, residual = fp8_folded_norm(residual, norm(0), norms.eps)
        for i, (qkv, out, up, down) in enumerate(self._coded_expert):
            n = 2 * i
            k, v = residual.new_empty(2, *residual.shape[:2], dims.kv_heads, dims.head_dim, dtype=self.dtype)
            factor = factor._replace(by=qkv.scales[1])
            q = folded_rope_write(x, factor, qkv.codes_NK, shifts[n], turns.table, k, v, turns.rows_B, heads=heads)
            y = out.suffix_attended(prefix, i, q, k, v, self.net.expert.lead)
            product, norms_of = (y, out.codes_NK, out.scales, residual, factor), (norm(n), norm(n + 1))
            x, factor, residual = fp8_linear_add_folded_norm(*product, *norms_of)
            factor = factor._replace(by=up.scales[1])
            y = folded_geglu(x, factor, up.codes_NK, shifts[n + 1], down.multiplier)
            if i == last:
                break
            product, norms_of = (y, down.codes_NK, down.scales, residual, factor), (norm(n + 1), norm(n + 2))
            x, factor, residual = fp8_linear_add_folded_norm(*product, *norms_of)
        return norms.add(2 * last + 2, residual, fp8_linear(y, down.codes_NK, None, down.scales, torch.float32))[0]


def _in_fp8(expert: list[Readers]) -> list[CodedReaders]:
    """Return the expert's layers if all of them are in FP8, else none."""
    found = [tuple(reader for reader in its if isinstance(reader, Fp8Linear)) for its in expert]
    return [CodedReaders(*its) for its in found] if all(len(its) == len(Readers._fields) for its in found) else []


def _coded(net: Pi0Net, expert: list[CodedReaders]) -> Coded:
    """Return the expert's products as its chain of launches takes them; shifts have tables."""
    weights = [Weights(*(reader.codes_NK for reader in its)) for its in expert]
    scales = torch.empty(len(expert), 6, dtype=torch.float32, device=net.table.device)
    return Coded(weights, scales, net.qkv_shifts, net.gate_up_shifts)


def _scales(its: CodedReaders) -> list[Tensor]:
    """A line of `Coded.scales_L6`. Rows of the stream are coded by their own size, not by a calibration."""
    by_out, by_down = (reader.scales[0] * reader.scales[1] for reader in (its.out, its.down))
    return [its.qkv.scales[1], its.out.multiplier[0], by_out, its.up.scales[1], its.down.multiplier[0], by_down]


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
    expert_rows: int | None = None,
    fold: bool = True,
) -> Fp8Net:
    """Return a network whose products run in FP8, with input scales from a calibration.

    From `expert_rows` suffix tokens on, where FP8 pays by default, the expert runs in FP8 as separate kernels; one robot by its
    chain of launches. With `fold` norms of pi0.5's expert are folded into its products; without, there is no chain either.

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

    return Fp8Net(net, make, expert_rows=expert_rows, fold=fold)


def _linears(net: Pi0Net) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, weight and bias of every product that FP8 takes."""
    for name, blocks in (("vision", net.vision.blocks), ("prefix", net.prefix.blocks), ("expert", net.expert.blocks)):
        for i, block in enumerate(blocks):
            layers: dict[str, FusedLinear | nn.Linear] = {}
            if isinstance(block, VisionBlock):
                layers = {"qkv": block.qkv, "out": block.out, "up": block.up, "down": block.down}
            elif isinstance(block, GemmaBlock):
                layers = {"qkv": block.qkv}
                layers |= {"out": block.out, "up": block.gate_up, "down": block.down} if block.heads else {}
            for field, layer in layers.items():
                yield f"{name}.{i}.{field}", layer.weight, layer.bias
