"""A gated product of many rows in CUDA C++ (gated_product.cuh): gelu(gate) * up of x and a weight, gate first.

Shape legend: ... any leading axes, M rows in all of them, K inner width, F hidden width.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from stretto.layers.cuda import wide
from stretto.layers.cuda.build import index_of, launch, launches_of
from stretto.layers.cuda.wide import E4M3, Cut, Left, left_words, pointer
from stretto.layers.part import part

TOKENS = (112, 128)
"""Rows of a tile of the lasting cuts, whose thread blocks take tile after tile."""
FEATURES = 256
"""Of a pair of their thread blocks."""
CUTS = (Cut(128, 56, 2, 1, 1, 1, 4), Cut(128, 104, 2, 1, 1, 2, 6), Cut(128, 200, 2, 1, 1, 2, 4))
"""Cuts whose thread blocks have one tile each, for rows up to some hundreds or thousands; those of gated.cu."""


def rule(rows: int) -> Cut:
    """Choose a cut for so many rows without a measurement."""
    return CUTS[0 if rows <= 56 else 1 if rows <= 300 else 2]


def lasting(tokens: int) -> Cut:
    return Cut(256, tokens, 2, 1, 1, 2, 4)


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
        cut: int | Cut,
        scales: tuple[Tensor, Tensor] | None = None,
        multiplier: Tensor | None = None,
        fold: Left | None = None,
        clusters: int | None = None,
        early: bool = False,
    ) -> Tensor:
        """Return gelu(gate) * up for x [..., K]: [..., F] in x's dtype.

        Args:
            cut: how to cut it, with a fold; or a number of TOKENS, without one, of rows a tile of a lasting cut.
            scales: of coded x and weight, tensors of one element each, where there is no fold.
            multiplier: of a coded result.
            fold: what is left of a norm; of codes, with all that they are multiplied by.
            clusters: of a lasting cut, pairs of thread blocks; as many as the device holds by default.
            early: whether the launch may start while the one ahead of it runs.

        Raises:
            RuntimeError: if the launch is refused.
        """
        inner, features = x.shape[-1], weight_2FK.shape[0] // 2
        rows = x.numel() // inner
        clusters = clusters or (min(self.clusters, part() // 2) if part() else self.clusters)
        out = torch.empty(*x.shape[:-1], features, dtype=x.dtype, device=x.device)
        pointers = (*((0, 0) if scales is None else (s.data_ptr() for s in scales)), pointer(multiplier))
        words = (
            x.data_ptr(), weight_2FK.data_ptr(), out.data_ptr(), *pointers, rows, 2 * features,
            inner * x.element_size(), int(x.dtype == E4M3), clusters, int(early), *left_words(fold, rows),
            *(lasting(cut) if isinstance(cut, int) else cut),
        )  # fmt: skip
        launch(self._launch, words, x, "a gated product")
        return out


def takes(x: Tensor, weight_2FK: Tensor) -> bool:
    """Tell whether the product takes these: dense bf16 or e4m3, whole runs of 128 bytes, whole clusters of features."""
    return wide.takes(x, weight_2FK) and weight_2FK.shape[0] % (2 * FEATURES) == 0


def product_for(x: Tensor, weight_2FK: Tensor) -> GatedProduct | None:
    """Return the launches if they are to be had on x's device and take these."""
    if not (x.is_cuda and takes(x, weight_2FK)):
        return None
    return gated_product(index_of(x.device))[0]


@functools.cache
def gated_product(device_index: int) -> tuple[GatedProduct | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    missing = "gated products in CUDA C++ are not to be had (%s); those in Triton run"
    return launches_of("gated", device_index, functools.partial(GatedProduct, device_index=device_index), missing)
