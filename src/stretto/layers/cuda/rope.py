"""Queries, keys and values of many rows in CUDA C++ (rope_product.cuh): rotated, and written where they belong.

Shape legend: as in kernels/linear_rope.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from stretto.layers.cuda import wide
from stretto.layers.cuda.build import index_of, launch, launches_of
from stretto.layers.cuda.wide import E4M3, Cut, Left, left_words

HEAD = 256
"""Channels of a head."""
ROWS = 512
"""Of the weight, of whole clusters of any cut."""
CUTS = (Cut(64, 56, 1, 1, 1, 1, 6), Cut(64, 72, 1, 1, 2, 1, 8), Cut(64, 136, 1, 1, 2, 1, 6), Cut(128, 72, 2, 1, 2, 2, 4))
"""Those of rope.cu."""
UNTIL = 600
"""Rows up to which it was faster than cuBLAS and a pass in bf16."""


def rule(rows: int, coded: bool) -> Cut:
    """Choose a cut for so many rows without a measurement."""
    return CUTS[0 if rows <= 56 else 1 if rows <= 300 else 3 if coded else 2]


class RopeProduct:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.stretto_rope_prepare.restype = library.stretto_rope_launch.restype = ctypes.c_char_p
        library.stretto_rope_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._launch = library.stretto_rope_launch
        error = library.stretto_rope_prepare()
        self.refusal = None if error is None else str(error.decode())

    def run(
        self,
        x_BTD: Tensor,
        weight_CD: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_arena_SPKd: Tensor,
        v_arena_SPKd: Tensor,
        slots_B: Tensor,
        heads: int,
        cut: Cut,
        fold: Left,
        early: bool = False,
    ) -> Tensor:
        """Return rotated queries [B, T, H, d] in the arenas' dtype, bf16; write keys and values as `linear_rope_write` does.

        Args:
            cos: dense fp32 [B, T, h], as `sin`.
            fold: what is left of a norm; of codes, with all that they are multiplied by.
            early: whether the launch may start while the one ahead of it runs.

        Raises:
            RuntimeError: if the launch is refused.
        """
        (batch, tokens, inner), kv_heads = x_BTD.shape, k_arena_SPKd.shape[-2]
        rows = batch * tokens
        q = torch.empty(batch, tokens, heads, HEAD, dtype=k_arena_SPKd.dtype, device=x_BTD.device)
        words = (
            *(t.data_ptr() for t in (x_BTD, weight_CD, cos, sin, q, k_arena_SPKd, v_arena_SPKd, slots_B)),
            *k_arena_SPKd.stride()[:2], *v_arena_SPKd.stride()[:2], heads, kv_heads, tokens,
            rows, weight_CD.shape[0], inner * x_BTD.element_size(), int(x_BTD.dtype == E4M3), int(early),
            *left_words(fold, rows), *cut,
        )  # fmt: skip
        launch(self._launch, words, x_BTD, "a product that rotates")
        return q


def takes(x: Tensor, weight_CD: Tensor, k_arena_SPKd: Tensor) -> bool:
    """Tell whether the product takes these: dense bf16 or e4m3, whole runs of 128 bytes, heads of 256 channels."""
    return wide.takes(x, weight_CD) and k_arena_SPKd.shape[-1] == HEAD and weight_CD.shape[0] % ROWS == 0


def product_for(x: Tensor, weight_CD: Tensor, k_arena_SPKd: Tensor) -> RopeProduct | None:
    """Return the launches if they are to be had on x's device and take these."""
    if not (x.is_cuda and takes(x, weight_CD, k_arena_SPKd)):
        return None
    return rope_product(index_of(x.device))[0]


@functools.cache
def rope_product(device_index: int) -> tuple[RopeProduct | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    missing = "products in CUDA C++ that rotate are not to be had (%s); those in Triton run"
    return launches_of("rope", device_index, RopeProduct, missing)
