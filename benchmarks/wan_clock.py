"""Times of captured graphs on a rested chip and under steady load, with the clock and the power draw beside them.

A GPU that computes without a pause reaches its power limit within a fraction of a second and lowers its clock. `rested`
pauses before every sample; `sustained` launches in a row. On a device without CUDA both time plain calls.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

PAUSE_S = 0.3
_AHEAD_MS = 25.0  # of launches that wait on the device, so that reading a sensor starves it of nothing
_SM_CLOCK, _POWER_NOW = 1, 186
Run = Callable[[], object]


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_uint64),
    )


class Sensors:
    """SM clock and momentary power of a CUDA device, through NVML; empty where there is none."""

    def __init__(self, device: torch.device) -> None:
        self._library: ctypes.CDLL | None = None
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == 0:
            self._library = library

    def read(self) -> dict[str, float]:
        """Return `sm_mhz` and `power_w`, as far as the device says them."""
        if self._library is None:
            return {}
        found: dict[str, float] = {}
        clock = ctypes.c_uint()
        if self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(clock)) == 0:
            found["sm_mhz"] = float(clock.value)
        power = _FieldValue(field=_POWER_NOW)
        if self._library.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(power)) == 0 and power.status == 0:
            found["power_w"] = (power.value & 0xFFFFFFFF) / 1e3
        return found


def rested(runs: Mapping[str, Run], device: torch.device, sensors: Sensors, samples: int) -> dict[str, dict[str, Any]]:
    """Time each run `samples` times in turn, each time after a pause and one untimed run right ahead of it. In ms."""
    spans: dict[str, list[float]] = {name: [] for name in runs}
    before: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    after: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(samples):
        for name, run in runs.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                time.sleep(PAUSE_S)
            before[name].append(sensors.read())
            spans[name].append(_one(run, device))
            after[name].append(sensors.read())
    return {
        name: {"ms": _spread(spans[name]), "ahead": _typical(before[name]), "behind": _typical(after[name])} for name in runs
    }


def _one(run: Run, device: torch.device) -> float:
    run()
    if device.type != "cuda":
        begin_s = time.perf_counter()
        run()
        return (time.perf_counter() - begin_s) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def sustained(run: Run, device: torch.device, sensors: Sensors, seconds: float) -> dict[str, Any]:
    """Time launches in a row; the last third of `seconds` counts. In ms."""
    if device.type != "cuda":
        return {"ms": _spread([_one(run, device) for _ in range(5)])}
    ahead = max(2, int(_AHEAD_MS / max(_one(run, device), 0.01)))
    under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    spans: list[float] = []
    seen: list[dict[str, float]] = []
    begin_s = read_s = time.monotonic()
    while (spent_s := time.monotonic() - begin_s) < seconds or len(spans) < 5:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        under_way.append((begin, end))
        if len(under_way) <= ahead:
            continue
        first, last = under_way.popleft()
        last.synchronize()
        if spent_s > 2.0 / 3.0 * seconds:
            spans.append(float(first.elapsed_time(last)))
            if time.monotonic() - read_s > 0.03:
                seen.append(sensors.read())
                read_s = time.monotonic()
    torch.cuda.synchronize(device)
    return {"ms": _spread(spans), "during": _typical(seen), "runs": len(spans)}


def _spread(spans: Sequence[float]) -> dict[str, float]:
    ordered = sorted(spans)
    return {
        "p50": round(statistics.median(ordered), 4),
        "least": round(ordered[0], 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
    }


def _typical(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for reading in readings for name in reading)
    return {name: round(statistics.median(r[name] for r in readings if name in r), 1) for name in names}


def per_visit(found: dict[str, Any], visits: int) -> dict[str, Any]:
    """Return the same for one of the visits that a run makes."""
    return found | {"ms": {name: round(ms / visits, 4) for name, ms in found["ms"].items()}}
