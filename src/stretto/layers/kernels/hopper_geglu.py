"""A product with GeGLU behind it for Hopper, its loads, products and epilogues side by side.

One warp brings tiles of rows and of weights through shared memory, tile after tile of the result; two groups of four warps have
64 rows each, and gate and up of the same columns. While one group activates what it has summed, the other goes on multiplying,
as far as loads are ahead. Written in Gluon, in bf16 and in e4m3.

Shape legend: M rows, K inner width, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.kernels.fp8_activation import E4M3
from stretto.layers.kernels.hopper_attention import runs_on
from stretto.layers.kernels.language import cdiv, multiprocessors

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # without Triton, or one whose Gluon is another
    gluon = None

ROWS, COLUMNS, BYTES, STAGES = 64, 128, 128, 4
"""Of a tile: rows of a group of warps, of which there are two; columns of gate and as many of up; bytes of the inner width."""


def _jit(fn: Any) -> Any:
    return fn if gluon is None else gluon.jit(fn)


@_jit
def _place(tile: gl.tensor, down: gl.tensor, across: gl.tensor, GROUP: gl.constexpr) -> gl.tensor:
    """Return row and column of a tile: they go down GROUP rows at a time, so what runs at once shares weights in the cache."""
    strip = tile // (GROUP * across)
    height = gl.minimum(down - strip * GROUP, GROUP)
    within = tile - strip * GROUP * across
    return strip * GROUP + within % height, within // height


@_jit
def _bring(
    x_desc: gl.tensor,
    w_desc: gl.tensor,
    x_buf: gl.tensor,
    w_buf: gl.tensor,
    full: gl.tensor,
    free: gl.tensor,
    down: gl.tensor,
    across: gl.tensor,
    steps: gl.tensor,
    hidden: gl.tensor,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    turn = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, down, across, GROUP)
        m, n = tile_m * (2 * ROWS), tile_n * COLUMNS
        for step in range(steps):
            stage, k = turn % STAGES, step * INNER
            mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 2 * x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [m, k], ready, x_buf.index(2 * stage))
            tma.async_copy_global_to_shared(w_desc, [n, k], ready, w_buf.index(2 * stage))
            tma.async_copy_global_to_shared(x_desc, [m + ROWS, k], ready, x_buf.index(2 * stage + 1))
            tma.async_copy_global_to_shared(w_desc, [hidden + n, k], ready, w_buf.index(2 * stage + 1))
            turn += 1


@_jit
def _gelu(x: gl.tensor) -> gl.tensor:
    # As activation.gelu_tanh_of.
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + gl.exp(gl.minimum(-2.0 * u, 80.0)))


@_jit
def _multiply(
    out_desc: gl.tensor,
    x_buf: gl.tensor,
    w_buf: gl.tensor,
    out_buf: gl.tensor,
    full: gl.tensor,
    free: gl.tensor,
    x_scale: gl.tensor,
    w_scale: gl.tensor,
    multiplier: gl.tensor,
    down: gl.tensor,
    across: gl.tensor,
    steps: gl.tensor,
    WHICH: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    """Make the rows of one group of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32 if CODED else 16]
    )
    scale = 1.0
    code = 1.0
    if CODED:
        scale, code = gl.load(x_scale) * gl.load(w_scale), gl.load(multiplier)
    turn = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, down, across, GROUP)
        gate = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        up = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for step in range(steps):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            x = x_buf.index(2 * stage + WHICH)
            gate = warpgroup_mma(x, w_buf.index(2 * stage).permute((1, 0)), gate, is_async=True)
            up = warpgroup_mma(x, w_buf.index(2 * stage + 1).permute((1, 0)), up, is_async=True)
            # The products of the step before are done: its stage is free.
            gate, up = warpgroup_mma_wait(2, deps=(gate, up))
            if step > 0:
                mbarrier.arrive(free.index((turn - 1) % STAGES))
            turn += 1
        gate, up = warpgroup_mma_wait(0, deps=(gate, up))
        mbarrier.arrive(free.index((turn - 1) % STAGES))
        if CODED:
            value = _gelu(gate * scale) * (up * scale) * code
            # Two selects instead of min and max, which would lose a NaN.
            value = gl.where(value > 448.0, 448.0, value)
            value = gl.where(value < -448.0, -448.0, value)
        else:
            value = _gelu(gate) * up
        tma.store_wait(0)
        out_buf.store(value.to(out_buf.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [tile_m * (2 * ROWS) + WHICH * ROWS, tile_n * COLUMNS], out_buf)
    tma.store_wait(0)


@_jit
def _hopper_geglu_kernel(
    x_desc: gl.tensor,
    w_desc: gl.tensor,
    out_desc: gl.tensor,
    x_scale: gl.tensor,
    w_scale: gl.tensor,
    multiplier: gl.tensor,
    rows: gl.tensor,
    hidden: gl.tensor,
    inner: gl.tensor,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CODED: gl.constexpr,
) -> None:
    down, across, steps = gl.cdiv(rows, 2 * ROWS), gl.cdiv(hidden, COLUMNS), gl.cdiv(inner, INNER)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, INNER], x_desc.layout)
    w_buf = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, COLUMNS, INNER], w_desc.layout)
    out_buf = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, COLUMNS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, x_buf, w_buf, out_buf.index(0), full, free, x_scale, w_scale, multiplier, down, across, steps,
                0, ROWS, COLUMNS, INNER, STAGES, GROUP, CODED,
            )),
            (_multiply, (
                out_desc, x_buf, w_buf, out_buf.index(1), full, free, x_scale, w_scale, multiplier, down, across, steps,
                1, ROWS, COLUMNS, INNER, STAGES, GROUP, CODED,
            )),
            (_bring, (
                x_desc, w_desc, x_buf, w_buf, full, free, down, across, steps, hidden,
                ROWS, COLUMNS, INNER, STAGES, GROUP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(x: Tensor, weight_2FK: Tensor) -> bool:
    """Tell whether the kernel runs this product: dense rows of a multiple of 16 bytes on Hopper, whole tiles of columns."""
    dense = x.is_contiguous() and weight_2FK.is_contiguous() and x.dtype == weight_2FK.dtype
    whole = weight_2FK.shape[0] % (2 * COLUMNS) == 0 and x.shape[-1] * x.element_size() % 16 == 0
    return dense and whole and x.dtype in (torch.bfloat16, E4M3) and runs_on(x.device.type, x.device.index)


def hopper_geglu(
    x: Tensor,
    weight_2FK: Tensor,
    group: int,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    multiplier: Tensor | None = None,
) -> Tensor:
    """Return gelu(x @ gate.T) * (x @ up.T) for x [..., K] and a weight [2 F, K], gate first; [..., F].

    Coded operands come with their scales, and with the multiplier of the result, which is in e4m3 too.
    """
    inner, hidden, coded = x.shape[-1], weight_2FK.shape[0] // 2, x.dtype == E4M3
    rows, step = x.numel() // inner, BYTES // x.element_size()
    out = torch.empty(*x.shape[:-1], hidden, dtype=x.dtype, device=x.device)
    numbers = (x, x, x) if scales is None or multiplier is None else (*scales, multiplier)
    tiles = cdiv(rows, 2 * ROWS) * cdiv(hidden, COLUMNS)
    _hopper_geglu_kernel[(min(tiles, multiprocessors(x)),)](
        _described(x.view(rows, inner), [ROWS, step]), _described(weight_2FK, [COLUMNS, step]),
        _described(out.view(rows, hidden), [ROWS, COLUMNS]), *numbers, rows, hidden, inner,
        ROWS=ROWS, COLUMNS=COLUMNS, INNER=step, STAGES=STAGES, GROUP=group, CODED=coded, num_warps=4,
    )  # fmt: skip
    return out


def _described(x: Tensor, block: list[int]) -> Any:
    width = min(128, block[-1] * x.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
