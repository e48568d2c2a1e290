"""Wide products in CUDA C++ whose thread blocks have one tile each: gated ones, and rotated ones; on a GPU and on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda import gated, rope
from stretto.layers.cuda.gated import GatedProduct, gated_product
from stretto.layers.cuda.rope import RopeProduct, rope_product
from stretto.layers.cuda.wide import E4M3, Cut, Left
from stretto.layers.kernels.fold import ShiftLines
from stretto.layers.kernels.folded_linear import folded_geglu, folded_rope_write
from stretto.layers.kernels.linear_rope import rotary_table_reference

TOKENS, HEAD = 50, 256


class Products(NamedTuple):
    gated: GatedProduct
    rope: RopeProduct


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> Products:
    return Products(GatedProduct(library_on_host("gated"), 0), RopeProduct(library_on_host("rope")))


@pytest.fixture(scope="module")
def on_device() -> Products:
    (product, reason), (rotating, why) = gated_product(0), rope_product(0)
    if product is None or rotating is None:
        pytest.skip(f"{reason}; {why}")
    return Products(product, rotating)


def factors(batch: int, width: int, columns: int, coded: bool, device: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return x, a weight and what their numbers are multiplied by."""
    g = torch.Generator().manual_seed(batch)
    x, w = torch.randn(batch, TOKENS, width, generator=g), torch.randn(columns, width, generator=g) * width**-0.5
    if not coded:
        one = torch.ones((), device=device)
        return x.bfloat16().to(device), w.bfloat16().to(device), (one, one)
    codes = ((t * 60).clamp(-448, 448).to(E4M3).to(device) for t in (x, w * width**0.5))
    return *codes, (torch.tensor(1 / 60, device=device), torch.tensor(width**-0.5 / 60, device=device))


class Norm(NamedTuple):
    """What is left of one, for a product and for its reference."""

    left: Left
    factor_BT: Tensor
    shift: ShiftLines | None


def norm_of(kind: str, batch: int, columns: int, scales: tuple[Tensor, Tensor], coded: bool) -> Norm:
    """Return a norm of a kind: its factors alone, with a line for each row or token, or by sums of squares."""
    device, by = scales[0].device, scales[0] * scales[1]
    g = torch.Generator().manual_seed(7)
    factor = (torch.rand(batch, TOKENS, generator=g) + 0.5).to(device)
    table = torch.randn(5, columns + 8, generator=g).to(device)[:, :columns]
    lines = torch.arange(batch * (TOKENS if kind == "token" else 1), device=device) % 5
    shift = None if kind == "factor" else ShiftLines(table, lines.view(batch, TOKENS) if kind == "token" else lines)
    given: tuple[Tensor | None, Tensor | None] = (None, None) if kind == "factor" else (table, lines)
    if kind != "squares":
        return Norm(Left((factor * by).flatten(), *given), factor * by, shift)
    # Sums of squares in 16 parts, so that the row's factor is the one above; codes were divided by something else.
    shares = torch.rand(batch * TOKENS, 16, generator=g).to(device)
    squares = shares / shares.sum(-1, keepdim=True) * (64 / factor.view(-1, 1).square() - 64 * 1e-3)
    before = torch.full((batch * TOKENS, 1), 64 * 2.0, device=device) if coded else None
    if before is not None:
        factor = factor * (2.0 + 1e-3) ** 0.5
    return Norm(Left(None, *given, squares, before, by, 64, 1e-3), factor * by, shift)


def close(got: Tensor, want: Tensor, coded: bool = False, atol: float = 0.01) -> None:
    """Compare up to one rounding, of bf16 or of e4m3; a GPU keeps fewer bits of sums of codes, and its tanh is not exact."""
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13 if coded else 0.01, atol=0.8 if coded else atol)


