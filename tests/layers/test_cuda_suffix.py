"""Attention over a slot and a suffix in CUDA C++: on a GPU, and on the CPU built for the host, its threads run as fibers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda import suffix
from stretto.layers.cuda.suffix import CUTS, Arena, Cut, SuffixAttention, suffix_attention
from stretto.layers.kernels.attention import prefix_attention
from stretto.layers.kernels.fp8_activation import to_fp8_reference


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> SuffixAttention:
    return SuffixAttention(library_on_host("suffix"))


@pytest.fixture(scope="module")
def on_device() -> SuffixAttention:
    launches, reason = suffix_attention(0)
    if launches is None:
        pytest.skip(reason)
    return launches


Inputs = tuple[Tensor, Arena, Tensor, Tensor]


def inputs(batch: int, tokens: int, prefix: int, lengths: list[int] | None, device: str = "cpu", seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16().to(device)

    arena, fresh = normal(batch + 1, 2, 2, prefix, 1, 256), normal(batch, tokens, 2, 256)
    mask = (torch.rand(batch, prefix, generator=g) < 0.8).to(device)
    slots = (torch.randperm(batch, generator=g) + 1).to(device)
    length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    q, (k, v) = normal(batch, tokens, 8, 256), fresh.chunk(2, dim=2)
    return q, Arena(arena[:, 1, 0], arena[:, 1, 1], slots, mask, length), k, v


def reference(q: Tensor, arena: Arena, k: Tensor, v: Tensor) -> Tensor:
    named = {"key_mask_BP": arena.mask_BP, "length_B": arena.length_B, "k_suffix_BTKd": k.float(), "v_suffix_BTKd": v.float()}
    return prefix_attention.reference(q.float(), arena.k_SPKd.float(), arena.v_SPKd.float(), arena.slots_B, **named)


def agree(got: Tensor, want: Tensor) -> None:
    # Roundings of the weights, of averages of cuts, and of the result.
    torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.004)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_attends_to_a_slot_and_a_suffix(on_host: SuffixAttention, cut: Cut) -> None:
    q, *rest = inputs(2, 20 if cut.tall else 9, 200, [200, 90])
    agree(on_host.run(q, *rest, cut), reference(q, *rest))


@pytest.mark.parametrize("lengths", [None, [1], [64], [57], [200]])
def test_the_suffix_begins_wherever_a_prefix_ends(on_host: SuffixAttention, lengths: list[int] | None) -> None:
    q, *rest = inputs(1, 9, 200, lengths)
    agree(on_host.run(q, *rest, Cut(0, 2, 1)), reference(q, *rest))


def test_cuts_without_any_valid_key_do_not_count(on_host: SuffixAttention) -> None:
    q, arena, k, v = inputs(1, 9, 200, None)
    arena.mask_BP[:, :150] = False
    agree(on_host.run(q, arena, k, v, Cut(0, 4, 1)), reference(q, arena, k, v))


def test_blocks_go_round_the_places_of_shared_memory_more_than_once(on_host: SuffixAttention) -> None:
    q, *rest = inputs(1, 20, 600, None)
    for cut in (Cut(1, 1, 2), Cut(0, 2, 1)):
        agree(on_host.run(q, *rest, cut), reference(q, *rest))


@pytest.mark.parametrize("cut", [Cut(0, 4, 1), Cut(1, 1, 2)], ids=str)
def test_a_coded_result_is_the_code_of_the_result(on_host: SuffixAttention, cut: Cut) -> None:
    q, *rest = inputs(1, 9, 100, None)
    multiplier = torch.full((1,), 40.0)
    got, plain = on_host.run(q, *rest, cut, multiplier=multiplier), on_host.run(q, *rest, cut)
    assert torch.equal(got.float(), to_fp8_reference(plain, multiplier).float())


def test_a_robot_does_not_depend_on_its_neighbours(on_host: SuffixAttention) -> None:
    q, arena, k, v = inputs(2, 9, 100, [100, 60])
    before = on_host.run(q, arena, k, v, Cut(0, 2, 1))
    q[1], k[1], v[1], arena.mask_BP[1] = 3.0, 2.0, 1.0, False
    assert torch.equal(before[0], on_host.run(q, arena, k, v, Cut(0, 2, 1))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_on_a_gpu(on_device: SuffixAttention, cut: Cut) -> None:
    q, *rest = inputs(5, 50, 968, [968, 784, 1, 961, 64], "cuda")
    got = on_device.run(q, *rest, cut)
    agree(got, reference(q, *rest))
    assert torch.equal(got, on_device.run(q, *rest, cut))
    multiplier = torch.full((1,), 40.0, device="cuda")
    coded = on_device.run(q, *rest, cut, multiplier=multiplier)
    assert torch.equal(coded.float(), to_fp8_reference(got, multiplier).float())


@pytest.mark.gpu
def test_a_graph_gives_the_bits_of_the_eager_call(on_device: SuffixAttention) -> None:
    q, *rest = inputs(4, 50, 968, [968, 784, 900, 1], "cuda")
    eager = on_device.run(q, *rest, Cut(0, 4, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [on_device.run(q, *rest, Cut(0, 4, 1), early=True) for _ in range(3)]
    graph.replay()
    assert all(torch.equal(eager, x) for x in captured)


def test_what_it_takes() -> None:
    q, arena, k, v = inputs(2, 9, 100, [100, 60])
    assert suffix.takes(q, arena, k, v)
    assert not suffix.takes(q.float(), arena, k, v)
    assert not suffix.takes(q.transpose(1, 2), arena, k, v)
    assert not suffix.takes(q[..., :128].contiguous(), arena, k[..., :128], v[..., :128])
    assert not suffix.takes(q, arena._replace(slots_B=arena.slots_B.int()), k, v)
    assert not suffix.takes(q, arena, k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1))


def test_a_cut_gives_work_to_most_multiprocessors() -> None:
    cuts = [suffix.cut_for(robots, 400) for robots in (2, 4, 8, 16, 32)]
    assert cuts == [Cut(0, 4, 1), Cut(0, 4, 1), Cut(0, 2, 1), Cut(0, 1, 1), Cut(1, 1, 2)]
