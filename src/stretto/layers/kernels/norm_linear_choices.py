"""What there is to choose for the products of normed few rows, and how a choice is timed.

Shape legend: as in norm_linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.norm_linear import chosen, norm_geglu_triton, norm_qkv_triton, tilings
from stretto.layers.kernels.stream import sample_stream
from stretto.layers.tuning import Config, Key, Tunable


def _qkv_candidates(key: Key) -> list[Config]:
    batch, tokens, _, heads, kv_heads, head_dim = key
    return [c for c in tilings(batch, tokens, (heads + 2 * kv_heads) * head_dim // 2) if int(c["block_n"]) <= head_dim // 2]


def _qkv_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, tokens, width, heads, kv_heads, head_dim = key
    stream, norm = sample_stream(batch, tokens, width, dtype, device)
    weight = torch.randn((heads + 2 * kv_heads) * head_dim, width, dtype=dtype, device=device) * width**-0.5
    starts = torch.full((batch,), 900, dtype=torch.int32, device=device)
    return stream.scaled_BRD, stream.squares_MP, weight, norm, starts, heads, kv_heads, head_dim


def _run_qkv(choice: Config | None, *inputs: Any) -> Tensor:
    *given, heads, kv_heads, head_dim = inputs
    scaled = given[0]
    batch, tokens = scaled.shape[0], given[1].shape[0] // scaled.shape[0]
    cut = chosen(choice, batch, tokens, (heads + 2 * kv_heads) * head_dim // 2)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return norm_qkv_triton(*given, **shape, theta=1e4, eps=1e-6, tiling=cut)


def _geglu_candidates(key: Key) -> list[Config]:
    batch, tokens, _, hidden = key
    return tilings(batch, tokens, hidden)


def _geglu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, tokens, width, hidden = key
    stream, norm = sample_stream(batch, tokens, width, dtype, device)
    weight = torch.randn(2 * hidden, width, dtype=dtype, device=device) * width**-0.5
    return stream.scaled_BRD, stream.squares_MP, weight, norm


def _run_geglu(choice: Config | None, scaled: Tensor, squares: Tensor, weight: Tensor, norm: Modulation) -> Tensor:
    batch = scaled.shape[0]
    cut = chosen(choice, batch, squares.shape[0] // batch, weight.shape[0] // 2)
    return norm_geglu_triton(scaled, squares, weight, norm, 1e-6, tiling=cut)


_FIELDS = {
    "segments": (1, 2, 4),
    "block_n": (16, 32, 64, 128),
    "block_k": (32, 64, 128, 256),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5, 6),
}
TUNABLES = (
    Tunable("norm_qkv", _FIELDS, _qkv_candidates, _qkv_inputs, _run_qkv),
    Tunable("norm_geglu", _FIELDS, _geglu_candidates, _geglu_inputs, _run_geglu),
)
