"""The expert's launches in CUDA C++: on a GPU as they are, and on the CPU built for the host, their threads run as fibers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from stretto.layers.cuda import build
from stretto.layers.cuda.chain import LAUNCHES, Coded, ExpertChain, Memory, Weights, expert_chain
from stretto.layers.kernels.ada_rms_norm import Modulation
from stretto.layers.kernels.attention import PrefixKV, prefix_attention
from stretto.layers.kernels.coded_layers import CodedLayer, CodedStream, code_stream, coded_layer
from stretto.layers.kernels.expert_layers import Shape
from stretto.layers.kernels.fold import shifted_products
from stretto.layers.kernels.fp8_activation import to_fp8_reference
from stretto.layers.kernels.gated_linear import gated_linear
from stretto.layers.kernels.norm_linear import norm_geglu, norm_qkv
from stretto.layers.kernels.stream import Stream, open_stream

WIDTH, HEADS, HEAD, MLP = 1024, 8, 256, 4096
HALF = torch.bfloat16
EPS = 1e-6


class Call(NamedTuple):
    stream: Stream
    weights: list[Weights]
    norms: list[Modulation]
    keys: PrefixKV
    coded: Coded | None = None

    def run(self, chain: ExpertChain, launches: int | None = None, memory: Memory | None = None) -> Stream:
        lines, named = (self.norms[0], self.norms[1]), {"launches": launches, "memory": memory, "coded": self.coded}
        return chain.run(self.stream, self.weights, lines, self.keys, theta=1e4, eps=EPS, **named)


def call(tokens: int, prefix: int, depth: int, device: str = "cpu") -> Call:
    """A random call. Beyond the prefix's length lie keys and values that are no numbers, within it some that are masked."""
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * std).to(device)

    shapes = [((HEADS + 2) * HEAD, WIDTH), (WIDTH, HEADS * HEAD), (2 * MLP, WIDTH), (WIDTH, MLP)]
    weights = [Weights(*(normal(*s, std=s[1] ** -0.5).to(HALF) for s in shapes)) for _ in range(depth)]
    table, rows = normal(3, 2 * depth + 1, 3 * WIDTH, std=0.3), torch.tensor([1], device=device)
    norms = [Modulation(table[:, i], rows) for i in range(2 * depth + 1)]
    k, v = (normal(3, depth, prefix, 1, HEAD).to(HALF) for _ in range(2))
    length = prefix * 9 // 10
    k[:, :, length:], v[:, :, length:] = float("nan"), float("nan")
    mask = torch.rand(1, prefix, generator=g).to(device) > 0.2

    def number(n: int) -> Tensor:
        return torch.tensor([n], dtype=torch.int32, device=device)

    keys = PrefixKV(k, v, torch.tensor([2], device=device), mask, number(length), number(700))
    return Call(open_stream.reference(normal(1, tokens, WIDTH), norms[0], HALF), weights, norms, keys)


def by_steps(c: Call, stream: Stream, layer: int, dtype: torch.dtype = HALF) -> tuple[Tensor, Tensor, Stream, Tensor, Stream]:
    """What each launch of a layer leaves, by the references of the separate kernels."""
    w, (first, second, third), keys = c.weights[layer], c.norms[2 * layer : 2 * layer + 3], c.keys
    shape = {"heads": HEADS, "kv_heads": 1, "head_dim": HEAD, "theta": 1e4, "eps": EPS}
    fresh = norm_qkv.reference(stream.scaled_BRD, stream.squares_MP, w.qkv, first, keys.suffix_start_B, **shape)
    q, k, v = torch.split(fresh, [HEADS, 1, 1], dim=2)
    kept = keys.k_SNPKd[:, layer].nan_to_num(), keys.v_SNPKd[:, layer].nan_to_num(), keys.slots_B
    named = {"key_mask_BP": keys.mask_BP, "length_B": keys.length_B, "k_suffix_BTKd": k, "v_suffix_BTKd": v}
    attended = prefix_attention.reference(q, *kept, **named).flatten(2)
    middle = gated_linear.reference(attended, w.out, stream.residual_BTD, first, second, HALF)
    hidden = norm_geglu.reference(middle.scaled_BRD, middle.squares_MP, w.gate_up, second, EPS)
    end = gated_linear.reference(hidden, w.down, middle.residual_BTD, second, third, dtype)
    return fresh, attended, middle, hidden, end


def coded(c: Call) -> Call:
    """The same call with its products in e4m3. Scales are what the first layer needs, and differ by layer."""
    table, scales = c.norms[0].table, []
    lines = torch.stack([n.table for n in c.norms], dim=1)
    codes = []
    for i, layer in enumerate(c.weights):
        by = [w.abs().amax().float() / 448 for w in layer]
        codes.append(Weights(*(to_fp8_reference(w, 1 / s) for w, s in zip(layer, by, strict=True))))
        to_out, to_down = 100.0 + i, 40.0 - i
        scales.append([by[0], to_out, by[1] / to_out, by[2], to_down, by[3] / to_down])
    shift = lines[:, :, WIDTH : 2 * WIDTH]
    qkv = [shifted_products(shift[:, 2 * i], w.qkv) for i, w in enumerate(c.weights)]
    gate_up = [shifted_products(shift[:, 2 * i + 1], w.gate_up) for i, w in enumerate(c.weights)]
    of = Coded(codes, torch.tensor(scales, device=table.device), torch.stack(qkv, dim=1), torch.stack(gate_up, dim=1))
    return c._replace(coded=of)


