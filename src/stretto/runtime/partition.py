"""Streams for the lanes of a device, and parts of its multiprocessors for lanes that are at work at the same time.

Without parts kernels go wherever there is room, and two lanes take turns: a large matrix product holds every multiprocessor
for as long as it runs, and small kernels that follow each other at a higher priority leave no room for a large one. Parts
are the driver's green contexts, and what is captured for one is made for its size: persistent programs as many as it
holds, cuBLAS's choices for so many, and tilings that were measured on so many.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stretto.core.errors import ConfigError
from stretto.layers.part import on_part

_SM_RESOURCE = 1
_RESOURCE_BYTES, _COUNT_AT = 144, 96  # the driver's interface fixes both
_DEFAULT_STREAM = _NON_BLOCKING = 1


class LaneStreams:
    """Makes the streams of the lanes of one CUDA device. Parts last as long as the process: streams may outlive this."""

    def __init__(self, device: torch.device, sms: Sequence[int]) -> None:
        """Make one; `sms[i]` is how many multiprocessors the part of lane i has, or 0. Parts do not overlap.

        Raises:
            ConfigError: if the device or its driver cannot be divided like that.
        """
        self._device = device
        self._contexts: dict[int, tuple[ctypes.c_void_p, int]] = {}
        if any(sms):
            # The driver divides the context that torch uses.
            torch.cuda.synchronize(device)
            driver = _Driver(device.index or 0)
            for lane, count in enumerate(sms):
                if count:
                    self._contexts[lane] = driver.part(count)
            self._driver = driver

    def new(self, lane: int) -> torch.cuda.Stream:
        """Return a new stream for a lane on the whole device; a higher lane's kernels go first where both wait."""
        return torch.cuda.Stream(self._device, priority=-lane)  # type: ignore[no-untyped-call]

    def part(self, lane: int) -> torch.cuda.Stream | None:
        """Return a new stream on a lane's part of the device; None where it has none."""
        if lane not in self._contexts:
            return None
        pointer = self._driver.stream(self._contexts[lane][0], -lane)
        return torch.cuda.ExternalStream(pointer, device=self._device)  # type: ignore[no-untyped-call]

    def size(self, lane: int) -> int:
        """Return how many multiprocessors a lane's part has; 0 where it has none. The driver rounds up."""
        return self._contexts[lane][1] if lane in self._contexts else 0


@contextmanager
def made_for(multiprocessors: int, device: torch.device) -> Iterator[None]:
    """Let kernels that this thread captures inside be made for so many multiprocessors; 0: for all. One thread at a time.

    Raises:
        ConfigError: if cuBLAS cannot be told.
    """
    if not multiprocessors:
        yield
        return
    whole = torch.cuda.get_device_properties(device).multi_processor_count
    with on_part(multiprocessors), torch.cuda.device(device):
        _tell_cublas(multiprocessors, whole - multiprocessors)
        try:
            yield
        finally:
            _tell_cublas(0, None)


def _tell_cublas(count: int, others: int | None) -> None:
    """Set the target of this thread's cuBLAS, and that of cuBLASLt, which torch keeps: what it leaves to others."""
    name = f"libcublas.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        call = ctypes.CDLL(name).cublasSetSmCountTarget
    except (OSError, AttributeError) as e:
        raise ConfigError("lane_sms", got=str(e), expected="cuBLAS with a target of multiprocessors") from e
    code = call(ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int(count))  # type: ignore[no-untyped-call]
    if code:
        raise ConfigError("lane_sms", got=f"cublasSetSmCountTarget: {code}", expected="a count that cuBLAS takes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this may change
        torch._C._set_sm_carveout_experimental(others)


class _Driver:
    """The few calls of the CUDA driver that torch has no stable name for."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise ConfigError("lane_sms", got=str(e), expected="the CUDA driver's library") from e
        self._ordinal = ctypes.c_int()
        self._do("cuDeviceGet", ctypes.byref(self._ordinal), ordinal)
        self._left = ctypes.create_string_buffer(_RESOURCE_BYTES)
        self._do("cuDeviceGetDevResource", self._ordinal, self._left, _SM_RESOURCE)

    def part(self, count: int) -> tuple[ctypes.c_void_p, int]:
        """Take a part of at least `count` multiprocessors from what is left; returns a context of it and how many it has."""
        taken, left = self._left, ctypes.create_string_buffer(_RESOURCE_BYTES)
        if count != _count(self._left):
            taken, groups = ctypes.create_string_buffer(_RESOURCE_BYTES), ctypes.c_uint(1)
            self._do("cuDevSmResourceSplitByCount", taken, ctypes.byref(groups), self._left, left, 0, count)
        self._left = left
        description, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuDevResourceGenerateDesc", ctypes.byref(description), taken, 1)
        self._do("cuGreenCtxCreate", ctypes.byref(context), description, self._ordinal, _DEFAULT_STREAM)
        return context, _count(taken)

    def stream(self, context: ctypes.c_void_p, priority: int) -> int:
        made = ctypes.c_void_p()
        self._do("cuGreenCtxStreamCreate", ctypes.byref(made), context, _NON_BLOCKING, priority)
        assert made.value is not None
        return made.value

    def _do(self, name: str, *arguments: object) -> None:
        call = getattr(self._lib, name, None)
        code = call(*arguments) if call is not None else "no such call"
        if code:
            raise ConfigError("lane_sms", got=f"{name}: {code}", expected="a GPU and a driver with green contexts")


def _count(resource: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.c_uint.from_buffer(resource, _COUNT_AT).value
