"""Noise by name: every element is a hash of its row's key and its index, so that there is no generator with a state.

All of it is tensor arithmetic, so it can be captured.

Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014) as a counter-based generator, and the Box-Muller transform.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST, SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
UNIT = 2.0**-32


def step_keys(keys_B: Tensor, steps_B: Tensor) -> Tensor:
    """Return the keys of the noise that enters each row's denoise step; int64, on the device of the keys."""
    return mix(keys_B * 31 + GOLDEN + steps_B)


def normal(keys_B: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal noise [B, *shape] in fp32; a row depends on its key alone."""
    count = math.prod(shape)
    half = (count + 1) // 2
    index = torch.arange(1, half + 1, dtype=torch.int64, device=keys_B.device) * GOLDEN
    bits = mix(keys_B[:, None] + index)
    low, high = bits & 0xFFFFFFFF, _shifted(bits, 32)
    # Both halves lie strictly inside (0, 1), so that the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log((low.double() + 0.5) * UNIT))
    angle = (high.double() + 0.5) * (2.0 * math.pi * UNIT)
    pair = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
    return pair[:, :count].float().reshape(-1, *shape)


def mix(x: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser of int64 numbers."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    # `>>` keeps the sign; a hash needs zeros from the left.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
