"""The attention of coded prefixes in CUDA C++: on a GPU as it is, and on the CPU built for the host, its threads as fibers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda import coded_prefix as prefix
from stretto.layers.cuda.coded_prefix import CodedPrefix, Codes
from stretto.layers.kernels.attention import attention_reference
from stretto.layers.kernels.fp8_activation import E4M3


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> CodedPrefix:
    return CodedPrefix(library_on_host("coded_prefix"), 0)


@pytest.fixture(scope="module")
def on_device() -> CodedPrefix:
    attention, reason = prefix.coded_prefix(0)
    if attention is None:
        pytest.skip(reason)
    return attention


def coded(x: Tensor, by: float) -> Tensor:
    return (x * by).clamp(-448, 448).to(E4M3)


def prefixes(batch: int, tokens: int, heads: int, device: str = "cpu") -> tuple[Codes, Tensor, Tensor]:
    """Return codes, a mask, and what attention of the codes gives in fp32."""
    g = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(batch, tokens, n, 256, generator=g) * 1.3 for n in (heads, 1, 1))
    mask = torch.rand(batch, tokens, generator=g) < 0.8
    mask[:, : tokens // 2] = True
    by = torch.tensor([8.0, 16.0, 32.0])
    q, k, v = (coded(x, b) for x, b in zip((q, k, v), by.tolist(), strict=True))
    width = -(-tokens // 32) * 32
    columns = torch.zeros(batch, width, 256)
    columns[:, :tokens] = v[:, :, 0].float()
    order = torch.tensor(prefix.ORDER)
    columns = columns.view(batch, width // 16, 16, 256)[:, :, order].flatten(1, 2).transpose(1, 2)
    want = attention_reference(*(x.float() / b for x, b in zip((q, k, v), by.tolist(), strict=True)), key_mask_BN=mask)
    codes = Codes(*(x.contiguous().to(device) for x in (q, k[:, :, 0], columns.to(E4M3), by)))
    return codes, mask.to(device), want.to(device)


@pytest.mark.parametrize("groups", [1, 2])
def test_coded_attention_is_that_of_the_codes(on_host: CodedPrefix, groups: int) -> None:
    codes, mask, want = prefixes(2, 150, 1)
    multiplier = torch.full((1,), 80.0)
    got = on_host.run(codes, mask, multiplier, groups=groups, blocks=2)
    # One rounding of the result and one of the weights.
    torch.testing.assert_close(got.float() / 80, want, rtol=0.1, atol=0.06)


def test_a_row_without_keys_is_zeros_whatever_is_beside_it(on_host: CodedPrefix) -> None:
    codes, mask, _ = prefixes(2, 90, 2)
    mask[1] = False
    multiplier = torch.full((1,), 80.0)
    one, two = (on_host.run(codes, mask, multiplier, groups=n, blocks=3) for n in (1, 2))
    assert torch.equal(one.float(), two.float())
    assert not one[1].float().any()
    assert one[0].float().any()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 968), (4, 784), (3, 50)])
def test_coded_attention_of_a_prefix_on_a_gpu(on_device: CodedPrefix, batch: int, tokens: int, groups: int) -> None:
    codes, mask, want = prefixes(batch, tokens, 8, "cuda")
    multiplier = torch.full((1,), 80.0, device="cuda")
    got = on_device.run(codes, mask, multiplier, groups=groups)
    assert torch.equal(got.float(), on_device.run(codes, mask, multiplier).float())
    off = (got.float() / 80 - want).norm() / want.norm()
    assert off < 0.06, off
