"""Rings of frame pages: where a chunk's keys and values go, and attention over what a ring holds.

A page is one latent frame. The first `sink_frames` pages keep the stream's first frames for good; the others are
overwritten in turn. Keys are stored roped at absolute positions, so the order of pages does not matter to softmax.

Shape legend: B rows, F frames of a chunk, N tokens of a chunk, T tokens of a page, H heads, d head size, S state slots,
W pages of a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, slots=True)
class Ring:
    """The layout of every ring of a model."""

    window_frames: int
    sink_frames: int
    frames_per_chunk: int

    def page(self, frame: int) -> int:
        """Return the page of an absolute frame."""
        if frame < self.sink_frames:
            return frame
        return self.sink_frames + (frame - self.sink_frames) % (self.window_frames - self.sink_frames)

    def valid(self, chunk: int) -> int:
        """Return how many pages, from page 0 on, hold frames once the chunk has written its own."""
        return min((chunk + 1) * self.frames_per_chunk, self.window_frames)

    def pages(self, frames: Tensor) -> Tensor:
        """Return the pages of absolute frames, int64 of any shape; nothing is read back to the host."""
        pages = (frames - self.sink_frames) % (self.window_frames - self.sink_frames) + self.sink_frames
        return torch.where(frames < self.sink_frames, frames, pages) if self.sink_frames else pages


def attend_slots(q_BNHd: Tensor, k_S: Tensor, v_S: Tensor, slots: Sequence[int], valid: Sequence[int]) -> Tensor:
    """Attend each row to the first `valid` pages of its state slot: [S, pages, T, H, d], or [S, X, H, d] unpaged.

    Rows whose slots follow one another and hold equally much share one call; no key is copied. Rows past the end of
    `slots` are padding and give zeros.
    """
    if k_S.dim() == 4:
        k_S, v_S = k_S[:, :, None], v_S[:, :, None]
    parts = []
    for first, count in _runs(slots, valid):
        at, n = slots[first], valid[first]
        q = q_BNHd[first : first + count].transpose(1, 2)
        k, v = (arena[at : at + count, :n].flatten(1, 2).transpose(1, 2) for arena in (k_S, v_S))
        parts.append(scaled_dot_product_attention(q, k, v).transpose(1, 2))
    if len(slots) < len(q_BNHd):
        parts.append(torch.zeros_like(q_BNHd[len(slots) :]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(slots: Sequence[int], valid: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of each run of consecutive slots with the same valid length."""
    for _, members in groupby(range(len(slots)), key=lambda i: (slots[i] - i, valid[i])):
        rows = list(members)
        yield rows[0], len(rows)


@functools.cache
def prefer_fastest_attention() -> object:
    """Make torch try cuDNN before FlashAttention 2, about twice as fast on Hopper for heads of 128; once for the process.

    Torch keeps the order for the whole process, so a context around each call would be undone by the executors of other
    devices. The context that is kept here is never left.
    """
    order = sdpa_kernel(CUDA_BACKENDS, set_priority=True)
    order.__enter__()
    return order
