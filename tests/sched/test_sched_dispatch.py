"""Dispatch policies on snapshots, and robots served by them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import toy

from stretto.sched.dispatch import POLICIES, Limits, Waiting, deadline_limited, earliest_virtual_deadline_first, ring_cap
from stretto.sched.patience import SHARE, Patience
from stretto.sched.robots import Fleet, Robot, Server

COSTS = {0: (0.030, 0.036, 0.042, 0.048)}


def waiting(key: int, deadline_s: float, **changes: object) -> Waiting:
    values: dict[str, object] = {"stream": key, "started": False, **changes}
    return Waiting(key, 0, 0.0, 0.0, deadline_s, **values)  # type: ignore[arg-type]


TASKS = st.lists(
    st.builds(
        Waiting,
        key=st.integers(0, 10**6),
        kind=st.integers(0, 3),
        ready_s=st.floats(0, 10),
        submitted_s=st.floats(0, 10),
        deadline_s=st.sampled_from([0.5, 2.0, 11.0, 20.0, math.inf]),
        stream=st.integers(0, 4),
        chunk=st.integers(0, 5),
        progress=st.floats(0.1, 1.0),
        started=st.booleans(),
        served_s=st.floats(0, 5),
    ),
    max_size=12,
    unique_by=lambda t: t.key,
)


@given(tasks=TASKS, cap=st.integers(1, 5), name=st.sampled_from(sorted(POLICIES)))
def test_every_policy_is_work_conserving_and_runs_one_kind_within_the_cap(tasks: list[Waiting], cap: int, name: str) -> None:
    limits = Limits(cap, kind_caps={1: 2}, costs={0: (0.1,), 1: (0.2, 0.3)})
    decision = POLICIES[name](1.0, tasks, limits)
    by_key = {t.key: t for t in tasks}
    kinds = {by_key[k].kind for k in decision.run}
    refused = {r.key for r in decision.refuse}
    assert len(kinds) <= 1
    assert len(decision.run) == len(set(decision.run)) <= cap
    assert kinds != {1} or len(decision.run) <= 2
    assert not refused & set(decision.run)
    assert bool(decision.run) == bool(set(by_key) - refused)
    assert decision == POLICIES[name](1.0, tasks, limits)


def test_a_task_behind_its_share_goes_before_one_with_an_earlier_deadline() -> None:
    ahead = Waiting(0, 0, 0.0, 0.0, 10.0, progress=0.9)
    behind = Waiting(1, 1, 0.0, 0.0, 12.0, progress=0.1)
    assert earliest_virtual_deadline_first(1.0, [ahead, behind], Limits(4)).run == (1,)


def test_a_batch_grows_only_as_far_as_its_earliest_deadline_allows() -> None:
    tasks = [waiting(0, 0.040), waiting(1, 0.060), waiting(2, 0.080)]
    decision = deadline_limited(0.0, tasks, Limits(4, costs=COSTS, margin=0.0))
    assert decision.run == (0, 1)
    assert not decision.refuse


def test_a_request_that_cannot_be_on_time_is_refused_with_the_reason() -> None:
    decision = deadline_limited(0.0, [waiting(0, 0.020), waiting(1, 0.100)], Limits(4, costs=COSTS, margin=0.0))
    assert decision.run == (1,)
    assert decision.refuse[0].key == 0
    assert decision.refuse[0].reason == "deadline"
    assert decision.refuse[0].text == "needs 30.0 ms more, and its deadline is in 20.0 ms"


def test_late_work_is_still_run_within_the_lateness_allowed() -> None:
    limits = Limits(4, costs=COSTS, margin=0.0, allowed_late_s=0.015)
    assert deadline_limited(0.0, [waiting(0, 0.020)], limits).run == (0,)


def test_a_newer_observation_takes_the_place_of_one_that_has_not_started() -> None:
    old, new = waiting(0, 1.0, stream=7, chunk=1), waiting(1, 1.0, stream=7, chunk=2)
    decision = deadline_limited(0.0, [old, new], Limits(4, costs=COSTS))
    assert decision.run == (1,)
    assert [(r.key, r.reason) for r in decision.refuse] == [(0, "superseded")]
    running = old._replace(started=True)
    assert deadline_limited(0.0, [running, new], Limits(4, costs=COSTS)).refuse == ()


def test_under_overload_those_served_least_come_first() -> None:
    tasks = [waiting(i, 0.05, served_s=float(9 - i)) for i in range(9)]
    decision = deadline_limited(0.0, tasks, Limits(2, costs=COSTS, margin=0.0))
    assert set(decision.run) == {7, 8}
    calm = deadline_limited(0.0, tasks[:2], Limits(2, costs=COSTS, margin=0.0))
    assert calm.run == (0, 1)


ROUTE = (0, 1, *[2] * 10)
STAGES = {0: (0.002, 0.004, 0.006, 0.008), 1: (0.006, 0.012, 0.018, 0.024), 2: (0.001,) * 4}
LIMITS = Limits(4, costs=STAGES, margin=0.0)


def robot(key: int, at: int, deadline_s: float, **changes: object) -> Waiting:
    """A robot's chunk that has passed `at` of the twelve places of its route; alone it needs 18 ms."""
    values: dict[str, object] = {"stream": key, "started": at > 0, "ahead": ROUTE[at + 1 :], **changes}
    return Waiting(key, ROUTE[at], 0.0, 0.0, deadline_s, **values)  # type: ignore[arg-type]


