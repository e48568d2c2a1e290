"""Products by cuBLASLt: a choice among the kernels that it lists for a shape, and epilogues that torch has no words for.

Torch runs the first kernel of the list. Which is fastest at a shape is for `layers.tuning` to say: a choice names a place in
the list, which is the same for one version of the library. On another one it may hold another kernel, which is as right.

The result may be in fp32 on top of an fp32 residual, or a GELU in e4m3 for the next product.

Shape legend: ... any leading axes, M rows in all of them, K inner width, N columns.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.part import part
from stretto.layers.tuning import Config

E4M3 = torch.float8_e4m3fn
LISTED = 32
WORKSPACE_BYTES = 32 * 2**20
CHOICES = tuple(range(LISTED))

_TYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28}
_COMPUTE_FP32, _TRANSPOSED = 68, 1
_TRANSA, _EPILOGUE, _BIAS, _SCALE_A, _SCALE_B, _SCALE_D, _FAST, _BIAS_TYPE = 3, 7, 8, 17, 18, 20, 25, 26
_PLAIN, _BIASED, _GELU = 1, 4, 32
_MULTIPROCESSORS = 15
_MAX_WORKSPACE = 1
_SPLITS, _REDUCTION = 2, 3


class _Found(ctypes.Structure):
    """One kernel of the list, as the library returns it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Problem(NamedTuple):
    """What the list of kernels depends on."""

    rows: int
    columns: int
    inner: int
    coded: bool
    dtype: torch.dtype
    bias: torch.dtype | None
    gelu: bool
    summed: bool
    """On top of a residual."""
    scaled: bool
    """The result is multiplied before it is written."""
    part: int = 0
    """Multiprocessors that it is made for; 0: all."""


def candidates(count: int) -> list[Config]:
    """Return choices that name the first kernels of the list."""
    return [{"impl": "lt", "algo": i} for i in range(count)]


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library that torch itself has loaded.

    Raises:
        OSError: if there is none.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


@functools.cache
def available() -> bool:
    try:
        return hasattr(_library(), "cublasLtMatmul")
    except OSError:
        return False


def takes(x: Tensor, weight_NK: Tensor) -> bool:
    """Tell whether the library is here and takes these operands: dense rows of a multiple of 16 bytes, both of one dtype."""
    kinds = x.dtype == weight_NK.dtype and x.dtype in (torch.bfloat16, E4M3)
    even = all(n * x.element_size() % 16 == 0 for n in (x.shape[-1], weight_NK.shape[0]))
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight_NK))
    dense = x.is_contiguous() and weight_NK.is_contiguous()
    return x.is_cuda and kinds and even and dense and aligned and available()


