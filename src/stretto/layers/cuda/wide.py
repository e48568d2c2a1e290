"""What wide products in CUDA C++ share (wide_product.cuh): their cuts, and what is left of a norm behind them.

Shape legend: M rows (tokens), K inner width, N rows of a weight, S lines of a table.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


class Cut(NamedTuple):
    """How a product is cut into thread blocks: one of those that were compiled."""

    rows: int
    """Of the weight, of a block."""
    tokens: int
    by_rows: int
    by_tokens: int
    """Groups of 128 threads."""
    across: int
    """Blocks of other rows in a cluster."""
    along: int
    """Blocks of other tokens in a cluster."""
    stages: int

    @property
    def name(self) -> str:
        """What tables call it."""
        groups, cluster = f"{self.by_rows}x{self.by_tokens}", f"{self.across}x{self.along}"
        return f"{self.rows}x{self.tokens}-{groups}-{cluster}-{self.stages}"

    @staticmethod
    def named(name: str) -> Cut:
        return Cut(*(int(n) for n in name.replace("-", "x").split("x")))


class Left(NamedTuple):
    """What is left of a norm behind its product, as fold.py has it: a factor of each row, and perhaps a line of a table."""

    factor_M: Tensor | None
    """None: by `squares`."""
    table_SN: Tensor | None = None
    lines: Tensor | None = None
    """Dense int64; each is of as many consecutive rows as there are rows for it."""
    squares_MP: Tensor | None = None
    """Sums of a row's squares, in parts."""
    before_MP: Tensor | None = None
    """In e4m3, those of the row that its codes were divided by."""
    by: Tensor | None = None
    """What the sums of coded factors are multiplied by, one element."""
    width: int = 1
    eps: float = 0.0

    def words(self, rows: int) -> tuple[int, ...]:
        line_words = (0, 0, 0, rows)
        if self.table_SN is not None and self.lines is not None:
            line_words = pointer(self.table_SN), pointer(self.lines), self.table_SN.stride(0), rows // self.lines.numel()
        parts = (0 if t is None else t.shape[-1] for t in (self.squares_MP, self.before_MP))
        factors = (pointer(t) for t in (self.squares_MP, self.before_MP, self.by))
        return 1, pointer(self.factor_M), *line_words, *factors, *parts, self.width, bits_of(self.eps)


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def bits_of(x: float) -> int:
    """Return the bits of a double as a whole number."""
    return int.from_bytes(struct.pack("<d", x), "little")


def left_words(left: Left | None, rows: int) -> tuple[int, ...]:
    return (0, 0, 0, 0, 0, rows, *(0,) * 7) if left is None else left.words(rows)


def takes(x: Tensor, weight_NK: Tensor) -> bool:
    """Tell whether a product takes these: dense bf16 or e4m3, whole runs of 128 bytes."""
    dense = x.is_contiguous() and weight_NK.is_contiguous() and x.dtype == weight_NK.dtype
    known = x.dtype in (torch.bfloat16, E4M3) and x.shape[-1] * x.element_size() % 128 == 0
    return dense and known and x.data_ptr() % 16 == 0 and weight_NK.data_ptr() % 16 == 0
