"""Attention of chunks over what their state slots hold: which kernel, and in how many splits over keys.

Where heads x tiles of queries fill the last wave of multiprocessors badly, keys are split too, and the splits joined. The
kernels are torch's, cuDNN's over splits, and our own; a measured table says which, and where it is silent a model of waves.
The choice depends on shapes and the device alone, so equal calls run equal kernels.

Shape legend: B rows, N query tokens, H heads, d head size, S state slots, P arena tokens, X keys of a run of rows.
"""

from __future__ import annotations

import functools
from itertools import groupby
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stretto.layers.kernels import ring_hopper
from stretto.layers.kernels.language import cdiv, multiprocessors
from stretto.layers.kernels.ring_attention import RingTiling, join_splits, ring_attention
from stretto.layers.tuning import Config, Key, Tunable, tuned

Method = Literal["sdpa", "cudnn", "triton", "hopper"]

CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
TILE = 128
MAX_SPLITS = 12
TILE_PAIR_US, TILE_FIXED_US = 1.75, 3.0
"""What 128 queries against 128 keys cost one multiprocessor of an H200, and what a tile costs besides."""
JOIN_FIXED_US, JOIN_BYTES_US = 3.0, 2.5e6
H200_PROCESSORS = 132
LONG = 8192
"""Keys from which on our kernel for Hopper was the faster one at every shape that was measured."""


class Places(NamedTuple):
    """What each row of a batch attends to: the first `tokens` of a state slot. Rows past the end of `slots` are padding."""

    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    slots_B: Tensor
    tokens_B: Tensor
    """The same on the device, int64; padding rows have 0 tokens."""


class Shape(NamedTuple):
    """The key of the table: rows, queries and keys of one row, heads and head size."""

    rows: int
    queries: int
    keys: int
    heads: int
    head_dim: int


class Choice(NamedTuple):
    """`sdpa` leaves the kernel to torch; `cudnn` runs its kernel over splits; `triton` and `hopper` are our own.

    `hopper` attends to full slots only; while one is filling torch's own runs.
    """

    method: Method
    splits: int = 1
    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 2


SDPA = Choice("sdpa")


