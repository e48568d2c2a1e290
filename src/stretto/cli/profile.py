"""`stretto profile MODEL`: time and bytes of every stage by batch size on the device at hand, for plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Args:
    model: Positional[str]
    """A preset (`pi0.5`, `wan2.1-1.3b`, ...): true shapes, seeded random weights."""
    batch: Annotated[str, arg(metavar="N,N,...")] = "1,2,3,4"
    chunk_frames: int | None = None
    """World models: latent frames of a chunk."""
    window_frames: int | None = None
    """World models: latent frames that a query sees."""
    size: Annotated[str | None, arg(metavar="HxW")] = None
    """World models: pixels, such as 480x832."""
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    mode: Literal["auto", "graph", "eager"] = "auto"
    n: int = 30
    """Timed runs of each case."""
    sustained: float = 4.0
    """World models on a GPU: seconds for which denoise steps run one behind the other, as in a stream, for each batch size."""
    out: Path | None = None
    """Write the profile here instead of printing it."""


def run(args: Args) -> int:
    from stretto.cli.bench import numbers, pixels
    from stretto.cli.files import writable
    from stretto.core.errors import ConfigError
    from stretto.deploy.profile import ProfileOptions, profile_preset

    if args.n < 1:
        raise ConfigError("n", got=args.n, expected="1 or more")
    if not 0.0 <= args.sustained < math.inf:
        raise ConfigError("sustained", got=args.sustained, expected="seconds, 0 or more")
    writable("out", args.out)
    height, width = pixels(args.size)
    fields = {
        "frames_per_chunk": args.chunk_frames,
        "window_frames": args.window_frames,
        "pixel_height": height,
        "pixel_width": width,
    }
    options = ProfileOptions(
        args.model,
        numbers("batch", args.batch),
        args.device,
        args.dtype,
        args.mode,
        n=args.n,
        sustained_s=args.sustained,
        changes=tuple((k, v) for k, v in fields.items() if v is not None),
    )
    text = profile_preset(options).to_json()
    if args.out is not None:
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 0
