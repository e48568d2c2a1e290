"""Interleaved rotary embedding over (frame, row, column) positions of a video latent.

Shape legend: B rows, T = f h w tokens in frame, row, column order, H heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp


def rope_3d_reference(x_BTHd: Tensor, frame_start_B: Tensor, grid: tuple[int, int, int], *, theta: float = 10000.0) -> Tensor:
    """Rotate adjacent pairs by absolute positions; frames count from `frame_start_B` (int64, on the device).

    Of the d / 2 pairs, a third (rounded down) turns with the row, as many with the column, the rest with the frame.
    """
    frames, height, width = grid
    device = x_BTHd.device
    frame = frame_start_B[:, None] + torch.arange(frames, device=device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    of_axis = axis_pairs(x_BTHd.shape[-1])
    parts = (
        _angles(frame, of_axis[0], theta)[:, :, None, None].expand(-1, -1, height, width, -1),
        _angles(row, of_axis[1], theta)[None, None, :, None].expand(len(frame), frames, -1, width, -1),
        _angles(column, of_axis[2], theta)[None, None, None].expand(len(frame), frames, height, -1, -1),
    )
    angles = torch.cat(parts, dim=-1).flatten(1, 3)[:, :, None]
    cos, sin = angles.cos().float(), angles.sin().float()
    even, odd = x_BTHd.float().reshape(*x_BTHd.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BTHd.dtype)


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs turn with frame, row and column: 22, 21, 21 for 128."""
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def _angles(positions: Tensor, pairs: int, theta: float) -> Tensor:
    exponents = torch.arange(pairs, device=positions.device, dtype=torch.float64) / pairs
    return positions.double()[..., None] / theta**exponents


rope_3d = FusedOp(rope_3d_reference)
