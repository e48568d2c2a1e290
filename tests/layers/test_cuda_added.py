"""The added product in CUDA C++: on a GPU as it is, and on the CPU built for the host, its threads run as fibers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda.added import CUTS, Added, AddedCut, AddedProduct, CodedRows, added_product, takes
from stretto.layers.cuda.wide import E4M3
from stretto.layers.kernels import linear_folded_norm
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.fold import Fold


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> AddedProduct:
    return AddedProduct(library_on_host("added"), 0)


@pytest.fixture(scope="module")
def on_device() -> AddedProduct:
    product, reason = added_product(0)
    if product is None:
        pytest.skip(reason)
    return product


class Case:
    """A product's arguments, and what it should leave."""

    def __init__(self, batch: int, tokens: int, inner: int, width: int, coded: bool, device: str = "cpu", lines: str = "rows"):
        g = torch.Generator().manual_seed(batch)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        self.x, self.weight = normal(batch, tokens, inner), normal(width, inner) * inner**-0.5
        self.coded: CodedRows | None = None
        self.eps = 1e-6
        self.residual = normal(batch, tokens, width).to(device)
        if coded:
            self.x, self.weight = (
                (self.x * 40).clamp(-448, 448).to(E4M3),
                (self.weight * inner**0.5 * 40).clamp(-448, 448).to(E4M3),
            )
            before = self.residual.square().view(batch, tokens, 8, -1).sum(-1)
            self.coded = CodedRows(torch.tensor(1 / 40).to(device), torch.tensor(inner**-0.5 / 40).to(device), before)
        else:
            self.x, self.weight = self.x.bfloat16(), self.weight.bfloat16()
        self.x, self.weight = self.x.to(device), self.weight.to(device)
        table = (normal(7, 3, 3 * width) * 0.5).to(device)
        rows = {"rows": torch.arange(batch) * 3 % 7, "tokens": torch.arange(batch * tokens).view(batch, tokens) % 7}.get(lines)
        rows = None if rows is None else rows.to(device)
        self.gate, self.norm = (Modulation(table[:, i] if rows is not None else table[:batch, i], rows) for i in range(2))

    def run(self, product: AddedProduct, cut: AddedCut) -> Added:
        return product.run(self.x, self.weight, self.residual, self.gate, self.norm, cut, coded=self.coded, eps=self.eps)

    def want(self) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.nn.functional.linear(self.x.double(), self.weight.double())
        if self.coded is not None:
            y = y * self.coded.x_scale * self.coded.weight_scale
        total = self.residual + self.gate.parts()[2] * y.float()
        scaled = total * (1.0 + self.norm.parts()[0])
        if self.coded is not None:
            mean = self.coded.before_BTP.sum(-1, keepdim=True) / total.shape[-1]
            scaled = scaled * torch.rsqrt(mean + self.eps)
        return scaled, total.square().view(*total.shape[:2], -1, 64).sum(-1), total


def check(case: Case, got: Added) -> None:
    scaled, squares, total = case.want()
    # Hopper keeps some 14 bits of an FP8 product's running sum, as cuBLAS lets it: a value may fall to the neighbouring code.
    rough = case.coded is not None and case.x.is_cuda
    sums = {"rtol": 1e-4, "atol": 2.0**-6 if rough else 1e-4}
    torch.testing.assert_close(got.total_BTD, total, **sums)
    torch.testing.assert_close(got.squares_BTP, squares, rtol=1e-2 if rough else 1e-4, atol=2e-2 if rough else 1e-4)
    rtol, atol = (0.13, 2.0**-5) if rough else (2.0**-4 * 1.01 if case.coded is not None else 2.0**-8 * 1.01, 2.0**-9)
    torch.testing.assert_close(got.scaled_BTD.float(), scaled, rtol=rtol, atol=atol)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_sums_are_gated_added_scaled_and_squared(on_host: AddedProduct, cut: AddedCut, coded: bool) -> None:
    case = Case(3, 50, 1024 if coded else 512, 256, coded)
    check(case, case.run(on_host, cut))


@pytest.mark.parametrize("lines", ["tokens", "none"])
def test_lines_of_tokens_and_lines_that_are_not_numbered(on_host: AddedProduct, lines: str) -> None:
    case = Case(3, 20, 256, 256, False, lines=lines)
    check(case, case.run(on_host, CUTS[0]))


def test_a_rows_bits_do_not_depend_on_where_it_lies(on_host: AddedProduct) -> None:
    case = Case(4, 40, 512, 256, False)
    first = case.run(on_host, CUTS[0])
    case.x, case.residual = (t.flip(0).contiguous() for t in (case.x, case.residual))
    case.gate, case.norm = (Modulation(m.table, m.rows.flip(0)) for m in (case.gate, case.norm) if m.rows is not None)
    other = case.run(on_host, CUTS[0])
    assert torch.equal(first.total_BTD, other.total_BTD.flip(0))
    assert torch.equal(first.squares_BTP, other.squares_BTP.flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
@pytest.mark.parametrize(("batch", "inner"), [(4, 2048), (3, 4096), (32, 2048)])
def test_the_product_on_a_gpu(on_device: AddedProduct, batch: int, inner: int, cut: AddedCut, coded: bool) -> None:
    case = Case(batch, 50, inner, 1024, coded, "cuda")
    got, again = case.run(on_device, cut), case.run(on_device, cut)
    check(case, got)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
def test_a_choice_of_it_leaves_what_the_other_ways_leave(on_device: AddedProduct) -> None:
    case = Case(4, 50, 2048, 1024, False, "cuda")
    args = case.x, case.weight, case.residual, case.gate, case.norm, case.eps, torch.bfloat16
    rows, factor, total = linear_folded_norm.run({"impl": "cuda", "cut": CUTS[0].name}, *args)
    want_rows, want_factor, want_total = linear_folded_norm.run({"impl": "cublas"}, *args)
    torch.testing.assert_close(total, want_total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(Fold(factor).factor_BT, Fold(want_factor).factor_BT, rtol=1e-4, atol=1e-4)
    assert (rows != want_rows).float().mean() < 0.01


def test_what_it_takes() -> None:
    case = Case(1, 5, 128, 256, False)
    assert takes(case.x, case.weight, case.residual, case.gate, case.norm)
    assert not takes(case.x, case.weight, case.residual.bfloat16(), case.gate, case.norm)
    assert not takes(case.x, case.weight[:250], case.residual, case.gate, case.norm)
    assert not takes(case.x, case.weight, case.residual, Modulation(case.gate.table.bfloat16(), case.gate.rows), case.norm)
    assert not takes(case.x.float(), case.weight.float(), case.residual, case.gate, case.norm)


def test_cuts_have_names() -> None:
    assert all(AddedCut.named(cut.name) == cut for cut in CUTS)
    assert len({cut.name for cut in CUTS}) == len(CUTS)
