"""Triton where it is installed, and the few launch helpers that all kernels share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.layers.part import part

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform: every op then runs its reference, and `implementation` says so
    triton = None
    tl = None

__all__ = ["ON_CHIP", "block_of", "cdiv", "jit", "multiprocessors", "programs", "tl", "warps_of"]

ON_CHIP: Any = None if tl is None else tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether kernels are compiled and may hold instructions of the chip; the interpreter knows none."""


def jit(fn: Callable[..., Any]) -> Any:
    """Compile `fn` as a Triton kernel on first launch; without Triton, leave it uncallable but importable."""
    return fn if triton is None else triton.jit(fn)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def block_of(width: int) -> int:
    """Return the power of two that covers `width`, as Triton's ranges need."""
    return 1 << max(width - 1, 0).bit_length()


def warps_of(block: int) -> int:
    """Return the warps for one row of `block` elements: 16 bytes of bf16 a thread, within 1 to 16 warps."""
    return min(max(block // 256, 1), 16)


@functools.cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """Return how many multiprocessors x's device has (132, those of an H200, when kernels are interpreted)."""
    return _multiprocessors(x.device.index) if x.is_cuda else 132


def programs(x: Tensor, tiles: int) -> int:
    """Return how many persistent programs share the tiles: one for each multiprocessor that they may have."""
    return min(tiles, part() or multiprocessors(x))
