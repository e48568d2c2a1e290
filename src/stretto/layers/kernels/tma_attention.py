"""Attention of many queries for Hopper: tiles of Q, K and V come by TMA, straight from a KV arena or a fused product.

One program takes a tile of packed query rows over all keys. A head size that is no power of two is padded on the chip: what
lies outside of a head is read as zeros and never written.

Shape legend: B rows, T query tokens, N keys, S slots, P arena tokens, H query heads, K key/value heads, d head size,
R = T H / K packed query rows of one key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.language import block_of, cdiv, jit, tl
from stretto.layers.tuning import Config

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

LOG2_E = 1.4426950408889634
FIELDS: Mapping[str, tuple[int | str, ...]] = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4),
}


class Tiling(NamedTuple):
    """How one call is cut."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    @staticmethod
    def of(config: Config) -> Tiling:
        return Tiling(**{name: int(config[name]) for name in Tiling._fields})

    @property
    def config(self) -> Config:
        return {"impl": "tma", **self._asdict()}


@jit
def _tma_attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    multiplier: tl.tensor,
    mask: tl.tensor,
    mask_b: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    INDEXED: tl.constexpr,
    MASKED: tl.constexpr,
    CODED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK_M
    b, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    page = b
    if INDEXED:
        page = tl.load(slots + b).to(tl.int32)
    q_tile = q.load([b, head, row, 0]).reshape(BLOCK_M, HEAD)
    acc = tl.zeros((BLOCK_M, HEAD), tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # Masked scores are infinite: a large number, scaled and rounded once for the top and once fused with its subtraction, need
    # not cancel, and a row whose first keys are all masked would then be no number.
    for first in tl.range(0, keys, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k_tile = k.load([page, head, first, 0]).reshape(BLOCK_N, HEAD)
        scores = tl.dot(q_tile, k_tile.T)
        if MASKED:
            valid = tl.load(mask + b.to(tl.int64) * mask_b + key, mask=key < keys, other=0) != 0
            scores = tl.where(valid[None, :], scores, float("-inf"))
        elif not EVEN:
            scores = tl.where((key < keys)[None, :], scores, float("-inf"))
        # A whole number, as in split_attention.
        new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale))
        weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        v_tile = v.load([page, head, first, 0]).reshape(BLOCK_N, HEAD)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    # A row without any valid key gives zeros.
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    value = acc * share[:, None]
    if CODED:
        # Rounded as a tensor in between would be, so that the code is the same.
        value = value.to(q.dtype).to(tl.float32) * tl.load(multiplier)
        # Two selects instead of min and max, which would lose a NaN.
        value = tl.where(value > 448.0, 448.0, value)
        value = tl.where(value < -448.0, -448.0, value)
    out.store([b, head, row, 0], value.to(out.dtype).reshape(1, 1, BLOCK_M, HEAD))


def tma_attention(
    q_BTHd: Tensor,
    k_SPKd: Tensor,
    v_SPKd: Tensor,
    tiling: Tiling,
    *,
    slots_B: Tensor | None = None,
    mask_BN: Tensor | None = None,
    scale: float | None = None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Attend every query to the keys of its row (or of its row's slot) whose mask is set; a row without any gives zeros.

    The mask is bool or uint8 and dense. Returns [B, T, H, d], with a multiplier in e4m3 (as `to_fp8` writes it). See `takes`
    for what the kernel accepts.
    """
    batch, tokens, heads, head_dim = q_BTHd.shape
    keys, kv_heads = k_SPKd.shape[1:3]
    out = torch.empty(q_BTHd.shape, dtype=q_BTHd.dtype if multiplier is None else E4M3, device=q_BTHd.device)
    rows = tokens * heads // kv_heads
    head = max(block_of(head_dim), 16)
    mask = q_BTHd if mask_BN is None else mask_BN.view(torch.uint8) if mask_BN.dtype == torch.bool else mask_BN
    t = tiling
    sides = (_packed(q_BTHd, kv_heads), k_SPKd.transpose(1, 2), v_SPKd.transpose(1, 2), _packed(out, kv_heads))
    blocks = (t.block_m, t.block_n, t.block_n, t.block_m)
    tiles = [_tiles(x, rows_of, head) for x, rows_of in zip(sides, blocks, strict=True)]
    _tma_attention_kernel[(cdiv(rows, t.block_m), batch * kv_heads)](
        *tiles, q_BTHd if slots_B is None else slots_B, mask if multiplier is None else multiplier, mask, mask.stride(0), keys,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        KV_HEADS=kv_heads, INDEXED=slots_B is not None, MASKED=mask_BN is not None, CODED=multiplier is not None,
        EVEN=keys % t.block_n == 0, BLOCK_M=t.block_m, BLOCK_N=t.block_n, HEAD=head, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def _packed(x_BTHd: Tensor, kv_heads: int) -> Tensor:
    """Return [B, K, R, d]: the rows of one key/value head, as a view."""
    batch, tokens, heads, head_dim = x_BTHd.shape
    if kv_heads == 1:
        return x_BTHd.view(batch, 1, tokens * heads, head_dim)
    return x_BTHd.transpose(1, 2)


def _tiles(x: Tensor, rows: int, head: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, head])


def takes(q_BTHd: Tensor, k_SPKd: Tensor, v_SPKd: Tensor, mask_BN: Tensor | None = None) -> bool:
    """Tell whether the kernel takes these tensors.

    They are 16-bit, with strides of a multiple of 16 bytes but the last, which is dense; query heads share one key/value
    head, or each has its own.
    """
    kv_heads, heads = k_SPKd.shape[2], q_BTHd.shape[2]
    packed = q_BTHd.is_contiguous() if kv_heads == 1 else heads == kv_heads
    tensors = (q_BTHd, k_SPKd, v_SPKd)
    dense = all(x.dtype == q_BTHd.dtype and x.stride(-1) == 1 and all(s % 8 == 0 for s in x.stride()[:-1]) for x in tensors)
    aligned = all(x.storage_offset() % 8 == 0 for x in tensors)
    return packed and dense and aligned and q_BTHd.element_size() == 2 and (mask_BN is None or mask_BN.stride(-1) == 1)
