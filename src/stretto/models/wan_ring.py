"""Rings of frame pages: where a chunk's keys and values go.

A page is one latent frame. The first `sink_frames` pages keep the stream's first frames for good; the others are
overwritten in turn. Keys are stored roped at absolute positions, so the order of pages does not matter to softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