def test_a_newcomer_does_not_start_where_it_would_make_a_started_robot_late() -> None:
    nearly_done, newcomer = robot(0, 7, 0.007), robot(1, 0, 0.050)
    decision = deadline_limited(0.0, [nearly_done, newcomer], LIMITS)
    assert (decision.run, decision.refuse) == ((0,), ())
    relaxed = nearly_done._replace(deadline_s=0.020)
    assert deadline_limited(0.0, [relaxed, newcomer], LIMITS).run == (1,)


def test_who_must_wait_too_long_for_its_turn_is_refused_before_it_starts() -> None:
    nearly_done, newcomer = robot(0, 7, 0.007), robot(1, 0, 0.020)
    decision = deadline_limited(0.0, [nearly_done, newcomer], LIMITS)
    assert decision.run == (0,)
    assert [(r.key, r.reason) for r in decision.refuse] == [(1, "deadline")]
    assert "23.0 ms more, 5.0 ms of them until its turn" in decision.refuse[0].text


def test_as_many_start_as_end_on_time_by_all_the_stages_that_are_left() -> None:
    # Three take 6 + 18 + 10 ms together; the first stage alone would let all four in.
    tasks = [robot(i, 0, 0.035, served_s=0.1 * (4 - i)) for i in range(4)]
    decision = deadline_limited(0.0, tasks, LIMITS)
    assert set(decision.run) == {1, 2, 3}
    assert [r.key for r in decision.refuse] == [0]


def test_a_robot_in_a_hurry_goes_ahead_of_started_ones_that_can_wait() -> None:
    patient = [robot(i, 1, 0.5) for i in range(3)]
    hurried = robot(3, 0, 0.025)
    # With all of them, its prefix would end after 2 + 24 ms and its chunk after 36.
    decision = deadline_limited(0.0, [*patient, hurried], LIMITS)
    assert (decision.run, decision.refuse) == ((3,), ())
    later = hurried._replace(kind=1, ahead=ROUTE[2:], started=True)
    assert deadline_limited(0.002, [*patient, later], LIMITS).run == (3,)


def test_of_started_robots_those_who_cannot_wait_stay_in_front_of_a_hurried_one() -> None:
    patient = [robot(i, 1, 0.5) for i in range(3)]
    # With the patient ones the first would just be on time, and not behind the second; these two alone are.
    tight, hurried = robot(3, 1, 0.036), robot(4, 0, 0.026)
    decision = deadline_limited(0.0, [*patient, tight, hurried], LIMITS)
    assert (decision.run, decision.refuse) == ((4,), ())
    both = [tight, hurried._replace(kind=1, ahead=ROUTE[2:], started=True)]
    assert set(deadline_limited(0.002, [*patient, *both], LIMITS).run) == {3, 4}


def test_two_in_a_hurry_go_ahead_together_where_the_second_would_make_the_first_late_among_all() -> None:
    patient, first, second = [robot(i, 1, 0.5) for i in range(2)], robot(2, 1, 0.030), robot(3, 0, 0.040)
    # All end after 2 + 24 + 10 ms, in time for the second; the two alone after 2 + 12 + 10, in time for both.
    decision = deadline_limited(0.0, [*patient, first, second], LIMITS)
    assert (decision.run, decision.refuse) == ((3,), ())


