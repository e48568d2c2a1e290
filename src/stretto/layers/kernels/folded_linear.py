"""Products of a folded norm (fold.py): queries, keys and values that are rotated and written, and gated units.

What is left of the norm, then rotation or gate, see the fp32 sums; only their result is rounded. Either one kernel does it on
the accumulator, in Triton or in CUDA C++, or cuBLAS leaves sums in fp32 and a pass reads them; which of them at a shape is a
measured choice. Rows and weights may be codes in e4m3: then what is left of the norm has all that they are multiplied by.

Shape legend: as in linear_rope; F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from stretto.layers import cublas_lt
from stretto.layers.cuda import gated, rope
from stretto.layers.cuda.wide import Cut, Left
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm, linear_rope
from stretto.layers.kernels.activation import geglu_into
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.fold import (
    Factor,
    Fold,
    RowSquares,
    ShiftLines,
    chosen_product_fp32,
    folded_norm_reference,
    product_fp32,
)
from stretto.layers.kernels.fp8_activation import E4M3, to_fp8, to_fp8_reference
from stretto.layers.kernels.fp8_linear import fp8_linear
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.overlap import overlaps
from stretto.layers.tuning import Config, Key, Tunable, tuned

FUSED_ROWS = 300
"""Below, without a measured choice, rotation is in the product: measured for the product that is not folded."""


def folded_rope_write_reference(
    scaled_BTD: Tensor,
    factor: Factor,
    weight_CD: Tensor,
    shift: ShiftLines | None,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Do what `linear_rope_write` does to the norm that rows, factors and shift stand for; round once, after rotation."""
    qkv = Fold(factor, shift).on(product_fp32(scaled_BTD, weight_CD))
    q = linear_rope.rotate_and_write_reference(qkv, table, k_arena_SPKd, v_arena_SPKd, slots_B, heads)
    return q.to(k_arena_SPKd.dtype)


