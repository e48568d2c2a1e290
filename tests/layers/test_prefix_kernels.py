"""The matrix kernels of prefix and vision against their references: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stretto.layers.kernels import gemm, linear_ada_rms_norm, linear_rope
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels import short_attention as short
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import attention, prefix_attention
from stretto.layers.kernels.fp8_activation import to_fp8
from stretto.layers.kernels.linear_activation import linear_geglu, linear_gelu
from stretto.layers.kernels.linear_ada_rms_norm import linear_add_ada_rms_norm
from stretto.layers.kernels.linear_rope import linear_rope_write, rotary_table
from stretto.layers.kernels.prefix_layout import prefix_layout
from stretto.layers.kernels.prefix_stream import prefix_stream
from stretto.layers.kernels.tma_attention import Tiling, takes, tma_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
kernel_test = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")
# The interpreter multiplies bf16 matrices as raw bits; on a GPU bf16 is what counts.
MATRIX = torch.float16 if INTERPRETED else torch.bfloat16
SMALL = gemm.Tiling(64, 64, 32, 3, 4, 2, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, MATRIX)


def agree(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    # The reference rounds the product before it goes on; the kernel does not.
    tolerance = 8e-3 if INTERPRETED else 6e-2
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@kernel_test
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize("rows", [1, 64, 150])
def test_products_with_an_activation_on_the_accumulator(rows: int, persistent: int) -> None:
    tiling = SMALL._replace(persistent=persistent)
    x, weight, bias = normal(rows, 72), normal(160, 72, seed=1) / 8, normal(160, seed=2)
    agree(gemm.gemm(x, weight, None, tiling), torch.nn.functional.linear(x, weight))
    agree(gemm.gemm(x, weight, bias, tiling, activation="gelu"), linear_gelu.reference(x, weight, bias))
    agree(gemm.gemm(x, weight, None, tiling, activation="geglu"), linear_geglu.reference(x, weight))


@kernel_test
@pytest.mark.parametrize("impl", ["cublas", "triton"])
@pytest.mark.parametrize("heads", [(4, 1), (0, 1), (2, 2)])
def test_a_qkv_product_rotates_and_writes_only_its_own_part_of_the_arena(heads: tuple[int, int], impl: str) -> None:
    (h, kv), d, tokens = heads, 32, 37
    x, weight = normal(2, tokens, 64), normal((h + 2 * kv) * d, 64, seed=1) / 8
    positions = torch.randint(0, 900, (2, tokens), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = rotary_table(positions, d, 1e4)
    arena = normal(2, 4, 3, tokens + 5, kv, d, seed=2)
    other, slots = arena.clone(), torch.tensor([3, 1], device=DEVICE)
    want = linear_rope_write.reference(x, weight, table, other[0][:, 1], other[1][:, 1], slots, heads=h)
    tiling = gemm.Tiling(32, 16, 32, 2, 4, 2, 0)
    choice = {"impl": "cublas"} if impl == "cublas" else tiling.config
    agree(linear_rope.run(choice, x, weight, *table, arena[0][:, 1], arena[1][:, 1], slots, h), want)
    agree(arena, other)
    for part in (slice(None), [0, 2]), (slice(None), slice(None), [0, 2]), (slice(None),) * 3 + (slice(tokens, None),):
        assert torch.equal(arena[part], other[part])


@kernel_test
def test_a_rotary_table_far_into_a_prefix() -> None:
    positions = torch.randint(0, 1000, (2, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert rotary_table.kernel is not None
    for got, want in zip(rotary_table.kernel(positions, 32, 1e4), rotary_table.reference(positions, 32, 1e4), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


@kernel_test
def test_a_prefix_begins_with_image_tokens_and_scaled_words_bit_for_bit() -> None:
    image, embed = normal(2, 5, 48), normal(30, 48, seed=1)
    words = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(prefix_stream(image, words, embed), prefix_stream.reference(image, words, embed))


@kernel_test
@pytest.mark.parametrize("splits", [1, 3])
def test_a_product_split_over_its_inner_width_is_gated_and_summed_by_the_modulated_norm_after_it(splits: int) -> None:
    x, weight = normal(2, 5, 192), normal(64, 192, seed=1) / 8
    residual, lines = normal(2, 5, 64, seed=2).float(), normal(2, 3, 192, seed=3).float() / 2
    rows = torch.tensor([2, 0], device=DEVICE)
    modulations = Modulation(lines[0], rows), Modulation(lines[1], rows)
    want = linear_add_ada_rms_norm.reference(x, weight, residual, *modulations, 1e-6, torch.float32)
    choice = {**SMALL.config, "splits": splits}
    got = linear_ada_rms_norm.run(choice, x, weight, residual, *modulations, 1e-6, torch.float32)
    for a, b in zip(got, want, strict=True):
        agree(a, b)


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize("cut", [(64, 2), (32, 3), (64, 3, 1, 1), (64, 2, 1, 2, 128)])
def test_attention_of_a_prefix_with_softmax_beside_the_products(cut: tuple[int, ...]) -> None:
    q, k, v = normal(2, 70, 4, 256), normal(3, 150, 1, 256, seed=1), normal(3, 150, 1, 256, seed=2)
    if not hopper.takes(q, k, v):
        pytest.skip("needs Hopper and Triton's Gluon")
    slots, multiplier = torch.tensor([2, 1], device=DEVICE), torch.full((1,), 40.0, device=DEVICE)
    mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.8
    mask[0, :64] = False
    got = hopper.hopper_attention(q, k, v, slots, mask, hopper.Tiling(*cut))
    agree(got, prefix_attention.reference(q, k, v, slots, key_mask_BP=mask))
    assert torch.equal(got, hopper.hopper_attention(q, k, v, slots, mask, hopper.Tiling(*cut)))
    coded = hopper.hopper_attention(q, k, v, slots, mask, hopper.Tiling(*cut), multiplier=multiplier)
    assert torch.equal(coded.float(), to_fp8(got, multiplier).float())
    mask[1] = False
    assert not hopper.hopper_attention(q, k, v, slots, mask, hopper.Tiling(*cut))[1].any()


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
def test_groups_of_an_attention_program_decide_no_bit() -> None:
    q, k, v = normal(2, 70, 8, 256), normal(3, 150, 1, 256, seed=1), normal(3, 150, 1, 256, seed=2)
    if not hopper.takes(q, k, v):
        pytest.skip("needs Hopper and Triton's Gluon")
    slots, mask = torch.tensor([2, 1], device=DEVICE), torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    cuts = [hopper.Tiling(64, 2), *(hopper.Tiling(64, 4 - n, groups=n, held=h) for n in (1, 2) for h in (0, 128))]
    first, *others = (hopper.hopper_attention(q, k, v, slots, mask, cut) for cut in cuts)
    assert all(torch.equal(first, other) for other in others)


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize(("tokens", "size"), [(256, 72), (70, 72), (130, 104), (16, 128)])
def test_attention_to_few_keys_in_one_pass(tokens: int, size: int) -> None:
    q, k, v = normal(3, tokens, 3 * 4 * size).view(3, tokens, 3, 4, size).unbind(2)
    if not short.takes(q, k, v):
        pytest.skip("needs Hopper and Triton's Gluon")
    got, multiplier = short.short_attention(q, k, v), torch.full((1,), 40.0, device=DEVICE)
    agree(got, attention.reference(q, k, v))
    assert torch.equal(got, short.short_attention(q, k, v))
    assert torch.equal(got[1:2], short.short_attention(q[1:2], k[1:2], v[1:2]))
    assert torch.equal(got, short.short_attention(q, k, v, 8))
    coded = short.short_attention(q, k, v, multiplier=multiplier)
    assert torch.equal(coded.float(), to_fp8(got, multiplier).float())


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter")
@pytest.mark.parametrize("splits", [1, 3, 6])
def test_a_suffix_attends_to_a_slot_and_to_itself_with_softmax_beside_the_products(splits: int) -> None:
    q, k, v = normal(2, 50, 8, 256), normal(3, 300, 1, 256, seed=1), normal(3, 300, 1, 256, seed=2)
    fresh = normal(2, 50, 2, 256, seed=4).chunk(2, dim=2)
    if not hopper.takes(q, k, v, *fresh):
        pytest.skip("needs Hopper and Triton's Gluon")
    slots, length = torch.tensor([2, 1], device=DEVICE), torch.tensor([290, 130], dtype=torch.int32, device=DEVICE)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.8
    mask &= torch.arange(300, device=DEVICE) < length[:, None]
    named = {"key_mask_BP": mask, "length_B": length, "k_suffix_BTKd": fresh[0], "v_suffix_BTKd": fresh[1]}
    want = prefix_attention.reference(q, k, v, slots, **named)
    cut = hopper.Tiling(64, 2, splits)
    got = hopper.hopper_attention(q, k, v, slots, mask, cut, length_B=length, suffix=fresh)
    agree(got, want)
    assert torch.equal(got, hopper.hopper_attention(q, k, v, slots, mask, cut, length_B=length, suffix=fresh))


@kernel_test
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no e4m3")
@pytest.mark.parametrize("masked", [False, True])
def test_attention_written_in_e4m3_is_the_code_of_attention(masked: bool) -> None:
    q, k, v = normal(2, 40, 4, 64), normal(3, 70, 1, 64, seed=1), normal(3, 70, 1, 64, seed=2)
    slots, multiplier = torch.tensor([2, 1], device=DEVICE), torch.full((1,), 40.0, device=DEVICE)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.8 if masked else None
    cut = Tiling(32, 32, 4, 2)
    plain = tma_attention(q, k, v, cut, slots_B=slots, mask_BN=mask)
    coded = tma_attention(q, k, v, cut, slots_B=slots, mask_BN=mask, multiplier=multiplier)
    assert torch.equal(coded.float(), to_fp8(plain, multiplier).float())


@kernel_test
@pytest.mark.parametrize("size", [64, 128, 256])
def test_attention_over_a_slot_whose_first_keys_are_all_masked(size: int) -> None:
    q, k, v = normal(2, 20, 4, size), normal(3, 150, 1, size, seed=1), normal(3, 150, 1, size, seed=2)
    slots = torch.tensor([2, 1], device=DEVICE)
    mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.8
    mask[0, :70] = False
    got = tma_attention(q, k, v, Tiling(32, 32, 4, 2), slots_B=slots, mask_BN=mask)
    agree(got, prefix_attention.reference(q, k, v, slots, key_mask_BP=mask))


@kernel_test
@pytest.mark.parametrize("keys", [31, 64, 70])
def test_attention_over_a_slot_with_holes_in_its_mask(keys: int) -> None:
    q, arena = normal(2, 21, 8, 32), normal(4, 3, 2, keys, 1, 32, seed=1)
    k, v, slots = arena[:, 1, 0], arena[:, 1, 1], torch.tensor([2, 0], device=DEVICE)
    mask = (torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) < 0.6).to(DEVICE)
    mask[0, : keys // 2] = False
    got = tma_attention(q, k, v, Tiling(32, 32, 4, 2), slots_B=slots, mask_BN=mask)
    agree(got, prefix_attention.reference(q, k, v, slots, key_mask_BP=mask))
    mask[1] = False
    assert not tma_attention(q, k, v, Tiling(32, 32, 4, 2), slots_B=slots, mask_BN=mask)[1].any()


@kernel_test
@pytest.mark.parametrize("keys", [32, 40])
@pytest.mark.parametrize("size", [24, 72, 104])
def test_attention_with_a_head_size_that_is_no_power_of_two(keys: int, size: int) -> None:
    q, k, v = normal(3, keys, 3 * 4 * size).view(3, keys, 3, 4, size).unbind(2)
    assert takes(q, k, v)
    agree(tma_attention(q, k, v, Tiling(32, 32, 4, 2)), attention.reference(q, k, v))


def test_attention_says_which_tensors_it_takes() -> None:
    q, kv = torch.zeros(1, 4, 8, 32, dtype=torch.bfloat16), torch.zeros(1, 4, 1, 32, dtype=torch.bfloat16)
    assert takes(q, kv, kv)
    assert not takes(q.float(), kv.float(), kv.float())
    assert not takes(q.transpose(1, 2), kv, kv)
    assert not takes(q, kv.expand(1, 4, 2, 32), kv.expand(1, 4, 2, 32))
    assert not takes(torch.zeros(1, 4, 8, 36, dtype=torch.bfloat16), kv, kv[..., :20])


def test_references_of_fused_layers_are_their_parts_in_turn() -> None:
    x, weight, bias = torch.randn(2, 5, 16), torch.randn(24, 16), torch.randn(24)
    both = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(
        linear_geglu(x, weight), torch.nn.functional.gelu(both[..., :12], approximate="tanh") * both[..., 12:]
    )
    torch.testing.assert_close(linear_gelu(x, weight, bias), torch.nn.functional.gelu(both + bias, approximate="tanh"))


@kernel_test
def test_a_prefix_is_laid_out_by_its_cameras_and_its_words() -> None:
    cameras = torch.tensor([[True, False, True], [False, True, True]], device=DEVICE)
    count = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE)
    got, want = prefix_layout(cameras, count, 4, 5), prefix_layout.reference(cameras, count, 4, 5)
    kernel = prefix_layout.kernel(cameras, count, 4, 5)
    for a, b, c in zip(got, want, kernel, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, b)
        assert c.dtype == b.dtype
    assert want.start_B.tolist() == [11, 8]
    assert want.length_B.tolist() == [15, 12]
