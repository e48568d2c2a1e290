"""The product behind a norm, for few rows: its input is a stream (stream.py), its output already rotated or gated.

Two products share one pass over the input: the two halves that RoPE turns against each other, or gate and up. A program
serves whole batch rows, so a row's shift lies in its tile. Weights are fetched to L2 before the stream is waited for.

Shape legend: as in stream.py; H query heads, K key/value heads, d head size, C = H + 2 K heads in all, F hidden width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.activation import gelu_tanh_of
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.fold import Fold, ShiftLines
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, overlaps, prefetch_span
from stretto.layers.kernels.rope import rotary_angles, rotate, split_qkv
from stretto.layers.kernels.stream import carries_shift, line_at, normed_reference
from stretto.layers.tuning import Config, tuned

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None


class PairTiling(NamedTuple):
    """How one shape is cut: batch rows a program, columns of each of the two products, step along the input."""

    segments: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def norm_qkv_reference(
    scaled_BRD: Tensor,
    squares_MP: Tensor,
    weight_ND: Tensor,
    normed_by: Modulation,
    starts_B: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
    shift: ShiftLines | None = None,
) -> Tensor:
    """Return queries, keys and values of a stream side by side, [B, T, C, d]; token t is rotated to `starts_B[b] + t`.

    `shift` is what the shifts add to the product, if it is known; a stream that carries its shifts does not need it.
    """
    qkv = _product_reference(scaled_BRD, squares_MP, weight_ND, normed_by, eps, shift)
    q, k, v = split_qkv(qkv, heads, kv_heads, head_dim)
    positions_BT = starts_B[:, None] + torch.arange(qkv.shape[1], device=qkv.device)
    cos, sin = rotary_angles(positions_BT, head_dim, theta)
    return torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=2).to(scaled_BRD.dtype)


def norm_geglu_reference(
    scaled_BRD: Tensor,
    squares_MP: Tensor,
    weight_ND: Tensor,
    normed_by: Modulation,
    eps: float,
    shift: ShiftLines | None = None,
) -> Tensor:
    """Return gelu(gate) * up of a stream, [B, T, F]; the weight holds gate, then up. `shift` is as in `norm_qkv`."""
    gate, up = _product_reference(scaled_BRD, squares_MP, weight_ND, normed_by, eps, shift).chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(scaled_BRD.dtype)


def _product_reference(
    scaled_BRD: Tensor, squares_MP: Tensor, weight_ND: Tensor, normed_by: Modulation, eps: float, shift: ShiftLines | None
) -> Tensor:
    if shift is None or carries_shift(normed_by):
        return linear(normed_reference(scaled_BRD, squares_MP, normed_by, eps), weight_ND.float())
    factor = torch.rsqrt(squares_MP.sum(-1) / scaled_BRD.shape[-1] + eps).view(scaled_BRD.shape[:2])
    return Fold(factor, shift).on(linear(scaled_BRD.float(), weight_ND.float()))


@jit
def _finish(
    acc: tl.tensor, factor: tl.tensor, row: tl.tensor, TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr
) -> tl.tensor:
    """Turn products of scaled rows into products of their norm, where each segment's row TOKENS is that of the shift."""
    shift = acc * 0.0
    for s in tl.static_range(SEGMENTS):
        of_segment = tl.sum(tl.where((row == s * SEGMENT + TOKENS)[:, None], acc, 0.0), 0)
        shift = tl.where((row // SEGMENT == s)[:, None], of_segment[None, :], shift)
    return acc * factor[:, None] + shift


@jit
def _cos_sin(angle: tl.tensor) -> tl.tensor:
    """Return cosine and sine of an fp32 angle from 0 to some thousands; the general ones cost this kernel its registers."""
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts, the first two short enough that their products are exact.
    r = ((angle - quarter * 1.5703125) - quarter * 4.837512969970703125e-4) - quarter * 7.549789948768648e-8
    z = r * r
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    turn = quarter.to(tl.int32) & 3
    swap = (turn & 1) == 1
    cos_turned, sin_turned = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
    cos_turned = tl.where((turn == 1) | (turn == 2), -cos_turned, cos_turned)
    return cos_turned, tl.where(turn >= 2, -sin_turned, sin_turned)


@jit
def _norm_pair_kernel(
    scaled: tl.tensor,
    squares: tl.tensor,
    weights: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    line_stride: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    batch: tl.tensor,
    log2_theta: tl.tensor,
    eps: tl.tensor,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    OUT: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATE: tl.constexpr,
    INDEXED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CARRIED: tl.constexpr,
    SHIFT: tl.constexpr,
    TABLED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Columns come in pairs HALF apart: within a head (ROTATE), or gate and up.
    BLOCK_M: tl.constexpr = SEGMENTS * SEGMENT
    TILES: tl.constexpr = HALF // BLOCK_N
    group, pair = tl.program_id(0) // TILES, (tl.program_id(0) % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    low = group * 2 * HALF + pair
    low_row = group * 2 * HALF + (tl.program_id(0) % TILES) * BLOCK_N
    span = weight + low_row.to(tl.int64) * WIDTH
    prefetch_span(span, BLOCK_N * WIDTH * 2, OVERLAP)
    prefetch_span(span + HALF * WIDTH, BLOCK_N * WIDTH * 2, OVERLAP)
    # What the chain does not write is asked for before the wait, and nothing is used before the loop's loads are on their way.
    row = tl.arange(0, BLOCK_M)
    b, t = tl.program_id(1) * SEGMENTS + row // SEGMENT, row % SEGMENT
    here = (b < batch) & (t < TOKENS)
    b_in, t_in = tl.minimum(b, batch - 1), tl.minimum(t, TOKENS - 1)
    position = t_in
    if ROTATE:
        position += tl.load(starts + b_in)
    shift_at = table
    if SHIFT and not CARRIED:
        shift_at = table + line_at(rows, b_in, t_in, TOKENS, INDEXED, PER_TOKEN) * line_stride + WIDTH
    if TABLED:
        line = table + line_at(rows, b_in, t_in, TOKENS, INDEXED, PER_TOKEN) * line_stride
    await_inputs(OVERLAP)

    part = tl.arange(0, PARTS)
    parts = tl.load(squares + (b_in * TOKENS + t_in)[:, None] * PARTS + part[None, :])
    if SHIFT and not CARRIED:
        factor = tl.rsqrt(tl.sum(parts, 1) / WIDTH + eps)
    lane = tl.arange(0, BLOCK_K)
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        x = scaled.load([tl.program_id(1) * SEGMENTS, 0, k]).reshape(BLOCK_M, BLOCK_K)
        if SHIFT and not CARRIED:
            shift = tl.load(shift_at[:, None] + (k + lane)[None, :])
            x = (x.to(tl.float32) * factor[:, None] + shift.to(tl.float32)).to(x.dtype)
        first = tl.dot(x, weights.load([low_row, k]).T, first, input_precision="ieee")
        second = tl.dot(x, weights.load([low_row + HALF, k]).T, second, input_precision="ieee")
    if CARRIED or not SHIFT:
        factor = tl.rsqrt(tl.sum(parts, 1) / WIDTH + eps)
    if CARRIED:
        first = _finish(first, factor, row, TOKENS, SEGMENTS, SEGMENT)
        second = _finish(second, factor, row, TOKENS, SEGMENTS, SEGMENT)
    elif not SHIFT:
        first *= factor[:, None]
        second *= factor[:, None]
        if TABLED:
            first += tl.load(line[:, None] + low[None, :])
            second += tl.load(line[:, None] + HALF + low[None, :])

    at = (b * TOKENS + t).to(tl.int64)[:, None] * OUT
    kind = out.dtype.element_ty
    if ROTATE:
        angle = position.to(tl.float32)[:, None] * tl.exp2(pair.to(tl.float32) * (-log2_theta / HALF))[None, :]
        cos, sin = _cos_sin(tl.where(group < ROTATED, angle, 0.0))
        tl.store(out + at + low[None, :], (first * cos - second * sin).to(kind), mask=here[:, None])
        tl.store(out + at + HALF + low[None, :], (second * cos + first * sin).to(kind), mask=here[:, None])
    else:
        tl.store(out + at + pair[None, :], (gelu_tanh_of(first) * second).to(kind), mask=here[:, None])


def rule(batch: int, tokens: int, pairs: int) -> PairTiling:
    """Choose a tiling without a measurement: enough programs for the chip, then larger tiles."""
    segments = 1 if batch == 1 or block_of(tokens + 1) > 64 else 2
    groups = cdiv(batch, segments)
    block_n = 64
    while block_n > 16 and groups * pairs // block_n < 120:
        block_n //= 2
    return PairTiling(segments, block_n, 128 if segments == 1 else 64, 4 * segments, 4)


def tilings(batch: int, tokens: int, pairs: int) -> list[Config]:
    """Return the tilings worth timing, the rule's first."""
    few = [(1, 16, 128, 4, 4), (1, 16, 256, 4, 3), (1, 32, 128, 4, 3), (1, 32, 128, 4, 4), (1, 32, 64, 4, 6)]
    few += [(1, 64, 64, 4, 4), (1, 32, 64, 4, 4), (1, 16, 128, 4, 3)]
    many = [(1, 64, 64, 4, 4), (2, 32, 64, 8, 4), (2, 64, 64, 8, 3), (2, 64, 64, 8, 4), (2, 64, 32, 8, 5)]
    many += [(4, 32, 64, 8, 3), (4, 64, 64, 8, 3)]
    found = dict.fromkeys([rule(batch, tokens, pairs), *(PairTiling(*c) for c in (few if batch == 1 else many))])
    return [t._asdict() for t in found if t.segments <= block_of(batch)]


def chosen(found: Config | None, batch: int, tokens: int, pairs: int) -> PairTiling:
    """Return a measured choice as a tiling, or the rule's where there is none."""
    return rule(batch, tokens, pairs) if found is None else PairTiling(**{name: int(v) for name, v in found.items()})


def _described(x: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _launch(
    scaled: Tensor,
    squares: Tensor,
    weight: Tensor,
    normed_by: Modulation,
    out: Tensor,
    half: int,
    eps: float,
    cut: PairTiling,
    starts: Tensor | None = None,
    rotated: int = 0,
    theta: float = 1.0,
    shift: ShiftLines | None = None,
) -> None:
    batch, _, width = scaled.shape
    tokens = squares.shape[0] // batch
    carried = carries_shift(normed_by)
    segment = max(block_of(tokens + carried), 16)
    block_n, block_k = min(cut.block_n, half & -half), min(cut.block_k, width & -width)
    tabled = shift is not None and not carried
    lines = Modulation(*shift, scale_only=True).addressing() if shift is not None and tabled else normed_by.addressing()
    overlap = overlaps(scaled) and weight.element_size() == 2
    _norm_pair_kernel[(weight.shape[0] // (2 * block_n), cdiv(batch, cut.segments))](
        _described(scaled, [cut.segments, segment, block_k]), squares, _described(weight, [block_n, block_k]), weight,
        out, lines.table, lines.stride, lines.rows, squares if starts is None else starts,
        batch, math.log2(theta), eps,
        TOKENS=tokens, WIDTH=width, PARTS=squares.shape[1], OUT=out.shape[2:].numel(), HALF=half,
        ROTATED=rotated, ROTATE=starts is not None, INDEXED=lines.indexed, PER_TOKEN=lines.per_token,
        CARRIED=carried, SHIFT=not normed_by.scale_only and not tabled, TABLED=tabled, SEGMENTS=cut.segments, SEGMENT=segment,
        BLOCK_N=block_n, BLOCK_K=block_k, OVERLAP=overlap,
        num_warps=cut.warps, num_stages=cut.stages, launch_pdl=overlap,
    )  # fmt: skip


def norm_qkv_triton(
    scaled_BRD: Tensor,
    squares_MP: Tensor,
    weight_ND: Tensor,
    normed_by: Modulation,
    starts_B: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
    shift: ShiftLines | None = None,
    tiling: PairTiling | None = None,
) -> Tensor:
    batch, tokens = scaled_BRD.shape[0], squares_MP.shape[0] // scaled_BRD.shape[0]
    heads_in_all = heads + 2 * kv_heads
    if tiling is None:
        key = (batch, tokens, scaled_BRD.shape[-1], heads, kv_heads, head_dim)
        found = tuned("norm_qkv", key, scaled_BRD.dtype, scaled_BRD.device)
        tiling = chosen(found, batch, tokens, heads_in_all * head_dim // 2)
    out = torch.empty(batch, tokens, heads_in_all, head_dim, dtype=scaled_BRD.dtype, device=scaled_BRD.device)
    rotated = heads + kv_heads
    _launch(scaled_BRD, squares_MP, weight_ND, normed_by, out, head_dim // 2, eps, tiling, starts_B, rotated, theta, shift)
    return out


def norm_geglu_triton(
    scaled_BRD: Tensor,
    squares_MP: Tensor,
    weight_ND: Tensor,
    normed_by: Modulation,
    eps: float,
    shift: ShiftLines | None = None,
    tiling: PairTiling | None = None,
) -> Tensor:
    batch, tokens, hidden = scaled_BRD.shape[0], squares_MP.shape[0] // scaled_BRD.shape[0], weight_ND.shape[0] // 2
    if tiling is None:
        key = (batch, tokens, scaled_BRD.shape[-1], hidden)
        tiling = chosen(tuned("norm_geglu", key, scaled_BRD.dtype, scaled_BRD.device), batch, tokens, hidden)
    out = torch.empty(batch, tokens, hidden, dtype=scaled_BRD.dtype, device=scaled_BRD.device)
    _launch(scaled_BRD, squares_MP, weight_ND, normed_by, out, hidden, eps, tiling, shift=shift)
    return out


def fits_few_rows(tokens: int, width: int, hidden: int, head_dim: int) -> bool:
    """Tell whether the kernels of few rows take a transformer of these sizes: a batch row is one tile, tiles have no rest."""
    powers = all(n & (n - 1) == 0 for n in (width, head_dim))
    return tokens < 128 and powers and width >= 64 and head_dim >= 32 and hidden % 64 == 0


norm_qkv = FusedOp(norm_qkv_reference, norm_qkv_triton)
norm_geglu = FusedOp(norm_geglu_reference, norm_geglu_triton)
