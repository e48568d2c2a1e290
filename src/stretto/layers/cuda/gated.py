"""A gated product of many rows in CUDA C++ (gated_product.cuh): gelu(gate) * up of x and a weight, gate first.

Shape legend: ... any leading axes, M rows in all of them, K inner width, F hidden width.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.cuda.build import Built, built
from stretto.layers.part import part

log = logging.getLogger(__name__)
E4M3 = torch.float8_e4m3fn
TOKENS = (112, 128)
"""Rows of a tile."""
FEATURES = 256
"""Of a pair of thread blocks."""


class Left(NamedTuple):
    """What is left of a norm behind its product, as fold.py has it: a factor of each row, and perhaps a line of a table."""

    factor_M: Tensor
    table_SN: Tensor | None = None
    lines: Tensor | None = None
    """Dense int64; each is of as many consecutive rows as there are rows for it."""

    def words(self, rows: int) -> tuple[int, ...]:
        if self.table_SN is None or self.lines is None:
            return self.factor_M.data_ptr(), 0, 0, 0, 1
        step = self.table_SN.stride(0)
        return self.factor_M.data_ptr(), self.table_SN.data_ptr(), self.lines.data_ptr(), step, rows // self.lines.numel()


class GatedProduct:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        library.stretto_gated_prepare.restype = library.stretto_gated_launch.restype = ctypes.c_char_p
        library.stretto_gated_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._launch = library.stretto_gated_launch
        clusters = ctypes.c_int()
        error = library.stretto_gated_prepare(device_index, ctypes.byref(clusters))
        self.refusal = None if error is None else str(error.decode())
        self.clusters = clusters.value

    def run(
        self,
        x: Tensor,
        weight_2FK: Tensor,
        tokens: int,
        scales: tuple[Tensor, Tensor] | None = None,
        multiplier: Tensor | None = None,
        fold: Left | None = None,
        clusters: int | None = None,
    ) -> Tensor:
        """Return gelu(gate) * up for x [..., K]: [..., F] in x's dtype.

        Args:
            tokens: rows of a tile, one of TOKENS.
            scales: of coded x and weight, tensors of one element each.
            multiplier: of a coded result.
            fold: what is left of a norm, of bf16 factors only.
            clusters: pairs of thread blocks; as many as the device holds by default.

        Raises:
            RuntimeError: if the launch is refused.
        """
        inner, features = x.shape[-1], weight_2FK.shape[0] // 2
        rows = x.numel() // inner
        clusters = clusters or (min(self.clusters, part() // 2) if part() else self.clusters)
        out = torch.empty(*x.shape[:-1], features, dtype=x.dtype, device=x.device)
        pointers = (
            (0, 0, 0) if scales is None or multiplier is None else (*(s.data_ptr() for s in scales), multiplier.data_ptr())
        )
        left = (0, 0, 0, 0, 1) if fold is None else fold.words(rows)
        words = (
            x.data_ptr(), weight_2FK.data_ptr(), out.data_ptr(), *pointers, rows, features,
            inner * x.element_size(), tokens, int(x.dtype == E4M3), clusters, *left,
        )  # fmt: skip
        queue = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        error = self._launch((ctypes.c_int64 * len(words))(*words), queue)
        if error is not None:
            raise RuntimeError(f"a gated product was not launched: {error.decode()}")
        return out


def takes(x: Tensor, weight_2FK: Tensor) -> bool:
    """Tell whether the product takes these: dense bf16 or e4m3, whole runs of 128 bytes, whole pairs of blocks of features."""
    dense = x.is_contiguous() and weight_2FK.is_contiguous() and x.dtype == weight_2FK.dtype
    known = x.dtype in (torch.bfloat16, E4M3) and x.shape[-1] * x.element_size() % 128 == 0
    aligned = x.data_ptr() % 16 == 0 and weight_2FK.data_ptr() % 16 == 0
    return dense and known and aligned and weight_2FK.shape[0] % (2 * FEATURES) == 0


def product_for(x: Tensor, weight_2FK: Tensor) -> GatedProduct | None:
    """Return the launches if they are to be had on x's device and take these."""
    if not (x.is_cuda and takes(x, weight_2FK)):
        return None
    return gated_product(torch.cuda.current_device() if x.device.index is None else x.device.index)[0]


@functools.cache
def gated_product(device_index: int) -> tuple[GatedProduct | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    found: Built = built("gated", device_index)
    product = None if found.library is None else GatedProduct(found.library, device_index)
    if product is not None and product.refusal is None:
        return product, found.reason
    why = found.reason if product is None or product.refusal is None else product.refusal
    log.warning("gated products in CUDA C++ are not to be had (%s); those in Triton run", why)
    return None, why
