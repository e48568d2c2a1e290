"""What there is to choose for attention, and how a choice is timed.

Shape legend: as in attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.cuda import suffix as cuda
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels import short_attention as short
from stretto.layers.kernels import tma_attention as tma
from stretto.layers.kernels.attention import RULE, run_attention, run_prefix_attention
from stretto.layers.kernels.split_attention import FIELDS, Tiling, choose_tiling
from stretto.layers.kernels.suffix_attention import run_suffix
from stretto.layers.tuning import Config, Key, Tunable


def _suffix_candidates(key: Key) -> list[Config]:
    batch, tokens, heads, head_dim, kv_heads, arena, suffix = key
    rows, groups = tokens * heads // kv_heads, batch * kv_heads
    if groups < 2:
        cuts = _cuts((64, 64, 9, 4, 2, 1), (64, 64, 9, 8, 3, 1), (64, 32, 11, 4, 3, 1))
    elif groups < 16:
        cuts = _cuts((128, 32, 4, 8, 3, 1), (128, 64, 5, 8, 2, 1), (128, 64, 8, 8, 2, 1))
    else:
        cuts = _cuts((128, 64, 1, 8, 2, 1))
    own = choose_tiling(rows, groups, arena + suffix, head_dim, 132)
    splits = (1, 2) if groups >= 16 else (3, 4, 5, 6) if groups > 1 else (6, 9, 17)
    held = (0, hopper.HELD) if groups >= 16 and head_dim > hopper.HELD else (0,)
    ours = cuda.CUTS if groups > 1 and kv_heads == 1 and head_dim == cuda.HEAD_DIM else ()
    return [
        *(t._asdict() for t in dict.fromkeys([own, *cuts])),
        *(hopper.Tiling(64, 2, n, held=h).config for n in splits for h in held),
        *(cut.config for cut in ours),
    ]


def _cuts(*cuts: tuple[int, ...]) -> list[Tiling]:
    return [Tiling(*cut) for cut in cuts]


def _suffix_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, tokens, heads, head_dim, kv_heads, arena, suffix = key
    q, k, v, slots, mask = _arena_inputs((batch, tokens, arena, heads, kv_heads, head_dim, 1), dtype, device)
    fresh = torch.randn(batch, suffix, 2 * kv_heads, head_dim, dtype=dtype, device=device).chunk(2, dim=2)
    length = torch.full((batch,), arena, dtype=torch.int32, device=device)
    return q, k, v, slots, mask, length, *fresh


def _tilings(head_dim: int) -> list[Config]:
    if head_dim > 128:
        blocks = [(128, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3)]
    else:
        blocks = [(64, 256, 4, 1), (64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 256, 8, 1), (128, 128, 8, 2)]
    return [tma.Tiling(*cut).config for cut in blocks]


def _candidates(key: Key) -> list[Config]:
    _, _, keys, heads, kv_heads, head_dim, masked = key
    found: list[Config] = [{"impl": RULE[bool(masked)]}, {"impl": "cudnn"}]
    if heads == kv_heads and not masked and keys <= short.MOST_KEYS and short.WIDE < head_dim <= short.MOST_HEAD:
        found += [{"impl": "short", "warps": warps} for warps in (4, 8)]
    return [*found, *_tilings(head_dim)]


def _prefix_candidates(key: Key) -> list[Config]:
    held = hopper.HELD if key[5] > hopper.HELD else 0
    cuts = [hopper.Tiling(64, 2), hopper.Tiling(64, 2, held=held)]
    if key[0] < 2:
        cuts += [hopper.Tiling(64, 3, groups=1), hopper.Tiling(64, 3, groups=1, held=held)]
    return [*(cut.config for cut in dict.fromkeys(cuts)), *_candidates(key)]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    batch, tokens, keys, heads, kv_heads, head_dim, masked = key
    q = torch.randn(batch, tokens, heads, head_dim, dtype=dtype, device=device)
    kv = torch.randn(2, batch, keys, kv_heads, head_dim, dtype=dtype, device=device)
    mask = torch.rand(batch, keys, device=device) < 0.9
    return (q, kv[0], kv[1], mask) if masked else (q, kv[0], kv[1])


def _arena_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    batch, _, keys, _, kv_heads, head_dim, _ = key
    q, _, _, mask = _inputs((*key[:6], 1), dtype, device)
    arena = torch.randn(batch + 1, 2, 2, keys, kv_heads, head_dim, dtype=dtype, device=device)
    return q, arena[:, 1, 0], arena[:, 1, 1], torch.randperm(batch, device=device) + 1, mask


_FIELDS = {"impl": ("sdpa", "cudnn", "short", "split", "tma", "hopper"), **tma.FIELDS, "splits": (1, 2), **hopper.FIELDS}
TUNABLES = (
    Tunable("attention", _FIELDS, _candidates, _inputs, run_attention),
    Tunable("prefix_attention", _FIELDS, _prefix_candidates, _arena_inputs, run_prefix_attention),
    Tunable(
        "suffix_attention",
        {**FIELDS, "impl": ("split", "hopper", "cuda"), **hopper.FIELDS, **cuda.FIELDS},
        _suffix_candidates,
        _suffix_inputs,
        run_suffix,
    ),
)
