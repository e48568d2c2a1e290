"""A linear layer whose weight holds several named projections side by side, so that they run as one product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class FusedLinear(nn.Module):
    """Several projections of one input, stored as one [sum(out), in] weight.

    `views()` gives each projection under its own name as a view of the storage, so that a checkpoint can be loaded, or
    a weight updated, in place.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.out_features = dict(out_features)
        total = sum(self.out_features.values())
        self.weight = nn.Parameter(torch.empty(total, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def views(self) -> dict[str, Tensor]:
        """Return `{projection}.weight` (and `.bias`) -> the slice of the fused parameter, sharing its memory."""
        named: dict[str, Tensor] = {}
        at = 0
        for name, width in self.out_features.items():
            named[f"{name}.weight"] = self.weight[at : at + width]
            if self.bias is not None:
                named[f"{name}.bias"] = self.bias[at : at + width]
            at += width
        return named

    def forward(self, x: Tensor) -> Tensor:
        """Return all projections of x_[...,in], concatenated on the last axis in the order of `out_features`."""
        return nn.functional.linear(x, self.weight, self.bias)
