"""Our server as `load.py` compares it: deadlines, batches that are on time, refusals with a reason."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from fcfs_single_flight import Inputs

from stretto.core.chunk import Chunk
from stretto.core.plan import Device, Mode, Placement, Plan, per_visit, whole
from stretto.core.route import Route
from stretto.runtime.engine import Engine, Stream


def cut(route: Route, kind: str, device: str, cap: int, mode: Mode) -> Plan:
    """Return a plan by name: `whole`, `per_visit`, or `stages` (vision | prefix | all denoise steps)."""
    if kind == "whole":
        return whole(route, device, batch_cap=cap, mode=mode)
    if kind == "per_visit":
        return per_visit(route, device, batch_cap=cap, mode=mode)
    first = [i for i, v in enumerate(route.visits) if i and v.stage != route.visits[i - 1].stage]
    placements = tuple(Placement(s, device) for s in route.cut(first))
    return Plan("stages", (Device(device),), {"default": placements}, {device: cap}, mode=mode)


class DeadlineAware:
    """Our engine: deadlines, batches that are on time, refusals with a reason."""

    name = "deadline_limited"

    def __init__(
        self, model: Any, device: str, mode: Mode, *, prompt: int, plan: str, cap: int, buckets: tuple[int, ...]
    ) -> None:
        shapes = {"prompt": (prompt,), "batch": (*[b for b in buckets if b < cap], cap)}
        made = cut(model.route, plan, device, cap, mode).with_shapes(shapes).with_dispatch("deadline_limited")
        self.engine = Engine(model, made, streams=512)
        self.engine.warm()
        self._lengths = {"prompt": prompt}
        self._streams: dict[int, Stream] = {}

    def join(self, robot: int) -> None:
        self._streams[robot] = self.engine.open()

    def leave_all(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]:
        return self._streams[robot].submit(inputs, lengths=self._lengths, deadline_s=deadline_s)

    def close(self) -> None:
        self.engine.close()
