"""Kernels of a trace go to the calls that launched them, and calls have floors by their shapes."""

from __future__ import annotations

import kernel_floor
import pytest
import torch

from stretto.layers.kernels.attention import attention
from stretto.layers.kernels.linear_activation import dense


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_kernel_belongs_to_the_fused_op_round_its_launch_else_to_the_torch_op() -> None:
    calls = {"op:0": kernel_floor.Work("dense 8x4x2", 128.0), "op:1": kernel_floor.Work("rms_norm 8x2", 0.0, 64.0)}
    events = [
        event("user_annotation", "op:0", 0.0, 10.0),
        event("cpu_op", "aten::mm", 1.0, 8.0, **{"Input Dims": [[8, 2], [2, 4]], "Input type": ["c10::BFloat16"] * 2}),
        event("cuda_driver", "cuLaunchKernelEx", 2.0, 1.0, correlation=7),
        event("user_annotation", "op:1", 20.0, 10.0),
        event("cuda_runtime", "cudaLaunchKernel", 21.0, 1.0, correlation=8),
        event("cpu_op", "aten::mm", 40.0, 8.0, **{"Input Dims": [[16, 2], [2, 4]], "Input type": ["c10::BFloat16"] * 2}),
        event("cuda_runtime", "cudaLaunchKernel", 41.0, 1.0, correlation=9),
        event("kernel", "nvjet", 100.0, 5.0, correlation=7),
        event("kernel", "_rms_norm_kernel", 106.0, 2.0, correlation=8),
        event("kernel", "nvjet", 109.0, 7.0, correlation=9),
        event("kernel", "of an unknown launch", 120.0, 1.0, correlation=10),
    ]
    found = kernel_floor.by_call(events, calls)
    assert [(w.label, us) for w, _, us in found] == [
        ("dense 8x4x2", 5.0),
        ("rms_norm 8x2", 2.0),
        ("aten::mm 16x4x2", 7.0),
        ("of an unknown launch", 1.0),
    ]
    table = kernel_floor.top(found, calls, 2)
    assert (table["kernel_us"], table["launches"]) == (15.0, 4)
    assert [c["call"] for c in table["calls"]] == ["aten::mm 16x4x2", "dense 8x4x2"]


def test_a_product_is_bound_by_arithmetic_when_large_and_by_its_weight_when_small() -> None:
    flop, rate = 2 * 8192.0**3, kernel_floor.BF16_FLOP_S
    large = kernel_floor.torch_work("aten::mm", [[8192, 8192], [8192, 8192]], ["c10::BFloat16"] * 2)
    assert large.floor_us == pytest.approx(1e6 * flop / rate)
    x, weight = torch.zeros(1, 1024), torch.zeros(4096, 1024)
    small = kernel_floor.work_of("dense", (x, weight), {}, torch.zeros(1, 4096))
    assert small.floor_us == pytest.approx(1e6 * (weight.nbytes + x.nbytes + 4 * 4096) / kernel_floor.BYTES_S)
    assert kernel_floor.Work("no shapes").floor_us is None


def test_every_call_of_a_run_is_noted_with_what_it_works_on() -> None:
    calls: dict[str, kernel_floor.Work] = {}
    q = torch.randn(2, 3, 4, 8)
    with kernel_floor.watched(calls):
        attention(q, q, q)
        dense(torch.randn(5, 8), torch.randn(6, 8))
    assert [w.label for w in calls.values()] == ["attention 2x3 over 3, 4/4 heads of 8", "dense 5x6x8"]
    assert calls["op:0"].flop == 4 * 2 * 3 * 4 * 3 * 8
