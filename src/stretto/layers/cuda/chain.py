"""The layers of a pi0.5 expert for one batch row as five launches each in CUDA C++ (chain_plan.cuh).

Takes and returns a residual stream as the kernels of `layers.kernels` have it, and rounds where they do.

Shape legend: as in layers.kernels.stream; P prefix tokens, K key/value heads, d head size.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.cuda.build import Built, built
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.stream import Stream, carries_shift

LAUNCHES = 5
"""Of a layer: queries, keys and values; attention; output; gate and up; down."""
CHUNK = 64
ROW_BYTES = 128
AHEAD = 0


class Sizes(NamedTuple):
    """What the launches were compiled for, and where in their memory things lie, in bytes."""

    width: int
    heads: int
    head_dim: int
    mlp: int
    max_layers: int
    max_tokens: int
    max_prefix: int
    tiles: int
    memory: int
    x: int
    middle: int
    attended: int
    hidden: int
    q: int
    k: int
    v: int
    squares: int
    middle_squares: int
    rows: int
    most_ctas: int


class Weights(NamedTuple):
    """The products of one layer: [(H + 2 K) d, D], [D, H d], [2 F, D], [D, F]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Coded(NamedTuple):
    """What runs products in e4m3: scales by layer, and what shifts add, since they are no row of a product then.

    `scales_L6` is fp32. Products of codes are multiplied by its columns 0, 2, 3 and 5 (of queries, keys and values; the output;
    gate and up; down), and by columns 1 and 4 what is coded for the output and for down. Tables are fp32 [lines, L, N]; lines
    may be strided.
    """

    weights: Sequence[Weights]
    scales_L6: Tensor
    qkv_shifts: Tensor
    gate_up_shifts: Tensor


