"""A segment made runnable: eager, or captured and replayed.

All inputs of a captured graph are the arenas and one small control tensor that names slots and steps, so a graph serves
any robots, at any denoise step, with any prompt length of its bucket. These graphs are all captured before the start.

Where a stage's work depends on the rows (`core.model.CapturesByRows`: the rings of a world model), there is one graph
for each key that the stages give. The keys of single rows that a plan can ask for are few, and captured before the start
(`capture_ahead`), with those of batches if they are few too: `KEYED_GRAPHS` a segment, the smallest batches first. A batch
that has no graph of its own replays those of its rows in turn. A row beyond them runs eagerly and is captured right after,
if there is room. Rows without a key, such as those whose rings are still filling, run eagerly.

Control rows: [0] slot of each batch row; then for every visit of the segment its step; then its state slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.core.model import Buckets, CapturesByRows, Model, Row
from stretto.core.plan import Mode
from stretto.core.route import Segment
from stretto.runtime.arena import Arenas
from stretto.runtime.graphs import Captured, Recent
from stretto.runtime.graphs import Graphs as Graphs
from stretto.runtime.rows import BatchRows
from stretto.sched.captures import KEYED_GRAPHS, captured_rows

_RING = 64  # control copies in flight before a pinned buffer is reused
_IDLE = 8 * KEYED_GRAPHS  # launches without use after which one makes room for another


@dataclass(frozen=True, slots=True)
class Member:
    """One row of a launch: the chunk's row, where its segment starts on the route, and its state slot per visit."""

    row: Row
    start: int
    state_slots: tuple[int, ...] = ()
    conditions: Mapping[str, tuple[int, Tensor]] = field(default_factory=dict)


