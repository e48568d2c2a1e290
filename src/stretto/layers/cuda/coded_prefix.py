"""Attention of a prefix to itself in e4m3, in CUDA C++ (coded_prefix.cuh): query heads that share one key/value head of 256.

Values are coded by columns, [B, d, W]: W keys, of whole runs of 32, in which every run of 16 keys is in the order of `ORDER`.

Shape legend: B rows, T tokens (queries and keys), H query heads, d head size.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.cuda.build import index_of, launch, launches_of
from stretto.layers.part import part

E4M3 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
HEAD = 256
RUN = 32
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which key of a run of 16 lies at a place: what a thread has of scores is so what it gives to the second product."""


class Codes(NamedTuple):
    """Queries, keys and values of a prefix in e4m3."""

    q_BTHd: Tensor
    k_BTd: Tensor
    v_BdW: Tensor
    by: Tensor
    """Three fp32 numbers: what queries, keys and values were multiplied by."""


class CodedPrefix:
    """The launches on one device."""

    def __init__(self, library: ctypes.CDLL, device_index: int) -> None:
        library.stretto_prefix_prepare.restype = library.stretto_prefix_launch.restype = ctypes.c_char_p
        library.stretto_prefix_launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._launch = library.stretto_prefix_launch
        multiprocessors = ctypes.c_int()
        error = library.stretto_prefix_prepare(device_index, ctypes.byref(multiprocessors))
        self.multiprocessors = multiprocessors.value
        self.refusal = None if error is None else str(error.decode())

    def run(
        self,
        codes: Codes,
        mask_BT: Tensor,
        multiplier: Tensor,
        *,
        scale: float | None = None,
        groups: int | None = None,
        blocks: int | None = None,
    ) -> Tensor:
        """Attend every query to the keys whose mask is set; [B, T, H, d] in e4m3, as `to_fp8` writes it with the multiplier.

        A row without any valid key gives zeros.

        Args:
            mask_BT: bool or uint8; its last axis is dense.
            groups: how many times 64 packed query rows a thread block has, 1 or 2; decides no bit.
            blocks: thread blocks; as many as the device holds by default.

        Raises:
            RuntimeError: if the launch is refused.
        """
        q, k, v, by = codes
        batch, tokens, heads, head_dim = q.shape
        rows, most = tokens * heads, blocks or part() or self.multiprocessors
        groups = groups or (1 if batch * -(-rows // 128) < most else 2)
        out = torch.empty_like(q)
        base_2 = struct.unpack("q", struct.pack("d", (head_dim**-0.5 if scale is None else scale) * LOG2_E))[0]
        words = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), mask_BT.data_ptr(), mask_BT.stride(0), out.data_ptr(), by.data_ptr(),
            multiplier.data_ptr(), base_2, batch, rows, tokens, v.shape[-1], groups,
            min(most, batch * -(-rows // (64 * groups))),
        )  # fmt: skip
        launch(self._launch, words, q, "attention of a coded prefix")
        return out


def attention_for(x: Tensor) -> CodedPrefix | None:
    """Return the launches if they are to be had on a tensor's device."""
    if not x.is_cuda:
        return None
    return coded_prefix(index_of(x.device))[0]


@functools.cache
def coded_prefix(device_index: int) -> tuple[CodedPrefix | None, str]:
    """Return the launches of a device, compiled if need be, or None; and where they are, or why there are none."""
    missing = "attention of coded prefixes in CUDA C++ is not to be had (%s); it is computed in bf16"
    return launches_of("coded_prefix", device_index, functools.partial(CodedPrefix, device_index=device_index), missing)
