"""Short films of robots: GIF with Pillow alone, or MP4 where PyAV is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stretto.core.errors import ConfigError

Frames = Sequence[NDArray[np.uint8]]
"""[H, W, 3] each, all of one size."""


def write_video(path: Path, frames: Frames, fps: float) -> None:
    """Write frames to a `.gif`, or to an `.mp4` if PyAV is installed.

    Raises:
        ConfigError: if there are no frames, the ending is another, or MP4 is asked for without PyAV.
    """
    if not frames:
        raise ConfigError("frames", got="none", expected="at least one")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        _write_gif(path, frames, fps)
    elif path.suffix == ".mp4":
        _write_mp4(path, frames, fps)
    else:
        raise ConfigError("video", got=repr(path.name), expected="a name that ends in .gif or .mp4")


def side_by_side(films: Sequence[Frames]) -> list[NDArray[np.uint8]]:
    """Join films of equal height into one; a film that ends early stays at its last frame."""
    length = max(len(film) for film in films)
    return [np.concatenate([film[min(i, len(film) - 1)] for film in films], axis=1) for i in range(length)]


def _write_gif(path: Path, frames: Frames, fps: float) -> None:
    # One palette for the whole film, or still parts flicker. Of frames from all of it, and covering rare colours too.
    sample = np.concatenate(frames[:: max(1, len(frames) // 8)], axis=0)
    palette = Image.fromarray(sample).quantize(255, method=Image.Quantize.MAXCOVERAGE)
    pictures = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    # GIF counts in hundredths of a second, and viewers slow down below two of them.
    duration_ms = max(20, round(100 / fps) * 10)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=duration_ms, loop=0, optimize=False)


def _write_mp4(path: Path, frames: Frames, fps: float) -> None:
    try:
        import av
    except ImportError as e:
        raise ConfigError("video", got=f"{path.name} without PyAV", expected="pip install av, or a .gif") from e
    height, width = frames[0].shape[0] // 2 * 2, frames[0].shape[1] // 2 * 2
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