def folded_geglu_reference(
    scaled_BTD: Tensor,
    factor: Factor,
    weight_2FD: Tensor,
    shift: ShiftLines | None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Return gelu(gate) * up of the norm that rows, factors and shift stand for, [B, T, F] in the rows' dtype.

    In e4m3 it is multiplied by `multiplier`.
    """
    gate, up = Fold(factor, shift).on(product_fp32(scaled_BTD, weight_2FD)).chunk(2, dim=-1)
    gated = gelu(gate, approximate="tanh") * up
    return gated.to(scaled_BTD.dtype) if multiplier is None else to_fp8_reference(gated, multiplier)


def folded_rope_write_triton(
    scaled_BTD: Tensor,
    factor: Factor,
    weight_CD: Tensor,
    shift: ShiftLines | None,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    heads: int,
) -> Tensor:
    key = (scaled_BTD.shape[:2].numel(), scaled_BTD.shape[2], heads, *k_arena_SPKd.shape[-2:])
    choice = _tuned("folded_rope_write", key, scaled_BTD, weight_CD)
    given = *table, k_arena_SPKd, v_arena_SPKd, slots_B, heads, Fold(factor, shift)
    return run_rope(choice, scaled_BTD, weight_CD, *given)


def folded_geglu_triton(
    scaled_BTD: Tensor,
    factor: Factor,
    weight_2FD: Tensor,
    shift: ShiftLines | None,
    multiplier: Tensor | None = None,
) -> Tensor:
    key = (scaled_BTD.shape[:2].numel(), scaled_BTD.shape[2], weight_2FD.shape[0] // 2)
    choice = _tuned("folded_geglu", key, scaled_BTD, weight_2FD)
    return run_geglu(choice, scaled_BTD, weight_2FD, Fold(factor, shift), multiplier)


def _tuned(op: str, key: Key, x: Tensor, weight: Tensor) -> Config | None:
    return tuned(op, key, x.dtype, x.device) if x.dtype == E4M3 or gemm.takes(x, weight) else None


def run_rope(choice: Config | None, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Run one choice; None is the rule. `rest` is as in `linear_rope.run`, and the fold."""
    cos, sin, k, v, slots, heads, fold = rest
    rows, coded = x.shape[:2].numel(), x.dtype == E4M3
    wanted = coded or rows <= rope.UNTIL if choice is None else choice["impl"] == "cuda"
    product = rope.product_for(x, weight, k) if wanted else None
    if product is not None:
        cut = rope.rule(rows, coded) if choice is None else Cut.named(str(choice["cut"]))
        return product.run(x, weight, cos, sin, k, v, slots, heads, cut, fold=_left(fold), early=overlaps(x))
    if choice is None or choice["impl"] == "cuda":
        choice = _rope_rule(x, weight, k.shape[-1] // 2)
    if choice["impl"] == "triton":
        return linear_rope.fused(Tiling.of(choice), x, weight, *rest)
    return linear_rope.rotate_and_write(_sums(choice, x, weight), *rest)


def run_geglu(
    choice: Config | None,
    x: Tensor,
    weight_2FD: Tensor,
    fold: Fold,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Run one choice; None is the rule."""
    product = gated.product_for(x, weight_2FD) if choice is None or choice["impl"] == "cuda" else None
    if product is not None:
        cut = gated.rule(x.shape[:2].numel()) if choice is None else Cut.named(str(choice["cut"]))
        return product.run(x, weight_2FD, cut, multiplier=multiplier, fold=_left(fold), early=overlaps(x))
    if choice is None or choice["impl"] == "cuda":
        choice = {"impl": "cublas"}
    if choice["impl"] == "triton":
        return gemm.gemm(x, weight_2FD, None, Tiling.of(choice), activation="geglu", fold=fold)
    dtype = x.dtype if multiplier is None else torch.float32
    out = torch.empty(*x.shape[:-1], weight_2FD.shape[0] // 2, dtype=dtype, device=x.device)
    geglu_into(_sums(choice, x, weight_2FD), out, fold)
    return out if multiplier is None else to_fp8(out, multiplier)


def _sums(choice: Config, x: Tensor, weight: Tensor) -> Tensor:
    """Return the product in fp32; that of codes as it is, since what they are multiplied by is in the fold."""
    if x.dtype != E4M3:
        return chosen_product_fp32(choice, x, weight)
    one = torch.ones((), device=x.device)
    return fp8_linear(x, weight, None, (one, one), torch.float32)


def _left(fold: Fold) -> Left:
    factor, shift = fold.factor, fold.shift
    table, lines = (None, None) if shift is None else (shift.table, shift.rows.contiguous())
    if not isinstance(factor, RowSquares):
        return Left(factor.contiguous(), table, lines)
    squares, before = (t if t is None else t.flatten(0, 1).contiguous() for t in (factor.squares_BTP, factor.before_BTP))
    return Left(None, table, lines, squares, before, factor.by, factor.width, factor.eps)


def _rope_rule(x: Tensor, weight: Tensor, half: int) -> Config:
    """Choose where there are no launches in CUDA C++."""
    fits = gemm.on_hopper(x) and gemm.takes(x, weight) and half % 64 == 0
    return Tiling(64, 64, 64, 5, 4, 8, 0).config if fits and x.shape[:2].numel() < FUSED_ROWS else {"impl": "cublas"}


def _cut_candidates(cuts: tuple[Cut, ...]) -> list[Config]:
    return [{"impl": "cuda", "cut": cut.name} for cut in cuts]


def _rope_candidates(key: Key) -> list[Config]:
    half = key[4] // 2
    cuts = ((64, 32, 64, 4, 4), (64, 64, 64, 3, 4), (64, 64, 64, 5, 4), (128, 32, 64, 3, 4), (128, 64, 64, 3, 4))
    own = [Tiling(*cut, 8, 0).config for cut in cuts if half % cut[1] == 0]
    return [{"impl": "cublas"}, *cublas_lt.candidates(10), *own, *_cut_candidates(rope.CUTS if key[4] == rope.HEAD else ())]


def _geglu_candidates(key: Key) -> list[Config]:
    cuts = ((64, 32, 64, 4, 4), (64, 64, 64, 3, 4), (64, 64, 64, 5, 4), (128, 64, 64, 3, 4), (64, 128, 64, 2, 4))
    own = [*(Tiling(*cut, 8, 0) for cut in cuts), Tiling(128, 128, 64, 2, 8, 8, 1), Tiling(128, 64, 64, 4, 8, 8, 1)]
    return [{"impl": "cublas"}, *cublas_lt.candidates(8), *(t.config for t in own), *_cut_candidates(gated.CUTS)]


def _fold(key: Key, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Fold]:
    """Return scaled rows, a weight, and what is left of the norm, for robots of 50 tokens."""
    rows, inner = key[:2]
    tokens = 50 if rows % 50 == 0 else rows
    x = torch.randn(rows // tokens, tokens, inner, device=device)
    scaled, factor = folded_norm_reference(x, Modulation(torch.rand(1, inner, device=device), scale_only=True), 1e-6, dtype)
    weight = torch.randn(columns, inner, dtype=dtype, device=device) * inner**-0.5
    lines = torch.randint(11, (rows // tokens,), device=device)
    return scaled, weight, Fold(factor, ShiftLines(torch.randn(11, columns, device=device), lines))


def _rope_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    heads, kv_heads, head_dim = key[2:]
    scaled, weight, fold = _fold(key, (heads + 2 * kv_heads) * head_dim, dtype, device)
    batch, tokens = scaled.shape[:2]
    positions = torch.arange(tokens, device=device).expand(batch, tokens) + 968
    table = linear_rope.rotary_table(positions, head_dim, 1e4)
    k, v = torch.zeros(2, batch, tokens, kv_heads, head_dim, dtype=dtype, device=device)
    return scaled, weight, *table, k, v, torch.arange(batch, device=device), heads, fold


def _geglu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _fold(key, 2 * key[2], dtype, device)


def _supports(
    scaled_BTD: Tensor,
    factor: Factor,
    weight_CD: Tensor,
    shift: ShiftLines | None,
    table: tuple[Tensor, Tensor],
    *arenas_and_slots: Tensor,
    **_: int,
) -> bool:
    """The kernels take heads that lie side by side in one token, all in one dtype."""
    arenas = arenas_and_slots[:2]
    dtype = torch.bfloat16 if scaled_BTD.dtype == E4M3 else scaled_BTD.dtype
    dense = all(a.stride(-1) == 1 and a.stride(-2) == a.shape[-1] and a.dtype == dtype for a in arenas)
    return dense and scaled_BTD.is_contiguous() and all(a.is_contiguous() for a in table)


folded_rope_write = FusedOp(folded_rope_write_reference, folded_rope_write_triton, _supports)
folded_geglu = FusedOp(folded_geglu_reference, folded_geglu_triton)


def _fields(cuts: tuple[Cut, ...]) -> dict[str, tuple[int | str, ...]]:
    return {**gemm.FIELDS, "impl": ("cublas", "lt", "triton", "cuda"), "cut": tuple(cut.name for cut in cuts)}


TUNABLES = (
    Tunable("folded_rope_write", _fields(rope.CUTS), _rope_candidates, _rope_inputs, run_rope),
    Tunable("folded_geglu", _fields(gated.CUTS), _geglu_candidates, _geglu_inputs, run_geglu),
)
