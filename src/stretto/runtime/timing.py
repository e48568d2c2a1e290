"""Points in time on a device: CUDA events where there are some, the host clock elsewhere."""

from __future__ import annotations

import time

import torch


class Stamp:
    """A point in the device's queue of work, recorded now."""

    __slots__ = ("_event", "_host_s")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Record one on a stream, the current one by default."""
        self._host_s = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Block the calling thread until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def reached(self) -> bool:
        """Tell whether the device has reached this point. Does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold(self) -> None:
        """Let the current stream wait for this point. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def ms_since(self, earlier: Stamp) -> float:
        """Return the device time between two stamps, in milliseconds; both must have been reached."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event))
        return (self._host_s - earlier._host_s) * 1e3
