"""The gated product in CUDA C++: on a GPU as it is, and on the CPU built for the host, its threads run as fibers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda import build, gated
from stretto.layers.cuda.gated import TOKENS, GatedProduct, gated_product
from stretto.layers.kernels import fp8_linear, gemm
from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.fp8_linear import fp8_linear_geglu_reference
from stretto.layers.kernels.linear_activation import linear_geglu_reference


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> GatedProduct:
    return GatedProduct(library_on_host("gated"), 0)


@pytest.fixture(scope="module")
def on_device() -> GatedProduct:
    product, reason = gated_product(0)
    if product is None:
        pytest.skip(reason)
    return product


def factors(rows: int, inner: int, features: int, coded: bool, device: str = "cpu") -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inner, generator=g), torch.randn(2 * features, inner, generator=g) * inner**-0.5
    if coded:
        x, weight = (x * 60).clamp(-448, 448).to(E4M3), (weight * inner**0.5 * 60).clamp(-448, 448).to(E4M3)
    else:
        x, weight = x.bfloat16(), weight.bfloat16()
    scales = torch.tensor(1 / 60), torch.tensor(inner**-0.5 / 60), torch.full((1,), 40.0)
    return tuple(t.to(device) for t in (x, weight, *scales))


def check(product: GatedProduct, rows: int, inner: int, features: int, tokens: int, coded: bool, **named: int) -> None:
    x, weight, x_scale, w_scale, multiplier = factors(rows, inner, features, coded, named.pop("device", "cpu"))
    if coded:
        got = product.run(x, weight, tokens, (x_scale, w_scale), multiplier, **named).float()
        want = fp8_linear_geglu_reference(x, weight, (x_scale, w_scale), multiplier).float()
    else:
        got = product.run(x, weight, tokens, **named).float()
        want = linear_geglu_reference(x.float(), weight.float())
    # One rounding, of bf16 or of e4m3.
    torch.testing.assert_close(got, want, rtol=0.13 if coded else 0.01, atol=0.25 if coded else 0.01)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("rows", "tokens"), [(300, 112), (150, 128), (20, 128), (230, 112)])
def test_products_and_gates_of_even_and_odd_numbers_of_tiles(
    on_host: GatedProduct, rows: int, tokens: int, coded: bool
) -> None:
    check(on_host, rows, 640 if coded else 320, 256, tokens, coded, clusters=2)


def test_strips_of_tiles_reach_every_row_once(on_host: GatedProduct) -> None:
    check(on_host, 17 * 112 + 5, 64, 256, 112, False, clusters=5)


@pytest.mark.gpu
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rows", [1, 784, 968, 3872])
def test_the_product_on_a_gpu(on_device: GatedProduct, rows: int, tokens: int, coded: bool) -> None:
    x, weight, x_scale, w_scale, multiplier = factors(rows, 2048, 16384, coded, "cuda")
    extra = ((x_scale, w_scale), multiplier) if coded else ()
    got = on_device.run(x, weight, tokens, *extra)
    assert torch.equal(got.float(), on_device.run(x, weight, tokens, *extra).float())
    tiling = gemm.Tiling(128, 128, 128 if coded else 64, 3, 8, 8, 1)
    if coded:
        want = fp8_linear.run_geglu(tiling.config, x, weight, (x_scale, w_scale), multiplier)
    else:
        want = gemm.gemm(x, weight, None, tiling, activation="geglu")
    # A row has the same bits in a batch, where the other kernel may be faster.
    assert torch.equal(got.float(), want.float()), (got.float() - want.float()).abs().max()


def test_what_it_takes() -> None:
    x, weight = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(512, 128, dtype=torch.bfloat16)
    assert gated.takes(x, weight)
    assert not gated.takes(x, weight[:400])
    assert not gated.takes(x.float(), weight.float())
    assert not gated.takes(x[:, :32].contiguous(), weight[:, :32].contiguous())
    assert not gated.takes(x.t(), weight)


@pytest.mark.parametrize(
    ("refusal", "library", "why"), [("no maps", object(), "no maps"), (None, None, "no nvcc"), (None, object(), "")]
)
def test_launches_are_had_or_a_warning_says_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: str | None, library: Any, why: str
) -> None:
    monkeypatch.setattr(build, "built", lambda name, index: build.Built(library, "no nvcc" if library is None else "x.so"))
    made = SimpleNamespace(refusal=refusal)
    got = build.launches_of("gated", 0, lambda _: made, "not to be had (%s)")
    if why:
        assert got == (None, why)
        assert [(r.name, r.getMessage()) for r in caplog.records] == [("stretto.layers.cuda.gated", f"not to be had ({why})")]
    else:
        assert got == (made, "x.so")
        assert not caplog.records
