"""Attention over a slot of a KV arena and a suffix, as the denoise loop calls it: which kernel, and how it is cut.

Launches overlap: the arena's keys and values, slots, lengths and masks must be there before the chain of kernels that a call is
part of, of which only the queries and the suffix are written. A denoise step begins with torch's own kernels, which start when
all before them is complete, so that holds for whatever an earlier stage wrote.

Shape legend: as in attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.cuda import suffix as cuda
from stretto.layers.kernels import gemm
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels.fp8_activation import to_fp8
from stretto.layers.kernels.overlap import overlaps
from stretto.layers.kernels.split_attention import Keys, Tiling, split_attention
from stretto.layers.tuning import Config, tuned


def named_keys(
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    key_mask_BP: Tensor | None = None,
    length_B: Tensor | None = None,
    k_suffix_BTKd: Tensor | None = None,
    v_suffix_BTKd: Tensor | None = None,
    suffix_lead: int = 0,
    scale: float | None = None,
    ahead: Tensor | None = None,
) -> Keys:
    """Return the keys of a call whose arguments are named as `prefix_attention` names them."""
    return Keys(k_arena_SPKd, v_arena_SPKd, slots_B, key_mask_BP, length_B, k_suffix_BTKd, v_suffix_BTKd, suffix_lead)


def attend_to_suffix(
    q_BTHd: Tensor, keys: Keys, scale: float | None, multiplier: Tensor | None = None, ahead: Tensor | None = None
) -> Tensor:
    """Attend to a slot and to a suffix by the measured choice, or by the rule; with a multiplier in e4m3.

    A kernel that can brings `ahead` to the second-level cache meanwhile.
    """
    suffix = keys.k_suffix_BNKd
    assert suffix is not None
    key = (*q_BTHd.shape, suffix.shape[2], keys.k_SPKd.shape[1], suffix.shape[1])
    return run_choice(tuned("suffix_attention", key, q_BTHd.dtype, q_BTHd.device), q_BTHd, keys, scale, multiplier, ahead)


def run_suffix(choice: Config | None, q: Tensor, *rest: Tensor) -> Tensor:
    """Run one choice over a slot, its mask and length, and a suffix; None is the rule."""
    k, v, slots, mask, length, k_suffix, v_suffix = rest
    return run_choice(choice, q, Keys(k, v, slots, mask, length, k_suffix, v_suffix), None)


def run_choice(
    choice: Config | None,
    q_BTHd: Tensor,
    keys: Keys,
    scale: float | None = None,
    multiplier: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Run one choice. Where the chosen kernel does not take a call, the kernel split over keys does."""
    choice = rule(q_BTHd) if choice is None else choice
    impl = "split" if choice is None else choice.get("impl", "split")
    out = None
    if choice is not None and impl == "cuda":
        out = _cuda(cuda.Cut.of(choice), q_BTHd, keys, scale, multiplier, ahead)
    elif choice is not None and impl == "hopper":
        out = _hopper(hopper.Tiling.of(choice), q_BTHd, keys, scale, multiplier)
    if out is not None:
        return out
    out = split_attention(q_BTHd, keys, scale, _tiling(choice, keys) if impl == "split" else None)
    # A token is coded as one row: rows as short as a head are slow to write.
    return out if multiplier is None else to_fp8(out.flatten(2), multiplier).view(out.shape)


def _cuda(
    cut: cuda.Cut, q_BTHd: Tensor, keys: Keys, scale: float | None, multiplier: Tensor | None, ahead: Tensor | None
) -> Tensor | None:
    k, v, slots, mask = keys.k_suffix_BNKd, keys.v_suffix_BNKd, keys.slots_B, keys.mask_BP
    if k is None or v is None or slots is None or mask is None or keys.suffix_lead:
        return None
    arena = cuda.Arena(keys.k_SPKd, keys.v_SPKd, slots, _as_bytes(mask), keys.length_B)
    launches = cuda.launches_for(q_BTHd, arena, k, v)
    return None if launches is None else launches.run(q_BTHd, arena, k, v, cut, scale, multiplier, ahead, overlaps(q_BTHd))


def _hopper(cut: hopper.Tiling, q_BTHd: Tensor, keys: Keys, scale: float | None, multiplier: Tensor | None) -> Tensor | None:
    k, v, slots, mask = keys.k_suffix_BNKd, keys.v_suffix_BNKd, keys.slots_B, keys.mask_BP
    if k is None or v is None or slots is None or mask is None or keys.suffix_lead:
        return None
    if not hopper.takes(q_BTHd, keys.k_SPKd, keys.v_SPKd, k, v) or (multiplier is not None and cut.splits > 1):
        return None
    named: dict[str, Any] = {"length_B": keys.length_B, "suffix": (k, v), "scale": scale, "multiplier": multiplier}
    return hopper.hopper_attention(q_BTHd, keys.k_SPKd, keys.v_SPKd, slots, mask, cut, **named)


def rule(q_BTHd: Tensor) -> Config | None:
    """From two robots on, wide heads on Hopper take the kernel in CUDA C++, cut so that all multiprocessors have work."""
    batch, tokens, heads, head_dim = q_BTHd.shape
    if batch < 2 or head_dim != cuda.HEAD_DIM or q_BTHd.dtype != torch.bfloat16 or not gemm.on_hopper(q_BTHd):
        return None
    return cuda.cut_for(batch, tokens * heads).config


def _tiling(choice: Config | None, keys: Keys) -> Tiling | None:
    if choice is None:
        return None
    cut = Tiling(**{name: int(v) for name, v in choice.items() if name != "impl"})
    given = [x for x in (keys.k_SPKd, keys.v_SPKd, keys.k_suffix_BNKd, keys.v_suffix_BNKd) if x is not None]
    # Tiles may come by descriptor where steps and starts are multiples of 16 bytes.
    describable = all(x.storage_offset() % 8 == 0 and all(n % 8 == 0 for n in x.stride()[:-1]) for x in given)
    return None if cut.described and not describable else cut


def _as_bytes(mask_BP: Tensor) -> Tensor:
    return mask_BP.view(torch.uint8) if mask_BP.dtype == torch.bool else mask_BP
