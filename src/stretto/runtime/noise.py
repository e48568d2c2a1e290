"""Noise as a pure function of (seed, stream, chunk, step), so that a pipelined run can equal the serial one."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash integers into 63 bits (splitmix64 finaliser, folded over the parts)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def noise(shape: tuple[int, ...], *, seed: int, stream: int = 0, chunk: int = 0, step: int = 0, device: str = "cpu") -> Tensor:
    """Draw standard normal noise, float32, of `shape` on `device`.

    The same key gives the same numbers on the same kind of device; CPU and CUDA differ.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(mix(seed, stream, chunk, step))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
