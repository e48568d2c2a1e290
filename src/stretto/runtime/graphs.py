"""Capturing work into CUDA graphs, before a device starts and while it runs, and keeping the graphs that are in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stretto.runtime.partition import made_for

V = TypeVar("V")

_CAPTURING = threading.Lock()  # torch takes one capture at a time in a process, whatever the device


class Graphs:
    """What the captured graphs of one lane of a device share: memory pool, capture stream, and the count of captures.

    Graphs of one pool must not run at the same time. Kernels keep the priority, and the part of the device, of the
    stream that they were captured on.
    """

    def __init__(
        self, device: torch.device | None = None, stream: torch.cuda.Stream | None = None, multiprocessors: int = 0
    ) -> None:
        """Make an empty set; `stream` is the one to capture on, a new one by default.

        `multiprocessors`: how many kernels are made for; 0: all of the device's.
        """
        self._made_for = multiprocessors
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.captures = 0
        # The allocator forgets a pool once no graph uses it, and a later capture into it fails: this one always does.
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.stream.device):
            cell = torch.zeros(1, device=self.stream.device)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._keeper, pool=self.pool, stream=self.stream):
                self._kept = cell + 1

    def capture_at_rest(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warm up and capture while nothing else runs in this process. Synchronises the device."""
        return self.capture_in_parts([run])[0]

    def capture_in_parts(self, runs: Sequence[Callable[[], None]]) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Warm up and capture work that is always replayed part after part, each a graph. Synchronises the device.

        What a part leaves for those behind it must stay referenced until the last is captured.
        """
        device, graphs = self.stream.device, []
        with _CAPTURING, made_for(self._made_for, device):
            self.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self.stream):
                for _ in range(2):
                    for run in runs:
                        run()
            torch.cuda.current_stream(device).wait_stream(self.stream)
            torch.cuda.synchronize(device)
            for run in runs:
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], pool=self.pool, stream=self.stream):
                    run()
        self.captures += 1
        return tuple(graphs)

    def capture_live(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what has just run eagerly at the same shapes, while other devices and threads go on.

        Nothing is executed and the device goes on with what it has. A graph that is dropped for this one must have been idle
        for longer than launches are queued, as `Recent` sees to.
        """
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.stream(self.stream), made_for(self._made_for, self.stream.device):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self.captures += 1
        return graph


@dataclass(slots=True)
class Captured:
    """Graphs that are replayed one after the other, with their static control tensor."""

    control: Tensor
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    holds: Hashable = None
    """What the control tensor was last filled for."""

    def replay(self, wanted: Hashable, control_cpu: Callable[[], Tensor]) -> None:
        """Replay with the control rows that `wanted` names; they are made and copied only if others are there."""
        if wanted != self.holds:
            self.control.copy_(control_cpu(), non_blocking=True)
            self.holds = wanted
        for graph in self.graphs:
            graph.replay()


class Recent(Generic[V]):
    """A bounded store that drops what was used longest ago, and only once that has been idle for `idle` turns.

    So more keys in turn than it holds do not push each other out: the ones that came first stay, the others are refused.
    """

    def __init__(self, bound: int, idle: int) -> None:
        self.bound, self.idle = bound, idle
        self._turn = 0
        self._kept: dict[Hashable, tuple[int, V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> V | None:
        """Return what is kept under a key and mark it as used; every call is a turn."""
        self._turn += 1
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = (self._turn, found[1])
        return found[1]

    def has_room(self) -> bool:
        if len(self._kept) < self.bound:
            return True
        oldest, _ = next(iter(self._kept.values()))
        return self._turn - oldest >= self.idle

    def put(self, key: Hashable, value: V) -> None:
        """Keep a new value; the caller has asked `has_room`."""
        if len(self._kept) >= self.bound:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = (self._turn, value)
