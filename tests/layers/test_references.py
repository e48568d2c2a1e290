"""The plain-torch references against straightforward float64 maths, and what training and models rely on."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stretto.cli.doctor import _fused_ops, _kernel_tables
from stretto.layers.dispatch import FusedOp, implementation, triton_runs_on, why_not_triton
from stretto.layers.kernels import (
    Modulation,
    ada_rms_norm,
    attention,
    gated_add,
    gated_add_ada_rms_norm,
    gated_add_modulated_layer_norm,
    geglu,
    gelu_tanh,
    layer_norm,
    modulated_layer_norm,
    patchify,
    prefix_attention,
    rms_norm,
    rope,
    rope_3d,
    rope_write,
    sum_layer_norm,
    sum_rms_norm,
)
from stretto.layers.linear import FusedLinear

B, T, H, K, D, d = 2, 5, 4, 2, 24, 8
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rms64(x: Tensor, eps: float = 1e-6) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def norm64(x: Tensor, eps: float = 1e-6) -> Tensor:
    x = x.double()
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()


def test_rms_norm_multiplies_by_one_plus_weight_unless_told_otherwise() -> None:
    x, w = torch.randn(B, T, D), torch.randn(D)
    close(rms_norm(x, w, 1e-6).double(), rms64(x) * (1 + w.double()), atol=1e-5, rtol=1e-5)
    close(rms_norm(x, w, 1e-6, unit_offset=False).double(), rms64(x) * w.double(), atol=1e-5, rtol=1e-5)


def test_norms_of_bf16_are_computed_in_fp32() -> None:
    # In bf16 the sum of squares of these loses most of its digits.
    x = (300 + torch.randn(1, 1, 2048)).bfloat16()
    assert (rms_norm(x, torch.zeros(2048), 1e-6).double() - rms64(x)).abs().max() < 2**-7
    assert rms_norm(x, torch.zeros(2048), 1e-6).dtype == torch.bfloat16


def test_the_residual_sum_is_returned_beside_its_norm() -> None:
    x, residual, w = torch.randn(B, T, D).bfloat16(), torch.randn(B, T, D), torch.randn(D)
    normed, stream = sum_rms_norm(residual, (x,), w, 1e-6)
    assert not stream.added
    close(stream.stored, x.float() + residual)
    close(normed.double(), rms64(stream.stored) * (1 + w.double()), atol=2e-2, rtol=2e-2)
    normed, stream = sum_layer_norm(residual, (x,), w, w, 1e-6)
    assert (normed.dtype, stream.stored.dtype) == (torch.bfloat16, torch.float32)


def test_a_sum_that_is_stored_later_is_the_same_sum() -> None:
    first, second, residual, w = *torch.randn(2, B, T, D).bfloat16(), torch.randn(B, T, D), torch.randn(D)
    normed, stream = sum_rms_norm(residual, (first,), w, 1e-6)
    again, waiting = sum_rms_norm(residual, (first,), w, 1e-6, store=False)
    assert torch.equal(again, normed)
    assert waiting.stored is residual
    want, got = sum_rms_norm(*stream.plus(second), w, 1e-6), sum_rms_norm(*waiting.plus(second), w, 1e-6)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].stored, want[1].stored)


def test_every_row_takes_its_own_line_of_a_modulation_table() -> None:
    x, table, rows = torch.randn(B, T, D), torch.randn(10, 3 * D), torch.tensor([7, 2])
    got = ada_rms_norm(x, Modulation(table, rows), 1e-6)
    for b, row in enumerate(rows):
        scale, shift, _ = table[row].double().chunk(3)
        close(got[b].double(), rms64(x[b]) * (1 + scale) + shift, atol=1e-5, rtol=1e-5)
    close(got, ada_rms_norm(x, Modulation(table[rows]), 1e-6))
    close(got, ada_rms_norm(x, Modulation(table, rows[:, None].expand(B, T)), 1e-6))


def test_gated_add_ada_rms_norm_gates_by_one_norm_and_scales_by_the_next() -> None:
    x, y = torch.randn(B, T, D), torch.randn(B, T, D)
    before, after = Modulation(torch.randn(B, T, 3 * D)), Modulation(torch.randn(B, 3 * D))
    normed, total = gated_add_ada_rms_norm(x, y, before, after, 1e-6)
    close(total, x + before.table[..., 2 * D :] * y)
    close(normed, ada_rms_norm(total, after, 1e-6))


def test_layer_norm_modulated_by_frame_uses_each_frames_own_line() -> None:
    frames, per_frame = 3, 4
    x = torch.randn(B, frames * per_frame, D)
    gate, scale, shift = torch.randn(B, frames, 3 * D).chunk(3, dim=-1)
    got = modulated_layer_norm(x, scale, shift, 1e-6)
    for f in range(frames):
        part = slice(f * per_frame, (f + 1) * per_frame)
        want = norm64(x[:, part]) * (1 + scale[:, f, None].double()) + shift[:, f, None].double()
        close(got[:, part].double(), want, atol=1e-5, rtol=1e-5)
    normed, total = gated_add_modulated_layer_norm(x, x, gate, scale, shift, 1e-6)
    close(total, gated_add(x, x, gate))
    close(normed, modulated_layer_norm(total, scale, shift, 1e-6))


def test_layer_norm_can_leave_an_fp32_residual_stream_in_bf16() -> None:
    x, w, b = torch.randn(B, T, D), torch.randn(D), torch.randn(D)
    got = layer_norm(x, w, b, 1e-6, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    close(got.double(), norm64(x) * w.double() + b.double(), atol=2e-2, rtol=2e-2)


def test_gelu_is_the_tanh_form_and_geglu_takes_the_gate_first() -> None:
    x, bias = 3 * torch.randn(T, 2 * D), torch.randn(2 * D)

    def gelu64(x: Tensor) -> Tensor:
        x = x.double()
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())

    close(geglu(x).double(), gelu64(x[:, :D]) * x[:, D:].double(), atol=1e-5, rtol=1e-5)
    close(gelu_tanh(x, bias).double(), gelu64(x.double() + bias.double()), atol=1e-5, rtol=1e-5)


def test_rope_turns_the_two_halves_of_a_head_as_complex_numbers() -> None:
    qkv, positions = torch.randn(B, T, (H + 2 * K) * d), torch.randint(0, 1000, (B, T))
    q, k, v = rope(qkv, positions, heads=H, kv_heads=K, head_dim=d, theta=1e4)
    split = qkv.double().unflatten(-1, (H + 2 * K, d))
    angle = positions.double()[..., None, None] * 1e4 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    turned = torch.complex(split[..., : d // 2], split[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    want = torch.cat((turned.real, turned.imag), dim=-1)
    close(q.double(), want[:, :, :H], atol=5e-4, rtol=0)
    close(k.double(), want[:, :, H : H + K], atol=5e-4, rtol=0)
    close(v.double(), split[:, :, H + K :])


def test_rope_write_leaves_the_same_keys_in_the_arena_that_rope_returns() -> None:
    qkv, positions, slots = torch.randn(B, T, (H + 2 * K) * d), torch.arange(T).expand(B, T), torch.tensor([3, 1])
    k_arena, v_arena = torch.zeros(4, T + 4, K, d), torch.zeros(4, T + 4, K, d)
    shape = {"heads": H, "kv_heads": K, "head_dim": d, "theta": 1e4}
    q, k, v = rope(qkv, positions, **shape)
    close(rope_write(qkv, positions, k_arena, v_arena, slots, offset=2, **shape), q)
    close(k_arena[slots, 2 : 2 + T], k)
    close(v_arena[slots, 2 : 2 + T], v)
    assert not k_arena[[0, 2]].any()
    assert not k_arena[:, :2].any()


def test_rope_3d_turns_adjacent_pairs_by_absolute_frame_row_and_column() -> None:
    frames, height, width, head_dim = 2, 3, 2, 128
    x, start = torch.randn(2, frames * height * width, 1, head_dim), torch.tensor([0, 5])
    got = rope_3d(x, start, (frames, height, width)).double()
    for b in range(2):
        token = 0
        for f in range(frames):
            for row in range(height):
                for column in range(width):
                    position = [int(start[b]) + f] * 22 + [row] * 21 + [column] * 21
                    exponent = [i / 22 for i in range(22)] + [i / 21 for i in range(21)] * 2
                    for pair in (0, 1, 21, 22, 42, 43, 63):
                        angle = position[pair] / 10000.0 ** exponent[pair]
                        even, odd = x[b, token, 0, 2 * pair : 2 * pair + 2].double()
                        want = torch.stack((
                            even * math.cos(angle) - odd * math.sin(angle), even * math.sin(angle) + odd * math.cos(angle)
                        ))  # fmt: skip
                        close(got[b, token, 0, 2 * pair : 2 * pair + 2], want, atol=1e-5, rtol=0)
                    token += 1


def attend64(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """One row, one query token and one head at a time; `valid` is [B, T, N]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                keys, values = k[b, valid[b, t], h // group].double(), v[b, valid[b, t], h // group].double()
                if len(keys):
                    weights = (keys @ q[b, t, h].double() / math.sqrt(q.shape[-1])).softmax(0)
                    out[b, t, h] = weights @ values
    return out


def test_attention_skips_masked_keys_and_gives_zeros_without_any() -> None:
    q, k, v = torch.randn(3, T, H, d), torch.randn(3, 7, K, d), torch.randn(3, 7, K, d)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    got = attention(q, k, v, key_mask_BN=mask)
    close(got.double(), attend64(q, k, v, mask.bool()[:, None].expand(-1, T, -1)), atol=1e-5, rtol=1e-5)
    close(attention(q, k, v)[0], got[0])


@pytest.mark.parametrize("lead", [0, 1])
def test_prefix_attention_sees_the_valid_prefix_and_the_suffix(lead: int) -> None:
    prefix = 6
    q, k_arena, v_arena = torch.randn(B, T, H, d), torch.randn(4, prefix, K, d), torch.randn(4, prefix, K, d)
    k, v, slots, length = torch.randn(B, T, K, d), torch.randn(B, T, K, d), torch.tensor([2, 0]), torch.tensor([4, 0])
    mask = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    got = prefix_attention(
        q, k_arena, v_arena, slots, key_mask_BP=mask, length_B=length, k_suffix_BTKd=k, v_suffix_BTKd=v, suffix_lead=lead
    )
    valid = torch.zeros(B, T, prefix + T, dtype=torch.bool)
    valid[0, :, [0, 2, 3]] = True
    valid[:, :, prefix:] = True
    valid[:, :lead, prefix + lead :] = False
    want = attend64(q, torch.cat((k_arena[slots], k), 1), torch.cat((v_arena[slots], v), 1), valid)
    close(got.double(), want, atol=1e-5, rtol=1e-5)
    alone = prefix_attention(q, k_arena, v_arena, slots, key_mask_BP=mask, length_B=length)
    close(alone.double(), attend64(q, k_arena[slots], v_arena[slots], valid[..., :prefix]), atol=1e-5, rtol=1e-5)


def test_a_patch_product_equals_the_convolution_with_the_same_weight() -> None:
    image, weight = torch.randint(0, 256, (2, 28, 42, 3), dtype=torch.uint8), torch.randn(6, 3, 14, 14)
    pixels = image.permute(0, 3, 1, 2).double() / 127.5 - 1
    want = torch.nn.functional.conv2d(pixels, weight.double(), stride=14).flatten(2).transpose(1, 2)
    got = patchify(image, 14, dtype=torch.float32) @ weight.flatten(1).T
    close(got.double(), want, atol=1e-3, rtol=0)
    close(patchify(pixels.permute(0, 2, 3, 1).float(), 14, dtype=torch.float32), patchify(image, 14, dtype=torch.float32))


def test_references_carry_gradients() -> None:
    x, w = torch.randn(B, T, D, requires_grad=True), torch.randn(D, requires_grad=True)
    table = torch.randn(3, 3 * D, requires_grad=True)
    m = Modulation(table, torch.tensor([0, 2]))
    normed, total = gated_add_ada_rms_norm(rms_norm(x, w, 1e-6), x, m, m, 1e-6)
    q, k, v = rope(torch.cat((normed, total), -1), torch.arange(T).expand(B, T), heads=4, kv_heads=1, head_dim=8, theta=1e4)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1] = False
    geglu(attention(q, k, v, key_mask_BN=mask).flatten(2)).sum().backward()
    for leaf in (x, w, table):
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.abs().sum() > 0


