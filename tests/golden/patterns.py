"""Frames rebuilt from a seed instead of being stored, by the scripts that write golden files and by their readers."""

from __future__ import annotations

from typing import Any

import numpy as np


def pattern_image(height: int, width: int, seed: int) -> np.ndarray[Any, Any]:
    """Make a uint8 [height, width, 3] chirp in integer arithmetic, so that any reader can rebuild it exactly."""
    y = np.arange(height, dtype=np.int64)[:, None, None]
    x = np.arange(width, dtype=np.int64)[None, :, None]
    c = np.arange(3, dtype=np.int64)[None, None, :]
    value = (3 * y * y + 5 * x * x + 7 * x * y) // (64 + 16 * c) + 11 * (c + 1) * (x + 2 * y) // 4 + 37 * seed
    return (value % 256).astype(np.uint8)
