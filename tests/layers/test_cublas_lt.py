"""Products by cuBLASLt's list of kernels against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.kernels.fp8_activation import fp8_chip, to_fp8
from stretto.layers.kernels.fp8_linear import fp8_linear_gelu

ALGOS = range(8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def test_a_product_on_the_cpu_is_left_to_torch() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert not cublas_lt.takes(x, torch.randn(32, 64, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ALGOS)
def test_every_kernel_of_the_list_makes_the_product(algo: int) -> None:
    x, weight, bias = normal(3, 100, 512), normal(384, 512, seed=1) / 16, normal(384, seed=2)
    assert cublas_lt.takes(x, weight)
    torch.testing.assert_close(cublas_lt.matmul(x, weight, algo), linear(x, weight), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(cublas_lt.matmul(x, weight, algo, bias_N=bias), linear(x, weight, bias), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_whatever_kernel_runs_and_however_many_rows_there_are() -> None:
    x, weight = normal(784, 16384), normal(2048, 16384, seed=1) / 128
    want = cublas_lt.matmul(x[:128], weight, 0)
    for algo in ALGOS:
        assert torch.equal(cublas_lt.matmul(x, weight, algo)[:128], want), algo


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_adds_to_a_residual_in_fp32_as_it_is_written(biased: bool) -> None:
    x, weight, bias = normal(100, 512), normal(384, 512, seed=1) / 16, normal(384, seed=2).float()
    residual = normal(100, 384, seed=3).float() * 100
    got = cublas_lt.matmul(x, weight, 0, bias_N=bias if biased else None, residual=residual)
    want = residual + linear(x.float(), weight.float()) + (bias if biased else 0.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
def test_a_gelu_is_written_in_e4m3_for_the_next_product() -> None:
    if not fp8_chip(torch.device("cuda:0")):
        pytest.skip("needs a GPU with FP8")
    multiplier, scales = torch.full((1,), 40.0, device="cuda"), (torch.tensor(0.02, device="cuda"),) * 2
    x, codes, bias = to_fp8(normal(96, 512), multiplier), to_fp8(normal(384, 512, seed=1), multiplier), normal(384, seed=2)
    got = cublas_lt.matmul(x, codes, 0, bias_N=bias, gelu=True, scales=scales, multiplier=multiplier, dtype=torch.float8_e4m3fn)
    want = fp8_linear_gelu.reference(x, codes, bias, scales, multiplier)
    torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=0.5)  # one code
