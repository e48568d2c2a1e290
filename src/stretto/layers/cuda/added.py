"""A product that is gated and added to a residual, in CUDA C++ (added_product.cuh), with what the next norm is made of.

Shape legend: B rows, T tokens, K inner width, D width, P = D / 64 parts of a row.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.cuda import wide
from stretto.layers.cuda.build import index_of, launch, launches_of
from stretto.layers.cuda.wide import E4M3, Cut
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.tuning import Config

RUN = 64
"""Columns of a row whose squares are one sum."""


class AddedCut(NamedTuple):
    """A cut, and over how many thread blocks of a cluster the inner width is cut."""

    cut: Cut
    splits: int

    @property
    def name(self) -> str:
        return "x".join(str(int(n)) for n in (*self.cut, self.splits))

    @classmethod
    def named(cls, name: str) -> AddedCut:
        *cut, splits = (int(n) for n in name.split("x"))
        return cls(Cut(*cut), splits)

    def suits(self, rows: int) -> bool:
        """Tell whether a cut may be worth timing for a product of 1,024 columns: it fills most of a chip once or twice."""
        blocks = -(-rows // self.cut.tokens) * (1024 // self.cut.rows) * self.splits
        return 60 <= blocks <= 264


CUTS = tuple(
    AddedCut.named(name)
    for name in (
        "64x56x1x1x1x1x6x4",
        "64x80x1x1x1x1x5x4",
        "64x104x1x1x1x1x4x4",
        "64x112x1x2x1x1x4x4",
        "64x56x1x1x1x1x6x2",
        "128x104x2x1x1x1x6x2",
    )
)
"""Those that are compiled."""
MOST_ROWS = 208
"""From more rows on, products by cuBLAS and a pass are as fast."""


def rule(rows: int, coded: bool) -> AddedCut | None:
    """Choose a cut for so many rows without a measurement; none where other ways are faster."""
    if rows > MOST_ROWS:
        return None
    return CUTS[0] if rows <= 112 else CUTS[1] if rows <= 160 else CUTS[3 if coded else 2]


def chosen(choice: Config | None, rows: int, coded: bool = False) -> AddedCut | None:
    """Return the cut that a choice, or without one the rule, names; none if it is for another kernel."""
    if choice is None:
        return rule(rows, coded)
    return AddedCut.named(str(choice["cut"])) if choice["impl"] == "cuda" else None


class CodedRows(NamedTuple):
    """What a product of e4m3 needs: scales of both factors, and sums of squares of the rows one norm ago."""

    x_scale: Tensor
    weight_scale: Tensor
    before_BTP: Tensor


class Added(NamedTuple):
    scaled_BTD: Tensor
    squares_BTP: Tensor
    total_BTD: Tensor


class AddedProduct:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        library.stretto_added_prepare.restype = library.stretto_added_launch.restype = ctypes.c_char_p
        library.stretto_added_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._launch = library.stretto_added_launch
        error = library.stretto_added_prepare(device_index)
        self.refusal = None if error is None else str(error.decode())

    def run(
        self,
        x_BTK: Tensor,
        weight_DK: Tensor,
        residual_BTD: Tensor,
        gated_by: Modulation,
        normed_by: Modulation,
        cut: AddedCut,
        *,
        coded: CodedRows | None = None,
        eps: float = 0.0,
        early: bool = False,
    ) -> Added:
        """Return s = residual + gate * (x @ weight.T), s (1 + scale) in x's dtype, and sums of squares of s.

        Args:
            coded: for a product of e4m3, whose rows are divided by their root mean square one norm ago.
            eps: of that root mean square.
            early: whether the launch may start while the one ahead of it runs.

        Raises:
            RuntimeError: if the launch is refused.
        """
        (batch, tokens, width), inner = residual_BTD.shape, x_BTK.shape[-1]
        device = x_BTK.device
        total, scaled = torch.empty_like(residual_BTD), torch.empty(residual_BTD.shape, dtype=x_BTK.dtype, device=device)
        squares = torch.empty(batch, tokens, width // RUN, dtype=torch.float32, device=device)
        gate = (0, 0, 0, tokens) if gated_by.scale_only else _words(gated_by, 2 * width, tokens)
        of_codes = (0, 0, 0, 0) if coded is None else (*(t.data_ptr() for t in coded), coded.before_BTP.shape[-1])
        words = (
            x_BTK.data_ptr(), weight_DK.data_ptr(), residual_BTD.data_ptr(),
            total.data_ptr(), scaled.data_ptr(), squares.data_ptr(), *gate, *_words(normed_by, 0, tokens), *of_codes,
            struct.unpack("<i", struct.pack("<f", eps))[0], batch * tokens, width, inner * x_BTK.element_size(),
            int(x_BTK.dtype == E4M3), int(early), *cut.cut, cut.splits,
        )  # fmt: skip
        launch(self._launch, words, x_BTK, "an added product")
        return Added(scaled, squares, total)


def _words(by: Modulation, column: int, tokens: int) -> tuple[int, int, int, int]:
    its = by.addressing()
    lines = its.rows.data_ptr() if its.indexed else 0
    return its.table.data_ptr() + 4 * column, lines, its.stride, 1 if its.per_token else tokens


def takes(x_BTK: Tensor, weight_DK: Tensor, residual_BTD: Tensor, gated_by: Modulation, normed_by: Modulation) -> bool:
    """Tell whether the product takes these: dense factors, a dense fp32 residual, tables in fp32 whose lines are aligned."""
    tables = gated_by.table, normed_by.table
    aligned = all(
        t.dtype == torch.float32 and t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and all(n % 4 == 0 for n in t.stride()[:-1])
        for t in tables
    )
    dense = residual_BTD.is_contiguous() and residual_BTD.dtype == torch.float32
    return wide.takes(x_BTK, weight_DK) and dense and aligned and weight_DK.shape[0] % 256 == 0


def product_for(
    x_BTK: Tensor, weight_DK: Tensor, residual_BTD: Tensor, gated_by: Modulation, normed_by: Modulation
) -> AddedProduct | None:
    """Return the launches if they are to be had on x's device and take these."""
    if not (x_BTK.is_cuda and takes(x_BTK, weight_DK, residual_BTD, gated_by, normed_by)):
        return None
    return added_product(index_of(x_BTK.device))[0]


@functools.cache
def added_product(device_index: int) -> tuple[AddedProduct | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    missing = "added products in CUDA C++ are not to be had (%s); those in Triton run"
    return launches_of("added", device_index, functools.partial(AddedProduct, device_index=device_index), missing)
