"""A product that is gated and added to a residual stream, for few rows: split along its input, summed in order.

Each split leaves its part in memory and counts itself; the one that comes last adds all parts in order of their index, so
equal inputs give equal bits. The counters return to zero by themselves.

Shape legend: as in stream.py; I input width, S splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.language import cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps, prefetch_rows
from stretto.layers.kernels.stream import Stream, carries_shift, line_at, sample_stream, stream_of
from stretto.layers.tuning import Config, Key, Tunable, tuned

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None


class SplitTiling(NamedTuple):
    """How one shape is cut; with `splits` 1 nothing is counted."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


def gated_linear_reference(
    x_BTI: Tensor,
    weight_DI: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    dtype: torch.dtype,
    counters: Tensor | None = None,
) -> Stream:
    """Return the stream residual + gate * (x W^T), for a product in `dtype` behind the norm `normed_by`.

    `counters`: int32 zeros, `counters_needed()` of them, that no concurrent call uses; zeros again afterwards. Without
    them they are made for the call.
    """
    total = residual_BTD + gated_by.parts()[2] * linear(x_BTI.float(), weight_DI.float())
    return stream_of(total, normed_by, dtype, 1)


@jit
def _lines(
    table: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    b: tl.tensor,
    t: tl.tensor,
    tokens: tl.tensor,
    column: tl.tensor,
    INDEXED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
) -> tl.tensor:
    line = table + line_at(rows, b, t, tokens, INDEXED, PER_TOKEN) * stride
    return line[:, None] + column[None, :]