def test_a_cpu_runs_the_reference_and_says_so() -> None:
    assert implementation(rms_norm, "cpu") == "reference"
    assert not triton_runs_on("cpu", None)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that `cuda:0` is of an architecture."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "another card")
        triton_runs_on.cache_clear()

    yield pretend
    triton_runs_on.cache_clear()


def test_a_gpu_of_an_older_architecture_runs_the_reference_and_says_so(a_gpu: Callable[..., None]) -> None:
    a_gpu(7, 5)
    assert implementation(rms_norm, "cuda:0") == "reference"
    assert why_not_triton("cuda", 0) == "the device is sm_75, kernels are for sm_80 and later"
    said = {check.name: check.found for check in (_fused_ops("cuda:0"), *_kernel_tables("cuda:0"))}
    assert "run as plain torch: the device is sm_75" in said["fused ops"]
    assert said["kernel choice"].startswith("on cuda:0: the reference (the device is sm_75")
    a_gpu(8, 9)
    said = {check.name: check for check in _kernel_tables("cuda:0")}
    assert "kernel table" not in said, "no table is for another card"
    assert implementation(rms_norm, "cuda:0") == "triton"
    assert why_not_triton("cuda", 0) is None


def test_a_gpu_without_triton_or_with_it_switched_off_runs_the_reference_and_says_so(
    a_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(9, 0)
    monkeypatch.setenv("STRETTO_TRITON", "0")
    assert implementation(rms_norm, "cuda:0") == "reference"
    assert why_not_triton("cuda", 0) == "STRETTO_TRITON=0 switches them off"
    monkeypatch.delenv("STRETTO_TRITON")
    monkeypatch.setattr("stretto.layers.dispatch.triton_installed", lambda: False)
    a_gpu(9, 0)
    assert implementation(rms_norm, "cuda:0") == "reference"
    assert why_not_triton("cuda", 0) == "triton is not installed"


def test_without_triton_every_op_still_imports_and_runs_its_reference() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from stretto.layers.dispatch import triton_installed
from stretto.layers.kernels import rms_norm
assert not triton_installed()
assert rms_norm(torch.ones(1, 8), torch.zeros(8), 0.0).eq(1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_call_that_needs_gradients_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.layers.dispatch.triton_runs_on", lambda kind, index: True)
    ran: list[str] = []

    def double_reference(x: Tensor) -> Tensor:
        ran.append("reference")
        return 2 * x

    def double_triton(x: Tensor) -> Tensor:
        ran.append("triton")
        return 2 * x

    double = FusedOp(double_reference, double_triton, supports=lambda x: x.shape[0] > 1)
    double(torch.ones(2))
    double(torch.ones(2, requires_grad=True))
    double(torch.ones(1))
    assert double.runs(torch.ones(1)) == "reference"
    with torch.no_grad():
        double(torch.ones(2, requires_grad=True))
    assert double.name == "double"
    assert ran == ["triton", "reference", "reference", "triton"]


def test_fused_linear_shows_each_projection_as_a_view_of_one_weight() -> None:
    fused = FusedLinear(D, {"q_proj": 8, "k_proj": 4, "v_proj": 4}, bias=True)
    views = fused.views()
    assert list(views) == [f"{n}.{p}" for n in ("q_proj", "k_proj", "v_proj") for p in ("weight", "bias")]
    with torch.no_grad():
        views["k_proj.weight"].fill_(2.0)
        views["k_proj.bias"].fill_(1.0)
    out = fused(torch.ones(1, D))
    close(out[:, 8:12], torch.full((1, 4), 2.0 * D + 1))
    close(out[:, :8], torch.nn.functional.linear(torch.ones(1, D), views["q_proj.weight"], views["q_proj.bias"]))
