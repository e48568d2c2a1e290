"""How attention over rings is cut: into splits that fill the chip, and into runs of neighbouring slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels import ring_hopper
from stretto.layers.kernels.chunk_attention import (
    MAX_SPLITS,
    Choice,
    Places,
    Shape,
    _per_split,
    _shares,
    by_blocks,
    by_waves,
    candidates,
    chunk_attention,
    folds,
    runs,
    split_cudnn,
)
from stretto.layers.tuning import tunables

ONE_FRAME_13B, ONE_FRAME_14B = Shape(1, 1560, 32760, 12, 128), Shape(1, 1560, 32760, 40, 128)


def test_keys_are_split_where_heads_and_queries_leave_half_of_the_last_wave_empty() -> None:
    assert by_waves(ONE_FRAME_13B)[0] > 1  # 156 tiles on 132 multiprocessors
    assert by_waves(ONE_FRAME_14B)[0] == 1  # 520 tiles: four waves but for eight


@pytest.mark.parametrize("keys", [512, 1560, 32760, 31337])
def test_splits_divide_the_keys_evenly_and_are_never_small(keys: int) -> None:
    counts = by_waves(Shape(1, 1560, keys, 12, 128))
    assert 1 in counts
    assert all(keys % z == 0 and (z == 1 or keys // z >= 512) and z <= MAX_SPLITS for z in counts)


def test_every_candidate_is_one_that_a_table_may_hold() -> None:
    fields = tunables()["chunk_attention"].fields
    for choice in candidates(ONE_FRAME_13B):
        assert set(choice) == set(fields)
        assert all(value in fields[name] for name, value in choice.items())


def test_rows_fold_with_shares_of_their_keys_only_where_no_gap_lies_between_rows() -> None:
    arena = torch.zeros(4, 12, 2, 8)
    assert folds(arena[1:3], 3)
    assert not folds(arena[1:3, :9], 3)
    assert folds(arena[1:2, :9], 3)
    assert not folds(arena[1:2, :9], 2)


@pytest.mark.parametrize("rows", [1, 2])
def test_shares_are_views_of_the_keys_in_order_and_queries_are_there_for_each(rows: int) -> None:
    arena, q = torch.randn(4, 12, 2, 8), torch.randn(rows, 5, 2, 8)
    keys = arena[1 : 1 + rows]
    shares, queries = _shares(keys, 3), _per_split(q, 3)
    assert shares.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    for row in range(rows):
        for split in range(3):
            assert torch.equal(shares[3 * row + split], keys[row, 4 * split : 4 * split + 4].transpose(0, 1))
            assert torch.equal(queries[3 * row + split], q[row].transpose(0, 1))


def test_a_run_is_of_neighbouring_slots_that_hold_equally_much() -> None:
    assert runs((2, 3, 4, 1, 2), (4, 4, 3, 3, 3)) == ((0, 2), (2, 1), (3, 2))
    assert runs((), ()) == ()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("choice", [Choice("cudnn", 3), Choice("triton", 1), Choice("triton", 4, 128, 64, 8, 3), None])
def test_every_way_to_attend_gives_what_torch_gives(choice: Choice | None, rows: int) -> None:
    q, k, v = normal(rows, 200, 3, 128, seed=0), normal(4, 1536, 3, 128, seed=1), normal(4, 1536, 3, 128, seed=2)
    slots = torch.arange(1, 1 + rows, device="cuda")
    places = Places(tuple(range(1, 1 + rows)), (1536,) * rows, slots, torch.full_like(slots, 1536))
    got = chunk_attention(q, k, v, places, choice)
    want = chunk_attention(q, k, v, places, Choice("sdpa"))
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-3)
    assert torch.equal(got, chunk_attention(q, k, v, places, choice))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "slots"), [(1, (2,)), (2, (3, 1))])
@pytest.mark.parametrize(
    "choice", [Choice("hopper", 1, 128, 128, 4, 2), Choice("hopper", 3, 128, 128, 4, 2), Choice("hopper", 2, 128, 64, 4, 4)]
)
@pytest.mark.parametrize(("queries", "keys"), [(200, 1560), (1560, 1024), (64, 1432)])
def test_the_kernel_for_hopper_gives_what_torch_gives(
    choice: Choice, rows: int, slots: tuple[int, ...], queries: int, keys: int
) -> None:
    q, k, v = normal(rows, queries, 3, 128, seed=0), normal(4, keys, 3, 128, seed=1), normal(4, keys, 3, 128, seed=2)
    if not ring_hopper.takes(q, k, v):
        pytest.skip("not a Hopper GPU with Gluon")
    slots_B = torch.tensor(slots, device="cuda")
    places = Places(slots, (keys,) * rows, slots_B, torch.full_like(slots_B, keys))
    got = chunk_attention(q, k, v, places, choice)
    want = chunk_attention(q, k, v, places, Choice("sdpa"))
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-3)
    assert torch.equal(got, chunk_attention(q, k, v, places, choice))


def test_splits_for_hopper_need_not_divide_the_keys() -> None:
    assert by_blocks(ONE_FRAME_14B)[0] == 1
    assert by_blocks(ONE_FRAME_13B)[0] > 1
    assert max(by_blocks(Shape(1, 64, 1560, 2, 128))) <= 3  # never less than four blocks of keys each


@pytest.mark.gpu
def test_splits_of_a_ring_that_is_filling_are_those_of_its_valid_part() -> None:
    q, ring = normal(1, 200, 3, 128, seed=0), [normal(2, 4096, 3, 128, seed=s) for s in (1, 2)]
    k, v = (x[1:, :3072] for x in ring)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(split_cudnn(q, k, v, 4).float(), want.float(), rtol=2e-2, atol=2e-3)
