"""Plan makers: from a profile's route and a list of devices to a plan, one for each way of spreading a stream.

`whole` keeps a chunk on one device; `by_step` gives each device whole denoise steps; `by_block` ranges of blocks for all
steps; `by_stage` the finest of all, a (step, block) a device; `circular` is `by_block` with admission slots at which
chunks never meet. `of_ranks` makes the plan of many streams from their virtual ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from stretto.core.errors import PlanError
from stretto.core.plan import Device, Placement, Plan
from stretto.core.route import Segment
from stretto.sched.columns import Columns, Rank, placements, split
from stretto.sched.profile import Profile


def quantum_of(columns: Columns) -> int:
    """Return the default quantum: an eighth of the model."""
    return max(1, math.ceil(len(columns) / 8))


def whole(profile: Profile, device: Device, *, quantum: int | None = None, batch_cap: int = 1) -> Plan:
    """Keep the whole route on one device, in segments of `quantum` columns; one segment where the quantum covers all."""
    columns = Columns.of(profile)
    ranks = (Rank(0, len(columns), device.name),)
    placed = placements(columns, ranks, quantum=quantum or quantum_of(columns))
    return Plan("whole", (device,), {"default": placed}, {device.name: batch_cap})


def by_block(profile: Profile, devices: Sequence[Device], *, quantum: int | None = None, batch_cap: int = 1) -> Plan:
    """Split the columns evenly by time; every step of a column runs on its one device.

    Raises:
        PlanError: if there are more devices than columns.
    """
    columns = Columns.of(profile)
    ends = columns.balanced(len(_some(devices)))
    ranks = [Rank(a, b, d.name) for (a, b), d in zip(itertools.pairwise((0, *ends)), devices, strict=True)]
    placed = placements(columns, ranks, quantum=quantum or quantum_of(columns))
    in_flight = profile.steps * len(devices)
    return Plan("by_block", tuple(devices), {"default": placed}, {d.name: batch_cap for d in devices}, in_flight=in_flight)


def by_step(profile: Profile, devices: Sequence[Device], *, batch_cap: int = 1) -> Plan:
    """Give each device consecutive passes of the route (denoise steps), balanced by time.

    Raises:
        PlanError: if there are more devices than passes, or state would have to be on two devices.
    """
    return _runs("by_step", profile, devices, _passes(profile), batch_cap)


def by_stage(profile: Profile, devices: Sequence[Device], *, batch_cap: int = 1) -> Plan:
    """Cut the route at every (step, column) and balance the pieces over the devices, in route order.

    Raises:
        PlanError: if there are more devices than pieces, or state would have to be on two devices.
    """
    columns = Columns.of(profile)
    return _runs("by_stage", profile, devices, [len(list(g)) for _, g in itertools.groupby(columns.visits)], batch_cap)


def circular(profile: Profile, devices: Sequence[Device], *, quantum: int | None = None) -> Plan:
    """Split by block, and admit chunks at slots in which no two of them want the same device.

    With S steps over G devices chunk c enters at slot (c div G) S G + S j + floor(j g / G), where j = c mod G and
    g = gcd(S, G); a slot is the time of one range. Zero slots are idle, and order is kept.

    Raises:
        PlanError: if there are more devices than columns.
    """
    # A range is one segment: two chunks on a device would otherwise take turns and leave their slots.
    plan = by_block(profile, devices, quantum=quantum or len(profile.visits))
    return Plan(
        "circular",
        plan.devices,
        plan.classes,
        plan.batch_caps,
        in_flight=len(devices),
        admission=admission_slots(profile.steps, len(devices)),
    )


def admission_slots(steps: int, devices: int) -> tuple[int, ...]:
    """Return the slots at which the first `devices` chunks enter, and the period after which they repeat."""
    g = math.gcd(steps, devices)
    return (*(steps * j + j * g // devices for j in range(devices)), steps * devices)


def of_ranks(
    profile: Profile,
    devices: Sequence[Device],
    ranks: Mapping[str, Sequence[Rank]],
    *,
    kind: str = "portfolio",
    quantum: int | None = None,
    caps: Mapping[str, int] | None = None,
    credits: Mapping[str, int] | None = None,
    pace_s: Mapping[str, float] | None = None,
    dispatch: str = "earliest_virtual_deadline_first",
) -> Plan:
    """Make the plan of many streams; each is a class of its own, placed by its virtual ranks.

    Raises:
        PlanError: if a stream's ranks do not cover the columns in order.
    """
    columns = Columns.of(profile)
    grid = quantum or quantum_of(columns)
    classes = {name: placements(columns, some, quantum=grid) for name, some in ranks.items()}
    return Plan(
        kind,
        tuple(devices),
        classes,
        dict(caps or {}),
        credits=dict(credits or {}),
        pace_s=dict(pace_s or {}),
        dispatch=dispatch,
    )


def waits(profile: Profile, placed: Sequence[Placement]) -> tuple[int | None, ...]:
    """Return, for each placement, the placement that the previous chunk must have passed; None where it waits for nothing.

    Raises:
        PlanError: if state would have to be on two devices.
    """
    at: dict[tuple[str, int], int] = {}
    for i, p in enumerate(placed):
        for v in profile.visits[p.segment.start : p.segment.stop]:
            at[v.stage, v.step] = i
    found: list[int | None] = []
    for i, p in enumerate(placed):
        last: int | None = None
        for visit in profile.visits[p.segment.start : p.segment.stop]:
            carry = profile.waits_for(visit)
            if carry is None:
                continue
            there = at[carry.stage, carry.step]
            if placed[there].device != p.device:
                raise PlanError(
                    f"placements[{i}].device",
                    got=f"{visit} on {p.device}, {carry} on {placed[there].device}",
                    expected="both on one device, since they share state and state never moves",
                )
            last = max(there, i if last is None else last)
        found.append(last)
    return tuple(found)


def check_memory(profile: Profile, plan: Plan, streams: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that a plan needs on each device for these streams of each class.

    Raises:
        PlanError: naming the device that has too little, and by how much.
    """
    need: dict[str, int] = {}
    weights: dict[str, set[str]] = {}
    for name, count in streams.items():
        slots: dict[tuple[str, str], set[int]] = {}
        for p in plan.placements(name):
            for v in profile.visits[p.segment.start : p.segment.stop]:
                weights.setdefault(p.device, set()).add(v.stage)
                stage = profile.stage(v.stage)
                alone = stage.state_of == "stream" or profile.carry == "last_pass"
                slots.setdefault((p.device, v.stage), set()).add(0 if alone else v.step)
        for (device, stage_name), steps in slots.items():
            need[device] = need.get(device, 0) + count * len(steps) * profile.stage(stage_name).state_bytes
    for device, stages in weights.items():
        need[device] = need.get(device, 0) + profile.reserved_bytes + sum(profile.stage(s).weight_bytes for s in stages)
    for d in plan.devices:
        if d.memory_bytes and need.get(d.name, 0) > d.memory_bytes:
            short = (need[d.name] - d.memory_bytes) / 1e9
            raise PlanError(
                f"devices[{d.name}].memory_bytes",
                got=f"{d.memory_bytes / 1e9:.1f} GB",
                expected=f"{need[d.name] / 1e9:.1f} GB or more for {dict(streams)}",
                hint=f"{short:.1f} GB are missing",
            )
    return need


