"""Actions that steer a world model: declared tracks, brought to the latent rate, applied in every block.

Shape legend: P pixel frames, F latent frames, A width of one action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.core.errors import ConfigError, ObservationError

Rate = Literal["pixel", "latent", "chunk"]


@dataclass(frozen=True, slots=True)
class ActionTrack:
    """One named input of a stream: `dim` numbers for each pixel frame, latent frame or chunk."""

    name: str
    dim: int
    rate: Rate = "pixel"

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"actions.{self.name}.dim", got=self.dim, expected="1 or more")
        if self.rate not in ("pixel", "latent", "chunk"):
            raise ConfigError(f"actions.{self.name}.rate", got=repr(self.rate), expected="pixel, latent or chunk")

    @property
    def value(self) -> str:
        """Name of the route's value that carries the track at the latent rate."""
        return f"action.{self.name}"

    def samples(self, chunk: int, frames_per_chunk: int, time_stride: int) -> int:
        """Return how many samples of the track one chunk takes."""
        if self.rate == "chunk":
            return 1
        if self.rate == "latent":
            return frames_per_chunk
        return frames_per_chunk * time_stride - (time_stride - 1 if chunk == 0 else 0)

    def to_latent_rate(self, track_PA: Tensor, chunk: int, frames_per_chunk: int, time_stride: int = 4) -> Tensor:
        """Return the track of one chunk as [F, A], fp32.

        At pixel rate a latent frame takes the mean over the pixel frames that it stands for: the first frame of a stream
        stands for one, every other for `time_stride` (the 1 + 4k rule of the VAE). A chunk's sample holds for all frames.

        Raises:
            ObservationError: if the track has another length or width.
        """
        want = (self.samples(chunk, frames_per_chunk, time_stride), self.dim)
        if tuple(track_PA.shape) != want:
            raise ObservationError(
                f"actions.{self.name}", got=f"shape {tuple(track_PA.shape)}", expected=f"{want} for chunk {chunk}"
            )
        track = track_PA.float()
        if not bool(torch.isfinite(track).all()):
            raise ObservationError(f"actions.{self.name}", got="a number that is not finite", expected="finite numbers")
        if self.rate == "chunk":
            return track.expand(frames_per_chunk, -1).contiguous()
        if self.rate == "latent":
            return track.contiguous()
        if chunk == 0:
            track = torch.cat((track[:1].expand(time_stride, -1), track[1:]))
        return torch.unflatten(track, 0, (frames_per_chunk, time_stride)).mean(dim=1)
