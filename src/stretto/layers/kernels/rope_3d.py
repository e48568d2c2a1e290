"""Interleaved rotary embedding over (frame, row, column) positions of a video latent, alone and between QK norm and KV write.

The cosines and sines of a chunk's own tokens are made once, in fp64, and shared by all blocks: inside every block they would
cost more than all its reading and writing. There is no table of positions that could overflow.

Shape legend: B rows, T = f h w tokens in frame, row, column order, H heads, d head size, C = 3 H d channels of q, k and v
side by side, S ring slots; of a ring P tokens, of a head P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of
from stretto.layers.kernels.overlap import await_inputs, overlaps
from stretto.layers.kernels.rms_norm import rms_norm_reference


def rope_3d_reference(x_BTHd: Tensor, frame_start_B: Tensor, grid: tuple[int, int, int], *, theta: float = 10000.0) -> Tensor:
    """Rotate adjacent pairs by absolute positions; frames count from `frame_start_B` (int64, on the device).

    Of the d / 2 pairs, a third (rounded down) turns with the row, as many with the column, the rest with the frame.
    """
    return _turned(x_BTHd, rope_3d_turns_reference(frame_start_B, grid, x_BTHd.shape[-1], theta=theta))


def rope_3d_turns_reference(
    frame_start_B: Tensor, grid: tuple[int, int, int], head_dim: int, *, theta: float = 10000.0
) -> Tensor:
    """Return the cosine and the sine of every pair's angle at every token, [B, T, 2, d / 2] in fp32."""
    frames, height, width = grid
    device = frame_start_B.device
    frame = frame_start_B[:, None] + torch.arange(frames, device=device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    of_axis = axis_pairs(head_dim)
    parts = (
        _angles(frame, of_axis[0], theta)[:, :, None, None].expand(-1, -1, height, width, -1),
        _angles(row, of_axis[1], theta)[None, None, :, None].expand(len(frame), frames, -1, width, -1),
        _angles(column, of_axis[2], theta)[None, None, None].expand(len(frame), frames, height, -1, -1),
    )
    angles = torch.cat(parts, dim=-1).flatten(1, 3)
    return torch.stack((angles.cos(), angles.sin()), dim=2).float()


def _turned(x_BTHd: Tensor, turns_BT2P: Tensor) -> Tensor:
    cos, sin = turns_BT2P[:, :, None].unbind(3)
    even, odd = x_BTHd.float().reshape(*x_BTHd.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BTHd.dtype)


def qk_norm_rope_write_reference(
    qkv_BTC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    turns_BT2P: Tensor,
    k_ring_SPHd: Tensor,
    v_ring_SPHd: Tensor,
    slots_B: Tensor,
    offset_B: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Normalise q and k over all heads, turn both (`rope_3d_turns`), and write k and v into a ring page; return q_BTHd.

    Row b writes tokens [offset_B[b], offset_B[b] + T) of slot slots_B[b]; both int64 and on the device. The weights are
    H d wide and multiply as they are.
    """
    (batch, tokens, _), (heads, head_dim) = qkv_BTC.shape, k_ring_SPHd.shape[2:]
    q, k, v = (x.reshape(batch, tokens, -1) for x in qkv_BTC.chunk(3, dim=-1))
    turned = []
    for x, weight in ((q, q_weight_D), (k, k_weight_D)):
        normed = rms_norm_reference(x.float(), weight, eps, unit_offset=False).view(batch, tokens, heads, head_dim)
        turned.append(_turned(normed, turns_BT2P).to(qkv_BTC.dtype))
    at = slots_B[:, None], offset_B[:, None] + torch.arange(tokens, device=qkv_BTC.device)
    k_ring_SPHd[at] = turned[1].to(k_ring_SPHd.dtype)
    v_ring_SPHd[at] = v.view(batch, tokens, heads, head_dim).to(v_ring_SPHd.dtype)
    return turned[0]


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs turn with frame, row and column: 22, 21, 21 for 128."""
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def _angles(positions: Tensor, pairs: int, theta: float) -> Tensor:
    exponents = torch.arange(pairs, device=positions.device, dtype=torch.float64) / pairs
    return positions.double()[..., None] / theta**exponents


@jit
def _turns_kernel(
    frame_start: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    log2_theta: tl.tensor,
    FRAME_PAIRS: tl.constexpr,
    SIDE_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Work on one token. Frames count without end, so the product is taken in fp64 and wrapped."""
    program = tl.program_id(0)
    token = program % tokens
    pair = tl.arange(0, PAIRS)
    by_frame, by_row = pair < FRAME_PAIRS, pair < FRAME_PAIRS + SIDE_PAIRS
    frame = tl.load(frame_start + program // tokens) + token // (height * width)
    row, column = token // width % height, token % width
    position = tl.where(by_frame, frame, tl.where(by_row, row, column)).to(tl.float64)
    index = tl.where(by_frame, pair, tl.where(by_row, pair - FRAME_PAIRS, pair - FRAME_PAIRS - SIDE_PAIRS))
    share = index.to(tl.float64) / tl.where(by_frame, FRAME_PAIRS, SIDE_PAIRS).to(tl.float64)
    turns = position * tl.exp2(-share * log2_theta) * 0.15915494309189535
    angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
    at = out + program.to(tl.int64) * (2 * PAIRS) + pair
    tl.store(at, tl.cos(angle))
    tl.store(at + PAIRS, tl.sin(angle))


@jit
def _rope_3d_kernel(
    source: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    turns: tl.tensor,
    slots: tl.tensor,
    offsets: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    tokens: tl.tensor,
    source_b: tl.tensor,
    source_t: tl.tensor,
    k_slot: tl.tensor,
    k_t: tl.tensor,
    v_slot: tl.tensor,
    v_t: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Turn one token, held in registers some heads at a time.

    When FUSED, axis 1 of the grid goes over q, k and v, and q and k are normalised first.
    """
    await_inputs(OVERLAP)
    part = tl.program_id(1)
    row = tl.program_id(0)
    b, token = (row // tokens).to(tl.int64), row % tokens
    dim = tl.arange(0, HEAD_DIM)[None, :]
    x = source + b * source_b + token * source_t + part * (HEADS * HEAD_DIM)
    out = q_out + row.to(tl.int64) * (HEADS * HEAD_DIM)
    weight = q_weight
    if FUSED:
        page, place = tl.load(slots + b).to(tl.int64), tl.load(offsets + b).to(tl.int64) + token
        if part == 1:
            out = k_out + page * k_slot + place * k_t
            weight = k_weight
        if part == 2:
            out = v_out + page * v_slot + place * v_t
    if part == 2:
        for first in tl.static_range(0, HEADS, BLOCK_HEADS):
            head = first + tl.arange(0, BLOCK_HEADS)[:, None]
            plain = tl.load(x + head * HEAD_DIM + dim, mask=head < HEADS, other=0.0)
            tl.store(out + head * HEAD_DIM + dim, plain.to(out.dtype.element_ty), mask=head < HEADS)
    else:
        pair = turns + row.to(tl.int64) * HEAD_DIM + tl.arange(0, HEAD_DIM // 2)
        cos, sin = tl.load(pair)[None, :], tl.load(pair + HEAD_DIM // 2)[None, :]
        values = ()
        squares = tl.zeros((BLOCK_HEADS, HEAD_DIM), tl.float32)
        for first in tl.static_range(0, HEADS, BLOCK_HEADS):
            head = first + tl.arange(0, BLOCK_HEADS)[:, None]
            value = tl.load(x + head * HEAD_DIM + dim, mask=head < HEADS, other=0.0).to(tl.float32)
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
            squares += value * value
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (HEADS * HEAD_DIM) + eps)
        for block in tl.static_range(0, (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS):
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            value = values[block]
            if FUSED:
                factor = tl.load(weight + head * HEAD_DIM + dim, mask=head < HEADS, other=0.0).to(tl.float32)
                value = value * inverse * factor
            even, odd = tl.split(tl.reshape(value, (BLOCK_HEADS, HEAD_DIM // 2, 2)))
            turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
            turned = tl.reshape(turned, (BLOCK_HEADS, HEAD_DIM)).to(out.dtype.element_ty)
            tl.store(out + head * HEAD_DIM + dim, turned, mask=head < HEADS)


def rope_3d_turns_triton(frame_start_B: Tensor, grid: tuple[int, int, int], head_dim: int, *, theta: float = 10000.0) -> Tensor:
    frames, height, width = grid
    batch, tokens = len(frame_start_B), frames * height * width
    frame_pairs, side_pairs, _ = axis_pairs(head_dim)
    out = torch.empty(batch, tokens, 2, head_dim // 2, dtype=torch.float32, device=frame_start_B.device)
    _turns_kernel[(batch * tokens,)](
        frame_start_B.contiguous(), out, tokens, height, width, math.log2(theta),
        FRAME_PAIRS=frame_pairs, SIDE_PAIRS=side_pairs, PAIRS=head_dim // 2, num_warps=1,
    )  # fmt: skip
    return out


def rope_3d_triton(x_BTHd: Tensor, frame_start_B: Tensor, grid: tuple[int, int, int], *, theta: float = 10000.0) -> Tensor:
    x = x_BTHd.contiguous()
    out = torch.empty_like(x)
    turns = rope_3d_turns_triton(frame_start_B, grid, x.shape[-1], theta=theta)
    _launch(x, (x, x), turns, out, (out, out), (frame_start_B, frame_start_B), 0.0, fused=False)
    return out


def qk_norm_rope_write_triton(
    qkv_BTC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    turns_BT2P: Tensor,
    k_ring_SPHd: Tensor,
    v_ring_SPHd: Tensor,
    slots_B: Tensor,
    offset_B: Tensor,
    *,
    eps: float,
) -> Tensor:
    batch, tokens, _ = qkv_BTC.shape
    q = torch.empty(batch, tokens, *k_ring_SPHd.shape[2:], dtype=qkv_BTC.dtype, device=qkv_BTC.device)
    weights, rings, places = (q_weight_D, k_weight_D), (k_ring_SPHd, v_ring_SPHd), (slots_B, offset_B)
    _launch(qkv_BTC, weights, turns_BT2P, q, rings, places, eps, fused=True)
    return q


def _launch(
    source: Tensor,
    weights: tuple[Tensor, Tensor],
    turns_BT2P: Tensor,
    q: Tensor,
    rings: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    eps: float,
    *,
    fused: bool,
) -> None:
    batch, tokens, heads, head_dim = q.shape
    (k_out, v_out), (slots_B, offset_B) = rings, places
    # Heads of one block divide all heads where they can, so that no thread is idle.
    block = next((n for n in (8, 4) if heads % n == 0), min(block_of(heads), 8))
    _rope_3d_kernel[(batch * tokens, 3 if fused else 1)](
        source, *weights, turns_BT2P, slots_B, offset_B, q, k_out, v_out,
        tokens, source.stride(0), source.stride(1),
        k_out.stride(0), k_out.stride(1), v_out.stride(0), v_out.stride(1), eps,
        HEADS=heads, HEAD_DIM=head_dim, FUSED=fused, BLOCK_HEADS=block,
        OVERLAP=overlaps(source), num_warps=warps_of(block * head_dim), launch_pdl=overlaps(source),
    )  # fmt: skip


def _even_power(x_BTHd: Tensor, *_: object, **__: object) -> bool:
    head_dim = x_BTHd.shape[-1]
    return head_dim >= 8 and head_dim & (head_dim - 1) == 0


def _same_layout(
    qkv_BTC: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, turns_BT2P: Tensor, *rings: Tensor, **_: object
) -> bool:
    dense = all(x.stride(-1) == 1 and x.stride(2) == x.shape[3] and x.dtype == qkv_BTC.dtype for x in rings[:2])
    dense = dense and qkv_BTC.stride(-1) == 1 and turns_BT2P.is_contiguous()
    return dense and q_weight_D.dtype == k_weight_D.dtype and _even_power(rings[0])


def _even_pairs(frame_start_B: Tensor, grid: tuple[int, int, int], head_dim: int, **_: object) -> bool:
    return head_dim >= 8 and head_dim & (head_dim - 1) == 0


rope_3d = FusedOp(rope_3d_reference, rope_3d_triton, supports=_even_power)
rope_3d_turns = FusedOp(rope_3d_turns_reference, rope_3d_turns_triton, supports=_even_pairs)
qk_norm_rope_write = FusedOp(qk_norm_rope_write_reference, qk_norm_rope_write_triton, supports=_same_layout)
