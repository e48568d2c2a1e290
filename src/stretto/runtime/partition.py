"""Streams for the lanes of a device, and parts of its multiprocessors for those lanes that must not fill it.

Without a part a lane's kernels go wherever there is room. Large matrix products take every multiprocessor for as long as
they run, and a kernel of another lane, whatever its priority, waits for them to end; so a lane of large kernels is given a
part, and the small kernels of the other lane always find the rest free. Parts are the driver's green contexts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from stretto.core.errors import ConfigError

_SM_RESOURCE = 1
_RESOURCE_BYTES = 144  # the driver's interface fixes it
_DEFAULT_STREAM = _NON_BLOCKING = 1


class LaneStreams:
    """Makes the streams of the lanes of one CUDA device. Parts last as long as the process: streams may outlive this."""

    def __init__(self, device: torch.device, sms: Sequence[int]) -> None:
        """Make one; `sms[i]` is how many multiprocessors lane i is confined to, or 0. Parts do not overlap.

        Raises:
            ConfigError: if the device or its driver cannot be divided like that.
        """
        self._device = device
        self._contexts: dict[int, ctypes.c_void_p] = {}
        if any(sms):
            # The driver divides the context that torch uses.
            torch.cuda.synchronize(device)
            driver = _Driver(device.index or 0)
            for lane, count in enumerate(sms):
                if count:
                    self._contexts[lane] = driver.part(count)
            self._driver = driver

    def new(self, lane: int) -> torch.cuda.Stream:
        """Return a new stream for a lane; a higher lane's kernels go first where both wait."""
        if lane not in self._contexts:
            return torch.cuda.Stream(self._device, priority=-lane)  # type: ignore[no-untyped-call]
        pointer = self._driver.stream(self._contexts[lane], -lane)
        return torch.cuda.ExternalStream(pointer, device=self._device)  # type: ignore[no-untyped-call]


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

    def part(self, count: int) -> ctypes.c_void_p:
        """Take a part of at least `count` multiprocessors from what is left, and make a context of it."""
        taken, left = ctypes.create_string_buffer(_RESOURCE_BYTES), ctypes.create_string_buffer(_RESOURCE_BYTES)
        groups = ctypes.c_uint(1)
        self._do("cuDevSmResourceSplitByCount", taken, ctypes.byref(groups), self._left, left, 0, count)
        self._left = left
        description, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuDevResourceGenerateDesc", ctypes.byref(description), taken, 1)
        self._do("cuGreenCtxCreate", ctypes.byref(context), description, self._ordinal, _DEFAULT_STREAM)
        return context

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
