"""Lanes in the simulator: side by side as fast as measured slowdowns allow, and never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import ConfigError
from stretto.core.plan import Plan, overlapped, per_visit, whole
from stretto.core.route import Route, StageSpec
from stretto.sched.costs import BatchCost
from stretto.sched.overlap import best_plan, predict
from stretto.sched.profile import Profile, Provenance, StageProfile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

STEPS = 10


def robot(prefix_s: float, step_s: float, beside: dict[str, dict[str, float]]) -> Profile:
    """A policy: one prefix, then ten steps; a second row of a batch of steps costs nothing."""
    return Profile(
        "robot",
        "toy device",
        ((("prefix",), (0,)), (("denoise",), tuple(range(STEPS)))),
        {
            "prefix": StageProfile(BatchCost.line(0.0, prefix_s)),
            "denoise": StageProfile(BatchCost(((1, step_s), (2, step_s)))),
        },
        Provenance("computed"),
        carry="none",
        beside=beside,
    )


def route(profile: Profile) -> Route:
    specs = {name: StageSpec(name, ("x",), ("x",)) for name in ("prefix", "denoise")}
    return Route(specs, profile.visits, ("x",), ("x",))


def both(times: float) -> dict[str, dict[str, float]]:
    return {"prefix": {"denoise": times}, "denoise": {"prefix": times}}


def test_lanes_that_do_not_slow_each_other_give_a_chunk_every_time_the_longer_one_is_through() -> None:
    profile = robot(0.008, 0.0005, both(1.0))
    plan = overlapped(route(profile), "gpu:0")
    found = predict(profile, plan, robots=2)
    assert found.chunks_per_s == pytest.approx(1 / 0.008, rel=0.01)
    assert found.p99_s == pytest.approx(2 * 0.008, rel=0.01)


def test_lanes_that_share_the_device_evenly_gain_nothing_over_one() -> None:
    profile = robot(0.005, 0.0005, {})
    one, two = (predict(profile, p, 2) for p in (whole(route(profile), "gpu:0"), overlapped(route(profile), "gpu:0")))
    assert two.chunks_per_s == pytest.approx(one.chunks_per_s, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(prefix_ms=st.floats(1, 20), step_ms=st.floats(0.1, 2), times=st.floats(1, 3), robots=st.integers(1, 4))
def test_two_lanes_are_never_faster_than_their_slowdown_allows(
    prefix_ms: float, step_ms: float, times: float, robots: int
) -> None:
    profile = robot(prefix_ms / 1e3, step_ms / 1e3, both(times))
    found = predict(profile, overlapped(route(profile), "gpu:0"), robots, chunks=60)
    prefix_s, loop_s = prefix_ms / 1e3, STEPS * step_ms / 1e3
    alone = 1 / (prefix_s + loop_s)
    # Both lanes busy get through 2 / times seconds of work a second, one busy lane through one.
    assert found.chunks_per_s <= min(max(1.0, 2 / times) * alone, 1 / max(prefix_s, loop_s)) * 1.02
    assert found.p99_s >= (prefix_s + loop_s) * 0.999
    if robots == 1:
        assert found.chunks_per_s == pytest.approx(alone, rel=0.01)


def test_a_task_goes_on_at_full_speed_once_its_neighbour_is_done() -> None:
    profile = robot(0.010, 0.0002, both(2.0))
    plan = overlapped(route(profile), "gpu:0")
    runs = [StreamRun(str(i), "robot", chunks=1) for i in range(2)]
    outcome = Simulation({"robot": Load(plan, profile)}, runs).run(1.0)
    ends = sorted(end for s in outcome.streams for _, _, end in s.done)
    # The first loop runs beside the second prefix: 2 ms of it in 4; the prefix then has 8 ms left.
    assert ends == pytest.approx([0.014, 0.014 + 0.008 + 0.002])
    assert outcome.busy_s["gpu:0"] == pytest.approx(0.024)


def test_slots_of_a_device_are_shared_by_its_lanes() -> None:
    profile = robot(0.008, 0.0005, both(1.0))
    plan = overlapped(route(profile), "gpu:0")
    runs = [StreamRun(str(i), "robot", chunks=4) for i in range(3)]
    free, tight = (Simulation({"robot": Load(plan, profile)}, runs, slots=n).run(1.0) for n in (0, 1))
    last = [max(end for s in o.streams for _, _, end in s.done) for o in (free, tight)]
    assert last[1] == pytest.approx(12 * 0.013)
    assert last[0] == pytest.approx(12 * 0.008 + 0.005)


def test_a_device_that_dies_takes_all_its_lanes_with_it() -> None:
    profile = robot(0.008, 0.0005, {})
    plan = overlapped(route(profile), "gpu:0")
    outcome = Simulation(
        {"robot": Load(plan, profile)}, [StreamRun("a", "robot", chunks=9)], weather=Weather(fails={"gpu:0": 0.03})
    ).run(1.0)
    assert outcome.streams[0].ended == "worker_died"
    assert len(outcome.streams[0].done) < 9


@pytest.mark.parametrize(
    ("beside", "expected"), [(1.05, "two lanes"), (2.0, "one lane"), (3.0, "one lane")], ids=["cheap", "even", "dear"]
)
def test_lanes_are_chosen_only_where_they_measured_better(beside: float, expected: str) -> None:
    profile = robot(0.008, 0.0005, both(beside))
    plans: dict[str, Plan] = {"one lane": whole(route(profile), "gpu:0"), "two lanes": overlapped(route(profile), "gpu:0")}
    assert best_plan(profile, plans, robots=2, p99_s=0.030) == expected


def test_where_no_plan_holds_the_one_with_the_lowest_p99_is_taken() -> None:
    profile = robot(0.008, 0.0005, both(2.5))
    plans = {"two lanes": overlapped(route(profile), "gpu:0"), "one lane": per_visit(route(profile), "gpu:0", batch_cap=2)}
    assert best_plan(profile, plans, robots=2, p99_s=0.001) == "one lane"


def test_a_profile_keeps_slowdowns_and_refuses_one_below_one() -> None:
    profile = robot(0.008, 0.0005, both(1.25))
    assert Profile.from_json(profile.to_json()).beside == both(1.25)
    with pytest.raises(ConfigError, match="1 or more"):
        replace(profile, beside={"prefix": {"denoise": 0.5}})
