"""Checks of a plan against a profile: route, precedence, memory. For plans that were edited by hand."""

from __future__ import annotations

import math

from stretto.core.errors import PlanError
from stretto.core.plan import Plan
from stretto.core.route import Route, StageSpec
from stretto.sched.dispatch import policy
from stretto.sched.outcome import quantile
from stretto.sched.plans import check_memory, waits
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun
from stretto.sched.simulator import Simulation


def route_of(profile: Profile) -> Route:
    """Return a route with the profile's visits; its stages declare nothing."""
    specs = {s: StageSpec(s, (), ()) for s in profile.order}
    return Route(specs, profile.visits, (), ())


def check_plan(profile: Profile, plan: Plan) -> dict[str, int]:
    """Check everything that can be known before a plan runs, with one stream of each class. Returns bytes by device.

    Raises:
        PlanError: naming the class, placement or device that does not fit.
        ConfigError: if the dispatch policy is unknown.
    """
    plan.validate(route_of(profile))
    policy(plan.dispatch)
    if not plan.classes:
        raise PlanError("classes", got="none", expected="one class of streams or more")
    for placements in plan.classes.values():
        waits(profile, placements)
    return check_memory(profile, plan, dict.fromkeys(plan.classes, 1))


def saturated(profile: Profile, plan: Plan, chunks: int = 40) -> dict[str, tuple[float, float]]:
    """Simulate one stream of each class, together and flat out; output interval and response p99 by class, seconds."""
    runs = [StreamRun(name, "m", name, chunks=chunks) for name in plan.classes]
    outcome = Simulation({"m": Load(plan, profile)}, runs).run(math.inf)
    found = {}
    for stream in outcome.streams:
        warm = stream.done[len(stream.done) // 3][2]
        found[stream.name] = (stream.interval_s(warm), quantile(stream.responses_s(warm), 0.99))
    return found
