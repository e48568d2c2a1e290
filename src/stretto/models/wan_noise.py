"""Noise that depends on nothing but its name: (seed, stream, chunk, step).

A pipelined run must draw the noise that the serial run draws, whatever the order of the draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.noise import normal, step_keys

__all__ = ["chunk_key", "noise", "normal", "step_keys"]


def chunk_key(seed: int, stream: int, chunk: int) -> int:
    """Return the key of one chunk's noise, a signed 64-bit number."""
    key = torch.zeros(1, dtype=torch.int64)
    for name in (seed, stream, chunk):
        key = step_keys(key, torch.tensor([name], dtype=torch.int64))
    return int(key)


def noise(seed: int, stream: int, chunk: int, step: int, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return the noise [*shape], fp32, that enters denoise step `step` of a chunk."""
    key = torch.tensor([chunk_key(seed, stream, chunk)], dtype=torch.int64, device=device)
    return normal(step_keys(key, torch.tensor([step], dtype=torch.int64, device=device)), shape)[0]
