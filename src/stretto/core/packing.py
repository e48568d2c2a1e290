"""Where named tensors lie in one row of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.route import TensorSpec


def packed(specs: Mapping[str, TensorSpec], align: int) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor, in the order of names and each on a multiple of `align`, and the bytes of the row."""
    offsets, at = {}, 0
    for name in sorted(specs):
        offsets[name] = at
        at += -(-specs[name].nbytes // align) * align
    return offsets, at