def check_gated(product: GatedProduct, cut: Cut, batch: int, width: int, kind: str, coded: bool, device: str = "cpu") -> None:
    features = 512 if device == "cpu" else 4096
    x, w, scales = factors(batch, width, 2 * features, coded, device)
    norm, multiplier = norm_of(kind, batch, 2 * features, scales, coded), torch.full((1,), 40.0, device=device)
    given = {"multiplier": multiplier if coded else None, "fold": norm.left}
    got = product.run(x, w, cut, **given)
    want = folded_geglu.reference(x.float(), norm.factor_BT, w.float(), norm.shift)
    close(got, (want * multiplier).clamp(-448, 448) if coded else want, coded)
    assert torch.equal(got.float(), product.run(x, w, cut, **given).float())


def check_rope(product: RopeProduct, cut: Cut, batch: int, width: int, kind: str, coded: bool, device: str = "cpu") -> None:
    heads = 2 if device == "cpu" else 8
    columns = (heads + 2) * HEAD
    x, w, scales = factors(batch, width, columns, coded, device)
    norm = norm_of(kind, batch, columns, scales, coded)
    positions = torch.arange(TOKENS, device=device).expand(batch, TOKENS) + torch.arange(batch, device=device)[:, None] * 7
    table = rotary_table_reference(positions, HEAD, 1e4)
    slots = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(1))[:batch].to(device)
    # Views of larger arenas: their slots are not dense.
    arenas = torch.zeros(2, 2, batch + 1, 2, TOKENS + 3, 1, HEAD, dtype=torch.bfloat16, device=device)[:, :, :, 1]
    got = product.run(x, w, *table, *arenas[0], slots, heads, cut, norm.left)
    want = folded_rope_write.reference(x.float(), norm.factor_BT, w.float(), norm.shift, table, *arenas[1], slots, heads=heads)
    close(got, want, atol=0.03 if coded else 0.01)
    close(arenas[0], arenas[1], atol=0.03 if coded else 0.01)


KINDS = [(kind, False) for kind in ("factor", "row", "token", "squares")] + [("row", True), ("squares", True)]


@pytest.mark.parametrize("cut", gated.CUTS, ids=str)
def test_gated_products_of_every_cut(on_host: Products, cut: Cut) -> None:
    check_gated(on_host.gated, cut, 4, 128, "row", False)


@pytest.mark.parametrize("cut", rope.CUTS, ids=str)
def test_rotated_products_of_every_cut(on_host: Products, cut: Cut) -> None:
    check_rope(on_host.rope, cut, 4, 128, "row", False)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("kind", "coded"), KINDS)
def test_what_is_left_of_a_norm_is_done_to_gates(on_host: Products, batch: int, kind: str, coded: bool) -> None:
    check_gated(on_host.gated, gated.CUTS[0], batch, 640, kind, coded)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("kind", "coded"), KINDS)
def test_what_is_left_of_a_norm_is_done_to_heads(on_host: Products, batch: int, kind: str, coded: bool) -> None:
    check_rope(on_host.rope, rope.CUTS[0], batch, 640, kind, coded)


def test_a_cut_that_was_not_compiled_is_refused(on_host: Products) -> None:
    with pytest.raises(RuntimeError, match="no such cut"):
        check_gated(on_host.gated, gated.CUTS[0]._replace(tokens=8), 1, 128, "row", False)


ON_DEVICE = [("row", False), ("token", False), ("squares", False), ("squares", True)]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("kind", "coded"), ON_DEVICE)
@pytest.mark.parametrize("cut", gated.CUTS, ids=str)
def test_gated_products_on_a_gpu(on_device: Products, cut: Cut, batch: int, kind: str, coded: bool) -> None:
    check_gated(on_device.gated, cut, batch, 1024, kind, coded, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("kind", "coded"), ON_DEVICE)
@pytest.mark.parametrize("cut", rope.CUTS, ids=str)
def test_rotated_products_on_a_gpu(on_device: Products, cut: Cut, batch: int, kind: str, coded: bool) -> None:
    check_rope(on_device.rope, cut, batch, 1024, kind, coded, "cuda")
