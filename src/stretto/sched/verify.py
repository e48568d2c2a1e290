"""From placed streams to plans that are known to hold: caps, credits and order of dispatch, chosen by simulating them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.core.plan import Device, Plan
from stretto.sched.batching import worthwhile_cap
from stretto.sched.cluster import Cluster, Placed, StreamSpec
from stretto.sched.columns import Columns
from stretto.sched.dispatch import ring_cap
from stretto.sched.hardware import CPU
from stretto.sched.outcome import Outcome, quantile
from stretto.sched.plans import of_ranks, quantum_of
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

ORDERS = ("earliest_virtual_deadline_first", "first_come_first_served", "oldest_chunk_first")
PIECE = 0.025
"""Most time that a piece takes, as a share of the promised interval; an eighth of the model where that is less."""
_GOLDEN = 0.6180339887498949  # spreads phases of any number of streams over the interval


@dataclass(frozen=True, slots=True)
class Trial:
    """How long to simulate, in intervals of the slowest stream, and under which weather."""

    intervals: int = 30
    warm: int = 10
    weather: Weather = Weather()  # noqa: RUF009 - frozen, and every field has a plain default


TRIAL = Trial()


@dataclass(frozen=True)
class Verified:
    """Plans by model, and what a simulation of them gave."""

    plans: Mapping[str, Plan]
    outcome: Outcome
    broken: Mapping[str, str]
    """Stream -> the promise that did not hold."""
    warm_s: float

    @property
    def dispatch(self) -> str:
        return next(iter(self.plans.values())).dispatch

    def interval_ms(self, q: float) -> float:
        """Return the quantile of the output intervals of all streams, in milliseconds."""
        values = [v for s in self.outcome.streams for v in s.intervals_s(self.warm_s)]
        return quantile(values, q) * 1e3

    def response_ms(self, q: float) -> float:
        values = [v for s in self.outcome.streams for v in s.responses_s(self.warm_s)]
        return quantile(values, q) * 1e3


def to_plans(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    placed: Mapping[str, Placed],
    *,
    dispatch: str = ORDERS[0],
    batching: bool = True,
    greedy: bool = False,
    kind: str = "portfolio",
) -> dict[str, Plan]:
    """Return one plan a model; every stream is a class of its own.

    A device's batch cap is the chunks in flight on it, so that batches never empty the other devices of a ring, and no more
    than pays by the profile.
    `greedy` lifts the cap to the model's largest batch; without `batching` it is one.
    """
    cluster = Cluster(devices, profiles)
    for p in placed.values():
        cluster.commit(p)
    depth: dict[tuple[str, str], float] = {}
    ring: dict[tuple[str, str], int] = {}
    credits: dict[str, int] = {}
    for name, p in placed.items():
        flying = cluster.response_s(p.spec, p.ranks) / p.spec.interval_s
        most = p.spec.response_s if math.isfinite(p.spec.response_s) else 2 * flying * p.spec.interval_s
        credits[name] = max(2, math.ceil(most / p.spec.interval_s) + 1)
        for rank in p.ranks:
            key = (p.spec.model, rank.device)
            depth[key] = depth.get(key, 0.0) + flying / len(p.ranks)
            ring[key] = max(ring.get(key, 1), len(p.ranks))
    plans = {}
    for model, profile in profiles.items():
        mine = {name: p for name, p in placed.items() if p.spec.model == model}
        if not mine:
            continue
        here = [d for m, d in depth if m == model]
        most = worthwhile_cap(profile, profile.max_batch)
        cap = {d: ring_cap(depth[model, d] * ring[model, d], ring[model, d], most) for d in here}
        caps = {d: profile.max_batch if greedy else cap[d] if batching else 1 for d in here}
        ranks = {name: p.ranks for name, p in mine.items()}
        used = [d for d in devices if d.name in caps]
        plan = of_ranks(
            profile,
            used,
            ranks,
            kind=kind,
            quantum=_quantum(profile, min(p.spec.interval_s for p in mine.values())),
            caps=caps,
            credits={n: credits[n] for n in mine},
            # Urgency by a chunk's own work, not by the promise: a generous promise would let it fall behind first.
            pace_s={n: min(p.spec.response_s, profile.work_s) for n, p in mine.items()},
            dispatch=dispatch,
        )
        # As it will run: with several streams on a device, few batches have graphs of their own.
        plans[model] = replace(plan, mode="eager" if profile.device == CPU.name else "graph")
    return plans


def _quantum(profile: Profile, interval_s: float) -> int:
    """Return after how many columns streams that share a device take turns.

    A chunk waits for the piece that runs and, where launches are queued ahead, for one more.
    """
    columns = Columns.of(profile)
    longest_s = max(work / passes for work, passes in zip(columns.work, columns.passes, strict=True))
    return max(1, min(quantum_of(columns), int(PIECE * interval_s / longest_s))) if longest_s else quantum_of(columns)


def simulate(
    plans: Mapping[str, Plan],
    profiles: Mapping[str, Profile],
    specs: Sequence[StreamSpec],
    trial: Trial = TRIAL,
    *,
    trace: bool = False,
) -> Verified:
    """Run streams at their promised intervals, with phases spread evenly."""
    loads = {m: Load(plan, profiles[m]) for m, plan in plans.items()}
    runs = [
        StreamRun(s.name, s.model, s.name, s.interval_s, s.response_s, start_s=(i * _GOLDEN % 1.0) * s.interval_s)
        for i, s in enumerate(specs)
    ]
    slowest = max(s.interval_s for s in specs)
    outcome = Simulation(loads, runs, weather=trial.weather, trace=trace).run(trial.intervals * slowest)
    warm_s = trial.warm * slowest
    return Verified(plans, outcome, outcome.broken(warm_s), warm_s)


def verify(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    placed: Mapping[str, Placed],
    trial: Trial = TRIAL,
    *,
    kind: str = "portfolio",
) -> Verified:
    """Return the first order of dispatch under which every promise holds, else the one that breaks the fewest."""
    specs = [p.spec for p in placed.values()]
    best: Verified | None = None
    for batching in (False, True):
        for dispatch in ORDERS:
            plans = to_plans(devices, profiles, placed, dispatch=dispatch, batching=batching, kind=kind)
            if batching and all(cap == 1 for plan in plans.values() for cap in plan.batch_caps.values()):
                continue
            found = simulate(plans, profiles, specs, trial)
            if best is None or len(found.broken) < len(best.broken):
                best = found
            if not best.broken:
                return best
    assert best is not None
    return best