def chunk_attention(q_BNHd: Tensor, k_SPHd: Tensor, v_SPHd: Tensor, places: Places, choice: Choice | None = None) -> Tensor:
    """Attend each row to what `places` says of its slot; padding rows give zeros. Returns [B, N, H, d].

    No key is copied. `choice` overrides the table.
    """
    rows, queries, heads, head_dim = q_BNHd.shape
    made = choice or choose(Shape(rows, queries, max(places.tokens), heads, head_dim), q_BNHd)
    cut = RingTiling(made.splits, made.block_m, made.block_n, made.warps, made.stages)
    if made.method == "triton":
        return ring_attention(q_BNHd, k_SPHd, v_SPHd, places.slots_B, places.tokens_B, cut)
    if made.method == "hopper" and places.tokens == (k_SPHd.shape[1],) * rows and ring_hopper.takes(q_BNHd, k_SPHd, v_SPHd):
        return ring_hopper.ring_hopper(q_BNHd, k_SPHd, v_SPHd, places.slots_B, cut)
    parts = []
    pieces = runs(places.slots, places.tokens)
    for first, count in pieces:
        at, n = places.slots[first], places.tokens[first]
        q, k, v = q_BNHd[first : first + count], k_SPHd[at : at + count, :n], v_SPHd[at : at + count, :n]
        if choice is None and len(pieces) > 1:
            made = choose(Shape(count, queries, n, heads, head_dim), q_BNHd)
        parts.append(split_cudnn(q, k, v, made.splits) if made.method == "cudnn" and folds(k, made.splits) else _sdpa(q, k, v))
    if len(places.slots) < len(q_BNHd):
        parts.append(torch.zeros_like(q_BNHd[len(places.slots) :]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_cudnn(q_BNHd: Tensor, k_BXHd: Tensor, v_BXHd: Tensor, splits: int) -> Tensor:
    """Attend by cuDNN's kernel over `splits` equal shares of the keys, all in one launch, and join them.

    The keys must fold (`folds`); all 16-bit, on a GPU. Returns [B, N, H, d].
    """
    batch, tokens, heads, _ = q_BNHd.shape
    q = _per_split(q_BNHd, splits)
    part, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, _shares(k_BXHd, splits), _shares(v_BXHd, splits), None, True
    )
    one, head, token, dim = part.stride()
    part_BZNHd = part.as_strided((batch, splits, tokens, heads, part.shape[-1]), (splits * one, one, token, head, dim))
    return join_splits(part_BZNHd, lse.view(batch, splits, heads, tokens))


def _per_split(q_BNHd: Tensor, splits: int) -> Tensor:
    """Return the queries once for each split, [B Z, H, N, d]; of one row without a copy."""
    batch, tokens, heads, head_dim = q_BNHd.shape
    if batch > 1:
        return q_BNHd[:, None].expand(-1, splits, -1, -1, -1).flatten(0, 1).transpose(1, 2)
    _, token, head, dim = q_BNHd.stride()
    return q_BNHd.as_strided((splits, heads, tokens, head_dim), (0, head, token, dim))


def _shares(x_BXHd: Tensor, splits: int) -> Tensor:
    """Return a view of equal shares of keys or values, [B Z, H, X / Z, d]. One call: in eager mode every view costs."""
    batch, keys, heads, head_dim = x_BXHd.shape
    _, key, head, dim = x_BXHd.stride()
    each = keys // splits
    return x_BXHd.as_strided((batch * splits, heads, each, head_dim), (each * key, head, key, dim))


def folds(k_BXHd: Tensor, splits: int) -> bool:
    """Tell whether rows and equal shares of their keys fold into one axis without a copy."""
    batch, keys = k_BXHd.shape[:2]
    return keys % splits == 0 and (batch == 1 or k_BXHd.stride(0) == keys * k_BXHd.stride(1))


@functools.lru_cache(maxsize=4096)
def runs(slots: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (first row, rows) of each run of consecutive slots that hold equally much."""
    groups = groupby(range(len(slots)), key=lambda i: (slots[i] - i, tokens[i]))
    rows = [list(members) for _, members in groups]
    return tuple((members[0], len(members)) for members in rows)


def choose(shape: Shape, q: Tensor) -> Choice:
    """Return how to attend on q's device."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
        return SDPA
    measured = tuned("chunk_attention", shape, q.dtype, q.device)
    if measured is not None and (measured["method"] != "hopper" or ring_hopper.runs_on(q.device.type, q.device.index)):
        return Choice(**measured)  # type: ignore[arg-type]
    if not cudnn_is_fastest(q.device):
        return SDPA
    ours = ring_hopper.runs_on(q.device.type, q.device.index) and shape.keys >= LONG and shape.head_dim == ring_hopper.HEAD_DIM
    return hopper_rule(shape, multiprocessors(q)) if ours else by_rule(shape, multiprocessors(q))


def by_waves(shape: Shape, processors: int = H200_PROCESSORS) -> list[int]:
    """Return how many splits to make, best first by a model of waves; each divides the keys evenly."""
    tiles = shape.rows * shape.heads * cdiv(shape.queries, TILE)
    out_bytes = 2 * shape.rows * shape.queries * shape.heads * shape.head_dim

    def cost_us(splits: int) -> float:
        waves = cdiv(tiles * splits, processors)
        run = waves * (cdiv(shape.keys // splits, TILE) * TILE_PAIR_US + TILE_FIXED_US)
        if splits == 1:
            return run
        # Splits write what the join reads; with several rows the queries are copied for each split too.
        moved = 2 * splits + 1 + (splits + 1 if shape.rows > 1 else 0)
        return run + JOIN_FIXED_US + out_bytes * moved / JOIN_BYTES_US

    counts = [z for z in range(1, MAX_SPLITS + 1) if shape.keys % z == 0 and (z == 1 or shape.keys // z >= 4 * TILE)]
    return sorted(counts, key=lambda splits: (cost_us(splits), splits))


@functools.cache
def by_blocks(shape: Shape, processors: int = H200_PROCESSORS) -> list[int]:
    """Return how many splits `hopper` is to make, best first by a model of waves; splits need not be even there."""
    tiles, blocks = shape.rows * shape.heads * cdiv(shape.queries, TILE), cdiv(shape.keys, TILE)

    def cost(splits: int) -> float:
        joined = 0.0 if splits == 1 else 0.01 * blocks * (1 + 0.1 * splits)
        return cdiv(tiles * splits, processors) * (cdiv(blocks, splits) + 2) + joined

    return sorted(range(1, min(MAX_SPLITS, blocks // 4) + 1), key=lambda splits: (cost(splits), splits))


@functools.cache
def cudnn_is_fastest(device: torch.device) -> bool:
    """Tell whether cuDNN's attention is the one to split: on Hopper it is about twice as fast as FlashAttention 2."""
    has_cudnn: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return has_cudnn and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def prefer_fastest_attention() -> object:
    """Make torch try cuDNN before FlashAttention 2, about twice as fast on Hopper for heads of 128; once for the process.

    Torch keeps the order for the whole process, so a context around each call would be undone by the executors of other
    devices. The context that is kept here is never left.
    """
    order = sdpa_kernel(CUDA_BACKENDS, set_priority=True)
    order.__enter__()
    return order


def hopper_rule(shape: Shape, processors: int) -> Choice:
    return Choice("hopper", by_blocks(shape, processors)[0], TILE, TILE, 4, 2)


@functools.cache
def by_rule(shape: Shape, processors: int) -> Choice:
    """Return how to attend on Hopper where no table knows the shape."""
    splits = by_waves(shape, processors)[0]
    return SDPA if splits == 1 else Choice("cudnn", splits)


def _sdpa(q_BNHd: Tensor, k_BXHd: Tensor, v_BXHd: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BNHd, k_BXHd, v_BXHd))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def candidates(key: Key) -> list[Config]:
    shape = Shape(*key)
    counts = by_waves(shape)
    choices = [SDPA, *(Choice("cudnn", splits) for splits in counts[:5] if splits > 1)]
    choices += [Choice("triton", splits, TILE, 64, 8, 3) for splits in counts[:2]]
    if shape.head_dim == ring_hopper.HEAD_DIM and shape.keys >= 8 * TILE:
        choices += [Choice("hopper", splits, TILE, TILE, 4, stages) for splits in by_blocks(shape)[:2] for stages in (2, 3)]
    if shape.keys < 8 * TILE:  # too short for a full pipeline: small tiles, several at once
        choices += [Choice("triton", 1, 64, 64, 4, 2), Choice("triton", 1, 64, 64, 4, 3), Choice("triton", 1, TILE, 64, 8, 2)]
    return [cast(Config, choice._asdict()) for choice in choices]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Places]:
    rows, queries, keys, heads, head_dim = key
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(rows, tokens, heads, head_dim, generator=generator, device=device).to(dtype)
        for tokens in (queries, keys, keys)
    )
    slots_B = torch.arange(rows, device=device)
    return q, k, v, Places(tuple(range(rows)), (keys,) * rows, slots_B, torch.full_like(slots_B, keys))


def _run(choice: Config | None, q_BNHd: Tensor, k_SPHd: Tensor, v_SPHd: Tensor, places: Places) -> Tensor:
    made = None if choice is None else Choice(**choice)  # type: ignore[arg-type]
    return chunk_attention(q_BNHd, k_SPHd, v_SPHd, places, made)


FIELDS: dict[str, tuple[int | str, ...]] = {
    "method": ("sdpa", "cudnn", "triton", "hopper"),
    "splits": tuple(range(1, MAX_SPLITS + 1)),
    "block_m": (64, TILE),
    "block_n": (64, TILE),
    "warps": (4, 8),
    "stages": (2, 3, 4),
}
TUNABLES = (Tunable("chunk_attention", FIELDS, candidates, _inputs, _run),)
