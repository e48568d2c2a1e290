"""A linear layer whose product runs in FP8 (e4m3) with one scale a row of its input and one an output channel.

Input scales are measured as rows are written, so there is nothing to calibrate, and a row does not depend on the others of its
batch. The weight stays as it is; its coded copy is refreshed in place, so that captured graphs go on when weights change.

Shape legend: ... any leading axes, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.core.errors import ConfigError
from stretto.layers.kernels.fp8_activation import E4M3, fp8_chip
from stretto.layers.kernels.row_codes import code_rows_reference

ALIGNMENT = 16


class RowFp8Linear:
    """The FP8 product of a live weight. Where a device has none, the same numbers are multiplied in fp32.

    Raises:
        ConfigError: if the weight's dtype or shape does not suit the product.
    """

    def __init__(self, name: str, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        if weight_NK.dtype is not torch.bfloat16:
            got = str(weight_NK.dtype).removeprefix("torch.")
            raise ConfigError("dtype", got=got, expected="bfloat16 for precision fp8")
        if any(n % ALIGNMENT for n in weight_NK.shape):
            expected = f"both multiples of {ALIGNMENT}, as the FP8 product needs"
            raise ConfigError(f"shape of {name}", got=list(weight_NK.shape), expected=expected)
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.native = fp8_chip(weight_NK.device)
        self.codes_NK = torch.empty(weight_NK.shape, dtype=E4M3, device=weight_NK.device)
        self.scales_N1 = torch.empty(len(weight_NK), 1, dtype=torch.float32, device=weight_NK.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow a change of the weight, in place."""
        codes, scales = code_rows_reference(self.weight_NK.detach())
        self.codes_NK.copy_(codes)
        self.scales_N1.copy_(scales)

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes + self.scales_N1.nbytes

    def __call__(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the product [..., N] in the weight's dtype, of rows as `code_rows` gives them."""
        if not self.native:
            out = linear(codes.float() * scales, self.codes_NK.float() * self.scales_N1)
            out = out if self.bias_N is None else out + self.bias_N.float()
            return out.to(self.weight_NK.dtype)
        product_MN = torch._scaled_mm(
            codes.view(-1, codes.shape[-1]),
            self.codes_NK.t(),
            scales.view(-1, 1),
            self.scales_N1.t(),
            bias=self.bias_N,
            out_dtype=self.weight_NK.dtype,
            use_fast_accum=True,
        )
        return product_MN.view(*codes.shape[:-1], -1)
