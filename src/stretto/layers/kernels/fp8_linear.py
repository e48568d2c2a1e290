"""FP8 products: plain, and with the GELU or GeGLU that follows them, whose result is written in e4m3 for the next product.

With what follows, either one kernel does it all on the accumulator, or cuBLAS makes the product in bf16 and a pass codes it; in
parts, so that a part is still in the cache. Which of them at a shape is a measured choice. Without one it is the kernel for
large products on devices that have TMA, else cuBLAS.

`scales` are those of the two coded matrices, each a tensor of no axes. Multiplier as in fp8_activation, of one element.

Shape legend: ... any leading axes, M rows in all of them, K inner width, F hidden width, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.layers import cublas_lt
from stretto.layers.cuda.gated import TOKENS, product_for
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels.activation import geglu_reference, gelu_for_codes, gelu_tanh_reference
from stretto.layers.kernels.fp8_activation import E4M3, activate_into, fp8_chip, to_fp8_reference
from stretto.layers.kernels.gemm import Tiling, halves, place_of
from stretto.layers.kernels.language import cdiv, jit, programs, tl
from stretto.layers.kernels.linear_activation import gated_candidates
from stretto.layers.tuning import Config, Key, Tunable, tuned

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

Scales = tuple[Tensor, Tensor]
TMA_CAPABILITY = (9, 0)
LARGE = (512, 1152)
"""Rows and inner width from which on the kernel won at every shape that was measured on an H200."""
GEGLU_RULE = Tiling(128, 128, 128, 3, 8, 8, 1)
PARTS = (1, 2, 4, 8, 16, 32)
FIELDS = {**gemm.FIELDS, "impl": ("cublas", "lt", "triton", "cuda"), "parts": PARTS, "tokens": TOKENS}
DENSE_FIELDS: dict[str, tuple[int | str, ...]] = {"impl": ("cublas", "lt"), "algo": cublas_lt.CHOICES}


def fp8_linear_reference(x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return x @ codes.T times both scales, + bias, for coded x [..., K]; [..., N] in `dtype`, summed in fp32."""
    product = linear(x.float(), codes_NK.float()) * (scales[0] * scales[1])
    return (product if bias_N is None else product + bias_N.float()).to(dtype)


