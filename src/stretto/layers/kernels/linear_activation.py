"""A linear layer with the activation that follows it, if any: one kernel, or a cuBLAS product and a pass over its result.

Which of them runs at a shape is a measured choice (`layers.tuning`). Without one it is cuBLAS, which has an epilogue for GELU
and none for GeGLU, so that large gated products on Hopper take the kernel. In an epilogue the activation sees sums before
they are rounded to x's dtype.

Shape legend: ... any leading axes, M rows in all of them, K inner width, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.cuda.gated import FEATURES, TOKENS, product_for
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.activation import geglu, geglu_into, geglu_reference, gelu_tanh, gelu_tanh_reference
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.sum_norm import Stream
from stretto.layers.tuning import Config, Key, Tunable, tuned

# From these on the kernel was faster than cuBLAS and a pass at every size that was measured.
LARGE_ROWS, LARGE_WEIGHT = 768, 2**25
FEW_ROW_BLOCKS = ((64, 32, 64, 4, 4), (64, 64, 64, 3, 4), (64, 64, 64, 5, 4), (128, 64, 64, 3, 4), (128, 64, 64, 3, 8))


def linear_geglu_reference(x: Tensor, weight_2FK: Tensor) -> Tensor:
    """Return gelu(x @ gate.T) * (x @ up.T) for x [..., K] and a weight [2 F, K], gate first; [..., F]."""
    return geglu_reference(linear(x, weight_2FK))


def linear_gelu_reference(x: Tensor, weight_FK: Tensor, bias_F: Tensor) -> Tensor:
    """Return gelu(x @ weight.T + bias) in its tanh form for x [..., K]; [..., F]."""
    return gelu_tanh_reference(linear(x, weight_FK, bias_F))


def dense_reference(x: Tensor, weight_FK: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias for x [..., K]; [..., F]."""
    return linear(x, weight_FK, bias_F)


def dense_triton(x: Tensor, weight_FK: Tensor, bias_F: Tensor | None = None) -> Tensor:
    return run_dense(_choice("dense", x, weight_FK, weight_FK.shape[0], int(bias_F is not None)), x, weight_FK, bias_F)


