"""One Triton matrix product with a choice of epilogues: the work that would follow it is done on the accumulator.

Operands and results move by TMA. An epilogue that needs two columns of the product at once (a gate with its value, the two
halves of a rotated head) has both in one accumulator, made from two parts of the weight that one load brings side by side.
`persistent` programs take tile after tile, so that the loads of the next overlap the epilogue of the last.

Shape legend: M rows, K inner width, N columns of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stretto.layers import cublas_lt
from stretto.layers.kernels.activation import gelu_tanh_of
from stretto.layers.kernels.fold import Fold, arguments_of, fold_line, kind_of
from stretto.layers.kernels.language import cdiv, jit, programs, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps, prefetch_rows
from stretto.layers.tuning import Config

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

FEW_ROWS = 600
"""Below, a product does not keep the chip busy, and what counts is how soon it starts."""
Activation = Literal["gelu", "geglu"]
FIELDS: Mapping[str, tuple[int | str, ...]] = {
    "impl": ("cublas", "lt", "triton"),
    "block_m": (64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128),
    "stages": (2, 3, 4, 5, 6),
    "warps": (4, 8),
    "group": (1, 4, 8, 16, 32),
    "persistent": (0, 1),
    "algo": cublas_lt.CHOICES,
}


class Tiling(NamedTuple):
    """How one product is cut and run."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group: int
    persistent: int

    @staticmethod
    def of(config: Config) -> Tiling:
        return Tiling(**{name: int(config[name]) for name in Tiling._fields})

    @property
    def config(self) -> Config:
        return {"impl": "triton", **self._asdict()}


@jit
def halves(acc: tl.tensor) -> tl.tensor:
    """Return the left and the right half of a tile's columns; they lie in the same threads."""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


@jit
def place_of(tile: tl.tensor, down: tl.tensor, across: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Return row and column of a tile: they go down GROUP rows at a time, so what runs at once shares weights in the cache."""
    strip = tile // (GROUP * across)
    height = tl.minimum(down - strip * GROUP, GROUP)
    within = tile - strip * GROUP * across
    return strip * GROUP + within % height, within // height


@jit
def _gemm_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    table: tl.tensor,
    lines: tl.tensor,
    line_stride: tl.tensor,
    tokens: tl.tensor,
    FOLD: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS)
    column = tl.arange(0, BLOCK_N)
    if OVERLAP:
        # Weights are written by no kernel of a chain: the first tile's are asked for while the kernel ahead still runs.
        first = place_of(tl.program_id(0) % (down * across), down, across, GROUP)[1] * BLOCK_N
        begin = tl.minimum(tl.program_id(0) // (down * across) * steps * BLOCK_K, inner - 8)
        held = tl.minimum(steps * BLOCK_K, inner - begin) * 2
        for part in tl.static_range(PARTS):
            row = tl.minimum(first + column, columns - 1) + part * columns
            prefetch_rows(weight + row.to(tl.int64) * inner + begin, BLOCK_N, held, OVERLAP)
    await_inputs(OVERLAP)
    for index in tl.range(tl.program_id(0), down * across * SPLITS, tl.num_programs(0), flatten=PERSISTENT):
        # What lies behind the inner width is read as zeros.
        split, tile = index // (down * across), index % (down * across)
        start = split * steps * BLOCK_K
        tile_m, tile_n = place_of(tile, down, across, GROUP)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
        for step in range(steps):
            w_tile = w.load([0, n, start + step * BLOCK_K]).reshape(PARTS * BLOCK_N, BLOCK_K)
            acc = tl.dot(x.load([m, start + step * BLOCK_K]), w_tile.T, acc)
        if PARTS == 2:
            gate, up = halves(acc)
            if FOLD:
                at = tl.minimum(m + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
                inverse = tl.load(factor + at)[:, None]
                gate, up = gate * inverse, up * inverse
            if FOLD > 1:
                line = fold_line(table, lines, line_stride, at, tokens, FOLD)[:, None] + (n + column)[None, :]
                there = (n + column < columns)[None, :]
                gate += tl.load(line, mask=there, other=0.0)
                up += tl.load(line + columns, mask=there, other=0.0)
            acc = gelu_tanh_of(gate) * up
        else:
            if BIAS:
                acc += tl.load(bias + n + column, mask=n + column < columns, other=0.0).to(tl.float32)[None, :]
            if GELU:
                acc = gelu_tanh_of(acc)
        out.store([split, m, n], acc.to(out.dtype).reshape(1, BLOCK_M, BLOCK_N))


def gemm(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiling: Tiling,
    *,
    activation: Activation | None = None,
    fold: Fold | None = None,
) -> Tensor:
    """Return activation(x @ weight.T + bias) for x [..., K]: [..., N], or [..., N / 2] for GeGLU (gate first, no bias).

    A GeGLU may be of a folded norm, then x is [B, T, K].
    """
    columns = weight_NK.shape[0] // (2 if activation == "geglu" else 1)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    _launch(x, weight_NK, bias_N, out.view(1, -1, columns), tiling, activation, fold)
    return out


def split_gemm(x: Tensor, weight_NK: Tensor, tiling: Tiling, splits: int) -> Tensor:
    """Return x @ weight.T for x [..., K] in fp32, as [splits, M, N] to be summed: each takes a run of the inner width."""
    rows = x.numel() // x.shape[-1]
    out = torch.empty(splits, rows, weight_NK.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight_NK, None, out, tiling, None)
    return out


def _launch(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_SMN: Tensor,
    t: Tiling,
    activation: Activation | None,
    fold: Fold | None = None,
) -> None:
    (splits, rows, columns), inner, parts = out_SMN.shape, x.shape[-1], 2 if activation == "geglu" else 1
    tiles, early = cdiv(rows, t.block_m) * cdiv(columns, t.block_n) * splits, starts_early(x, rows)
    _gemm_kernel[(programs(x, tiles) if t.persistent else tiles,)](
        TensorDescriptor.from_tensor(x.view(rows, inner), [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(weight_NK.view(parts, columns, inner), [parts, t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out_SMN, [1, t.block_m, t.block_n]),
        weight_NK, x if bias_N is None else bias_N, rows, columns, inner,
        *arguments_of(fold, x), 1 if fold is None else fold.factor_BT.shape[1], FOLD=kind_of(fold),
        PARTS=parts, BIAS=bias_N is not None, GELU=activation == "gelu", BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        BLOCK_K=t.block_k, GROUP=t.group, PERSISTENT=bool(t.persistent), SPLITS=splits,
        OVERLAP=early, num_warps=t.warps, num_stages=t.stages, launch_pdl=early,
    )  # fmt: skip


def starts_early(x: Tensor, rows: int) -> bool:
    """Tell whether a kernel on so many rows starts before the one ahead ends: between large products that costs time."""
    return rows < FEW_ROWS and overlaps(x)


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def on_hopper(x: Tensor) -> bool:
    """Tell whether x is on a GPU of the kind that the rules of TMA kernels were measured on."""
    return x.is_cuda and _capability(x.device.index) == (9, 0)


def takes(x: Tensor, weight_NK: Tensor, *others: Tensor | None) -> bool:
    """Tell whether the kernel can run this product: TMA wants dense 16-bit rows of a multiple of 16 bytes."""
    dense = x.is_contiguous() and weight_NK.is_contiguous() and all(o is None or o.is_contiguous() for o in others)
    return (
        dense and x.dtype == weight_NK.dtype and x.element_size() == 2 and x.shape[-1] % 8 == 0 and weight_NK.shape[0] % 16 == 0
    )