def fp8_linear(x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return what the reference returns, by cuBLAS where the device has FP8; which of its kernels is a measured choice."""
    if not fp8_chip(x.device):
        return fp8_linear_reference(x, codes_NK, bias_N, scales, dtype)
    key = (x.numel() // x.shape[-1], x.shape[-1], codes_NK.shape[0], int(bias_N is not None))
    choice = tuned("fp8_dense", key, E4M3, x.device) if dtype == torch.bfloat16 and cublas_lt.takes(x, codes_NK) else None
    return run_dense(choice, x, codes_NK, bias_N, scales, dtype)


def run_dense(
    choice: Config | None, x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, dtype: torch.dtype
) -> Tensor:
    """Run one choice; None is the rule."""
    if choice is not None and choice["impl"] == "lt":
        return cublas_lt.matmul(x, codes_NK, int(choice["algo"]), bias_N=bias_N, scales=scales, dtype=dtype)
    flat = x.reshape(-1, x.shape[-1])
    product_MN = torch._scaled_mm(flat, codes_NK.t(), *scales, bias=bias_N, out_dtype=dtype, use_fast_accum=True)
    return product_MN.view(*x.shape[:-1], -1)


def fp8_linear_geglu_reference(x: Tensor, codes_2FK: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    """Return gelu(gate) * up of the product with [2 F, K] codes (gate first) in e4m3, [..., F]."""
    return to_fp8_reference(geglu_reference(fp8_linear_reference(x, codes_2FK, None, scales, torch.float32)), multiplier)


def fp8_linear_gelu_reference(x: Tensor, codes_FK: Tensor, bias_F: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    """Return gelu(product + bias) in e4m3, [..., F]."""
    return to_fp8_reference(gelu_tanh_reference(fp8_linear_reference(x, codes_FK, bias_F, scales, torch.float32)), multiplier)


@jit
def _kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    w_scale: tl.tensor,
    multiplier: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
) -> None:
    PARTS: tl.constexpr = 2 if GATED else 1
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    steps = tl.cdiv(inner, BLOCK_K)
    scale, code = tl.load(x_scale) * tl.load(w_scale), tl.load(multiplier)
    coded = scale * code
    column = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = place_of(tile, down, across, GROUP)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, PARTS * BLOCK_N), tl.float32)
        for step in range(steps):
            w_tile = w.load([0, n, step * BLOCK_K]).reshape(PARTS * BLOCK_N, BLOCK_K)
            acc = tl.dot(x.load([m, step * BLOCK_K]), w_tile.T, acc)
        # Codes of what is out of range are the largest ones, which is how the chip rounds to e4m3.
        if GATED:
            gate, up = halves(acc)
            value = gelu_for_codes(gate * scale) * (up * coded)
        else:
            shift = tl.load(bias + n + column, mask=n + column < columns, other=0.0).to(tl.float32)
            value = gelu_for_codes(acc * scale + shift[None, :]) * code
        out.store([m, n], value.to(tl.float8e4nv))


def _fused(
    x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, multiplier: Tensor, t: Tiling, *, gated: bool
) -> Tensor:
    inner, parts = x.shape[-1], 2 if gated else 1
    rows, columns = x.numel() // inner, codes_NK.shape[0] // parts
    out = torch.empty(*x.shape[:-1], columns, dtype=E4M3, device=x.device)
    tiles = cdiv(rows, t.block_m) * cdiv(columns, t.block_n)
    _kernel[(programs(x, tiles) if t.persistent else tiles,)](
        TensorDescriptor.from_tensor(x.view(rows, inner), [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(codes_NK.view(parts, columns, inner), [parts, t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out.view(rows, columns), [t.block_m, t.block_n]),
        multiplier if bias_N is None else bias_N, *scales, multiplier, rows, columns, inner,
        GATED=gated, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, GROUP=t.group,
        PERSISTENT=bool(t.persistent), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def _run(
    choice: Config | None, x: Tensor, codes_NK: Tensor, bias_N: Tensor | None, scales: Scales, multiplier: Tensor, gated: bool
) -> Tensor:
    if choice is not None and choice["impl"] == "cuda":
        product = product_for(x, codes_NK) if gated else None
        if product is not None:
            return product.run(x, codes_NK, int(choice["tokens"]), scales, multiplier)
        choice = None
    choice = (_geglu_rule(x) if gated else _gelu_rule(x, codes_NK)) if choice is None else choice
    if choice["impl"] == "triton":
        return _fused(x, codes_NK, bias_N, scales, multiplier, Tiling.of(choice), gated=gated)
    if choice["impl"] == "lt":  # a GELU in the product's own epilogue
        return cublas_lt.matmul(
            x, codes_NK, int(choice["algo"]), bias_N=bias_N, gelu=True, scales=scales, multiplier=multiplier, dtype=E4M3
        )
    out = torch.empty(*x.shape[:-1], codes_NK.shape[0] // (2 if gated else 1), dtype=E4M3, device=x.device)
    parts = int(choice.get("parts", 1))
    for rows, into in zip(x.flatten(0, -2).chunk(parts), out.flatten(0, -2).chunk(parts), strict=True):
        activate_into(fp8_linear(rows, codes_NK, bias_N, scales, torch.bfloat16), multiplier, into, gated=gated)
    return out


def _geglu_rule(x: Tensor) -> Config:
    large = x.numel() // x.shape[-1] >= LARGE[0] and x.shape[-1] >= LARGE[1]
    tma = x.is_cuda and torch.cuda.get_device_capability(x.device) >= TMA_CAPABILITY
    return GEGLU_RULE.config if large and tma else {"impl": "cublas", "parts": 1}


def _gelu_rule(x: Tensor, codes_NK: Tensor) -> Config:
    """Take the product's own epilogue wherever it is, whatever the number of rows."""
    own = gemm.on_hopper(x) and cublas_lt.takes(x, codes_NK)
    return {"impl": "lt", "algo": 0} if own else {"impl": "cublas", "parts": 1}


def run_geglu(choice: Config | None, x: Tensor, codes_2FK: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    """Run one choice; None is the rule."""
    return _run(choice, x, codes_2FK, None, scales, multiplier, gated=True)


def run_gelu(choice: Config | None, x: Tensor, codes_FK: Tensor, bias_F: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    """Run one choice; None is the rule."""
    return _run(choice, x, codes_FK, bias_F, scales, multiplier, gated=False)


def fp8_linear_geglu_triton(x: Tensor, codes_2FK: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    key = (x.numel() // x.shape[-1], x.shape[-1], codes_2FK.shape[0] // 2)
    return run_geglu(tuned("fp8_linear_geglu", key, E4M3, x.device), x, codes_2FK, scales, multiplier)


def fp8_linear_gelu_triton(x: Tensor, codes_FK: Tensor, bias_F: Tensor, scales: Scales, multiplier: Tensor) -> Tensor:
    key = (x.numel() // x.shape[-1], x.shape[-1], codes_FK.shape[0])
    return run_gelu(tuned("fp8_linear_gelu", key, E4M3, x.device), x, codes_FK, bias_F, scales, multiplier)


def _supports(x: Tensor, codes_NK: Tensor, *rest: object) -> bool:
    return fp8_chip(x.device) and x.is_contiguous() and codes_NK.is_contiguous()


def _candidates(key: Key, blocks: Sequence[tuple[int, int, int, int, int]]) -> list[Config]:
    found: list[Config] = [{"impl": "cublas", "parts": 1}]
    for m, n, k, stages, warps in blocks:
        found += [Tiling(m, n, k, stages, warps, group, 1).config for group in ((8,) if key[0] <= 1024 else (8, 16))]
    return found


def _geglu_candidates(key: Key) -> list[Config]:
    own = gated_candidates(key, 1) if key[0] >= gemm.FEW_ROWS else []
    blocks = [(128, 128, 128, 3, 8), (128, 128, 128, 4, 8)]
    if key[0] < 2000 and key[1] < 2000:  # of an expert, whose large tiles end in a wave that is nearly empty
        blocks += [(128, 64, 128, 4, 8), (64, 128, 128, 3, 4), (64, 64, 128, 4, 4)]
    return [*_candidates(key, blocks), *own]


def _gelu_candidates(key: Key) -> list[Config]:
    blocks = [(128, 256, 128, 3, 8)]
    return [*cublas_lt.candidates(24), *_candidates(key, blocks)]


def _dense_candidates(key: Key) -> list[Config]:
    return [{"impl": "cublas"}, *cublas_lt.candidates(24)]


def _dense_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    x, codes, scales, _ = _inputs(key[:3], key[2], device)
    return x, codes, torch.randn(key[2], dtype=torch.bfloat16, device=device) if key[3] else None, scales, torch.bfloat16


def _inputs(key: Key, columns: int, device: torch.device) -> tuple[Tensor, Tensor, Scales, Tensor]:
    rows, inner, _ = key
    x = (torch.randn(rows, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    codes = (torch.randn(columns, inner, device=device) * 60).clamp(-448, 448).to(E4M3)
    scales = (torch.tensor(1 / 60, device=device), torch.tensor(inner**-0.5 / 60, device=device))
    return x, codes, scales, torch.full((1,), 40.0, device=device)


def _geglu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return _inputs(key, 2 * key[2], device)


def _gelu_inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    x, codes, scales, multiplier = _inputs(key, key[2], device)
    return x, codes, torch.randn(key[2], dtype=torch.bfloat16, device=device), scales, multiplier


fp8_linear_geglu = FusedOp(fp8_linear_geglu_reference, fp8_linear_geglu_triton, _supports)
fp8_linear_gelu = FusedOp(fp8_linear_gelu_reference, fp8_linear_gelu_triton, _supports)
TUNABLES = (
    Tunable("fp8_dense", DENSE_FIELDS, _dense_candidates, _dense_inputs, run_dense),
    Tunable("fp8_linear_geglu", FIELDS, _geglu_candidates, _geglu_inputs, run_geglu),
    Tunable("fp8_linear_gelu", FIELDS, _gelu_candidates, _gelu_inputs, run_gelu),
)
