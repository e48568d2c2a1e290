"""A segment made runnable: eager, or captured once per batch bucket and replayed.

All inputs of a captured graph are the arenas and one small control tensor that names slots and steps, so a graph serves
any robots, at any denoise step, with any prompt length of its bucket.

Control rows: [0] slot of each batch row; then for every visit of the segment its step; then its state slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.core.model import Buckets, Model, Row
from stretto.core.plan import Mode
from stretto.core.route import Segment
from stretto.runtime.arena import Arenas
from stretto.runtime.rows import BatchRows

_RING = 8  # control copies in flight before a pinned buffer is reused


@dataclass(frozen=True, slots=True)
class Member:
    """One row of a launch: the chunk's row, where its segment starts on the route, and its state slot per visit."""

    row: Row
    start: int
    state_slots: tuple[int, ...] = ()
    conditions: Mapping[str, tuple[int, Tensor]] = field(default_factory=dict)


class Graphs:
    """What every captured graph of one device shares: the memory pool, and the count of captures."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.captures = 0


class _Captured:
    """One graph with its static control tensor."""

    def __init__(self, control: Tensor, graph: torch.cuda.CUDAGraph) -> None:
        self.control = control
        self.graph = graph


class Program:
    """Runs one signature of stages on one device for any members of it."""

    def __init__(
        self,
        model: Model,
        segment: Segment,
        arenas: Arenas,
        *,
        mode: Mode,
        batch_buckets: Sequence[int],
        graphs: Graphs | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._route = model.route
        self._stages = [model.stages[name] for name in model.route.signature(segment)]
        self._keeps = model.route.crossing(segment.stop)
        self._arenas = arenas
        signature = set(model.route.signature(segment))
        self._buckets = tuple(_narrowed(b, shapes or {}) for b in model.buckets if set(b.stages) & signature)
        self.batch_buckets = tuple(sorted(set(batch_buckets)))
        self.mode = mode
        self._graphs = graphs
        self._captured: dict[tuple[int, tuple[int, ...]], _Captured] = {}
        self._turn = 0
        self._pinned: dict[int, list[Tensor]] = {}
        if mode == "graph" and (arenas.device.type != "cuda" or graphs is None):
            raise ConfigError(
                "mode", got="graph", expected="eager on a device without CUDA graphs", hint=f"device {arenas.device}"
            )

    @property
    def visits(self) -> int:
        return len(self._stages)

    def shapes(self) -> list[tuple[int, tuple[int, ...]]]:
        """List every (batch bucket, lengths of the bucketed axes) that a launch can need."""
        return list(product(self.batch_buckets, product(*(b.lengths for b in self._buckets))))

    def capture(self) -> None:
        """Capture a graph for every shape, largest first so that the pool is laid out once. Synchronises the device."""
        if self.mode == "eager" or self._graphs is None:
            return
        for batch, lengths in sorted(self.shapes(), reverse=True):
            if (batch, lengths) not in self._captured:
                self._captured[batch, lengths] = self._capture(self._graphs, batch, lengths)

    def _capture(self, graphs: Graphs, batch: int, lengths: tuple[int, ...]) -> _Captured:
        control = torch.zeros(1 + 2 * self.visits, batch, dtype=torch.int64, device=self._arenas.device)
        side = torch.cuda.Stream(self._arenas.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._arenas.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run(self._rows(control, self._named(lengths)))
        torch.cuda.current_stream(self._arenas.device).wait_stream(side)
        torch.cuda.synchronize(self._arenas.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs.pool):
            self._run(self._rows(control, self._named(lengths)))
        graphs.captures += 1
        return _Captured(control, graph)

    def _named(self, lengths: tuple[int, ...]) -> dict[str, int]:
        return {b.axis: n for b, n in zip(self._buckets, lengths, strict=True)}

    def _rows(self, control: Tensor, lengths: Mapping[str, int], members: Sequence[Member] = ()) -> BatchRows:
        v = self.visits
        return BatchRows(
            self._arenas,
            control[0],
            control[1 : 1 + v],
            control[1 + v :],
            host=[m.row for m in members],
            steps=[[self._route.visits[m.start + i].step for m in members] for i in range(v)] if members else (),
            state_slots=[[m.state_slots[i] if m.state_slots else 0 for m in members] for i in range(v)] if members else (),
            conditions=[m.conditions for m in members],
            buckets=self._buckets,
            lengths=lengths,
        )

    def _run(self, rows: BatchRows) -> None:
        for visit, stage in enumerate(self._stages):
            rows.enter(visit)
            stage.run(rows)
        rows.flush(self._keeps)

    def _control(self, members: Sequence[Member], batch: int) -> Tensor:
        host = self._pinned_buffer(batch)
        view = host.numpy()
        view[:] = 0
        v = self.visits
        for column, member in enumerate(members):
            view[0, column] = member.row.slot
            for i in range(v):
                view[1 + i, column] = self._route.visits[member.start + i].step
                if member.state_slots:
                    view[1 + v + i, column] = member.state_slots[i]
        return host

    def _pinned_buffer(self, batch: int) -> Tensor:
        ring = self._pinned.setdefault(batch, [])
        if len(ring) < _RING:
            pin = self._arenas.device.type == "cuda"
            ring.append(torch.zeros(1 + 2 * self.visits, batch, dtype=torch.int64, pin_memory=pin))
            return ring[-1]
        self._turn = (self._turn + 1) % _RING
        return ring[self._turn]

    def launch(self, members: Sequence[Member], lengths: Mapping[str, int]) -> int:
        """Run the segment for these members on the current stream; `lengths` are their longest real lengths.

        Does not synchronise. Returns the batch size that ran: a bucket in graph mode, exact in eager mode.
        """
        batch = len(members) if self.mode == "eager" else self._bucket(len(members))
        fitted = tuple(b.fit(lengths.get(b.axis, b.lengths[0])) for b in self._buckets)
        control = self._control(members, batch)
        if self.mode == "eager":
            device_control = control.to(self._arenas.device, non_blocking=True, copy=True)
            self._run(self._rows(device_control, self._named(fitted), members))
            return batch
        captured = self._captured[batch, fitted]
        captured.control.copy_(control, non_blocking=True)
        captured.graph.replay()
        return batch

    def _bucket(self, n: int) -> int:
        for bucket in self.batch_buckets:
            if n <= bucket:
                return bucket
        raise ConfigError("batch", got=n, expected=f"at most {self.batch_buckets[-1]} rows")


def _narrowed(buckets: Buckets, shapes: Mapping[str, Sequence[int]]) -> Buckets:
    """Keep the buckets that the wanted lengths need."""
    if buckets.axis not in shapes:
        return buckets
    return replace(buckets, lengths=tuple(sorted({buckets.fit(n) for n in shapes[buckets.axis]})))


def batch_buckets(cap: int, wanted: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> tuple[int, ...]:
    """Return the batch sizes to prepare for a cap: the wanted ones below it, and the cap itself."""
    return (*[n for n in wanted if n < cap], cap)
