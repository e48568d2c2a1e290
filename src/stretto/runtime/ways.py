"""All routes of a model under one plan. A plan places the main route; other routes run where their stages and state are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.core.errors import PlanError
from stretto.core.model import Model, StateKey
from stretto.core.plan import Placement, Plan
from stretto.core.route import Route, Segment, Visit

MAIN = "main"
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Ways:
    """Every route by name, and its placements for each stream class."""

    routes: Mapping[str, Route]
    placed: Mapping[str, Mapping[str, Placements]]
    """Stream class -> route -> placements."""

    def placements(self, route: str, stream_class: str) -> Placements:
        return self.placed[stream_class][route]

    def on(self, device: str) -> list[tuple[str, Placement]]:
        """Return (route, placement) of everything that can run on a device."""
        return [(route, p) for ways in self.placed.values() for route, ps in ways.items() for p in ps if p.device == device]

    def links(self) -> list[tuple[str, str]]:
        """Return the (producer, consumer) pairs of devices between which chunks cross, in a fixed order."""
        pairs = {
            (a.device, b.device)
            for ways in self.placed.values()
            for ps in ways.values()
            for a, b in itertools.pairwise(ps)
            if a.device != b.device
        }
        return sorted(pairs)

    def crossing(self, producer: str, consumer: str) -> tuple[str, ...]:
        """Return the values that can cross from one device to another."""
        names: set[str] = set()
        for ways in self.placed.values():
            for route, ps in ways.items():
                for a, b in itertools.pairwise(ps):
                    if (a.device, b.device) == (producer, consumer):
                        names.update(self.routes[route].crossing(b.segment.start))
        return tuple(sorted(names))

    def stages(self, device: str) -> tuple[str, ...]:
        """Return the stages whose weights a device needs."""
        visits = (v for route, p in self.on(device) for v in self.routes[route].on(p.segment))
        return tuple(dict.fromkeys(v.stage for v in visits))


def ways_of(model: Model, plan: Plan, others: Mapping[str, Route] | None = None) -> Ways:
    """Place all routes.

    Raises:
        PlanError: if the plan does not fit the model, or another route has a stage that the main one does not have.
    """
    plan.validate(model.route)
    crowded = [d.name for d in plan.devices if plan.lanes(d.name) > 1]
    if crowded and (model.state or model.conditions):
        raise PlanError(
            "lane",
            got=f"several lanes on {crowded} for {model.name}, which keeps state or conditions",
            expected="one lane a device: only the values of a chunk are handed from lane to lane",
        )
    placed = {
        name: {MAIN: placements} | {other: _cover(model, route, placements) for other, route in (others or {}).items()}
        for name, placements in plan.classes.items()
    }
    return Ways({MAIN: model.route} | dict(others or {}), placed)


def _cover(model: Model, route: Route, placements: Placements) -> Placements:
    """Place a route by another: a visit with state goes where that state is, one without goes with the visit it leads to."""
    main = [(v, p.device) for p in placements for v in model.route.on(p.segment)]
    holds: dict[tuple[str, StateKey], int] = {}
    for i, (visit, _) in enumerate(main):
        key = model.state_key(visit)
        if key is not None:
            holds.setdefault((visit.stage, key), i)
    at = len(main) - 1
    devices: list[str] = []
    for visit in reversed(route.visits):
        at = _beside(model, visit, main, holds, at)
        devices.append(main[at][1])
    devices.reverse()
    cuts = [i for i in range(1, len(devices)) if devices[i] != devices[i - 1]]
    return tuple(Placement(s, devices[s.start]) for s in (route.cut(cuts) if cuts else (Segment(0, len(route)),)))


def _beside(
    model: Model, visit: Visit, main: list[tuple[Visit, str]], holds: Mapping[tuple[str, StateKey], int], following: int
) -> int:
    """Return the index of the main visit whose device takes a visit of another route."""
    key = model.state_key(visit)
    if key is not None and (visit.stage, key) in holds:
        return holds[visit.stage, key]
    same = [i for i, (v, _) in enumerate(main) if v.stage == visit.stage]
    if key is not None or not same:
        raise PlanError(
            f"route visit {visit.stage}", got="no such stage or state on the main route", expected="routes of the same stages"
        )
    return max((i for i in same if i <= following), default=same[0])


class OnRoute:
    """A model seen on another of its routes."""

    def __init__(self, model: Model, route: Route) -> None:
        self.route = route
        self.name, self.module, self.stages = model.name, model.module, model.stages
        self.values, self.state, self.conditions = model.values, model.state, model.conditions
        self.buckets, self.state_key, self.carry = model.buckets, model.state_key, model.carry
