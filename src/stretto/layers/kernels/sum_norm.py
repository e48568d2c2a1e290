"""The kernel of RMSNorm and LayerNorm with weights, of a residual stream and of what is to be added to it.

What is added may stay unstored: the norm behind adds it again, in the same order, together with its own, and stores both. So of
two norms only one writes the stream. What is normed is written in the dtype of the product that reads it, e4m3 as well.

A program has one row, which it holds in registers. All of it is asked for before any of it is used.

Shape legend: ... any leading axes, M rows in all of them, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.kernels.fp8_activation import E4M3, fp8_chip, to_codes
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.kernels.overlap import await_inputs, passes_early

CHUNKS = 3
"""Of a row, each loaded by 32 threads for every 128 columns; rows wider than MAX_CHUNK allows have more."""
MAX_CHUNK = 1024


class Stream(NamedTuple):
    """A residual stream: a sum as it is stored, and what has not been added to it yet. Sums are made and stored in fp32."""

    stored: Tensor
    added: tuple[Tensor, ...] = ()
    """Each [..., D], two at most. `stored` may have fewer axes, and is then of every group of that many rows."""

    def total(self) -> Tensor:
        """Return the sum."""
        return sum((y.float() for y in self.added), start=self.stored.float())

    def way_onto(self, impl: int | str, x: Tensor) -> str:
        """Return the way of a product of x: without its sum on top, if what is stored is not such a sum yet."""
        whole = self.stored.dtype == torch.float32 and self.stored.is_contiguous() and self.stored.shape[:-1] == x.shape[:-1]
        return str(impl) if whole else str(impl).removesuffix("_sum")

    def plus(self, y: Tensor) -> Stream:
        return Stream(self.stored, (*self.added, y))


@jit
def _sum_norm_kernel(
    residual: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    multiplier: tl.tensor,
    period: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PERIODIC: tl.constexpr,
    ADDED: tl.constexpr,
    STORED: tl.constexpr,
    CENTRED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    CODED: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row, column = tl.program_id(0), tl.arange(0, CHUNK)
    at = row.to(tl.int64) * WIDTH
    source = residual + (row % period * WIDTH if PERIODIC else at)
    values, ones, twos, factors, offsets = (), (), (), (), ()
    for start in tl.static_range(0, WIDTH, CHUNK):
        inside = None if start + CHUNK <= WIDTH else start + column < WIDTH
        other = None if start + CHUNK <= WIDTH else 0.0
        values += (tl.load(source + start + column, mask=inside, other=other),)  # type: ignore[assignment]
        if ADDED > 0:
            ones += (tl.load(first + at + start + column, mask=inside, other=other),)  # type: ignore[assignment]
        if ADDED > 1:
            twos += (tl.load(second + at + start + column, mask=inside, other=other),)  # type: ignore[assignment]
    for start in tl.static_range(0, WIDTH, CHUNK):
        inside = None if start + CHUNK <= WIDTH else start + column < WIDTH
        factors += (tl.load(weight + start + column, mask=inside),)  # type: ignore[assignment]
        if CENTRED:
            offsets += (tl.load(bias + start + column, mask=inside),)  # type: ignore[assignment]
    code = 1.0
    if CODED:
        code = tl.load(multiplier)
    stream, sums = (), tl.zeros((CHUNK,), tl.float32)
    for i in tl.static_range(0, (WIDTH + CHUNK - 1) // CHUNK):
        value = tl.cast(values[i], tl.float32)
        if ADDED > 0:
            value = value + tl.cast(ones[i], tl.float32)
        if ADDED > 1:
            value = value + tl.cast(twos[i], tl.float32)
        stream += (value,)  # type: ignore[assignment]
        sums += value if CENTRED else value * value
    if CENTRED:
        mean = tl.sum(sums, 0) / WIDTH
        sums = tl.zeros((CHUNK,), tl.float32)
        for i in tl.static_range(0, (WIDTH + CHUNK - 1) // CHUNK):
            centred = stream[i] - mean
            if (i + 1) * CHUNK > WIDTH:
                centred = tl.where(i * CHUNK + column < WIDTH, centred, 0.0)
            sums += centred * centred
    scale = tl.rsqrt(tl.sum(sums, 0) / WIDTH + eps)
    for i in tl.static_range(0, (WIDTH + CHUNK - 1) // CHUNK):
        inside = None if (i + 1) * CHUNK <= WIDTH else i * CHUNK + column < WIDTH
        to = at + i * CHUNK + column
        if STORED:
            tl.store(total + to, stream[i], mask=inside)
        factor = tl.cast(factors[i], tl.float32)
        if UNIT_OFFSET:
            factor += 1.0
        normed = (stream[i] - mean if CENTRED else stream[i]) * scale * factor
        if CENTRED:
            normed += tl.cast(offsets[i], tl.float32)
        if CODED:
            tl.store(out + to, to_codes(normed * code), mask=inside)
        else:
            tl.store(out + to, normed.to(out.dtype.element_ty), mask=inside)


def norm(
    stream: Stream,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    multiplier: Tensor | None = None,
    unit_offset: bool = False,
    store: bool = True,
) -> tuple[Tensor, Stream]:
    """Return the norm of a stream's sum, and the stream: with its sum stored, or as it was.

    With a bias it is a LayerNorm, without one an RMSNorm. With a multiplier the norm is written in e4m3.
    """
    shape = (stream.added[0] if stream.added else stream.stored).shape
    width = shape[-1]
    source, added = stream.stored.contiguous(), [y.contiguous() for y in stream.added]
    out = torch.empty(shape, dtype=dtype if multiplier is None else E4M3, device=source.device)
    store = store and bool(added)
    total = torch.empty(shape, dtype=torch.float32, device=source.device) if store else out
    rows, period = out.numel() // width, source.numel() // width
    early = passes_early(out, rows)
    chunk = min(max(block_of(cdiv(width, CHUNKS)), 128), MAX_CHUNK)
    _sum_norm_kernel[(rows,)](
        source, *added, *[out] * (2 - len(added)), out, total, weight_D, weight_D if bias_D is None else bias_D,
        weight_D if multiplier is None else multiplier, period, eps,
        WIDTH=width, PERIODIC=period != rows, ADDED=len(added), STORED=store, CENTRED=bias_D is not None,
        UNIT_OFFSET=unit_offset, CODED=multiplier is not None, CHUNK=chunk, OVERLAP=early,
        num_warps=chunk // 128, launch_pdl=early,
    )  # fmt: skip
    return out, Stream(total) if store else stream


def takes(*args: object, multiplier: Tensor | None = None, **kwargs: object) -> bool:
    """Tell whether the kernel writes what is asked for."""
    return multiplier is None or fp8_chip(multiplier.device)


def stores(inner: int, width: int) -> bool:
    """Tell whether the norm behind a product stores the sum in a layer of two products: the one behind the wide input does."""
    return inner > width


def stream_inputs(rows: int, inner: int, width: int, dtype: torch.dtype, device: torch.device) -> Stream:
    """Return a random stream as it is ahead of a product in such a layer."""
    stream = Stream(torch.randn(rows, width, device=device))
    return stream.plus(torch.randn(rows, width, device=device).to(dtype)) if stores(inner, width) else stream