def test_newcomers_of_whom_one_would_be_lost_among_all_go_ahead_together() -> None:
    patient, hurried = [robot(i, 1, 0.5) for i in range(2)], [robot(i, 0, 0.039) for i in (2, 3)]
    # Of the 37 ms that the answer leaves, both take 4 + 24 + 10 with the patient ones, one takes 2 + 18 + 10, both alone 26.
    limits = Limits(4, costs=STAGES, margin=0.0, answer_s=0.002)
    decision = deadline_limited(0.0, [*patient, *hurried], limits)
    assert (set(decision.run), decision.refuse) == ({2, 3}, ())
    # Where all have the same time nobody goes ahead.
    alike = [t._replace(deadline_s=0.039) for t in patient]
    assert not {2, 3} <= set(deadline_limited(0.0, [*alike, *hurried], limits).run)


def test_started_robots_come_along_with_a_hurried_one_where_that_costs_it_nothing() -> None:
    patient, hurried = robot(0, 1, 0.5), robot(1, 3, 0.0095)
    sharing = patient._replace(kind=2, ahead=ROUTE[3:])
    assert deadline_limited(0.0, [patient, sharing._replace(key=2, stream=2), hurried], LIMITS).run == (1, 2)


def test_a_large_batch_of_patient_newcomers_does_not_crowd_out_one_in_a_hurry() -> None:
    # All four would take 8 + 24 + 10 ms, the first stage of the three patient ones 6; the other needs 18 of its 23 alone.
    tasks = [robot(i, 0, 0.3) for i in range(3)] + [robot(3, 0, 0.023)]
    decision = deadline_limited(0.0, tasks, LIMITS)
    assert (decision.run, decision.refuse) == ((3,), ())


def test_a_deadline_leaves_time_for_the_answer() -> None:
    assert deadline_limited(0.0, [waiting(0, 0.0305)], Limits(4, costs=COSTS, margin=0.0)).run == (0,)
    told = deadline_limited(0.0, [waiting(0, 0.0305)], Limits(4, costs=COSTS, margin=0.0, answer_s=0.001)).refuse
    assert [r.reason for r in told] == ["deadline"]


def test_nobody_goes_ahead_of_started_robots_that_cannot_wait() -> None:
    started, hurried = [robot(i, 1, 0.029) for i in range(2)], robot(2, 0, 0.025)
    decision = deadline_limited(0.0, [*started, hurried], LIMITS)
    assert 2 not in decision.run
    assert [r.key for r in decision.refuse] == [2]


def test_a_batch_is_no_longer_than_who_may_come_next_can_wait_for() -> None:
    tasks = [robot(i, 0, 1.0) for i in range(4)]
    assert len(deadline_limited(0.0, tasks, LIMITS).run) == 4
    hasty = Limits(4, costs=STAGES, margin=0.0, patience_s=0.005)
    assert deadline_limited(0.0, tasks, hasty).run == (0, 1)
    never = Limits(4, costs=STAGES, margin=0.0, patience_s=0.001)
    assert deadline_limited(0.0, tasks, never).run == (0,)


def test_batches_that_save_much_time_are_not_split_for_who_may_come_next() -> None:
    tasks = [robot(i, 0, 1.0) for i in range(4)]
    saving = Limits(4, costs={**STAGES, 0: (0.005, 0.0055, 0.006, 0.0065)}, margin=0.0, patience_s=0.001)
    assert len(deadline_limited(0.0, tasks, saving).run) == 4


def test_patience_is_a_share_of_what_the_tightest_of_late_had_to_spare() -> None:
    patience = Patience()
    assert patience.note(1, math.inf, 0.0) == math.inf
    assert patience.note(2, 0.040, 0.0) == SHARE * 0.040
    assert patience.note(3, 0.100, 1.0) == SHARE * 0.040
    assert patience.note(2, 0.060, 2.0) == SHARE * 0.060
    # Who cannot be on time at all hurries nobody, and who has not asked for a while is forgotten.
    assert patience.note(4, -0.010, 3.0) == SHARE * 0.060
    assert patience.note(3, 0.100, 8.0) == SHARE * 0.100
    patience.forget(3)
    assert patience.note(4, math.inf, 8.0) == math.inf


