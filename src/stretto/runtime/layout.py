"""What a plan puts on a device: the values that pass there, and the state of the stages that run there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stretto.core.model import CapturesByRows, Model
from stretto.core.plan import Placement, Plan
from stretto.core.route import TensorSpec
from stretto.runtime.arena import Arenas, InputLayout
from stretto.runtime.pools import StatePools
from stretto.runtime.ways import Ways, ways_of

Streams = int | Mapping[str, int]
"""Streams that a plan holds at a time: so many of any class, or so many of each class."""


def placed_on(plan: Plan, device: str) -> list[Placement]:
    return [p for placements in plan.classes.values() for p in placements if p.device == device]


def values_on(ways: Ways, device: str) -> set[str]:
    """Return the values that some chunk reads, writes, brings or takes away on a device."""
    names: set[str] = set()
    for name, p in ways.on(device):
        route = ways.routes[name]
        names.update(route.crossing(p.segment.start), route.crossing(p.segment.stop))
        for visit in route.on(p.segment):
            spec = route.stages[visit.stage]
            names.update(spec.reads, spec.writes)
    return names


def state_on(model: Model, plan: Plan, device: str) -> dict[str, dict[str, TensorSpec]]:
    """Return the state tensors of the stages on a device, by the pool whose slots index them."""
    pools: dict[str, dict[str, TensorSpec]] = {}
    known = StatePools(model, plan.classes, device)
    for p in placed_on(plan, device):
        for visit in model.route.on(p.segment):
            key = known.key(visit)
            for name in model.route.stages[visit.stage].state if key else ():
                pools.setdefault(key.pool, {})[name] = model.state[name]  # type: ignore[union-attr]
    return pools


def unpadded(model: Model, pools: Mapping[str, Mapping[str, TensorSpec]]) -> set[str]:
    """Return the pools that no padded row touches: all stages that use them capture by their rows, and are never padded."""
    padded = {n for s in model.stages.values() if not isinstance(s, CapturesByRows) for n in s.spec.state}
    return {pool for pool, tensors in pools.items() if not padded & set(tensors)}


def state_slots(model: Model, plan: Plan, device: str, streams: Streams) -> Mapping[str, int]:
    """Return the slots of each pool on a device; where any class may come, for the most demanding one."""
    counts: dict[str, int] = {}
    pools = StatePools(model, plan.classes, device)
    for name in plan.classes:
        for pool, n in pools.counts(name).items():
            if isinstance(streams, int):
                counts[pool] = max(counts.get(pool, 0), n * streams)
            else:
                counts[pool] = counts.get(pool, 0) + n * streams.get(name, 0)
    return counts


def inputs_on(model: Model, ways: Ways, device: str) -> InputLayout:
    """Return how a device packs the inputs of chunks that start there."""
    starts = any(p.segment.start == 0 for _, p in ways.on(device))
    return InputLayout.of({n: model.values[n] for n in model.route.inputs} if starts else {})


def arenas_for(
    model: Model, plan: Plan, name: str, device: torch.device, *, slots: int, streams: Streams, ways: Ways | None = None
) -> Arenas:
    """Allocate a device's share of a plan: `slots` chunks at a time, and state for `streams`."""
    ways = ways or ways_of(model, plan)
    inputs = inputs_on(model, ways, name).specs
    values = {n: model.values[n] for n in sorted(values_on(ways, name)) if n not in inputs}
    counts = state_slots(model, plan, name, streams)
    state = state_on(model, plan, name)
    apart = unpadded(model, state)
    lanes = plan.lanes(name)
    return Arenas(inputs, values, state, device=device, slots=slots, state_slots=counts, unpadded=apart, lanes=lanes)
