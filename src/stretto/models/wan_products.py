"""The products of one block with what writes their inputs: in the network's own precision, or in FP8.

An operand is what a product reads: a tensor, or its rows coded for FP8. What lies between operands (attention, rotation, the
ring, the residual stream) is the same in both.

Shape legend: B rows, F frames of a chunk, N tokens of a chunk, D width, H heads, d head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.core.errors import ConfigError
from stretto.layers.fp8_rows import RowFp8Linear
from stretto.layers.kernels import layer_norm, rms_norm
from stretto.layers.kernels.fp8_activation import fp8_chip
from stretto.layers.kernels.level_norm import (
    add_level_layer_norm,
    add_level_layer_norm_coded,
    level_gated_add_layer_norm,
    level_gated_add_layer_norm_coded,
    level_layer_norm,
    level_layer_norm_coded,
)
from stretto.layers.kernels.linear_activation import dense, linear_gelu
from stretto.layers.kernels.row_codes import code_rows, gelu_code_rows
from stretto.models.wan_config import WanConfig
from stretto.models.wan_net import GATE1, SCALE1, SCALE2, SHIFT1, SHIFT2, Block

Coded = tuple[Tensor, Tensor]


class Products(Protocol):
    """What a block does between its attentions. What an `x` holds is between the methods."""

    def refresh(self) -> None:
        """Follow a change of the block's weights, in place."""
        ...

    def enter(self, h_BND: Tensor, levels_BF: Tensor) -> Any:
        """Return the input of `qkv`."""
        ...

    def qkv(self, x: Any) -> Tensor: ...
    def self_out(self, attended_BND: Tensor) -> Tensor: ...
    def after_self(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Any, Tensor]:
        """Return the input of `query`, and h with y added through its gate."""
        ...

    def norm_for_query(self, h_BND: Tensor) -> Any:
        """Return the input of `query` where something else has come between."""
        ...

    def query(self, x: Any) -> Tensor:
        """Return the queries of the prompt's keys, normalised, [B, N, H, d]."""
        ...

    def cross_out(self, attended_BND: Tensor) -> Tensor: ...
    def after_cross(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Any, Tensor]:
        """Return the input of `feed_forward`, and h with y added."""
        ...

    def feed_forward(self, x: Any) -> Tensor: ...


class PlainProducts:
    """In the network's own precision."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def refresh(self) -> None:
        pass

    def enter(self, h_BND: Tensor, levels_BF: Tensor) -> Tensor:
        block = self.block
        return level_layer_norm(h_BND, block.table_L6D, levels_BF, block.eps, shift=SHIFT1, scale=SCALE1)

    def qkv(self, x: Tensor) -> Tensor:
        return _product(x, self.block.self_attn.qkv)

    def self_out(self, attended_BND: Tensor) -> Tensor:
        return _product(attended_BND, self.block.self_attn.o)

    def after_self(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Tensor, Tensor]:
        block, norm = self.block, self.block.norm3
        return level_gated_add_layer_norm(
            h_BND, y_BND, block.table_L6D, levels_BF, norm.weight, norm.bias, block.eps, gate=GATE1
        )

    def norm_for_query(self, h_BND: Tensor) -> Tensor:
        norm = self.block.norm3
        return layer_norm(h_BND, norm.weight, norm.bias, self.block.eps)

    def query(self, x: Tensor) -> Tensor:
        return _heads(self.block, _product(x, self.block.cross_attn.q))

    def cross_out(self, attended_BND: Tensor) -> Tensor:
        return _product(attended_BND, self.block.cross_attn.o)

    def after_cross(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Tensor, Tensor]:
        block = self.block
        return add_level_layer_norm(h_BND, y_BND, block.table_L6D, levels_BF, block.eps, shift=SHIFT2, scale=SCALE2)

    def feed_forward(self, x: Tensor) -> Tensor:
        first, second = self.block.ffn["0"], self.block.ffn["2"]
        return _product(linear_gelu(x, first.get_parameter("weight"), first.get_parameter("bias")), second)


class Fp8Products:
    """In e4m3, with a scale a row of the input and one an output channel of the weight.

    The coded weights stand beside the block's own, which stay.

    Raises:
        ConfigError: if the block's dtype or shapes do not suit the product.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        attn, cross = block.self_attn, block.cross_attn
        of: dict[str, nn.Module] = {"qkv": attn.qkv, "self_out": attn.o, "query": cross.q, "cross_out": cross.o}
        of |= {"up": block.ffn["0"], "down": block.ffn["2"]}
        self.layers = {
            name: RowFp8Linear(name, layer.get_parameter("weight"), layer.get_parameter("bias")) for name, layer in of.items()
        }

    def refresh(self) -> None:
        for layer in self.layers.values():
            layer.refresh()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def enter(self, h_BND: Tensor, levels_BF: Tensor) -> Coded:
        block = self.block
        return level_layer_norm_coded(h_BND, block.table_L6D, levels_BF, block.eps, shift=SHIFT1, scale=SCALE1)

    def qkv(self, x: Coded) -> Tensor:
        return self.layers["qkv"](*x)

    def self_out(self, attended_BND: Tensor) -> Tensor:
        return self.layers["self_out"](*code_rows(attended_BND))

    def after_self(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Coded, Tensor]:
        block, norm = self.block, self.block.norm3
        codes, scales, h = level_gated_add_layer_norm_coded(
            h_BND, y_BND, block.table_L6D, levels_BF, norm.weight, norm.bias, block.eps, gate=GATE1
        )
        return (codes, scales), h

    def norm_for_query(self, h_BND: Tensor) -> Coded:
        norm = self.block.norm3
        return code_rows(layer_norm(h_BND, norm.weight, norm.bias, self.block.eps))

    def query(self, x: Coded) -> Tensor:
        return _heads(self.block, self.layers["query"](*x))

    def cross_out(self, attended_BND: Tensor) -> Tensor:
        return self.layers["cross_out"](*code_rows(attended_BND))

    def after_cross(self, h_BND: Tensor, y_BND: Tensor, levels_BF: Tensor) -> tuple[Coded, Tensor]:
        block = self.block
        codes, scales, h = add_level_layer_norm_coded(
            h_BND, y_BND, block.table_L6D, levels_BF, block.eps, shift=SHIFT2, scale=SCALE2
        )
        return (codes, scales), h

    def feed_forward(self, x: Coded) -> Tensor:
        return self.layers["down"](*gelu_code_rows(self.layers["up"](*x)))


def products_of(config: WanConfig, block: Block, device: torch.device) -> Products:
    """Return the products that the config asks for; a block without weights (of another device's share) has plain ones.

    Raises:
        ConfigError: if FP8 is asked for where the device has no such product, or it does not suit the network.
    """
    if config.precision == "dtype" or block.modulation.is_meta:
        return PlainProducts(block)
    if config.precision == "fp8" and not fp8_chip(device):
        hint = "fp8-emulated gives the same numbers anywhere, slowly"
        raise ConfigError("precision", got=f"fp8 on {device}", expected="a GPU of compute capability 8.9 or more", hint=hint)
    return Fp8Products(block)


def _product(x: Tensor, layer: nn.Module) -> Tensor:
    return dense(x, layer.get_parameter("weight"), layer.get_parameter("bias"))


def _heads(block: Block, q_BND: Tensor) -> Tensor:
    attn = block.cross_attn
    return torch.unflatten(rms_norm(q_BND, attn.norm_q.weight, attn.eps, unit_offset=False), -1, (attn.heads, -1))
