"""A page: the values of one chunk as they cross a link, packed into bytes at fixed places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.core.packing import packed
from stretto.core.route import TensorSpec

_ALIGN = 256  # any dtype can be viewed in place, and copies start on a line of memory


@dataclass(frozen=True)
class PageLayout:
    """Where each value that can cross a link lies in a page."""

    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    page_bytes: int

    @staticmethod
    def of(specs: Mapping[str, TensorSpec]) -> PageLayout:
        offsets, size = packed(specs, _ALIGN)
        return PageLayout(dict(specs), offsets, max(size, _ALIGN))

    def views(self, page: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named values of a page, as views on its bytes."""
        found = {}
        for name in names:
            spec, start = self.specs[name], self.offsets[name]
            dtype = getattr(torch, spec.dtype)
            found[name] = page[start : start + spec.nbytes].view(dtype).view(spec.shape)
        return found

    def store(self, page: Tensor, values: Mapping[str, Tensor]) -> None:
        """Copy values into a page; asynchronous on a CUDA device."""
        for name, view in self.views(page, values).items():
            view.copy_(values[name], non_blocking=True)