def matmul(
    x: Tensor,
    weight_NK: Tensor,
    algo: int,
    *,
    bias_N: Tensor | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    multiplier: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias for x [..., K]: [..., N] in `dtype` (x's own by default), summed in fp32.

    Args:
        algo: a place in the list of kernels; lists that are shorter are gone round.
        gelu: its tanh form is taken of the sum.
        residual: [..., N] in fp32, added; the result is then in fp32.
        scales: of coded x and weight, tensors of one element each.
        multiplier: for a result in e4m3, which is `multiplier` times what it stands for.

    Raises:
        RuntimeError: if the library has no kernel for this product, or refuses it.
    """
    inner, columns = x.shape[-1], weight_NK.shape[0]
    dtype = torch.float32 if residual is not None else dtype or x.dtype
    problem = Problem(
        x.numel() // inner, columns, inner, x.dtype == E4M3, dtype, None if bias_N is None else bias_N.dtype, gelu,
        residual is not None, multiplier is not None, part(),
    )  # fmt: skip
    out = torch.empty(*x.shape[:-1], columns, dtype=dtype, device=x.device)
    with torch.cuda.device(x.device), _Call(problem) as call:
        call.point(_BIAS, bias_N)
        call.point(_SCALE_A, None if scales is None else scales[1])
        call.point(_SCALE_B, None if scales is None else scales[0])
        call.point(_SCALE_D, multiplier)
        call.run(_listed(problem, x.device.index), algo, weight_NK, x, residual, out)
    return out


@functools.cache
def _handle(index: int | None) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)), "no handle")
    return handle


@functools.cache
def _listed(problem: Problem, index: int | None) -> tuple[_Found, ...]:
    """Return the kernels for a problem, the one that the library expects to be fastest first."""
    lib, preference, count = _library(), ctypes.c_void_p(), ctypes.c_int()
    found = (_Found * LISTED)()
    _check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "no preference")
    limit = ctypes.c_size_t(WORKSPACE_BYTES)
    lib.cublasLtMatmulPreferenceSetAttribute(
        preference, _MAX_WORKSPACE, ctypes.byref(limit), ctypes.c_size_t(ctypes.sizeof(limit))
    )
    with _Call(problem) as call:
        # Some kernels of the list are for operands that are scaled: pointers are there, or not, as in the call.
        for field in call.pointed():
            call.point_at(field, 256)
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(index), call.product, *call.layouts, preference, LISTED, ctypes.byref(found), ctypes.byref(count)
        )
    lib.cublasLtMatmulPreferenceDestroy(preference)
    _check(status, f"no kernel for {problem}")
    kernels = [f for f in found[: count.value] if f.state == 0]
    if not kernels:
        raise RuntimeError(f"cuBLASLt lists no kernel for {problem}")
    # A split inner width is summed in another order, and lists differ by the number of rows: with whole ones only, a row has
    # the same bits in every batch. The places of the others are taken by the first whole one.
    whole = next((f for f in kernels if not _split(f)), kernels[0])
    return tuple(whole if _split(f) else f for f in kernels)


def _split(kernel: _Found) -> bool:
    """Tell whether a kernel cuts the inner width into parts that are summed afterwards."""
    value = ctypes.c_int32()
    for field, plain in ((_SPLITS, 1), (_REDUCTION, 0)):
        status = _library().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(kernel.algorithm), field, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)), None
        )
        if status == 0 and value.value not in (plain, 0):
            return True
    return False


class _Call:
    """The descriptions of one product, column by column as the library has it: weight.T times x.T."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.product = ctypes.c_void_p()
        _check(
            _library().cublasLtMatmulDescCreate(ctypes.byref(self.product), _COMPUTE_FP32, _TYPES[torch.float32]), "no product"
        )
        operand, result = _TYPES[E4M3 if p.coded else torch.bfloat16], _TYPES[p.dtype]
        # A result in e4m3 stands on a bf16 one that is not there.
        before = _TYPES[torch.bfloat16] if p.dtype == E4M3 else result
        sides = (
            (operand, p.inner, p.columns),
            (operand, p.inner, p.rows),
            (before, p.columns, p.rows),
            (result, p.columns, p.rows),
        )
        self.layouts = [_layout(kind, height, width) for kind, height, width in sides]
        self._set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._set(_EPILOGUE, ctypes.c_int32((_GELU if p.gelu else 0) | (_BIASED if p.bias is not None else 0) or _PLAIN))
        if p.coded:
            self._set(_FAST, ctypes.c_int8(1))
        if p.part:
            self._set(_MULTIPROCESSORS, ctypes.c_int32(p.part))
        if p.bias is not None:
            self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[p.bias]))

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, *_: object) -> None:
        lib = _library()
        for layout in self.layouts:
            lib.cublasLtMatrixLayoutDestroy(layout)
        lib.cublasLtMatmulDescDestroy(self.product)

    def pointed(self) -> list[int]:
        """Return which pointers this problem has."""
        fields = {_BIAS: self.p.bias is not None, _SCALE_A: self.p.coded, _SCALE_B: self.p.coded, _SCALE_D: self.p.scaled}
        return [field for field, there in fields.items() if there]

    def point(self, field: int, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.point_at(field, tensor.data_ptr())

    def point_at(self, field: int, address: int) -> None:
        self._set(field, ctypes.c_void_p(address))

    def _set(self, field: int, value: ctypes.c_int32 | ctypes.c_int8 | ctypes.c_void_p) -> None:
        size = ctypes.sizeof(value)
        _check(
            _library().cublasLtMatmulDescSetAttribute(self.product, field, ctypes.byref(value), ctypes.c_size_t(size)),
            f"attribute {field}",
        )

    def run(
        self, kernels: tuple[_Found, ...], algo: int, weight: Tensor, x: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        # A place in the list was measured on the whole device.
        kernel = kernels[0 if self.p.part else algo % len(kernels)]
        workspace = torch.empty(kernel.workspace, dtype=torch.uint8, device=x.device) if kernel.workspace else None
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(0.0 if residual is None else 1.0)
        before = _at(residual) if residual is not None else _at(None if out.dtype == E4M3 else out)
        a, b, c, d = self.layouts
        status = _library().cublasLtMatmul(
            _handle(x.device.index), self.product, ctypes.byref(alpha), _at(weight), a, _at(x), b, ctypes.byref(beta),
            before, c, _at(out), d, ctypes.byref(kernel.algorithm), _at(workspace), ctypes.c_size_t(kernel.workspace),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        _check(status, f"kernel {algo} for {self.p}")


def _layout(kind: int, height: int, width: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = (ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height))
    _check(_library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes), "no layout")
    return layout


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt: {what} (status {status})")
