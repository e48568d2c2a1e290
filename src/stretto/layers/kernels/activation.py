"""GELU (tanh form) with its gate or its bias.

Shape legend: ... any leading axes, F hidden width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from stretto.layers.dispatch import FusedOp


def geglu_reference(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up for gate_up [..., 2 F], gate first; computed in fp32, in the input's dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_tanh_reference(x: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return gelu(x + bias), computed in fp32, in x's dtype."""
    x32 = x.float() if bias_F is None else x.float() + bias_F.float()
    return gelu(x32, approximate="tanh").to(x.dtype)


geglu = FusedOp(geglu_reference)
gelu_tanh = FusedOp(gelu_tanh_reference)
