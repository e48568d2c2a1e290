"""What one device can run under a plan: a program for every kind of task, what it costs, and what follows a task there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.core.route import Route, Segment
from stretto.runtime.arena import Arenas
from stretto.runtime.costs import measure, progress
from stretto.runtime.flow import Flow
from stretto.runtime.program import Graphs, Program, batch_buckets
from stretto.runtime.ways import MAIN, OnRoute, Placements, Ways
from stretto.sched.dispatch import Limits

Kind = tuple[str, tuple[str, ...]]
"""What tasks must have in common to share a batch: their route, and the stages they run."""


class Entry(NamedTuple):
    """A task as its device runs it: the number of its kind, the program, and the stages."""

    number: int
    program: Program
    stages: tuple[str, ...]


class Repertoire:
    """The kinds of task that a plan puts on a device, numbered in the order of the plan."""

    def __init__(self, model: Model, plan: Plan, ways: Ways, name: str, arenas: Arenas) -> None:
        self._name, self._ways = name, ways
        self._device = arenas.device
        self._on = {route: model if route == MAIN else OnRoute(model, r) for route, r in ways.routes.items()}
        self.graphs = Graphs(self._device) if plan.mode == "graph" else None
        self._programs: dict[Kind, Program] = {}
        for route, p in ways.on(name):
            kind = self._kind(route, p.segment)
            if kind not in self._programs:
                self._programs[kind] = Program(
                    self._on[route],
                    p.segment,
                    arenas,
                    mode=plan.mode,
                    batch_buckets=plan.shapes.get("batch") or batch_buckets(plan.batch_cap(name)),
                    graphs=self.graphs,
                    shapes=plan.shapes,
                )
        self._numbers = {kind: i for i, kind in enumerate(self._programs)}
        # By place, since a segment of many visits makes a long key and a task is looked up at every decision.
        kinds = {(route, p.segment): self._kind(route, p.segment) for route, p in ways.on(name)}
        self._at = {place: Entry(self._numbers[k], self._programs[k], k[1]) for place, k in kinds.items()}
        self._known: dict[Placements, list[tuple[float, float, tuple[int, ...]]]] = {}

    def _kind(self, route: str, segment: Segment) -> Kind:
        return route, self.route(route).signature(segment)

    def model(self, route: str) -> Model:
        return self._on[route]

    def route(self, route: str) -> Route:
        return self._on[route].route

    def entry(self, flow: Flow) -> Entry:
        """Return what a chunk's task here is."""
        return self._at[flow.route, flow.placement.segment]

    def capture(self) -> None:
        """Capture every graph that can be captured before the start. Synchronises the device."""
        for program in self._programs.values():
            program.capture()

    def measured(self, cap: int) -> dict[int, tuple[float, ...]]:
        """Return, for each kind by number, the seconds of batches of 1 to `cap`. Runs them; synchronises the device."""
        first: dict[Kind, int] = {}
        for route, p in self._ways.on(self._name):
            first.setdefault(self._kind(route, p.segment), p.segment.start)
        return {self._numbers[k]: measure(p, first[k], self._device, cap) for k, p in self._programs.items()}

    def by_stages(self, costs: Mapping[int, Sequence[float]]) -> dict[tuple[str, ...], Sequence[float]]:
        """Return costs by the stages of a kind instead of its number."""
        return {kind[1]: costs[i] for kind, i in self._numbers.items() if i in costs}

    def progress(self, flow: Flow, limits: Limits) -> tuple[float, float, tuple[int, ...]]:
        """Return a chunk's share of work done, the seconds it has left alone, and the kinds that follow on this device."""
        known = self._known.get(flow.placements)
        if known is None:
            here = [self._numbers[self._kind(flow.route, p.segment)] if p.device == self._name else -1 for p in flow.placements]
            seconds = [limits.seconds(kind, 1) if kind >= 0 else 0.0 for kind in here]
            shares = progress(self.route(flow.route), flow.placements, seconds)
            ahead = [tuple(kind for kind in here[i + 1 :] if kind >= 0) for i in range(len(here))]
            known = [(share, left_s, after) for (share, left_s), after in zip(shares, ahead, strict=True)]
            self._known[flow.placements] = known
        return known[flow.at]
