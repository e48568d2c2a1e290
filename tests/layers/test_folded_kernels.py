"""The kernels of a folded norm against their references: on a GPU where there is one, else in the interpreter (own process)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels import folded_linear, gemm, linear_folded_norm
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm
from stretto.layers.kernels.fold import Fold, ShiftLines, folded_norm, product_fp32, row_factors, shifted_products
from stretto.layers.kernels.folded_linear import folded_geglu, folded_rope_write
from stretto.layers.kernels.linear_folded_norm import linear_add_folded_norm
from stretto.layers.kernels.linear_rope import rotary_table

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")
# The interpreter multiplies bf16 matrices as raw bits; on a GPU bf16 is what counts.
MATRIX = torch.float16 if INTERPRETED else torch.bfloat16
KINDS = ["none", "row", "token"]
TILING = gemm.Tiling(32, 16, 32, 2, 4, 2, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).to(MATRIX)


def agree(got: Tensor, want: Tensor) -> None:
    """Both round once, so what differs is a last place of the format here and there, where sums ran in another order."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    places = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[want.dtype]
    torch.testing.assert_close(got, want, rtol=places, atol=places)
    assert got.dtype == torch.float32 or (got != want).float().mean() < 0.02


def shift_of(kind: str, b: int, t: int, columns: int) -> ShiftLines | None:
    """Make lines of a table that is a slice of a wider one, another for every row or token."""
    if kind == "none":
        return None
    g = torch.Generator().manual_seed(5)
    lines = torch.randperm(5, generator=g)[:b] if kind == "row" else torch.randint(5, (b, t), generator=g)
    return ShiftLines(normal(5, 3, columns, seed=6)[:, 1], lines.to(DEVICE))


def modulation_of(kind: str, b: int, t: int, width: int) -> Modulation:
    if kind == "none":
        return Modulation(normal(1, width, seed=7) / 2, scale_only=True)
    g = torch.Generator().manual_seed(8)
    lines = torch.randint(5, (b,) if kind == "row" else (b, t), generator=g)
    return Modulation(normal(5, 3 * width, seed=7) / 2, lines.to(DEVICE))


@kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_norm_leaves_scaled_rows_and_their_factor(kind: str) -> None:
    x, norm = normal(2, 5, 72), modulation_of(kind, 2, 5, 72)
    assert folded_norm.kernel is not None
    for got, want in zip(folded_norm.kernel(x, norm, 1e-6, MATRIX), folded_norm.reference(x, norm, 1e-6, MATRIX), strict=True):
        agree(got, want)
    scaled, factor = folded_norm.kernel(x, norm, 1e-6, torch.float32)
    shift = 0.0 if kind == "none" else norm.parts()[1]
    agree(scaled * factor[..., None] + shift, ada_rms_norm.reference(x, norm, 1e-6))


@kernel_test
@pytest.mark.parametrize("before", [0, 1, 3])
def test_factors_are_made_of_sums_of_squares_in_parts(before: int) -> None:
    parts, earlier = normal(2, 37, 16).square(), normal(2, 37, before, seed=1).square() + 0.1 if before else None
    by = torch.full((1,), 0.3, device=DEVICE) if before else None
    want = torch.rsqrt((parts.sum(-1) / 64 + 1e-6) / (1.0 if earlier is None else earlier.sum(-1) / 64 + 1e-6))
    assert row_factors.kernel is not None
    agree(row_factors.kernel(parts, earlier, by, 64, 1e-6), want if by is None else want * 0.3)
    agree(row_factors.reference(parts, earlier, by, 64, 1e-6), want if by is None else want * 0.3)


@kernel_test
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("choice", [{"impl": "cublas"}, {**TILING.config, "splits": 1}, {**TILING.config, "splits": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_reaches_the_sum_and_the_next_norm_in_fp32(kind: str, choice: dict[str, int | str], fold: bool) -> None:
    x, weight, residual = matrix(2, 5, 192), matrix(64, 192, seed=1) / 8, normal(2, 5, 64, seed=2)
    modulations = modulation_of(kind, 2, 5, 64), modulation_of(kind, 2, 5, 64)
    dtype = MATRIX if fold else torch.float32
    want = linear_add_folded_norm.reference(x, weight, residual, *modulations, 1e-6, dtype, fold)
    got = linear_folded_norm.run(choice, x, weight, residual, *modulations, 1e-6, dtype, fold)
    for a, b in zip(got, want, strict=True):
        agree(a, b)


@kernel_test
@pytest.mark.parametrize("choice", [{"impl": "cublas"}, TILING.config], ids=["pass", "fused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [5, 37])
def test_queries_keys_and_values_of_a_folded_norm(tokens: int, kind: str, choice: dict[str, int | str]) -> None:
    b, h, kv, d = 2, 4, 1, 32
    scaled, factor, weight = matrix(b, tokens, 64), normal(b, tokens, seed=1).abs(), matrix((h + 2 * kv) * d, 64, seed=2) / 8
    shift = shift_of(kind, b, tokens, (h + 2 * kv) * d)
    positions = torch.randint(0, 900, (b, tokens), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table, slots = rotary_table(positions, d, 1e4), torch.tensor([1, 0], device=DEVICE)
    arenas = torch.zeros(2, 2, b, tokens, kv, d, dtype=MATRIX, device=DEVICE)
    want = folded_rope_write.reference(scaled, factor, weight, shift, table, *arenas[0], slots, heads=h)
    got = folded_linear.run_rope(choice, scaled, weight, *table, *arenas[1], slots, h, Fold(factor, shift))
    agree(got, want)
    agree(arenas[1], arenas[0])


@kernel_test
@pytest.mark.parametrize("choice", [{"impl": "cublas"}, TILING.config, {**TILING.config, "persistent": 1}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [5, 37])
def test_gated_units_of_a_folded_norm(tokens: int, kind: str, choice: dict[str, int | str]) -> None:
    scaled, factor, weight = matrix(2, tokens, 72), normal(2, tokens, seed=1).abs(), matrix(160, 72, seed=2) / 8
    shift = shift_of(kind, 2, tokens, 160)
    want = folded_geglu.reference(scaled, factor, weight, shift)
    agree(folded_linear.run_geglu(choice, scaled, weight, Fold(factor, shift)), want)


def test_rows_factors_and_a_table_of_shifts_stand_for_the_product_of_the_norm() -> None:
    x, weight = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)), torch.randn(24, 32) / 6
    norm = Modulation(torch.randn(5, 96) / 2, torch.tensor([4, 0, 2]))
    scaled, factor = folded_norm(x, norm, 1e-6, torch.float32)
    shift = ShiftLines(shifted_products(norm.table[:, 32:64], weight), torch.tensor([4, 0, 2]))
    want = ada_rms_norm(x, norm, 1e-6) @ weight.T
    torch.testing.assert_close(Fold(factor, shift).on(product_fp32(scaled, weight)), want, atol=1e-5, rtol=1e-5)


def test_the_gradients_of_a_product_of_16_bit_matrices_are_those_of_the_product() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g).bfloat16() for shape in ((2, 3, 16), (8, 16)))
    at = torch.randn(2, 3, 8, generator=g).bfloat16().float()
    x32, weight32 = (v.float().requires_grad_() for v in (x, weight))
    want = torch.autograd.grad((x32 @ weight32.T * at).sum(), (x32, weight32))
    x.requires_grad_(), weight.requires_grad_()
    out = product_fp32(x, weight)
    torch.testing.assert_close(out, x32 @ weight32.T)
    for got, full in zip(torch.autograd.grad((out * at).sum(), (x, weight)), want, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), full, atol=2e-2, rtol=1e-2)
