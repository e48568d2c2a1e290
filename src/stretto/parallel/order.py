"""Order of work on a device: marks in a stream of work that other streams, and other processes, can wait for.

On a CPU work is done when its call returns, so marks do nothing. Code that moves values is the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Mark:
    """A point in a device's work. `shared` marks can be sent to another process of the host."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @staticmethod
    def new(device: torch.device, *, shared: bool = False) -> Mark:
        if device.type != "cuda":
            return Mark()
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=shared)  # type: ignore[no-untyped-call]
            if shared:
                event.ipc_handle()  # type: ignore[no-untyped-call]  # makes the event now, on this device
            return Mark(event)

    @staticmethod
    def now(device: torch.device) -> Mark:
        """Return a mark at the current end of the current stream."""
        mark = Mark.new(device)
        mark.record()
        return mark

    def record(self) -> None:
        """Move the mark to the current end of the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Let the current stream wait for the mark. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def reach(self) -> None:
        """Let the host wait for the mark."""
        if self._event is not None:
            self._event.synchronize()

    def handle(self) -> torch.cuda.Event | None:
        """Return what `multiprocessing` can send in the place of a shared mark."""
        return self._event


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which work goes to a stream of its own, ahead of computation where both are ready."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device, priority=-1)))  # type: ignore[no-untyped-call]
    return stack


def hold_for_current_stream(tensors: Iterable[Tensor]) -> None:
    """Keep the memory of tensors from being reused before the current stream is done with them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
