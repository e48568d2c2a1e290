"""Attention over a prefix in an arena and a suffix in CUDA C++ (suffix_attention.cuh), for batches of robots.

Shape legend: B rows, T query tokens, H query heads of one key/value head, d = 256 channels, S arena slots, P arena tokens,
N suffix tokens.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.cuda.build import index_of, launch, launches_of
from stretto.layers.tuning import Config

E4M3 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
HEAD_DIM = 256
MOST_KEYS = 64 * 64
"""Of a prefix and a suffix that one cluster may have."""


class Cut(NamedTuple):
    """How a call is cut: whether each group of a thread block has rows of its own, cuts of the keys, blocks that share keys."""

    tall: int
    cuts: int
    shared: int

    @staticmethod
    def of(config: Config) -> Cut:
        return Cut(*(int(config[name]) for name in Cut._fields))

    @property
    def config(self) -> Config:
        return {"impl": "cuda", **self._asdict()}


CUTS = (Cut(0, 4, 1), Cut(0, 2, 1), Cut(0, 1, 1), Cut(1, 1, 2))
"""Those that are compiled."""
FIELDS: Mapping[str, tuple[int | str, ...]] = {"tall": (0, 1), "cuts": (1, 2, 4), "shared": (1, 2)}


class Arena(NamedTuple):
    """The old keys and values of a call: those of slot `slots_B[b]`, where a mask is set and below a length."""

    k_SPKd: Tensor
    v_SPKd: Tensor
    slots_B: Tensor
    mask_BP: Tensor
    length_B: Tensor | None = None


class SuffixAttention:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.stretto_suffix_prepare.restype = library.stretto_suffix_launch.restype = ctypes.c_char_p
        library.stretto_suffix_prepare.argtypes = (ctypes.c_int64,) * 3
        library.stretto_suffix_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._launch = library.stretto_suffix_launch
        errors = [library.stretto_suffix_prepare(*cut) for cut in CUTS]
        self.refusal = next((str(e.decode()) for e in errors if e is not None), None)

    def run(
        self,
        q_BTHd: Tensor,
        arena: Arena,
        k_BNKd: Tensor,
        v_BNKd: Tensor,
        cut: Cut,
        scale: float | None = None,
        multiplier: Tensor | None = None,
        ahead: Tensor | None = None,
        early: bool = False,
    ) -> Tensor:
        """Return [B, T, H, d]; with a multiplier in e4m3, as `to_fp8` writes it.

        Args:
            cut: one of CUTS.
            ahead: dense; meanwhile brought to the second-level cache for a launch behind.
            early: whether the launch may start while the one ahead of it runs. The arena, its mask, slots and lengths must be
                there before the chain of such launches that it is part of.

        Raises:
            RuntimeError: if the launch is refused.
        """
        batch, tokens, heads, head_dim = q_BTHd.shape
        k, v, slots, mask, length = arena
        out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype if multiplier is None else E4M3, device=q_BTHd.device)
        optional = [0 if x is None else x.data_ptr() for x in (length, multiplier)]
        steps = [n for x in (k, v, k_BNKd, v_BNKd) for n in x.stride()[:2]]
        words = (
            *(x.data_ptr() for x in (q_BTHd, k, v, k_BNKd, v_BNKd, slots)), optional[0], mask.data_ptr(), out.data_ptr(),
            optional[1], mask.stride(0), *steps, batch, tokens * heads, *k.shape[:2], k_BNKd.shape[1], *cut,
            *((0, 0) if ahead is None else (ahead.data_ptr(), ahead.nbytes // 16 * 16)), int(early),
        )  # fmt: skip
        given = struct.pack(f"{len(words)}qd", *words, (head_dim**-0.5 if scale is None else scale) * LOG2_E)
        launch(self._launch, given, q_BTHd, "attention over a suffix")
        return out


def takes(q_BTHd: Tensor, arena: Arena, k_BNKd: Tensor, v_BNKd: Tensor) -> bool:
    """Tell whether the kernel takes these: bf16, one key/value head of 256, int64 slots, int32 lengths, aligned steps."""
    keys = (arena.k_SPKd, arena.v_SPKd, k_BNKd, v_BNKd)
    one = all(x.shape[2] == 1 and x.shape[3] == HEAD_DIM and x.stride(3) == 1 for x in keys)
    apart = all(x.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in x.stride()[:2]) for x in keys)
    known = all(x.dtype == torch.bfloat16 for x in (q_BTHd, *keys)) and q_BTHd.is_contiguous() and q_BTHd.data_ptr() % 16 == 0
    told = arena.slots_B.dtype == torch.int64 and arena.slots_B.is_contiguous() and arena.mask_BP.stride(-1) == 1
    bounded = arena.length_B is None or (arena.length_B.dtype == torch.int32 and arena.length_B.is_contiguous())
    return one and apart and known and told and bounded and arena.k_SPKd.shape[1] + k_BNKd.shape[1] + 8 <= MOST_KEYS


def cut_for(batch: int, rows: int, multiprocessors: int = 132) -> Cut:
    """Return the cut of an unmeasured call: as few cuts of the keys as give work to most multiprocessors."""
    tiles = batch * -(-rows // 64)
    if tiles > multiprocessors:
        return Cut(1, 1, 2)
    return next((cut for cut in reversed(CUTS[:3]) if 2 * tiles * cut.cuts > multiprocessors), CUTS[0])


def launches_for(q_BTHd: Tensor, arena: Arena, k_BNKd: Tensor, v_BNKd: Tensor) -> SuffixAttention | None:
    """Return the launches if they are to be had on q's device and take these."""
    if not (q_BTHd.is_cuda and takes(q_BTHd, arena, k_BNKd, v_BNKd)):
        return None
    return suffix_attention(index_of(q_BTHd.device))[0]


@functools.cache
def suffix_attention(device_index: int) -> tuple[SuffixAttention | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""

    def prepared(library: ctypes.CDLL) -> SuffixAttention:
        with torch.cuda.device(device_index):
            return SuffixAttention(library)

    missing = "attention over a suffix in CUDA C++ is not to be had (%s); that in Triton runs"
    return launches_of("suffix", device_index, prepared, missing)
