"""All layers over few suffix tokens that also read a prefix's keys and values: as a chain of launches, or as separate kernels.

The chain is in CUDA C++ (layers.cuda) for the sizes of pi0.5's expert on sm_90, compiled when it is first asked for. Where it
does not run the layers are Triton kernels, six each.

Shape legend: as in stream.py; L layers, P prefix tokens, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from stretto.layers.cuda.build import index_of
from stretto.layers.cuda.chain import Coded, ExpertChain, Weights, expert_chain
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.fold import ShiftLines
from stretto.layers.kernels.gated_linear import counters_needed, gated_linear
from stretto.layers.kernels.norm_linear import norm_geglu, norm_qkv
from stretto.layers.kernels.stream import Stream, open_stream
from stretto.layers.tuning import Config, Key, Tunable, choices, tuned

OP = "expert_layers"
CHAINED_UNTIL = 1
"""Up to this many batch rows the chain runs at a shape that no table knows."""


Size = torch.Size | tuple[int, int, int]


class Shape(NamedTuple):
    """What the tensors do not say."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    lead: int = 0
    """Leading suffix tokens that do not see those behind them."""


class _Sizes(TypedDict):
    heads: int
    kv_heads: int
    head_dim: int


def expert_layers(
    stream: Stream,
    weights: Sequence[Weights],
    norms: Sequence[Modulation],
    keys: PrefixKV,
    shape: Shape,
    shifts: Sequence[ShiftLines | None] | None = None,
    coded: Coded | None = None,
) -> Stream:
    """Return the stream behind the last layer; its scaled rows are in fp32, for what comes after the last norm.

    `norms` are the 2 L + 1 in the order in which layers meet them; their tables lie evenly in memory. `shifts` is what all but
    the last add to the product behind them: a stream that does not carry its shifts is rounded like one that does, with them.
    `coded` are the products in e4m3, whose tables hold the same shifts: the chain takes them if there are tables. Separate
    kernels do not.
    """
    chain, _ = chain_of(stream.residual_BTD.shape, stream.scaled_BRD.dtype, weights, norms[0], keys, shape)
    asked = choices(stream.residual_BTD.device).ran.setdefault(OP, set())
    if chain is None:
        asked.add("separate")
        return separate_layers(stream, weights, norms, keys, shape, shifts)
    if coded is None or shifts is None or not chain.takes_coded(coded, len(weights)):
        coded = None
    asked.add("chain" if coded is None else "chain in e4m3")
    return chain.run(stream, weights, (norms[0], norms[1]), keys, theta=shape.theta, eps=shape.eps, coded=coded)


def chain_of(
    size: Size, dtype: torch.dtype, weights: Sequence[Weights], first: Modulation, keys: PrefixKV, shape: Shape
) -> tuple[ExpertChain | None, str]:
    """Return the launches that would run a stream [B, T, D] for products in `dtype`, or None; where they are, or why not."""
    device = keys.mask_BP.device
    if device.type != "cuda":
        return None, f"they do not run on {device.type}"
    choice = tuned(OP, key_of(size, weights, keys, shape), dtype, device)
    if (rule(size[0]) if choice is None else choice["impl"]) != "chain":
        return None, "separate kernels are chosen"
    if (shape.kv_heads, shape.lead) != (1, 0):
        return None, "they have one key/value head and no leading tokens"
    chain, said = expert_chain(index_of(device))
    if chain is not None and not chain.takes(weights, size, dtype, first, keys):
        return None, "they were made for other sizes"
    return chain, said


def rule(batch: int) -> str:
    return "chain" if batch <= CHAINED_UNTIL else "separate"


def key_of(size: Size, weights: Sequence[Weights], keys: PrefixKV, shape: Shape) -> Key:
    batch, tokens, width = size
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return (batch, tokens, len(weights), width, weights[0].down.shape[1], *heads, keys.mask_BP.shape[1])


def separate_layers(
    stream: Stream,
    weights: Sequence[Weights],
    norms: Sequence[Modulation],
    keys: PrefixKV,
    shape: Shape,
    shifts: Sequence[ShiftLines | None] | None = None,
) -> Stream:
    """Run layers as separate kernels: norms are folded into the products behind them, sums into those before."""
    dtype, (heads, kv_heads, head_dim, theta, eps, lead) = stream.scaled_BRD.dtype, shape
    batch, tokens, width = stream.residual_BTD.shape
    counters = torch.zeros(counters_needed(batch * tokens, width), dtype=torch.int32, device=stream.residual_BTD.device)
    for i, w in enumerate(weights):
        first, second, third = norms[2 * i : 2 * i + 3]
        sizes: _Sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        of_qkv, of_gate_up = (None, None) if shifts is None else shifts[2 * i : 2 * i + 2]
        qkv = norm_qkv(
            stream.scaled_BRD, stream.squares_MP, w.qkv, first, keys.suffix_start_B, **sizes, theta=theta, eps=eps, shift=of_qkv
        )
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
        y = keys.attend(i, q, k, v, lead)
        stream = gated_linear(y, w.out, stream.residual_BTD, first, second, dtype, counters)
        y = norm_geglu(stream.scaled_BRD, stream.squares_MP, w.gate_up, second, eps, of_gate_up)
        last = i == len(weights) - 1
        stream = gated_linear(y, w.down, stream.residual_BTD, second, third, torch.float32 if last else dtype, counters)
    return stream


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, tokens, depth, width, mlp, heads, kv_heads, head_dim, prefix = key

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * std

    def number(n: int) -> Tensor:
        return torch.full((batch,), n, dtype=torch.int32, device=device)

    shapes = [((heads + 2 * kv_heads) * head_dim, width), (width, heads * head_dim), (2 * mlp, width), (width, mlp)]
    weights = [Weights(*(normal(*s, std=s[1] ** -0.5) for s in shapes)) for _ in range(depth)]
    table = torch.randn(11, 2 * depth + 1, 3 * width, device=device) * 0.1
    lines = torch.randint(11, (batch,), device=device)
    norms = [Modulation(table[:, i], lines) for i in range(2 * depth + 1)]
    kept = [normal(batch, depth, prefix, kv_heads, head_dim) for _ in range(2)]
    slots, mask = torch.randperm(batch, device=device), torch.rand(batch, prefix, device=device) < 0.9
    keys = PrefixKV(kept[0], kept[1], slots, mask, number(prefix), number(prefix))
    stream = open_stream.reference(torch.randn(batch, tokens, width, device=device), norms[0], dtype)
    return stream, weights, norms, keys, Shape(heads, kv_heads, head_dim, 1e4, 1e-6)


def _run(choice: Config | None, *given: Any) -> Stream:
    stream, weights, norms, keys, shape = given
    if choice is None:
        return expert_layers(*given)
    if choice["impl"] == "separate":
        return separate_layers(*given)
    chain, said = expert_chain(stream.residual_BTD.device.index or 0)
    if chain is None:
        raise RuntimeError(said)
    return chain.run(stream, weights, (norms[0], norms[1]), keys, theta=shape.theta, eps=shape.eps)


def _candidates(key: Key) -> list[Config]:
    return [{"impl": "chain"}, {"impl": "separate"}] if key[0] == 1 else [{"impl": "separate"}]


TUNABLES = (Tunable(OP, {"impl": ("chain", "separate")}, _candidates, _inputs, _run),)
