"""Linear layers whose product runs in FP8 (e4m3), over weights that stay as they are.

An `Fp8Linear` holds a coded copy of a weight and the scale of its input, both tensors that `refresh` fills in place, so that
captured graphs go on when weights change. Its input is written in e4m3 by what comes before it: a norm, a GELU, or a plain
copy. An `ObservedLinear` takes its place for calibration: the same layers in the network's own precision, noting how large
inputs become. Where a device has no FP8 product, the same numbers are multiplied in fp32.

Why static scales of whole tensors: e4m3 is a floating-point format, so its error is relative to each value, over a range of
2^15 between the largest and the smallest normal number. A finer scale would move values within that range and gain nothing.

Shape legend: ... any leading axes, M rows of the product, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.core.errors import ConfigError
from stretto.layers.kernels.activation import geglu, gelu_tanh
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm, gated_add_ada_rms_norm
from stretto.layers.kernels.attention import PrefixKV, attention, prefix_attention
from stretto.layers.kernels.coded_attention import attention_fp8, suffix_attention_fp8
from stretto.layers.kernels.coded_prefix import coded_prefix_attention
from stretto.layers.kernels.fp8_activation import E4M3, E4M3_MAX, fp8_chip, to_fp8, to_fp8_reference
from stretto.layers.kernels.fp8_linear import fp8_linear, fp8_linear_geglu, fp8_linear_gelu
from stretto.layers.kernels.fp8_linear_add import fp8_linear_add
from stretto.layers.kernels.fp8_norm import ada_rms_norm_fp8
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.rms_norm import sum_rms_norm
from stretto.layers.kernels.rotate_write import rotate_write
from stretto.layers.kernels.sum_norm import Stream

HEADROOM = 2.0
"""How much larger than in calibration an input may become before it is cut. One binary order of magnitude of e4m3's fifteen."""
ALIGNMENT = 16


class Kept(NamedTuple):
    """How a prefix's layer keeps its keys and values, and how they are coded."""

    table: tuple[Tensor, Tensor]
    """Of `rotary_table`."""
    k_SPKd: Tensor
    v_SPKd: Tensor
    slots_B: Tensor
    by: Tensor
    """Of `code_factors`."""


