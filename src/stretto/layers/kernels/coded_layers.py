"""What the chain of launches computes where its products are in e4m3, in plain torch: a reference for them.

A stream's rows are coded as x (1 + scale) / r, where r is their root mean square one norm ago: whoever writes a row does not
know that of the row itself yet. A row is at most 32 r' wide for 1024 channels, where r' is its own, so codes hold it unless
it becomes many times larger from one norm to the next; what does not fit is cut. Products are multiplied by r / r'
behind them. Shifts are added from tables of products in full precision. Sums of layers stay in fp32.

Shape legend: B batch rows, T tokens, D width, N columns of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from stretto.layers.cuda.chain import Coded
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import PrefixKV, prefix_attention
from stretto.layers.kernels.expert_layers import Shape
from stretto.layers.kernels.fold import ShiftLines
from stretto.layers.kernels.fp8_activation import to_fp8_reference
from stretto.layers.kernels.rope import rotary_angles, rotate, split_qkv
from stretto.layers.kernels.stream import Stream


class CodedStream(NamedTuple):
    """A residual stream and its coded rows; mean squares of its rows, and of those by which the codes were divided."""

    residual_BTD: Tensor
    codes_BTD: Tensor
    mean_BT1: Tensor
    before_BT1: Tensor


def code_stream(stream: Stream, eps: float) -> CodedStream:
    """Code the first stream, whose scaled rows are given."""
    residual = stream.residual_BTD
    mean = stream.squares_MP.sum(-1).view(*residual.shape[:2], 1) / residual.shape[-1]
    scaled = stream.scaled_BRD[:, : residual.shape[1]].float()
    return CodedStream(residual, to_fp8_reference(scaled, torch.rsqrt(mean + eps)), mean, mean)


def coded_product(stream: CodedStream, codes_ND: Tensor, by: Tensor, shift: ShiftLines, eps: float) -> Tensor:
    """Return the product of a stream's norm in fp32, [B, T, N]."""
    factor = by * torch.rsqrt((stream.mean_BT1 + eps) / (stream.before_BT1 + eps))
    return linear(stream.codes_BTD.float(), codes_ND.float()) * factor + shift.lines()


def coded_add(
    x_BTI: Tensor, codes_DI: Tensor, by: Tensor, stream: CodedStream, gated_by: Modulation, normed_by: Modulation, eps: float
) -> CodedStream:
    """Return the stream residual + gate * product of coded numbers."""
    total = stream.residual_BTD + gated_by.parts()[2] * (linear(x_BTI.float(), codes_DI.float()) * by)
    codes = to_fp8_reference(total * (1.0 + normed_by.parts()[0]), torch.rsqrt(stream.mean_BT1 + eps))
    return CodedStream(total, codes, total.square().mean(-1, keepdim=True), stream.mean_BT1)


class CodedLayer(NamedTuple):
    """What each launch of a layer leaves."""

    fresh_BTCd: Tensor
    """Queries, a key and a value in bf16, C = heads + 2."""
    attended_BTI: Tensor
    middle: CodedStream
    hidden_BTF: Tensor
    end: CodedStream


def coded_layer(
    i: int,
    stream: CodedStream,
    coded: Coded,
    norms: Sequence[Modulation],
    keys: PrefixKV,
    shape: Shape,
    given: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> CodedLayer:
    """Run layer `i`. `given` are codes to go on with in place of those of attention, the stream and the hidden columns."""
    first, second, third = norms[2 * i : 2 * i + 3]
    rows_B, eps, (attended, between, hidden) = first.rows, shape.eps, given
    assert rows_B is not None, "shifts are lines of a table"
    of_qkv, of_gate_up = (ShiftLines(t[:, i], rows_B) for t in (coded.qkv_shifts, coded.gate_up_shifts))
    w, (by_qkv, to_out, by_out, by_gate_up, to_down, by_down) = coded.weights[i], coded.scales_L6[i]
    q, k, v = split_qkv(coded_product(stream, w.qkv, by_qkv, of_qkv, eps), shape.heads, 1, shape.head_dim)
    positions_BT = keys.suffix_start_B[:, None] + torch.arange(q.shape[1], device=q.device)
    cos, sin = rotary_angles(positions_BT, shape.head_dim, shape.theta)
    fresh = torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v), dim=2).to(keys.k_SNPKd.dtype)
    q, k, v = torch.split(fresh, [shape.heads, 1, 1], dim=2)
    # What lies beyond a prefix may be no number.
    kept = keys.k_SNPKd[:, i].nan_to_num(), keys.v_SNPKd[:, i].nan_to_num(), keys.slots_B
    y = prefix_attention.reference(q, *kept, key_mask_BP=keys.mask_BP, length_B=keys.length_B, k_suffix_BTKd=k, v_suffix_BTKd=v)
    of_attention = to_fp8_reference(y.flatten(2), to_out)
    x = of_attention if attended is None else attended
    middle = coded_add(x, w.out, by_out, stream, first, second, eps)
    x = coded_product(middle if between is None else middle._replace(codes_BTD=between), w.gate_up, by_gate_up, of_gate_up, eps)
    gate, up = x.chunk(2, dim=-1)
    of_gate_and_up = to_fp8_reference(gelu(gate, approximate="tanh") * up, to_down)
    end = coded_add(of_gate_and_up if hidden is None else hidden, w.down, by_down, middle, second, third, eps)
    return CodedLayer(fresh, of_attention, middle, of_gate_and_up, end)
