"""Observations of the tiny checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def observation(seed: int, prompt: str = "open the drawer") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    images = {f"observation.images.{c}": rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for c in CAMERAS}
    return {**images, "observation.state": rng.uniform(-0.5, 0.5, 8).astype(np.float32), "task": prompt}
