"""What no plan can beat, and which resource says so.

Of one stream: an interval below the busiest device's work (resource), below any circuit of waits (recurrence), below
the bytes of a link, or a pool too small for its memory. Of many: how many streams time and memory have room for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from stretto.core.plan import Device, Placement, Plan
from stretto.sched.profile import Profile
from stretto.sched.sim_state import link_s, signature_of


@dataclass(frozen=True, slots=True)
class IntervalBound:
    """Lower bounds on the output interval of one stream."""

    resource_s: float
    """Work of the busiest device."""
    recurrence_s: float
    """Longest circuit of waits over the chunks in it."""
    link_s: float
    """Transfer time of the busiest link."""
    response_s: float
    """Least response latency: the chunk's own work, one row at a time, and its hand-overs."""

    @property
    def interval_s(self) -> float:
        return max(self.resource_s, self.recurrence_s, self.link_s)

    @property
    def binds(self) -> str:
        parts = {"resource": self.resource_s, "recurrence": self.recurrence_s, "link": self.link_s}
        return max(parts, key=lambda k: parts[k])

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "interval_s": self.interval_s, "binds": self.binds}


def plan_bound(profile: Profile, plan: Plan, stream_class: str = "default", *, environment_s: float = 0.0) -> IntervalBound:
    """Bound the interval of one stream of a class under a plan, alone on the devices.

    `environment_s` > 0 closes the loop: a chunk enters only after an earlier one has left and the world has answered.
    """
    placements = plan.placements(stream_class)
    node = {d.name: d for d in plan.devices}
    busy: dict[str, float] = {}
    wire: dict[tuple[str, str], float] = {}
    hops = 0.0
    for i, p in enumerate(placements):
        # In a batch of chunks the time of one is a share, never less than the best share.
        best = min(_batch_s(profile, signature_of(profile, p), n) / n for n in range(1, plan.batch_cap(p.device) + 1))
        busy[p.device] = busy.get(p.device, 0.0) + best
        if i + 1 < len(placements):
            other = placements[i + 1].device
            s = link_s(profile, node[p.device], node[other], profile.visits[p.segment.stop - 1].stage)
            hops += s
            if other != p.device:
                wire[p.device, other] = wire.get((p.device, other), 0.0) + s
    least = sum(_batch_s(profile, signature_of(profile, p), 1) for p in placements) + hops
    circuit = (least + environment_s) / plan.credit(stream_class)
    self_circuit = _carried_s(profile)
    return IntervalBound(max(busy.values()), max(circuit, self_circuit), max(wire.values(), default=0.0), least)


def pool_bound(profile: Profile, devices: int, *, in_flight: int = 0) -> IntervalBound:
    """Bound the interval of one stream over all placements on this many devices.

    State does not move, so with `same_step` a (step, column) is the least that stays together.
    """
    largest = max(profile.stage(v.stage).cost.best_row_s(profile.max_batch) for v in profile.visits)
    work = profile.best_work_s
    resource = max(work / devices, largest)
    flying = in_flight or len(profile.visits)
    return IntervalBound(resource, max(_carried_s(profile), profile.work_s / flying), 0.0, profile.work_s)


def _batch_s(profile: Profile, signature: tuple[str, ...], rows: int) -> float:
    return profile.launch_s + sum(profile.stage(s).cost(rows) for s in signature)


def _carried_s(profile: Profile) -> float:
    """Return the longest circuit through the state that one chunk leaves for the next."""
    if profile.carry == "none":
        return 0.0
    longest = 0.0
    first: dict[str, int] = {}
    times = [profile.stage(v.stage).cost(1) for v in profile.visits]
    for i, visit in enumerate(profile.visits):
        first.setdefault(visit.stage, i)
    for i, visit in enumerate(profile.visits):
        back = profile.waits_for(visit)
        if back is None:
            continue
        # From this visit on to the one that the next chunk waits for, all of it between two chunks.
        end = i if back == visit else max(j for j, v in enumerate(profile.visits) if v == back)
        longest = max(longest, sum(times[i : end + 1]))
    return longest


@dataclass(frozen=True, slots=True)
class StreamBound:
    """The most equal streams that a pool could carry, by resource."""

    time: int
    memory: int

    @property
    def streams(self) -> int:
        return min(self.time, self.memory)

    @property
    def binds(self) -> str:
        return "time" if self.time <= self.memory else "memory"


def streams_bound(profile: Profile, devices: Sequence[Device], interval_s: float) -> StreamBound:
    """Bound how many streams of this interval fit: all devices busy all the time in their best batches, weights once."""
    time = math.floor(len(devices) * interval_s / profile.best_work_s + 1e-9)
    memory = sum(d.memory_bytes - profile.reserved_bytes for d in devices)
    if any(not d.memory_bytes for d in devices):
        return StreamBound(time, time)
    state = sum(profile.stage(s).state_bytes * profile.state_slots(s) for s in profile.order)
    weights = sum(profile.stage(s).weight_bytes for s in profile.order)
    fits = max(0, math.floor((memory - weights) / state)) if state else time
    return StreamBound(time, fits)


def chunks_under_way(profile: Profile, plan: Plan) -> int:
    """Return how many chunks of the stream with the longest way must be under way so that no device waits for a credit.

    A chunk under way is computed, handed over, or waits for the host of the device that it has come to.
    """
    bound = plan_bound(profile, plan)

    def host_s(placements: Sequence[Placement]) -> float:
        arrivals = [b for a, b in itertools.pairwise([None, *placements]) if b and (a is None or a.device != b.device)]
        return sum(profile.host_s + profile.host_stage_s * len(p.segment) for p in arrivals)

    longest = max(host_s(placements) for placements in plan.classes.values())
    return math.ceil((bound.response_s + longest) / bound.resource_s) + 1