class Reader(Protocol):
    """A linear layer that says how it wants its input written: first one of the named ways, then the product."""

    def rms_normed(self, stream: Stream, weight_D: Tensor, eps: float, *, store: bool = True) -> tuple[Tensor, Stream]:
        """Return (input, stream), as `sum_rms_norm`; the input is the RMSNorm, with factor 1 + w, of the stream's sum."""
        ...

    def layer_normed(
        self, stream: Stream, weight_D: Tensor, bias_D: Tensor, eps: float, *, store: bool = True
    ) -> tuple[Tensor, Stream]: ...
    def ada_normed(
        self, residual: Tensor, y: Tensor | None, gated_by: Modulation | None, normed_by: Modulation, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def geglu_of(self, before: Any, x: Tensor) -> Tensor:
        """Return, as this layer reads it, the GeGLU of what the layer before makes of x."""
        ...

    def gelu_of(self, before: Any, x: Tensor) -> Tensor: ...
    def plain(self, x: Tensor) -> Tensor: ...
    def attended(self, q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor) -> Tensor:
        """Return attention over fresh keys, [B, T, H d]."""
        ...

    def prefix_attended(self, qkv: Tensor, keep: Kept, mask_BT: Tensor, heads: int) -> Tensor:
        """Return a prefix's attention to itself, [B, T, H d], and keep its keys and values."""
        ...

    def suffix_attended(
        self,
        prefix: PrefixKV,
        layer: int,
        q_BTHd: Tensor,
        k_BTKd: Tensor,
        v_BTKd: Tensor,
        lead: int,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Return what a layer's suffix sees, [B, T, H d], as `prefix.attend`."""
        ...

    def onto(self, stream: Stream, x: Tensor) -> Stream:
        """Return the stream with the product: added to what is stored, or beside it; the norm behind takes either."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [..., N] in the weight's dtype."""
        ...

    def refresh(self) -> None:
        """Follow a change of the weight, in place."""
        ...


class Fp8Linear:
    """The FP8 product of a live weight.

    Args:
        weight_NK: the weight as the network holds it; read at `refresh`, never changed.
        input_max: largest absolute value of an input in calibration.

    Raises:
        ConfigError: naming `name` if the calibration is not a positive number, or the shape does not suit the product.
    """

    def __init__(
        self, name: str, weight_NK: Tensor, bias_N: Tensor | None, input_max: float, headroom: float = HEADROOM
    ) -> None:
        if not 0.0 < input_max < float("inf"):
            raise ConfigError(f"fp8 scale of {name}", got=input_max, expected="a finite number above 0")
        self.name, self.weight_NK, self.bias_N = name, weight_NK, bias_N
        device = weight_NK.device
        if fp8_chip(device):
            _check_shape(name, weight_NK)
        self.codes_NK = torch.empty(weight_NK.shape, dtype=E4M3, device=device)
        self.scales = (torch.full((), input_max * headroom / E4M3_MAX, device=device), torch.ones((), device=device))
        self.multiplier = torch.full((1,), E4M3_MAX / (input_max * headroom), device=device)

    @torch.no_grad()
    def refresh(self) -> None:
        weight = self.weight_NK.detach()
        scale = (weight.abs().amax().float() / E4M3_MAX).clamp_min(1e-12)
        self.scales[1].copy_(scale)
        self.codes_NK.copy_(to_fp8_reference(weight, 1.0 / scale))

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes

    def rms_normed(self, stream: Stream, weight_D: Tensor, eps: float, *, store: bool = True) -> tuple[Tensor, Stream]:
        return sum_rms_norm(*stream, weight_D, eps, multiplier=self.multiplier, store=store)

    def layer_normed(
        self, stream: Stream, weight_D: Tensor, bias_D: Tensor, eps: float, *, store: bool = True
    ) -> tuple[Tensor, Stream]:
        return sum_layer_norm(*stream, weight_D, bias_D, eps, multiplier=self.multiplier, store=store)

    def ada_normed(
        self, residual: Tensor, y: Tensor | None, gated_by: Modulation | None, normed_by: Modulation, eps: float
    ) -> tuple[Tensor, Tensor]:
        return ada_rms_norm_fp8(residual, y, gated_by, normed_by, self.multiplier, eps)

    def geglu_of(self, before: Fp8Linear, x: Tensor) -> Tensor:
        return fp8_linear_geglu(x, before.codes_NK, before.scales, self.multiplier)

    def gelu_of(self, before: Fp8Linear, x: Tensor) -> Tensor:
        assert before.bias_N is not None
        return fp8_linear_gelu(x, before.codes_NK, before.bias_N, before.scales, self.multiplier)

    def plain(self, x: Tensor) -> Tensor:
        return to_fp8(x, self.multiplier)

    def attended(self, q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor) -> Tensor:
        return attention_fp8(q_BTHd, k_BNKd, v_BNKd, self.multiplier).flatten(2)

    def prefix_attended(self, qkv: Tensor, keep: Kept, mask_BT: Tensor, heads: int) -> Tensor:
        arena = (keep.k_SPKd, keep.v_SPKd, keep.slots_B)
        return coded_prefix_attention(qkv, keep.table, *arena, mask_BT, keep.by, self.multiplier, heads=heads).flatten(2)

    def suffix_attended(
        self,
        prefix: PrefixKV,
        layer: int,
        q_BTHd: Tensor,
        k_BTKd: Tensor,
        v_BTKd: Tensor,
        lead: int,
        ahead: Tensor | None = None,
    ) -> Tensor:
        around = prefix.around(k_BTKd, v_BTKd, lead)
        return suffix_attention_fp8(q_BTHd, *prefix.arena(layer), self.multiplier, **around, ahead=ahead).flatten(2)

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.codes_NK, self.bias_N, self.scales, self.weight_NK.dtype)

    def onto(self, stream: Stream, x: Tensor) -> Stream:
        return fp8_linear_add(x, self.codes_NK, self.bias_N, self.scales, stream, self.weight_NK.dtype)


class ObservedLinear:
    """A linear layer in the network's own precision that notes the largest absolute value of its inputs."""

    def __init__(self, name: str, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.name, self.weight_NK, self.bias_N = name, weight_NK, bias_N
        self.dtype = weight_NK.dtype
        self.largest = torch.zeros((), device=weight_NK.device)

    def refresh(self) -> None:
        """Forget what was seen: it was of other weights."""
        self.largest.zero_()

    def rms_normed(self, stream: Stream, weight_D: Tensor, eps: float, *, store: bool = True) -> tuple[Tensor, Stream]:
        return sum_rms_norm(*stream, weight_D, eps, dtype=self.dtype, store=store)

    def layer_normed(
        self, stream: Stream, weight_D: Tensor, bias_D: Tensor, eps: float, *, store: bool = True
    ) -> tuple[Tensor, Stream]:
        return sum_layer_norm(*stream, weight_D, bias_D, eps, dtype=self.dtype, store=store)

    def ada_normed(
        self, residual: Tensor, y: Tensor | None, gated_by: Modulation | None, normed_by: Modulation, eps: float
    ) -> tuple[Tensor, Tensor]:
        if y is None or gated_by is None:
            return ada_rms_norm(residual, normed_by, eps).to(self.dtype), residual
        return gated_add_ada_rms_norm(residual, y, gated_by, normed_by, eps)

    def geglu_of(self, before: ObservedLinear, x: Tensor) -> Tensor:
        return geglu(before(x))

    def gelu_of(self, before: ObservedLinear, x: Tensor) -> Tensor:
        return gelu_tanh(before(x))

    def plain(self, x: Tensor) -> Tensor:
        return x

    def attended(self, q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor) -> Tensor:
        return attention(q_BTHd, k_BNKd, v_BNKd).flatten(2)

    def prefix_attended(self, qkv: Tensor, keep: Kept, mask_BT: Tensor, heads: int) -> Tensor:
        q = rotate_write(qkv, keep.table, keep.k_SPKd, keep.v_SPKd, keep.slots_B, heads=heads)
        return prefix_attention(q, keep.k_SPKd, keep.v_SPKd, keep.slots_B, key_mask_BP=mask_BT).flatten(2)

    def suffix_attended(
        self,
        prefix: PrefixKV,
        layer: int,
        q_BTHd: Tensor,
        k_BTKd: Tensor,
        v_BTKd: Tensor,
        lead: int,
        ahead: Tensor | None = None,
    ) -> Tensor:
        return prefix.attend(layer, q_BTHd, k_BTKd, v_BTKd, lead, ahead)

    def __call__(self, x: Tensor) -> Tensor:
        torch.maximum(self.largest, x.detach().abs().amax().float(), out=self.largest)
        return linear(x, self.weight_NK, self.bias_N)

    def onto(self, stream: Stream, x: Tensor) -> Stream:
        return stream.plus(self(x))


def _check_shape(name: str, weight_NK: Tensor) -> None:
    if weight_NK.dtype is not torch.bfloat16:
        raise ConfigError("dtype", got=str(weight_NK.dtype).removeprefix("torch."), expected="bfloat16 for precision fp8")
    if any(n % ALIGNMENT for n in weight_NK.shape):
        expected = f"both multiples of {ALIGNMENT}, as the FP8 product needs"
        raise ConfigError(f"shape of {name}", got=list(weight_NK.shape), expected=expected)
