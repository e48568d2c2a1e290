"""Attention whose result is written in e4m3 for an FP8 product: by the kernel that attends where it can, else by a pass.

Multiplier as in fp8_activation. Shape legend: as in attention.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels import short_attention as short
from stretto.layers.kernels import tma_attention as tma
from stretto.layers.kernels.attention import (
    attention,
    attention_reference,
    chosen,
    prefix_attention,
    prefix_attention_reference,
    prefix_rule,
    warps_of_short,
)
from stretto.layers.kernels.fp8_activation import fp8_chip, to_fp8, to_fp8_reference
from stretto.layers.kernels.split_attention import fits
from stretto.layers.kernels.suffix_attention import attend_to_suffix, named_keys


def attention_fp8_reference(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, multiplier: Tensor) -> Tensor:
    """Return `attention` of fresh keys in e4m3."""
    return to_fp8_reference(attention_reference(q_BTHd, k_BNKd, v_BNKd), multiplier)


def prefix_attention_fp8_reference(
    q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, mask_BP: Tensor, multiplier: Tensor
) -> Tensor:
    """Return `prefix_attention` of the keys of a slot in e4m3."""
    attended = prefix_attention_reference(q_BTHd, k_arena_SPKd, v_arena_SPKd, slots_B, key_mask_BP=mask_BP)
    return to_fp8_reference(attended, multiplier)


def attention_fp8_triton(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, multiplier: Tensor) -> Tensor:
    choice = chosen("attention", q_BTHd, k_BNKd, v_BNKd, None)
    if choice is not None and choice["impl"] == "tma" and _describable(q_BTHd):
        return tma.tma_attention(q_BTHd, k_BNKd, v_BNKd, tma.Tiling.of(choice), multiplier=multiplier)
    if (choice is None or choice["impl"] == "short") and short.takes(q_BTHd, k_BNKd, v_BNKd):
        return short.short_attention(q_BTHd, k_BNKd, v_BNKd, warps_of_short(choice), multiplier=multiplier)
    return _coded(attention(q_BTHd, k_BNKd, v_BNKd), multiplier)


def prefix_attention_fp8_triton(
    q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, mask_BP: Tensor, multiplier: Tensor
) -> Tensor:
    arena = (k_arena_SPKd, v_arena_SPKd)
    choice = chosen("prefix_attention", q_BTHd, *arena, mask_BP) or prefix_rule(q_BTHd, *arena, mask_BP)
    if choice is not None and choice["impl"] == "tma" and _describable(q_BTHd):
        cut = tma.Tiling.of(choice)
        return tma.tma_attention(q_BTHd, *arena, cut, slots_B=slots_B, mask_BN=mask_BP, multiplier=multiplier)
    if choice is not None and choice["impl"] == "hopper" and hopper.takes(q_BTHd, *arena):
        tiling = hopper.Tiling.of(choice)
        if tiling.splits == 1:
            return hopper.hopper_attention(q_BTHd, *arena, slots_B, mask_BP, tiling, multiplier=multiplier)
    return _coded(prefix_attention(q_BTHd, *arena, slots_B, key_mask_BP=mask_BP), multiplier)


def suffix_attention_fp8_reference(
    q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, multiplier: Tensor, **named: Any
) -> Tensor:
    """Return `prefix_attention` with a suffix, whose arguments are named as there, in e4m3."""
    return to_fp8_reference(prefix_attention_reference(q_BTHd, k_arena_SPKd, v_arena_SPKd, slots_B, **named), multiplier)


def suffix_attention_fp8_triton(
    q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, multiplier: Tensor, **named: Any
) -> Tensor:
    keys = named_keys(k_arena_SPKd, v_arena_SPKd, slots_B, **named)
    return attend_to_suffix(q_BTHd, keys, named.get("scale"), multiplier, named.get("ahead"))


def _coded(x_BTHd: Tensor, multiplier: Tensor) -> Tensor:
    """Code a token as one row: rows as short as a head are slow to write."""
    return to_fp8(x_BTHd.flatten(2), multiplier).view(x_BTHd.shape)


def _describable(q_BTHd: Tensor) -> bool:
    """Tell whether a coded head is a multiple of 16 bytes, as a descriptor wants it."""
    return q_BTHd.shape[-1] % 16 == 0


def _suffix_on_chip(q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, *_: object, **named: object) -> bool:
    suffix = [x for x in (named.get("k_suffix_BTKd"), named.get("v_suffix_BTKd")) if isinstance(x, Tensor)]
    return fp8_chip(q_BTHd.device) and len(suffix) == 2 and fits(q_BTHd, k_arena_SPKd, v_arena_SPKd, *suffix)


def _on_chip(q_BTHd: Tensor, *_: object) -> bool:
    return fp8_chip(q_BTHd.device)


attention_fp8 = FusedOp(attention_fp8_reference, attention_fp8_triton, _on_chip)
prefix_attention_fp8 = FusedOp(prefix_attention_fp8_reference, prefix_attention_fp8_triton, _on_chip)
suffix_attention_fp8 = FusedOp(suffix_attention_fp8_reference, suffix_attention_fp8_triton, _suffix_on_chip)