@jit
def _gated_linear_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    part: tl.tensor,
    counters: tl.tensor,
    gate_table: tl.tensor,
    gate_stride: tl.tensor,
    gate_rows: tl.tensor,
    norm_table: tl.tensor,
    norm_stride: tl.tensor,
    norm_rows: tl.tensor,
    all_rows: tl.tensor,
    tokens: tl.tensor,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    GATE_INDEXED: tl.constexpr,
    GATE_PER_TOKEN: tl.constexpr,
    NORM_INDEXED: tl.constexpr,
    NORM_PER_TOKEN: tl.constexpr,
    CARRIED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    EACH: tl.constexpr = INNER // SPLITS
    tile_n, split, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    prefetch_rows(weight + column.to(tl.int64) * INNER + split * EACH, BLOCK_N, EACH * 2, OVERLAP)
    # What the chain does not write is asked for before the wait.
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    here = row < all_rows
    row_in = tl.minimum(row, all_rows - 1)
    b, t = row_in // tokens, row_in % tokens
    norm_at = _lines(norm_table, norm_stride, norm_rows, b, t, tokens, column, NORM_INDEXED, NORM_PER_TOKEN)
    if GATED:
        gate_at = _lines(gate_table, gate_stride, gate_rows, b, t, tokens, column + 2 * WIDTH, GATE_INDEXED, GATE_PER_TOKEN)
    await_inputs(OVERLAP)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, EACH, BLOCK_K):
        x_tile = x.load([tile_m * BLOCK_M, split * EACH + k])
        acc = tl.dot(x_tile, weights.load([tile_n * BLOCK_N, split * EACH + k]).T, acc, input_precision="ieee")

    at = row_in.to(tl.int64)[:, None] * WIDTH + column[None, :]
    before = tl.load(residual + at, mask=here[:, None], other=0.0)
    scale = 1.0 + tl.load(norm_at, mask=here[:, None], other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_at, mask=here[:, None], other=0.0).to(tl.float32)
    last = True
    if SPLITS > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        cell = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        part_at = part + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + cell
        tl.store(part_at + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()  # all threads have stored their part before one of them counts it
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            acc = tl.load(part_at, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                acc += tl.load(part_at + s * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(counters + tile, 0)
        if GATED:
            acc *= gate
        acc += before
        tl.store(total + at, acc, mask=here[:, None])
        tl.store(squares + row_in * tl.num_programs(0) + tile_n, tl.sum(acc * acc, 1), mask=here)
        acc *= scale
        if CARRIED:
            at += (b * WIDTH)[:, None]
            ends = (here & (t == tokens - 1))[:, None]
            shift = tl.load(norm_at + WIDTH, mask=ends, other=0.0)
            tl.store(scaled + at + WIDTH, shift.to(scaled.dtype.element_ty), mask=ends)
        tl.store(scaled + at, acc.to(scaled.dtype.element_ty), mask=here[:, None])


def rule(rows: int, width: int, inner: int) -> SplitTiling:
    """Choose a tiling without a measurement: split until the chip is full."""
    block_m = 64 if rows <= 64 else 128
    block_n = 32 if rows <= 256 else 64
    tiles = cdiv(rows, block_m) * (width // block_n)
    splits = 1
    while tiles * splits * 2 <= 132 and inner // splits > 512:
        splits *= 2
    return SplitTiling(block_m, block_n, 128 if block_m == 64 else 64, splits, block_m // 16, 4)


def _candidates(key: Key) -> list[Config]:
    rows, width, inner = key
    few = [(64, 16, 128, 2, 4, 4), (64, 16, 256, 2, 4, 3), (64, 16, 128, 4, 4, 3), (64, 32, 128, 4, 4, 2)]
    few += [(64, 32, 128, 4, 4, 4), (64, 32, 256, 4, 4, 2), (64, 32, 64, 4, 4, 4), (64, 32, 128, 8, 4, 3)]
    many = [(64, 32, 128, 1, 4, 4), (64, 64, 128, 2, 4, 3), (128, 32, 64, 2, 8, 4), (128, 32, 128, 2, 8, 3)]
    many += [(128, 64, 64, 2, 8, 4), (128, 64, 64, 4, 8, 4), (128, 64, 128, 1, 8, 3)]
    tilings = [SplitTiling(*c) for c in (few if rows <= 64 else many)]
    return [t._asdict() for t in dict.fromkeys([rule(rows, width, inner), *tilings])]


def counters_needed(rows: int, width: int) -> int:
    """Return how many counters serve any tiling of a shape."""
    return cdiv(rows, 16) * cdiv(width, 16)


def _chosen(found: Config | None, key: Key) -> SplitTiling:
    return rule(*key) if found is None else SplitTiling(**{name: int(v) for name, v in found.items()})


def gated_linear_triton(
    x_BTI: Tensor,
    weight_DI: Tensor,
    residual_BTD: Tensor,
    gated_by: Modulation,
    normed_by: Modulation,
    dtype: torch.dtype,
    counters: Tensor | None = None,
    tiling: SplitTiling | None = None,
) -> Stream:
    batch, tokens, width = residual_BTD.shape
    rows, inner, device = batch * tokens, x_BTI.shape[-1], x_BTI.device
    x, key = x_BTI.contiguous(), (rows, width, inner)
    cut = tiling or _chosen(tuned("gated_linear", key, x.dtype, device), key)
    block_n = min(cut.block_n, width & -width)
    block_k = min(cut.block_k, inner & -inner)
    splits = min(cut.splits, (inner & -inner) // block_k)
    carried, tiles = carries_shift(normed_by), cdiv(rows, cut.block_m) * (width // block_n)
    out = Stream(
        torch.empty_like(residual_BTD, memory_format=torch.contiguous_format),
        torch.empty(batch, tokens + carried, width, dtype=dtype, device=device),
        torch.empty(rows, width // block_n, dtype=torch.float32, device=device),
    )
    kept = tiles * splits * cut.block_m * block_n if splits > 1 else 0
    part = torch.empty(kept, dtype=torch.float32, device=device)
    if splits > 1 and counters is None:
        counters = torch.zeros(tiles, dtype=torch.int32, device=device)
    gate, norm = gated_by.addressing(), normed_by.addressing()
    overlap = overlaps(x) and weight_DI.element_size() == 2
    _gated_linear_kernel[(width // block_n, splits, cdiv(rows, cut.block_m))](
        TensorDescriptor(x, [rows, inner], [inner, 1], [cut.block_m, block_k]),
        TensorDescriptor(weight_DI, [width, inner], list(weight_DI.stride()), [block_n, block_k]),
        weight_DI, residual_BTD.contiguous(), *out, part, part if counters is None else counters,
        gate.table, gate.stride, gate.rows, norm.table, norm.stride, norm.rows, rows, tokens,
        WIDTH=width, INNER=inner,
        GATED=not gated_by.scale_only, GATE_INDEXED=gate.indexed, GATE_PER_TOKEN=gate.per_token,
        NORM_INDEXED=norm.indexed, NORM_PER_TOKEN=norm.per_token, CARRIED=carried,
        SPLITS=splits, BLOCK_M=cut.block_m, BLOCK_N=block_n, BLOCK_K=block_k, OVERLAP=overlap,
        num_warps=cut.warps, num_stages=cut.stages, launch_pdl=overlap,
    )  # fmt: skip
    return out


gated_linear = FusedOp(gated_linear_reference, gated_linear_triton)


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    rows, width, inner = key
    stream, norm = sample_stream(1, rows, width, dtype, device)
    x = torch.randn(1, rows, inner, dtype=dtype, device=device)
    weight = torch.randn(width, inner, dtype=dtype, device=device) * inner**-0.5
    counters = torch.zeros(counters_needed(rows, width), dtype=torch.int32, device=device)
    return x, weight, stream.residual_BTD, norm, counters


def _run(
    choice: Config | None, x: Tensor, weight: Tensor, residual: Tensor, norm: Modulation, counters: Tensor
) -> tuple[Tensor, Tensor]:
    key = (x.shape[0] * x.shape[1], weight.shape[0], weight.shape[1])
    out = gated_linear_triton(x, weight, residual, norm, norm, x.dtype, counters, _chosen(choice, key))
    return out.residual_BTD, out.scaled_BRD


_FIELDS = {
    "block_m": (16, 32, 64, 128),
    "block_n": (16, 32, 64, 128),
    "block_k": (32, 64, 128, 256),
    "splits": (1, 2, 4, 8),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5, 6),
}
TUNABLES = (Tunable("gated_linear", _FIELDS, _candidates, _inputs, _run),)
