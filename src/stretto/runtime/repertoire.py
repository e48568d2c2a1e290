"""What one device can run under a plan: a program for every kind of task, what it costs, and what follows a task there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from stretto.core.model import Model, Row
from stretto.core.plan import Placement, Plan
from stretto.core.route import Route
from stretto.runtime.arena import Arenas, torch_dtype
from stretto.runtime.costs import measure, progress
from stretto.runtime.crowd import Crowd
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane
from stretto.runtime.layout import Streams
from stretto.runtime.partition import LaneStreams
from stretto.runtime.program import Graphs, Member, Program, batch_buckets
from stretto.runtime.residents import Residents, Seat
from stretto.runtime.ways import MAIN, OnRoute, Ways
from stretto.sched.dispatch import Limits

_LATE = 1 << 40  # a chunk number

Kind = tuple[str, tuple[str, ...], int]
"""What tasks must have in common to share a batch: their route, the stages they run, and the lane."""


class Entry(NamedTuple):
    """A task as its device runs it: the number of its kind, the program, and the stages."""

    number: int
    program: Program
    stages: tuple[str, ...]


class Repertoire:
    """The kinds of task that a plan puts on a device, numbered in the order of the plan."""

    def __init__(
        self, model: Model, plan: Plan, ways: Ways, name: str, arenas: Arenas, streams: LaneStreams | None = None
    ) -> None:
        self._name, self._ways = name, ways
        self._device = arenas.device
        self.slowed: dict[tuple[str, ...], float] = {}
        """Stages that run as one task -> how many times longer they take beside another lane; known once measured."""
        self._on = {route: model if route == MAIN else OnRoute(model, r) for route, r in ways.routes.items()}
        # Graphs that share a memory pool must not run at the same time, so each lane has its own.
        lanes = range(plan.lanes(name)) if plan.mode == "graph" else ()
        self._graphs = {n: Graphs(self._device, streams.new(n) if streams else None) for n in lanes}
        parts = {n: part for n in lanes if streams and (part := streams.part(n)) is not None}
        self._beside = {n: Graphs(self._device, part, streams.size(n)) for n, part in parts.items() if streams}
        self._programs: dict[Kind, Program] = {}
        self._places: dict[tuple[str, Placement], Kind] = {}
        for route, p in ways.on(name):
            kind = route, self.route(route).signature(p.segment), p.lane
            self._places[route, p] = kind
            if kind not in self._programs:
                self._programs[kind] = Program(
                    self._on[route],
                    p.segment,
                    arenas,
                    mode=plan.mode,
                    batch_buckets=plan.shapes.get("batch") or batch_buckets(plan.batch_cap(name)),
                    graphs=self._graphs.get(p.lane),
                    beside=self._beside.get(p.lane),
                    shapes=plan.shapes,
                )
        self._numbers = {kind: i for i, kind in enumerate(self._programs)}
        # By place, since a segment of many visits makes a long key and a task is looked up at every decision.
        self._at = {
            (route, p.segment, p.lane): Entry(self._numbers[k], self._programs[k], k[1])
            for (route, p), k in self._places.items()
        }
        self._met: dict[tuple[int, str], tuple[Placement, Entry]] = {}
        """The same by the placement itself, which is kept so that its number stays its own."""
        self._cap = plan.batch_cap(name)
        self._blank = {
            name: (0, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device))
            for name, spec in (model.conditions if plan.mode == "graph" else {}).items()
        }
        self._known: dict[tuple[str, str], list[tuple[float, float, tuple[int, ...]]]] = {}

    @property
    def captures(self) -> int:
        return sum(graphs.captures for graphs in (*self._graphs.values(), *self._beside.values()))

    def model(self, route: str) -> Model:
        return self._on[route]

    def route(self, route: str) -> Route:
        return self._on[route].route

    def entry(self, flow: Flow) -> Entry:
        """Return what a chunk's task here is."""
        place = flow.placements[flow.at]
        found = self._met.get((id(place), flow.route))
        if found is None:
            entry = self._at[flow.route, place.segment, place.lane]
            found = self._met[id(place), flow.route] = place, entry
        return found[1]

    def _of_lane(self, lane: Lane) -> dict[Kind, Program]:
        return {kind: program for kind, program in self._programs.items() if kind[2] == lane.number}

    def capture(self, lane: Lane, residents: Residents | None = None, streams: Streams = 0) -> None:
        """Capture every graph of a lane that can be captured before the start. Synchronises the device.

        Where graphs are for the state slots of their rows, those of all seats that `streams` will take.
        """
        for program in self._of_lane(lane).values():
            program.capture()
        if residents is None or not self._graphs:
            return
        rows: dict[Kind, list[Member]] = {}
        for name, seats in residents.reserve(streams).items():
            for (route, p), kind in self._places.items():
                if kind[2] == lane.number and p in self._ways.placed[name].get(route, ()):
                    rows.setdefault(kind, []).extend(self._seated(route, p, seat, residents) for seat in seats)
        for kind, members in rows.items():
            self._programs[kind].capture_ahead(members, self._cap)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _seated(self, route: str, place: Placement, seat: Seat, residents: Residents) -> Member:
        """Return a row of nobody's chunk in a seat, so late that its rings count as full."""
        model = self.model(route)
        slots = residents.slots_of(seat, place.segment, model)
        return Member(Row(-1, _LATE, 0, slot=1), place.segment.start, slots, self._blank)

    def measured(self, cap: int, lanes: Sequence[Lane]) -> dict[int, tuple[float, ...]]:
        """Return, for each kind by number, the seconds of batches of 1 to `cap`. Runs them; synchronises the device.

        Where other lanes run beside it, a kind costs what it does while the longest kind of another lane runs.
        """
        first: dict[Kind, int] = {}
        for (_, p), kind in self._places.items():
            first.setdefault(kind, p.segment.start)
        found: dict[Kind, tuple[float, ...]] = {}
        for lane in lanes:
            with lane.current():
                found |= {kind: measure(p, first[kind], self._device, cap) for kind, p in self._of_lane(lane).items()}
        for lane in lanes if self._device.type == "cuda" else ():
            others = [(found[kind][0], kind) for kind in found if kind[2] != lane.number]
            if not others:
                continue
            seconds, beside = max(others)
            for kind in self._of_lane(lane):
                crowd = Crowd(self._programs[beside], first[beside], seconds, lanes[beside[2]])
                factor = crowd.slows(self._programs[kind], first[kind], found[kind][0], lane)
                self.slowed[kind[1]] = factor
                found[kind] = tuple(s * factor for s in found[kind])
        return {self._numbers[kind]: costs for kind, costs in found.items()}

    def by_stages(self, costs: Mapping[int, Sequence[float]]) -> dict[tuple[str, ...], Sequence[float]]:
        """Return costs by the stages of a kind instead of its number."""
        return {kind[1]: costs[i] for kind, i in self._numbers.items() if i in costs}

    def progress(self, flow: Flow, limits: Limits) -> tuple[float, float, tuple[int, ...]]:
        """Return a chunk's share of work done, the seconds it has left alone, and the kinds that follow in its lane."""
        known = self._known.get((flow.route, flow.stream_class))
        if known is None:
            places = flow.placements
            kinds = [self._places.get((flow.route, p)) for p in places]
            here = [-1 if kind is None else self._numbers[kind] for kind in kinds]
            seconds = [limits.seconds(kind, 1) if kind >= 0 else 0.0 for kind in here]
            shares = progress(self.route(flow.route), places, seconds)
            ahead = [
                tuple(
                    kind for p, kind in zip(places[i + 1 :], here[i + 1 :], strict=True) if kind >= 0 and p.lane == place.lane
                )
                for i, place in enumerate(places)
            ]
            known = [(share, left_s, after) for (share, left_s), after in zip(shares, ahead, strict=True)]
            self._known[flow.route, flow.stream_class] = known
        return known[flow.at]