def linear_geglu_triton(x: Tensor, weight_2FK: Tensor) -> Tensor:
    return run_geglu(_choice("linear_geglu", x, weight_2FK, weight_2FK.shape[0] // 2), x, weight_2FK)


def linear_gelu_triton(x: Tensor, weight_FK: Tensor, bias_F: Tensor) -> Tensor:
    return run_gelu(_choice("linear_gelu", x, weight_FK, weight_FK.shape[0]), x, weight_FK, bias_F)


def _choice(op: str, x: Tensor, weight: Tensor, hidden: int, *more: int) -> Config | None:
    key = (x.numel() // x.shape[-1], x.shape[-1], hidden, *more)
    return tuned(op, key, x.dtype, x.device) if gemm.takes(x, weight) else None


def run_dense(choice: Config | None, x: Tensor, weight_FK: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Run one choice; None is the rule."""
    if choice is None or choice["impl"] == "cublas":
        return linear(x, weight_FK, bias_F)
    if choice["impl"] == "lt":
        return cublas_lt.matmul(x, weight_FK, int(choice["algo"]), bias_N=bias_F)
    return gemm.gemm(x, weight_FK, bias_F, Tiling.of(choice))


def run_onto(
    choice: Config | None,
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    stream: Stream,
    wide_bias_N: Tensor | None = None,
) -> Stream:
    """Return the stream with the product: added to what is stored, by products that can, or beside it. None is torch's."""
    choice = None if choice is None else {**choice, "impl": stream.way_onto(choice["impl"], x)}
    if choice is not None and choice["impl"] == "lt_sum":
        wide = bias_N.float() if wide_bias_N is None and bias_N is not None else wide_bias_N
        total = cublas_lt.matmul(x, weight_NK, int(choice["algo"]), bias_N=wide, residual=stream.stored)
        return Stream(total, stream.added)
    return stream.plus(run_dense(choice, x, weight_NK, bias_N))


def onto_candidates() -> list[Config]:
    """Return the choices of `run_onto`."""
    summed: list[Config] = [{**choice, "impl": "lt_sum"} for choice in cublas_lt.candidates(8)]
    return [{"impl": "cublas"}, *cublas_lt.candidates(24), *summed]


def run_geglu(choice: Config | None, x: Tensor, weight_2FK: Tensor) -> Tensor:
    """Run one choice; None is the rule. A product in parts is activated while it is still in the cache."""
    if choice is not None and choice["impl"] == "cuda":
        product = product_for(x, weight_2FK)
        if product is not None:
            return product.run(x, weight_2FK, int(choice["tokens"]))
        choice = None
    choice = choice or _geglu_rule(x, weight_2FK)
    if choice is None or choice["impl"] == "cublas":
        parts = 1 if choice is None else int(choice["parts"])
        return geglu(linear(x, weight_2FK)) if parts == 1 else _in_parts(x, weight_2FK, parts)
    if choice["impl"] == "lt":
        return geglu(cublas_lt.matmul(x, weight_2FK, int(choice["algo"])))
    return gemm.gemm(x, weight_2FK, None, Tiling.of(choice), activation="geglu")


def run_gelu(choice: Config | None, x: Tensor, weight_FK: Tensor, bias_F: Tensor) -> Tensor:
    """Run one choice; None is the rule. `cublas_gelu` is cuBLAS with its own epilogue."""
    if choice is not None and choice["impl"] == "cublas":
        return gelu_tanh(linear(x, weight_FK, bias_F))
    if choice is None or choice["impl"] == "cublas_gelu":
        flat: Tensor = torch._addmm_activation(bias_F, x.flatten(0, -2), weight_FK.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], -1)
    if choice["impl"] == "lt":
        return cublas_lt.matmul(x, weight_FK, int(choice["algo"]), bias_N=bias_F, gelu=True)
    return gemm.gemm(x, weight_FK, bias_F, Tiling.of(choice), activation="gelu")


def _geglu_rule(x: Tensor, weight_2FK: Tensor) -> Config | None:
    rows = x.numel() // x.shape[-1]
    if rows < LARGE_ROWS or weight_2FK.numel() < LARGE_WEIGHT or not (gemm.on_hopper(x) and gemm.takes(x, weight_2FK)):
        return None
    return Tiling(128, 128, 64, 3, 8, 8 if rows < 16384 else 16, 1).config


def _in_parts(x: Tensor, weight_2FK: Tensor, parts: int) -> Tensor:
    out = torch.empty(*x.shape[:-1], weight_2FK.shape[0] // 2, dtype=x.dtype, device=x.device)
    for rows, into in zip(x.flatten(0, -2).chunk(parts), out.flatten(0, -2).chunk(parts), strict=True):
        geglu_into(linear(rows, weight_2FK), into)
    return out


def _geglu_candidates(key: Key) -> list[Config]:
    whole: list[Config] = [{"impl": "cublas", "parts": 1}]
    if key[0] < gemm.FEW_ROWS:
        return [*whole, *cublas_lt.candidates(8), *(Tiling(*cut, 8, 0).config for cut in FEW_ROW_BLOCKS)]
    whole += gated_candidates(key, 2)
    if key[0] <= 1024:  # two programs a multiprocessor, and less height beyond the last row
        apart = ((64, 128, 64, 2, 4), (64, 128, 32, 4, 4), (128, 64, 64, 3, 4))
        own = [Tiling(128, 128, 64, 3, 8, 8, 1), *(Tiling(*cut, 8, 0) for cut in apart)]
        return [*whole, *(t.config for t in own)]
    groups = (8,) if key[0] < 7000 else (8, 16)
    own = [Tiling(128, 128, 64, stages, 8, group, 1) for stages in (3, 4) for group in groups]
    return [*whole, *(t.config for t in own)]


def gated_candidates(key: Key, bytes_each: int) -> list[Config]:
    """Return the ways of the product in CUDA C++ at a shape, if it takes that."""
    fits = key[1] * bytes_each % 128 == 0 and key[2] % FEATURES == 0
    return [{"impl": "cuda", "tokens": n} for n in TOKENS] if fits else []


def _dense_candidates(key: Key) -> list[Config]:
    # No tile of ours was faster than cuBLAS's at a plain product of many rows.
    own = [Tiling(*cut, 8, 0).config for cut in FEW_ROW_BLOCKS] if key[0] < gemm.FEW_ROWS else []
    return [{"impl": "cublas"}, *cublas_lt.candidates(24), *own]


def _dense_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    found = _gelu_inputs(key[:3], dtype, device)
    return found if key[3] else found[:2]


def _gelu_candidates(key: Key) -> list[Config]:
    return [{"impl": "cublas"}, {"impl": "cublas_gelu"}, *cublas_lt.candidates(24)]


def _geglu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, inner, hidden = key
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    return x, torch.randn(2 * hidden, inner, dtype=dtype, device=device) * inner**-0.5


def _gelu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rows, inner, hidden = key
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    return (
        x,
        torch.randn(hidden, inner, dtype=dtype, device=device) * inner**-0.5,
        torch.randn(hidden, dtype=dtype, device=device),
    )


linear_geglu = FusedOp(linear_geglu_reference, linear_geglu_triton)
linear_gelu = FusedOp(linear_gelu_reference, linear_gelu_triton)
dense = FusedOp(dense_reference, dense_triton)
_GEGLU_FIELDS = {**gemm.FIELDS, "impl": ("cublas", "lt", "triton", "cuda"), "parts": (1, 2, 4), "tokens": TOKENS}
ONTO_FIELDS = {**gemm.FIELDS, "impl": ("cublas", "lt", "lt_sum", "triton")}
_GELU_FIELDS = {**gemm.FIELDS, "impl": ("cublas", "cublas_gelu", "lt", "triton")}
TUNABLES = (
    Tunable("dense", gemm.FIELDS, _dense_candidates, _dense_inputs, run_dense),
    Tunable("linear_geglu", _GEGLU_FIELDS, _geglu_candidates, _geglu_inputs, run_geglu),
    Tunable("linear_gelu", _GELU_FIELDS, _gelu_candidates, _gelu_inputs, run_gelu),
)
