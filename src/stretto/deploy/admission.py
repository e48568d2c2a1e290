"""Whether one more robot can be on time, by the measured costs of the policy at hand and a simulation of everybody."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from stretto.core.errors import CapacityError, ConfigError
from stretto.core.plan import Plan
from stretto.core.route import Route
from stretto.sched.costs import BatchCost
from stretto.sched.profile import Profile, Provenance, StageProfile
from stretto.sched.robots import Fleet, Robot, Server

ALLOWED_MISSED = 0.01


def profile_of(
    model: str, route: Route, plan: Plan, costs: Mapping[tuple[str, ...], Sequence[float]], beside_s: float = 0.0
) -> Profile:
    """Return what the engine measured, as a profile with one stage for each piece that runs without a break.

    `beside_s`: device time that other work takes for each request, which is counted to its first piece.
    """
    (placements,) = plan.classes.values()
    pieces = [route.signature(p.segment) for p in placements]
    names = {signature: "+".join(dict.fromkeys(signature)) for signature in pieces}
    more = {signature: beside_s / pieces.count(signature) if signature == pieces[0] else 0.0 for signature in pieces}
    stages = {
        names[signature]: StageProfile(BatchCost(tuple((n, s + n * more[signature]) for n, s in enumerate(seconds, 1))))
        for signature, seconds in costs.items()
        if signature in names
    }
    passes = tuple(((names[signature],), (i,)) for i, signature in enumerate(pieces))
    device = plan.devices[0].name
    return Profile(model, device, passes, stages, Provenance("measured"), carry="none", max_batch=plan.batch_cap(device))


class Gate:
    """Admits robots of one rhythm while everybody is predicted to be on time at the 99th percentile.

    Raises:
        ConfigError: on construction, if only one of the two times is given, or one is not above zero.
    """

    def __init__(self, period_ms: float | None, deadline_ms: float | None) -> None:
        if (period_ms is None) != (deadline_ms is None):
            raise ConfigError("robot_period_ms", got=period_ms, expected="both or none of robot_period_ms, robot_deadline_ms")
        self._rhythm = None
        if period_ms is not None and deadline_ms is not None:
            self._rhythm = Robot("robot", period_ms / 1e3, deadline_ms / 1e3)
        self._fleet: Fleet | None = None

    def open(self, profile: Profile) -> None:
        """Begin to admit, now that costs are known."""
        if self._rhythm is not None:
            self._fleet = Fleet(Server(profile, max_batch=profile.max_batch, whole=False, allowed_missed=ALLOWED_MISSED))

    def enter(self, key: Hashable) -> None:
        """Let a robot in.

        Raises:
            CapacityError: if it, or one of those already here, would not be on time; with the prediction.
        """
        if self._fleet is None or self._rhythm is None:
            return
        name = str(key)
        verdict = self._fleet.arrive(Robot(name, self._rhythm.period_s, self._rhythm.deadline_s))
        if not verdict.admitted:
            raise CapacityError(verdict.reason, f"robot {len(self._fleet.robots) + 1} would not be on time: {verdict.text}")

    def leave(self, key: Hashable) -> None:
        if self._fleet is not None:
            self._fleet.leave(str(key))
