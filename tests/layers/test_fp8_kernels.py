"""Each kernel that writes e4m3 against its reference: on a GPU where there is one, else in the interpreter (own process)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels.ada_rms_norm import Modulation, launch
from stretto.layers.kernels.fp8_activation import E4M3, fp8_chip, geglu_fp8, gelu_tanh_fp8, to_fp8
from stretto.layers.kernels.fp8_folded_norm import fp8_folded_norm
from stretto.layers.kernels.fp8_linear import (
    _inputs,
    fp8_linear,
    fp8_linear_geglu,
    fp8_linear_gelu,
    fp8_linear_reference,
    run_geglu,
    run_gelu,
)
from stretto.layers.kernels.fp8_norm import ada_rms_norm_fp8
from stretto.layers.kernels.gemm import Tiling
from stretto.layers.kernels.layer_norm import sum_layer_norm
from stretto.layers.kernels.linear_rope import rotary_table
from stretto.layers.kernels.rms_norm import sum_rms_norm
from stretto.layers.kernels.rotate_write import rotate_write

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")
SHAPES = [(2, 3, 33), (1, 5, 64)]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def multiplier() -> Tensor:
    """Return a multiplier under which some values leave e4m3's range and others its normal numbers."""
    return torch.full((1,), 260.0, device=DEVICE)


def agree(got: Tensor, want: Tensor, apart: float = 0.02) -> None:
    """Compare codes: a value whose fp32 sum ran in another order may fall to the neighbouring code, rarely."""
    assert got.dtype == want.dtype == E4M3
    a, b = got.float(), want.float()
    # Hopper keeps some 14 bits of an FP8 product's running sum: what is left of large terms that cancel is off by more.
    sums = 2.0**-10 * b.abs().max() if apart > 0.02 and not INTERPRETED else 0.0
    far = (a - b).abs() > 0.13 * b.abs() + 2.0**-9 + sums
    # The interpreter forgets the carry where rounding reaches the next power of two, and halves such values.
    halved = ((2 * a - b).abs() <= 0.13 * b.abs()) if INTERPRETED else torch.zeros_like(far)
    assert not (far & ~halved).any()
    a = torch.where(halved, b, a)
    assert (a != b).float().mean() < apart


@kernel_test
@pytest.mark.parametrize("op", ["to_fp8", "geglu_fp8", "gelu_tanh_fp8"])
def test_activations(op: str) -> None:
    fused = {"to_fp8": to_fp8, "geglu_fp8": geglu_fp8, "gelu_tanh_fp8": gelu_tanh_fp8}[op]
    x, m = normal(3, 5, 2 * 72), multiplier()
    x[0, 0, 0] = 1e9
    agree(fused.kernel(x, m), fused.reference(x, m))


@kernel_test
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize("gated", [False, True])
def test_products_with_what_follows(gated: bool, persistent: int) -> None:
    rows, inner, hidden = 70, 96, 80
    x, codes, scales, m = _inputs((rows, inner, hidden), 2 * hidden if gated else hidden, torch.device(DEVICE))
    tiling = {**Tiling(64, 32, 64, 2, 4, 8, persistent).config}
    rule = {"impl": "cublas", "parts": 2}
    if gated:
        want = fp8_linear_geglu.reference(x, codes, scales, m)
        agree(run_geglu(tiling, x, codes, scales, m), want, apart=0.03)
        agree(run_geglu(rule, x, codes, scales, m), want, apart=0.2)  # by way of bf16
    else:
        bias = normal(hidden)
        want = fp8_linear_gelu.reference(x, codes, bias, scales, m)
        agree(run_gelu(tiling, x, codes, bias, scales, m), want, apart=0.03)
        agree(run_gelu(rule, x, codes, bias, scales, m), want, apart=0.2)


@kernel_test
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_norms(shape: tuple[int, ...]) -> None:
    m, width = multiplier(), shape[-1]
    residual, y = normal(*shape, dtype=torch.float32), normal(*shape, seed=1)
    w, b = normal(width, dtype=torch.float32, seed=2), normal(width, dtype=torch.float32, seed=3)
    for added in ((), (y,), (y, y)):
        got = sum_rms_norm.kernel(residual, added, w, 1e-6, multiplier=m)
        want = sum_rms_norm.reference(residual, added, w, 1e-6, multiplier=m)
        agree(got[0], want[0])
        torch.testing.assert_close(got[1].stored, want[1].stored)
        got = sum_layer_norm.kernel(residual, added, w, b, 1e-6, multiplier=m, store=False)
        want = sum_layer_norm.reference(residual, added, w, b, 1e-6, multiplier=m, store=False)
        agree(got[0], want[0])


