"""All layers of a pi0.5 expert for one batch row in one launch of a kernel that stays on the chip (expert_kernel.cuh).

Takes and returns a residual stream as the separate kernels of `layers.kernels` have it, and rounds where they do.

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

PHASES = 5
WEIGHTS = 4
LINES_A_LAYER = 2


class Sizes(NamedTuple):
    """What the kernel was compiled for, and how much memory it needs, in elements."""

    width: int
    heads: int
    head_dim: int
    mlp: int
    max_layers: int
    max_tokens: int
    max_prefix: int
    tiles: int
    ctas: int
    stamps: int
    words: int
    of_layer: int
    fresh: int
    attended: int
    hidden: int
    middle: int
    end: int
    middle_squares: int
    end_squares: int


class Weights(NamedTuple):
    """The products of one layer: [(H + 2 K) d, D], [D, H d], [2 F, D], [D, F]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Board:
    """What CTAs hand to each other in one call; kept by those who look at what a phase left."""

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        self.sizes, self.tokens = sizes, tokens
        # A word with all bits set is not there yet.
        self.words = torch.full((sizes.words,), -1, dtype=torch.int32, device=device)

    def fresh(self, layer: int) -> Tensor:
        """Queries, keys and values as the first phase leaves them, [T, H + 2, d]."""
        s = self.sizes
        return self._half(layer, s.fresh, (s.heads + 2) * s.head_dim).view(self.tokens, -1, s.head_dim)

    def attended(self, layer: int) -> Tensor:
        return self._half(layer, self.sizes.attended, self.sizes.heads * self.sizes.head_dim)

    def hidden(self, layer: int) -> Tensor:
        return self._half(layer, self.sizes.hidden, self.sizes.mlp)

    def stream(self, layer: int, end: bool) -> tuple[Tensor, Tensor]:
        """The stream in the middle or at the end of a layer: scaled rows [T + 1, D], squares [T, parts]."""
        s = self.sizes
        scaled = self._half(layer, s.end if end else s.middle, s.width, self.tokens + 1)
        at = layer % 2 * s.of_layer + (s.end_squares if end else s.middle_squares)
        return scaled, self.words[at : at + self.tokens * s.tiles].view(torch.float32).view(self.tokens, s.tiles)

    def _half(self, layer: int, at: int, width: int, rows: int | None = None) -> Tensor:
        rows, begin = self.tokens if rows is None else rows, layer % 2 * self.sizes.of_layer + at
        return self.words[begin : begin + rows * width // 2].view(torch.bfloat16).view(rows, width)


class ExpertKernel:
    """The kernel on one device."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        self.device_index = device_index
        library.stretto_expert_launch.restype = ctypes.c_char_p
        library.stretto_expert_launch.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        library.stretto_expert_prepare.restype = ctypes.c_char_p
        self._launch = library.stretto_expert_launch
        sizes = (ctypes.c_int64 * len(Sizes._fields))()
        library.stretto_expert_sizes(sizes)
        self.sizes = Sizes(*sizes)
        error = library.stretto_expert_prepare(device_index)
        self.refusal = None if error is None else str(error.decode())

    def takes(self, weights: Sequence[Weights], stream: Stream, first: Modulation, keys: PrefixKV) -> bool:
        """Tell whether the kernel runs this call; depends on shapes, strides and dtypes only."""
        s, (batch, tokens, width) = self.sizes, stream.residual_BTD.shape
        inner = s.heads * s.head_dim
        shapes = [(inner + 2 * s.head_dim, s.width), (s.width, inner), (2 * s.mlp, s.width), (s.width, s.mlp)]
        fits = all(
            [tuple(w.shape) for w in layer] == shapes and all(w.is_contiguous() and w.dtype == torch.bfloat16 for w in layer)
            for layer in weights
        )
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
            and stream.scaled_BRD.dtype == torch.bfloat16
            and carries_shift(first)
            and first.table.dtype == torch.float32
            and keys.slots_B.dtype == torch.int64
            and {keys.length_B.dtype, keys.suffix_start_B.dtype} == {torch.int32}
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
        phases: int | None = None,
        board: Board | None = None,
        stamps: Tensor | None = None,
    ) -> Stream:
        """Return the stream behind the last layer, scaled rows in fp32.

        Args:
            lines: the modulations of the first two norms; those of the others follow at the same distance.
            phases: stop after this many of the five of each layer; what the last layer's left is on `board`.

        Raises:
            RuntimeError: if the launch is refused.
        """
        residual, device, sizes = stream.residual_BTD.contiguous(), stream.residual_BTD.device, self.sizes
        tokens = residual.shape[1]
        board = board or Board(sizes, tokens, device)
        out = Stream(
            torch.empty_like(residual),
            torch.empty(1, tokens + 1, sizes.width, dtype=torch.float32, device=device),
            torch.empty(tokens, sizes.tiles, dtype=torch.float32, device=device),
        )
        line, mask = lines[0].addressing(), keys.mask_BP
        norm_step = (lines[1].table.data_ptr() - lines[0].table.data_ptr()) // 4
        words = [
            len(weights), len(weights) * PHASES if phases is None else phases, tokens,
            mask.shape[1], stream.squares_MP.shape[1],
            keys.k_SNPKd.data_ptr(), keys.v_SNPKd.data_ptr(), *keys.k_SNPKd.stride()[:3],
            keys.slots_B.data_ptr(), mask.data_ptr(), keys.length_B.data_ptr(), keys.suffix_start_B.data_ptr(),
            line.table.data_ptr(), line.stride, norm_step,
            line.rows.data_ptr() if line.indexed else 0,
            residual.data_ptr(), stream.squares_MP.data_ptr(), stream.scaled_BRD.data_ptr(),
            *(x.data_ptr() for x in out), board.words.data_ptr(),
            0 if stamps is None else stamps.data_ptr(),
            *(w.data_ptr() for layer in weights for w in layer),
        ]  # fmt: skip
        reals = (ctypes.c_float * 2)(math.log2(theta), eps)
        queue = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        error = self._launch(self.device_index, (ctypes.c_int64 * len(words))(*words), reals, queue)
        if error is not None:
            raise RuntimeError(f"the expert's kernel was not launched: {error.decode()}")
        return Stream(out.residual_BTD, out.scaled_BRD, out.squares_MP)


@functools.cache
def expert_kernel(device_index: int) -> tuple[ExpertKernel | None, str]:
    """Return the kernel of a device, compiled if need be, or None; and where it is, or why there is none."""
    found: Built = built("expert", device_index)
    if found.library is None:
        return None, found.reason
    kernel = ExpertKernel(found.library, device_index)
    return (kernel, found.reason) if kernel.refusal is None else (None, kernel.refusal)