def _some(devices: Sequence[Device]) -> Sequence[Device]:
    if not devices:
        raise PlanError("devices", got="none", expected="at least one device")
    return devices


def _passes(profile: Profile) -> list[int]:
    """Lengths of the stretches of the route in which no stage comes twice."""
    lengths: list[int] = []
    seen: set[str] = set()
    for visit in profile.visits:
        if not lengths or visit.stage in seen:
            lengths.append(0)
            seen = set()
        seen.add(visit.stage)
        lengths[-1] += 1
    return lengths


def _runs(kind: str, profile: Profile, devices: Sequence[Device], lengths: Sequence[int], batch_cap: int) -> Plan:
    """Give each device consecutive pieces of the route, so that the busiest is as idle as can be."""
    if not 1 <= len(_some(devices)) <= len(lengths):
        raise PlanError("devices", got=len(devices), expected=f"1 to {len(lengths)}, the pieces of {profile.model}")
    starts = [0, *itertools.accumulate(lengths)]
    loads = [sum(profile.stage(v.stage).cost(1) for v in profile.visits[a:b]) for a, b in itertools.pairwise(starts)]
    ends = split(loads, len(devices))
    placed = tuple(
        Placement(Segment(starts[piece], starts[piece + 1]), d.name)
        for (a, b), d in zip(itertools.pairwise((0, *ends)), devices, strict=True)
        for piece in range(a, b)
    )
    plan = Plan(kind, tuple(devices), {"default": placed}, {d.name: batch_cap for d in devices}, in_flight=len(devices))
    waits(profile, placed)
    return plan