@kernel_test
@pytest.mark.parametrize("rows", ["row", "token"])
def test_modulated_norm(rows: str) -> None:
    shape, m = (2, 3, 32), multiplier()
    residual, y = normal(*shape, dtype=torch.float32), normal(*shape, seed=1)
    table = normal(4, 5, 96, dtype=torch.float32, seed=2)
    index = torch.tensor([3, 1] if rows == "row" else [[3, 1, 0], [2, 2, 1]], device=DEVICE)
    first, second = Modulation(table[:, 1], index), Modulation(table[:, 2], index)
    got = ada_rms_norm_fp8.kernel(residual, y, first, second, m, 1e-6)
    want = ada_rms_norm_fp8.reference(residual, y, first, second, m, 1e-6)
    agree(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    direct = Modulation(second.lines()[:, 0] if rows == "row" else second.lines())
    agree(ada_rms_norm_fp8.kernel(residual, None, None, direct, m, 1e-6)[0], to_code(residual, second, m))


@kernel_test
@pytest.mark.parametrize("tokens", [3, 5])
def test_rows_of_a_folded_norm_are_coded_by_their_size_and_one_norm_later_by_what_it_was(tokens: int) -> None:
    residual, y = normal(2, tokens, 72, dtype=torch.float32), normal(2, tokens, 72, dtype=torch.float32, seed=1)
    rows = torch.tensor([3, 1], device=DEVICE)
    first, second = (Modulation(normal(5, 3 * 72, dtype=torch.float32, seed=i) / 4, rows) for i in (2, 3))
    assert fp8_folded_norm.kernel is not None
    got, want = fp8_folded_norm.kernel(residual, first, 1e-6), fp8_folded_norm.reference(residual, first, 1e-6)
    agree(got.codes_BTD, want.codes_BTD)
    torch.testing.assert_close(got.squares.factor_BT(), want.squares.factor_BT())
    codes, total = torch.empty_like(got.codes_BTD), torch.empty_like(residual)
    squares, before = residual.new_empty(2, tokens, 1), residual.square().view(2, tokens, 9, 8).sum(-1)
    launch(residual, y, codes, total, first, second, 1e-6, add=True, squares_BT1=squares, before_BTP=before)
    want_total = residual + first.parts()[2] * y
    over = torch.rsqrt(before.sum(-1, keepdim=True) / 72 + 1e-6)
    torch.testing.assert_close(total, want_total)
    torch.testing.assert_close(squares, want_total.square().sum(-1, keepdim=True))
    agree(codes, to_fp8.reference(want_total * (1.0 + second.parts()[0]), over))


def to_code(residual: Tensor, modulation: Modulation, m: Tensor) -> Tensor:
    return ada_rms_norm_fp8.reference(residual, None, None, modulation, m, 1e-6)[0]


@kernel_test
@pytest.mark.parametrize("heads", [0, 3])
def test_rotated_heads_in_their_arena(heads: int) -> None:
    batch, tokens, kv_heads, width = 2, 5, 1, 16
    qkv = normal(batch, tokens, (heads + 2 * kv_heads) * width, dtype=torch.float32)
    table = rotary_table.reference(torch.arange(batch * tokens, device=DEVICE).view(batch, tokens), width, 1e4)
    slots = torch.tensor([2, 0], device=DEVICE)
    arenas = [torch.zeros(2, 3, 7, kv_heads, width, device=DEVICE) for _ in range(2)]
    got = rotate_write.kernel(qkv, table, *arenas[0], slots, heads=heads)
    torch.testing.assert_close(got, rotate_write.reference(qkv, table, *arenas[1], slots, heads=heads))
    torch.testing.assert_close(arenas[0], arenas[1])


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [50, 968])
def test_the_chips_product_is_the_reference(rows: int, bias: bool) -> None:
    if not fp8_chip(torch.device("cuda")):
        pytest.skip("no FP8 on this GPU")
    x, codes, scales, _ = _inputs((rows, 1152, 4304), 4304, torch.device("cuda"))
    shift = normal(4304) if bias else None
    got, want = (
        fp8_linear(x, codes, shift, scales, torch.bfloat16),
        fp8_linear_reference(x, codes, shift, scales, torch.float32),
    )
    torch.testing.assert_close(got.float(), want, atol=0.03, rtol=0.02)