class Memory:
    """What launches leave to each other in one call; kept by those who look at what one left."""

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device, coded: bool = False) -> None:
        self.sizes, self.tokens, self.coded = sizes, tokens, coded
        self.bytes = torch.empty(sizes.memory, dtype=torch.uint8, device=device)

    def queries(self) -> Tensor:
        """[T, H, d]"""
        s = self.sizes
        blocks = s.rows // 8
        chunks = self._halves(s.q, s.rows * s.heads * s.head_dim).view(blocks, s.head_dim // CHUNK, 8, 8, CHUNK)
        rows = _swapped(chunks.flatten(2, 3)).view(chunks.shape)
        return rows.permute(0, 2, 3, 1, 4).reshape(s.rows, s.heads, s.head_dim)[: self.tokens]

    def fresh(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the suffix, [T, d] each."""
        s = self.sizes
        k, v = (self._halves(at, s.rows * s.head_dim).view(s.rows, -1)[: self.tokens] for at in (s.k, s.v))
        return k, v

    def attended(self) -> Tensor:
        return self._rows(self.sizes.attended, self.sizes.heads * self.sizes.head_dim, self.tokens)

    def hidden(self) -> Tensor:
        return self._rows(self.sizes.hidden, self.sizes.mlp, self.tokens)

    def stream(self, end: bool) -> tuple[Tensor, Tensor]:
        """The stream in the middle or at the end of a layer: scaled rows [T + 1, D], squares [T, parts].

        In e4m3 there is no row of the shift, and rows are divided by what their root mean square was one norm ago.
        """
        s = self.sizes
        at = s.squares if end else s.middle_squares
        squares = self.bytes[at : at + self.tokens * s.tiles * 4].view(torch.float32).view(self.tokens, -1)
        return self._rows(s.x if end else s.middle, s.width, self.tokens + (not self.coded)), squares

    def _halves(self, at: int, count: int) -> Tensor:
        return self.bytes[at : at + count * 2].view(torch.bfloat16)

    def _rows(self, at: int, width: int, rows: int) -> Tensor:
        all_rows, number = self.sizes.rows, torch.float8_e4m3fn if self.coded else torch.bfloat16
        chunks = self.bytes[at : at + all_rows * width * number.itemsize].view(-1, all_rows, ROW_BYTES)
        return _swapped(chunks).view(number).transpose(0, 1).reshape(all_rows, width)[:rows]


def _swapped(chunks: Tensor) -> Tensor:
    """Put the eight pieces of each row of [..., rows, n] in order: row r has piece i in place i ^ (r % 8)."""
    rows = torch.arange(chunks.shape[-2], device=chunks.device)
    order = torch.arange(8, device=chunks.device) ^ (rows % 8)[:, None]
    pieces = chunks.view(*chunks.shape[:-1], 8, -1)
    return torch.gather(pieces, -2, order[..., None].expand(pieces.shape)).flatten(-2)


class ExpertChain:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        self.device_index = device_index
        library.stretto_chain_launch.restype = ctypes.c_char_p
        library.stretto_chain_launch.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        library.stretto_chain_prepare.restype = ctypes.c_char_p
        self._launch = library.stretto_chain_launch
        sizes = (ctypes.c_int64 * len(Sizes._fields))()
        library.stretto_chain_sizes(sizes)
        self.sizes = Sizes(*sizes)
        error = library.stretto_chain_prepare(device_index)
        self.refusal = None if error is None else str(error.decode())

    def takes(
        self, weights: Sequence[Weights], size: Sequence[int], dtype: torch.dtype, first: Modulation, keys: PrefixKV
    ) -> bool:
        """Tell whether the launches run a stream of this size, [B, T, D], for products in `dtype`."""
        s, (batch, tokens, width) = self.sizes, size
        fits = self._suit(weights, torch.bfloat16)
        arena = keys.k_SNPKd, keys.v_SNPKd
        kept = all(
            x.shape[2:] == (keys.mask_BP.shape[1], 1, s.head_dim) and x.dtype == torch.bfloat16 and x.stride(-1) == 1
            and x.stride() == arena[0].stride() and all(n % 8 == 0 for n in x.stride()[:3])
            for x in arena
        )  # fmt: skip
        return (
            fits
            and kept
            and (batch, width) == (1, s.width)
            and tokens <= s.max_tokens
            and len(weights) <= s.max_layers
            and keys.mask_BP.shape[1] <= s.max_prefix
            and dtype == torch.bfloat16
            and carries_shift(first)
            and first.table.dtype == torch.float32
            and keys.slots_B.dtype == torch.int64
            and {keys.length_B.dtype, keys.suffix_start_B.dtype} == {torch.int32}
        )

    def takes_coded(self, coded: Coded, depth: int) -> bool:
        """Tell whether the products of a call that the launches run may be in e4m3."""
        s, tables = self.sizes, (coded.qkv_shifts, coded.gate_up_shifts)
        columns = (s.heads + 2) * s.head_dim, 2 * s.mlp
        tabled = all(
            t.dtype == torch.float32 and t.shape[1:] == (depth, n) and t.stride()[1:] == (n, 1)
            for t, n in zip(tables, columns, strict=True)
        )
        return len(coded.weights) == depth and self._suit(coded.weights, torch.float8_e4m3fn) and tabled

    def _suit(self, weights: Sequence[Weights], dtype: torch.dtype) -> bool:
        s = self.sizes
        inner = s.heads * s.head_dim
        shapes = [(inner + 2 * s.head_dim, s.width), (s.width, inner), (2 * s.mlp, s.width), (s.width, s.mlp)]
        return all(
            [tuple(w.shape) for w in layer] == shapes and all(w.is_contiguous() and w.dtype == dtype for w in layer)
            for layer in weights
        )

    def run(
        self,
        stream: Stream,
        weights: Sequence[Weights],
        lines: tuple[Modulation, Modulation],
        keys: PrefixKV,
        *,
        theta: float,
        eps: float,
        launches: int | None = None,
        memory: Memory | None = None,
        stamps: Tensor | None = None,
        ahead: int = AHEAD,
        coded: Coded | None = None,
    ) -> Stream:
        """Return the stream behind the last layer, scaled rows in fp32.

        Args:
            lines: the modulations of the first two norms; those of the others follow at the same distance.
            launches: stop after this many of the five of each layer; what they left is in `memory`.
            coded: products are in e4m3, over these weights instead.
            ahead: which launches ask for what later ones read: bits by launch, and 32 for the next layer's keys and values.

        Raises:
            RuntimeError: if a launch is refused.
        """
        residual, device, sizes = stream.residual_BTD.contiguous(), stream.residual_BTD.device, self.sizes
        tokens = residual.shape[1]
        memory = memory or Memory(sizes, tokens, device)
        out = Stream(
            torch.empty_like(residual),
            torch.empty(1, tokens + 1, sizes.width, dtype=torch.float32, device=device),
            torch.empty(tokens, sizes.tiles, dtype=torch.float32, device=device),
        )
        line, mask = lines[0].addressing(), keys.mask_BP
        norm_step = (lines[1].table.data_ptr() - lines[0].table.data_ptr()) // 4
        words = [
            len(weights), len(weights) * LAUNCHES if launches is None else launches, tokens,
            mask.shape[1], stream.squares_MP.shape[1],
            keys.k_SNPKd.data_ptr(), keys.v_SNPKd.data_ptr(), keys.k_SNPKd.shape[0], *keys.k_SNPKd.stride()[:3],
            keys.slots_B.data_ptr(), mask.data_ptr(), keys.length_B.data_ptr(), keys.suffix_start_B.data_ptr(),
            line.table.data_ptr(), line.stride, norm_step,
            line.rows.data_ptr() if line.indexed else 0,
            residual.data_ptr(), stream.squares_MP.data_ptr(), stream.scaled_BRD.data_ptr(),
            *(x.data_ptr() for x in out), memory.bytes.data_ptr(),
            0 if stamps is None else stamps.data_ptr(), ahead, *_of(coded),
            *(w.data_ptr() for layer in (weights if coded is None else coded.weights) for w in layer),
        ]  # fmt: skip
        reals = (ctypes.c_float * 2)(math.log2(theta), eps)
        queue = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        error = self._launch(self.device_index, (ctypes.c_int64 * len(words))(*words), reals, queue)
        if error is not None:
            raise RuntimeError(f"the expert's layers were not launched: {error.decode()}")
        return out


def _of(coded: Coded | None) -> tuple[int, ...]:
    if coded is None:
        return 0, 0, 0, 0, 0
    tables = coded.qkv_shifts, coded.gate_up_shifts
    return coded.scales_L6.data_ptr(), *(t.data_ptr() for t in tables), *(t.stride(0) for t in tables)


@functools.cache
def expert_chain(device_index: int) -> tuple[ExpertChain | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    found: Built = built("chain", device_index)
    if found.library is None:
        return None, found.reason
    chain = ExpertChain(found.library, device_index)
    return (chain, found.reason) if chain.refusal is None else (None, chain.refusal)