def test_a_newcomer_catches_up_so_that_denoise_steps_are_shared() -> None:
    ahead, behind = robot(0, 4, 0.1), robot(1, 1, 0.1)
    assert deadline_limited(0.0, [ahead, behind], LIMITS).run == (1,)
    level = [robot(0, 4, 0.1), robot(1, 2, 0.1)]
    assert set(deadline_limited(0.0, level, LIMITS).run) == {0, 1}


def test_a_started_robot_in_danger_goes_first_and_one_without_hope_is_given_up() -> None:
    waits = robot(1, 1, 0.1)
    assert deadline_limited(0.0, [robot(0, 9, 0.004), waits], LIMITS).run == (0,)
    decision = deadline_limited(0.0, [robot(0, 9, 0.002), waits], LIMITS)
    assert decision.run == (1,)
    assert [r.key for r in decision.refuse] == [0]


def test_two_small_batches_are_taken_where_padding_makes_one_dearer() -> None:
    costs = {0: (0.010, 0.016, 0.030, 0.030)}
    tasks = [waiting(i, 1.0) for i in range(3)]
    assert deadline_limited(0.0, tasks, Limits(4, costs=costs)).run == (0, 1)
    assert deadline_limited(0.0, [*tasks, waiting(3, 1.0)], Limits(4, costs=costs)).run == (0, 1, 2, 3)


def test_work_without_a_deadline_takes_what_room_is_left() -> None:
    urgent, idle = robot(0, 7, 0.0055), robot(1, 7, math.inf)
    assert deadline_limited(0.0, [urgent, idle], LIMITS).run == (0, 1)
    dear = Limits(4, costs={**STAGES, 2: (0.001, 0.002)}, margin=0.0)
    assert deadline_limited(0.0, [urgent, idle], dear).run == (0,)


@given(tasks=TASKS, cap=st.integers(1, 5))
def test_without_deadlines_the_oldest_chunk_is_served_in_full_batches(tasks: list[Waiting], cap: int) -> None:
    free = [t._replace(deadline_s=math.inf, started=True) for t in tasks]
    limits = Limits(cap, costs={0: (0.1,), 1: (0.2, 0.3)})
    assert deadline_limited(1.0, free, limits).run == earliest_virtual_deadline_first(1.0, free, limits).run


@pytest.mark.parametrize(("flying", "ring", "cap"), [(16, 4, 4), (3, 4, 1), (40, 4, 8), (2.5, 1, 8)])
def test_the_cap_of_a_ring_leaves_every_device_something_to_run(flying: float, ring: int, cap: int) -> None:
    assert ring_cap(flying, ring, 8) == cap


def policy_profile() -> object:
    return toy(1, 10, fixed_s=0.0022, per_row_s=0.0006, carry="none", max_batch=16)


def test_batches_limited_by_deadlines_serve_more_robots_than_one_at_a_time() -> None:
    profile = policy_profile()
    robot = Robot("r", 0.5, 0.12)
    one = Server(profile, 1, max_batch=1, seconds=3.0).most(robot, 64)  # type: ignore[arg-type]
    batched = Server(profile, 1, max_batch=16, seconds=3.0).most(robot, 64)  # type: ignore[arg-type]
    assert one <= 15
    assert batched > 2 * one


def test_a_robot_is_refused_when_world_work_may_block_it_too_long() -> None:
    server = Server(policy_profile(), blocking_s=0.28)  # type: ignore[arg-type]
    verdict = server.judge([Robot("r", 0.5, 0.12)])
    assert (verdict.admitted, verdict.reason) == (False, "blocking")
    assert "280.0 ms" in verdict.text


def test_a_fleet_admits_until_full_and_again_after_a_robot_leaves() -> None:
    fleet = Fleet(Server(policy_profile(), seconds=2.0))  # type: ignore[arg-type]
    verdicts = [fleet.arrive(Robot(f"r{i}", 0.25, 0.1)) for i in range(40)]
    admitted = sum(v.admitted for v in verdicts)
    assert 0 < admitted < 40
    assert verdicts[-1].reason in ("utilisation", "late")
    assert fleet.server.judge(list(fleet.robots.values())).missed <= 0.001
    fleet.leave("r0")
    assert fleet.arrive(Robot("again", 0.25, 0.1)).admitted
    delay = fleet.inference_delay({"again": 50.0})
    assert 2 <= delay["again"] <= 5
