"""Whether two lanes of one device are worth it: the same robots under each plan, by measured costs and slowdowns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.core.plan import Plan
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun
from stretto.sched.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Predicted:
    """What robots that ask again as soon as they have their chunk get from a plan."""

    chunks_per_s: float
    p99_s: float


def predict(profile: Profile, plan: Plan, robots: int, *, chunks: int = 200) -> Predicted:
    """Simulate some robots under a plan, the first tenth left out.

    Raises:
        PlanError: if the plan does not fit the profile.
    """
    name, classes = profile.model, list(plan.classes)
    streams = [StreamRun(str(i), name, classes[i % len(classes)], chunks=chunks, in_flight=1) for i in range(robots)]
    until_s = 10.0 * chunks * robots * max(profile.work_s, 1e-9)
    outcome = Simulation({name: Load(plan, profile)}, streams).run(until_s)
    done = sorted(((end, end - due) for s in outcome.streams for _, due, end in s.done))[chunks * robots // 10 :]
    times = sorted(taken for _, taken in done)
    return Predicted((len(done) - 1) / (done[-1][0] - done[0][0]), times[min(len(times) - 1, int(0.99 * len(times)))])


def best_plan(profile: Profile, plans: Mapping[str, Plan], robots: int, p99_s: float) -> str:
    """Return the name of the plan that serves the most chunks of those whose p99 holds; the first of equals.

    Where none holds, the one with the lowest p99.
    """
    found = {name: predict(profile, plan, robots) for name, plan in plans.items()}
    holding = [name for name, p in found.items() if p.p99_s <= p99_s]
    # A gain below the noise of measured costs is none, and one lane is the simpler thing.
    if holding:
        most = max(found[name].chunks_per_s for name in holding)
        return next(name for name in holding if found[name].chunks_per_s >= 0.98 * most)
    return min(found, key=lambda name: found[name].p99_s)