def coded_steps(c: Call, stream: CodedStream, layer: int, memory: Memory | None = None) -> CodedLayer:
    """What each launch of a layer leaves where its products are in e4m3; with a memory, given the codes that lie there."""
    assert c.coded is not None
    left = (None, None, None)
    if memory is not None:
        left = memory.attended()[None], memory.stream(end=False)[0][None], memory.hidden()[None]
    return coded_layer(layer, stream, c.coded, c.norms, c.keys, Shape(HEADS, 1, HEAD, 1e4, EPS), left)


def off_by(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


def same_stream(got: Stream, want: Stream, tolerance: float) -> None:
    assert off_by(got.residual_BTD, want.residual_BTD) < tolerance
    assert off_by(got.scaled_BRD, want.scaled_BRD) < tolerance
    assert off_by(got.squares_MP.sum(-1), want.squares_MP.sum(-1)) < tolerance


@pytest.fixture(scope="module")
def on_host(library_on_host: Callable[[str], ctypes.CDLL]) -> ExpertChain:
    return ExpertChain(library_on_host("chain"), 0)


@pytest.fixture(scope="module")
def on_device() -> ExpertChain:
    chain, reason = expert_chain(0)
    if chain is None:
        pytest.skip(reason)
    return chain


def left_by(memory: Memory, launch: int) -> Tensor:
    """What one of a layer's launches left, as the separate kernels lay it out."""
    if launch == 0:
        return torch.cat((memory.queries(), *(x[:, None] for x in memory.fresh())), dim=1)
    return (memory.attended(), memory.stream(end=False)[0], memory.hidden())[launch - 1]


def test_each_launch_leaves_what_its_separate_kernel_would(on_host: ExpertChain) -> None:
    tokens = 13
    c = call(tokens, 77, 1)
    memory = Memory(on_host.sizes, tokens, torch.device("cpu"))
    end = c.run(on_host, memory=memory)
    fresh, attended, middle, hidden, want = by_steps(c, c.stream, 0, torch.float32)
    for launch, left in enumerate((fresh, attended, middle.scaled_BRD, hidden)):
        assert off_by(left_by(memory, launch), left[0]) < 8e-3
    assert off_by(memory.stream(end=False)[1].sum(-1), middle.squares_MP.sum(-1)) < 1e-3
    same_stream(end, want, 3e-3)


@pytest.mark.parametrize(("tokens", "prefix"), [(1, 1), (55, 968)])
def test_the_fewest_and_the_most_tokens_fit(on_host: ExpertChain, tokens: int, prefix: int) -> None:
    c = call(tokens, prefix, 1)
    same_stream(c.run(on_host), by_steps(c, c.stream, 0, torch.float32)[-1], 3e-3)


def test_layers_follow_each_other_and_equal_inputs_give_equal_bits(on_host: ExpertChain) -> None:
    c = call(3, 9, 2)
    first, second = c.run(on_host), c.run(on_host)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    stream = by_steps(c, c.stream, 0)[-1]
    same_stream(first, by_steps(c, stream, 1, torch.float32)[-1], 5e-3)


def differs_by(got: Tensor, want: Tensor) -> float:
    """Root mean square of what differs, over that of what is wanted: some codes may be rounded to their other neighbour."""
    assert got.shape == want.shape
    return ((got.float() - want.float()).square().mean() / want.float().square().mean()).sqrt().item()


def test_each_coded_launch_leaves_what_its_codes_say(on_host: ExpertChain) -> None:
    tokens = 13
    c = coded(call(tokens, 77, 1))
    memory = Memory(on_host.sizes, tokens, torch.device("cpu"), coded=True)
    end = c.run(on_host, memory=memory)
    fresh, attended, middle, hidden, want = coded_steps(c, code_stream(c.stream, EPS), 0, memory)
    for launch, left in enumerate((fresh, attended, middle.codes_BTD, hidden)):
        # Weights of attention are rounded to bf16, in another order.
        assert differs_by(left_by(memory, launch), left[0]) < (2e-2 if launch == 1 else 4e-3)
    assert off_by(memory.stream(end=False)[1].sum(-1) / WIDTH, middle.mean_BT1[0, :, 0]) < 2e-3
    assert differs_by(end.residual_BTD, want.residual_BTD) < 3e-3
    assert off_by(end.squares_MP.sum(-1) / WIDTH, want.mean_BT1[0, :, 0]) < 3e-3
    scale, shift, _ = c.norms[2].parts()
    last = torch.cat((want.residual_BTD * (1.0 + scale), shift), dim=1)
    assert differs_by(end.scaled_BRD, last) < 3e-3


def test_coded_layers_follow_each_other_and_are_near_to_uncoded_ones(on_host: ExpertChain) -> None:
    plain = call(3, 9, 2)
    c = coded(plain)
    got, again = c.run(on_host), c.run(on_host)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    stream, near = code_stream(c.stream, EPS), c.stream
    for layer in range(2):
        stream, near = coded_steps(c, stream, layer)[-1], by_steps(c, near, layer)[-1]
    assert differs_by(got.residual_BTD, stream.residual_BTD) < 3e-2
    assert 1e-3 < differs_by(got.residual_BTD, near.residual_BTD) < 6e-2


def test_codes_of_other_shapes_are_not_taken(on_host: ExpertChain) -> None:
    of = coded(call(3, 9, 2)).coded
    assert of is not None
    assert on_host.takes_coded(of, 2)
    assert not on_host.takes_coded(of, 1)
    assert not on_host.takes_coded(of._replace(weights=call(3, 9, 2).weights), 2)
    assert not on_host.takes_coded(of._replace(qkv_shifts=of.gate_up_shifts), 2)


def takes(chain: ExpertChain, c: Call) -> bool:
    return chain.takes(c.weights, c.stream.residual_BTD.shape, c.stream.scaled_BRD.dtype, c.norms[0], c.keys)


def test_calls_of_other_shapes_are_not_taken(on_host: ExpertChain) -> None:
    c = call(5, 77, 1)
    assert takes(on_host, c)
    many = call(56, 1, 1)
    assert not takes(on_host, many)
    long = c.keys._replace(mask_BP=torch.ones(1, 969, dtype=torch.bool))
    assert not takes(on_host, c._replace(keys=long))
    two_rows = c.stream._replace(residual_BTD=c.stream.residual_BTD.expand(2, -1, -1))
    assert not takes(on_host, c._replace(stream=two_rows))
    by_token = Modulation(c.norms[0].table, torch.zeros(1, 5, dtype=torch.int64))
    assert not takes(on_host, c._replace(norms=[by_token]))
    other = [c.weights[0]._replace(down=c.weights[0].down.float())]
    assert not takes(on_host, c._replace(weights=other))


def test_a_machine_without_the_device_says_why_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    build.built.cache_clear()
    monkeypatch.setattr(build, "triton_runs_on", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert build.built("chain", 0) == (None, "the device is sm_86, the kernel is for sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    build.built.cache_clear()
    monkeypatch.setattr(build, "nvcc", lambda: None)
    assert build.built("chain", 0) == (None, "there is no nvcc on this machine")
    build.built.cache_clear()


def test_a_compiler_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 1\n')
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as e:
        build.compiled("chain", str(compiler), (), tmp_path / "cache")
    assert build._tail(e.value) == "no such flag"
    assert not list((tmp_path / "cache").iterdir())


def test_a_library_is_compiled_once_for_the_same_sources(tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    # Writes its output file, and counts its runs.
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho >> {tmp_path}/runs\necho library > "$2"\n')
    compiler.chmod(0o755)
    first = build.compiled("chain", str(compiler), (), tmp_path / "cache")
    second = build.compiled("chain", str(compiler), (), tmp_path / "cache")
    assert first == second
    assert (tmp_path / "runs").read_text().count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "prefix"), [(50, 968), (10, 784), (55, 960), (1, 1)])
def test_launches_on_the_device_leave_what_separate_kernels_would(on_device: ExpertChain, tokens: int, prefix: int) -> None:
    c = call(tokens, prefix, 3, "cuda")
    got, again = c.run(on_device), c.run(on_device)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    stream = c.stream
    for layer in range(3):
        stream = by_steps(c, stream, layer, torch.float32 if layer == 2 else HALF)[-1]
    same_stream(got, stream, 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "prefix"), [(50, 968), (10, 784), (55, 960), (1, 1)])
def test_coded_launches_on_the_device_leave_what_their_codes_say(on_device: ExpertChain, tokens: int, prefix: int) -> None:
    c = coded(call(tokens, prefix, 1, "cuda"))
    memory = Memory(on_device.sizes, tokens, torch.device("cuda"), coded=True)
    end, again = c.run(on_device, memory=memory), c.run(on_device)
    assert all(torch.equal(a, b) for a, b in zip(end, again, strict=True))
    fresh, attended, middle, hidden, want = coded_steps(c, code_stream(c.stream, EPS), 0, memory)
    for launch, left in enumerate((fresh, attended, middle.codes_BTD, hidden)):
        assert differs_by(left_by(memory, launch), left[0]) < (3e-2 if launch == 1 else 1e-2)
    assert differs_by(end.residual_BTD, want.residual_BTD) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("launch", range(LAUNCHES - 1))
def test_a_run_that_stops_early_leaves_what_its_last_launch_made(on_device: ExpertChain, launch: int) -> None:
    c = call(50, 968, 1, "cuda")
    memory = Memory(on_device.sizes, 50, torch.device("cuda"))
    c.run(on_device, launch + 1, memory)
    fresh, attended, middle, hidden, _ = by_steps(c, c.stream, 0)
    assert off_by(left_by(memory, launch), (fresh, attended, middle.scaled_BRD, hidden)[launch][0]) < 8e-3
