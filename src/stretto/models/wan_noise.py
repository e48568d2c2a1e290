"""Noise that depends on nothing but its name: (seed, stream, chunk, step).

A pipelined run must draw the noise that the serial run draws, whatever the order of the draws, so there is no generator
with a state: every element is a hash of its key and its index. All of it is tensor arithmetic, so it can be captured.

Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014) as a counter-based generator, and the Box-Muller transform.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def chunk_key(seed: int, stream: int, chunk: int) -> int:
    """Return the key of one chunk's noise, a signed 64-bit number."""
    key = torch.zeros(1, dtype=torch.int64)
    for name in (seed, stream, chunk):
        key = step_keys(key, torch.tensor([name], dtype=torch.int64))
    return int(key)


def step_keys(keys_B: Tensor, steps_B: Tensor) -> Tensor:
    """Return the keys of the noise that enters each row's denoise step; int64, on the device of the keys."""
    return _mix(keys_B * 31 + _signed(GOLDEN) + steps_B)


def normal(keys_B: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal noise [B, *shape] in fp32; a row depends on its key alone."""
    count = math.prod(shape)
    half = (count + 1) // 2
    index = torch.arange(1, half + 1, dtype=torch.int64, device=keys_B.device) * _signed(GOLDEN)
    bits = _mix(keys_B[:, None] + index)
    low, high = bits & 0xFFFFFFFF, _shifted(bits, 32)
    # Both halves lie strictly inside (0, 1), so that the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log((low.double() + 0.5) * 2.0**-32))
    angle = (high.double() + 0.5) * (2.0 * math.pi * 2.0**-32)
    pair = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
    return pair[:, :count].float().reshape(-1, *shape)


def noise(seed: int, stream: int, chunk: int, step: int, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return the noise [*shape], fp32, that enters denoise step `step` of a chunk."""
    key = torch.tensor([chunk_key(seed, stream, chunk)], dtype=torch.int64, device=device)
    return normal(step_keys(key, torch.tensor([step], dtype=torch.int64, device=device)), shape)[0]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    # `>>` keeps the sign; a hash needs zeros from the left.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)