class Ran(NamedTuple):
    """How a launch ran: the rows in its batch, padded ones included, and its mode."""

    batch: int
    mode: Mode


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
        beside: Graphs | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Make one; `beside` takes graphs for a part of the device, which are replayed while another lane is at work."""
        self._route = model.route
        self._stages = [model.stages[name] for name in model.route.signature(segment)]
        self._keeps = model.route.crossing(segment.stop)
        self._arenas = arenas
        signature = set(model.route.signature(segment))
        self.buckets = tuple(_narrowed(b, shapes or {}) for b in model.buckets if set(b.stages) & signature)
        self.batch_buckets = tuple(sorted(set(batch_buckets)))
        self.mode = mode
        self._graphs = graphs
        self._captured: dict[tuple[int, tuple[int, ...]], Captured] = {}
        self._beside = beside
        self._captured_beside: dict[tuple[int, tuple[int, ...]], Captured] = {}
        self._by_rows = [(i, s) for i, s in enumerate(self._stages) if isinstance(s, CapturesByRows)]
        self._steps_V = np.asarray([v.step for v in model.route.visits], np.int64)
        self._no_control = torch.zeros(1 + 2 * self.visits, 0, dtype=torch.int64)
        self._by_key: Recent[Captured] = Recent(KEYED_GRAPHS, _IDLE)
        # A device starts with a graph when all of it has been handed over: a short first one lets it start early.
        first = 1 if self._stages[-1] is not self._stages[0] else self.visits
        self._parts = [part for part in (range(first), range(first, self.visits)) if part]
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
        return list(product(self.batch_buckets, product(*(b.lengths for b in self.buckets))))

    def capture(self) -> None:
        """Capture a graph for every shape, largest first so that the pool is laid out once. Synchronises the device.

        Does nothing where captures depend on the rows.
        """
        if self.mode == "eager" or self._graphs is None or self._by_rows:
            return
        for batch, lengths in sorted(self.shapes(), reverse=True):
            if (batch, lengths) not in self._captured:
                self._captured[batch, lengths] = self._capture(self._graphs, batch, lengths)
                if self._beside is not None:
                    self._captured_beside[batch, lengths] = self._capture(self._beside, batch, lengths)

    def capture_ahead(self, members: Sequence[Member], cap: int) -> None:
        """Capture the graphs of batches of these members that launches can ask for. Runs some of them, on the current lane.

        Does nothing where captures do not depend on the rows.

        Args:
            members: every row that can come, with rings that count as full.
        """
        if self._graphs is None or not self._by_rows:
            return
        sizes: set[int] = set()
        for lengths in product(*(b.lengths for b in self.buckets)):
            for batch in batches(sorted(members, key=lambda m: m.state_slots), cap):
                key = self.capture_key(batch)
                if key is None or self._by_key.get((lengths, key)) is not None or not self._by_key.has_room():
                    continue
                if len(batch) not in sizes:
                    # Kernels must be built and chosen before they can be captured. The first of a size has neighbouring
                    # slots, and runs of them in other batches are no longer than those of smaller ones before it.
                    self._run_eagerly(self._control(batch, len(batch)), batch, lengths)
                sizes.add(len(batch))
                self._by_key.put((lengths, key), self._capture_rows(self._graphs, batch, lengths))

    def _capture(self, graphs: Graphs, batch: int, lengths: tuple[int, ...]) -> Captured:
        control = torch.zeros(1 + 2 * self.visits, batch, dtype=torch.int64, device=self._arenas.device)
        made: list[BatchRows] = []

        def run(part: range) -> None:
            if part.start == 0:
                made[:] = [self._rows(control, self._named(lengths))]  # fresh: nothing of a run before may be baked in
            self._run(made[0], part)

        return Captured(control, graphs.capture_in_parts([partial(run, part) for part in self._parts]))

    def _named(self, lengths: tuple[int, ...]) -> dict[str, int]:
        return {b.axis: n for b, n in zip(self.buckets, lengths, strict=True)}

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
            buckets=self.buckets,
            lengths=lengths,
        )

    def _run(self, rows: BatchRows, visits: range | None = None) -> None:
        for visit in visits or range(self.visits):
            rows.enter(visit)
            self._stages[visit].run(rows)
        if visits is None or visits.stop == self.visits:
            rows.flush(self._keeps)

    def _control(self, members: Sequence[Member], batch: int) -> Tensor:
        host = self._pinned_buffer(batch)
        view, v = host.numpy(), self.visits
        view[:, len(members) :] = 0
        for column, member in enumerate(members):
            view[0, column] = member.row.slot
            view[1 : 1 + v, column] = self._steps_V[member.start : member.start + v]
            view[1 + v :, column] = member.state_slots or 0
        return host

    def _pinned_buffer(self, batch: int) -> Tensor:
        ring = self._pinned.setdefault(batch, [])
        if len(ring) < _RING:
            pin = self._arenas.device.type == "cuda"
            ring.append(torch.zeros(1 + 2 * self.visits, batch, dtype=torch.int64, pin_memory=pin))
            return ring[-1]
        self._turn = (self._turn + 1) % _RING
        return ring[self._turn]

    def launch(self, members: Sequence[Member], lengths: Mapping[str, int], *, beside: bool = False) -> Ran:
        """Run the segment for these members on the current stream; `lengths` are their longest real lengths.

        `beside`: on the part of the device, if there are graphs for one. Does not synchronise. Returns how it really ran.
        """
        fitted = tuple(b.fit(lengths.get(b.axis, b.lengths[0])) for b in self.buckets)
        if self._by_rows:
            # One order for one set of rows: fewer keys, and neighbouring state slots side by side.
            return self._launch_by_rows(sorted(members, key=lambda m: m.state_slots), fitted)
        if self.mode == "eager":
            self._run_eagerly(self._control(members, len(members)), members, fitted)
            return Ran(len(members), "eager")
        batch = self._bucket(len(members))
        captured = self._captured_beside if beside and self._beside is not None else self._captured
        captured[batch, fitted].replay(_placed(members), lambda: self._control(members, batch))
        return Ran(batch, "graph")

    def _run_eagerly(self, control_cpu: Tensor, members: Sequence[Member], lengths: tuple[int, ...]) -> None:
        control = control_cpu.to(self._arenas.device, non_blocking=True, copy=True)
        self._run(self._rows(control, self._named(lengths), members))

    def _launch_by_rows(self, members: Sequence[Member], lengths: tuple[int, ...]) -> Ran:
        batch, graphs = len(members), self._graphs
        key = self.capture_key(members) if graphs else None
        captured = None if key is None else self._by_key.get((lengths, key))
        if captured is not None:
            self._replay_rows(captured, members, lengths)
            return Ran(batch, "graph")
        if key is not None and batch > 1:
            single = [self._by_key.get((lengths, self.capture_key((m,)))) for m in members]
            if all(single):
                for captured, member in zip(single, members, strict=True):
                    assert captured is not None
                    self._replay_rows(captured, (member,), lengths)
                return Ran(batch, "graph")
        self._run_eagerly(self._control(members, batch), members, lengths)
        if graphs and key is not None and self._by_key.has_room():
            self._by_key.put((lengths, key), self._capture_rows(graphs, members, lengths))
        return Ran(batch, "eager")

    def _replay_rows(self, captured: Captured, members: Sequence[Member], lengths: tuple[int, ...]) -> None:
        rows = self._rows(captured.control, self._named(lengths), members)
        for visit, stage in self._by_rows:
            rows.enter(visit)
            stage.prepare(rows)
        captured.replay(_placed(members), lambda: self._control(members, len(members)))

    def _capture_rows(self, graphs: Graphs, members: Sequence[Member], lengths: tuple[int, ...]) -> Captured:
        control = torch.zeros(1 + 2 * self.visits, len(members), dtype=torch.int64, device=self._arenas.device)
        rows = self._rows(control, self._named(lengths), members)  # fresh: what an eager run made must not be baked in
        return Captured(control, (graphs.capture_live(partial(self._run, rows)),))

    def capture_key(self, members: Sequence[Member]) -> Hashable:
        """Return the key of the graph that serves these members; None if one of their stages gives none."""
        rows = self._rows(self._no_control, {}, members)
        keys: dict[tuple[Hashable, int], Hashable] = {}
        for visit, stage in self._by_rows:
            rows.enter(visit)
            asked = getattr(stage, "alike", visit), id(rows.host)
            if asked not in keys:
                keys[asked] = key = stage.capture_key(rows.host)
                if key is None:
                    return None
        return tuple(keys.values())

    def _bucket(self, n: int) -> int:
        for bucket in self.batch_buckets:
            if n <= bucket:
                return bucket
        raise ConfigError("batch", got=n, expected=f"at most {self.batch_buckets[-1]} rows")


def _placed(members: Sequence[Member]) -> Hashable:
    """Return all that control rows say of members."""
    return tuple([(m.row.slot, m.start, m.state_slots) for m in members])


def _narrowed(buckets: Buckets, shapes: Mapping[str, Sequence[int]]) -> Buckets:
    """Keep the buckets that the wanted lengths need."""
    if buckets.axis not in shapes:
        return buckets
    return replace(buckets, lengths=tuple(sorted({buckets.fit(n) for n in shapes[buckets.axis]})))


def batches(members: Sequence[Member], cap: int, bound: int = KEYED_GRAPHS) -> Iterator[tuple[Member, ...]]:
    """Yield the batches of these members, small ones first; of a size all or none, but single rows up to the bound."""
    yield from ((m,) for m in members[:bound])
    for n in range(2, captured_rows(len(members), cap, bound) + 1):
        yield from combinations(members, n)


def batch_buckets(cap: int, wanted: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> tuple[int, ...]:
    """Return the batch sizes to prepare for a cap: the wanted ones below it, and the cap itself."""
    return (*[n for n in wanted if n < cap], cap)
