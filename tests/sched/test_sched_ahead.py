"""Devices whose host launches batches ahead of the one that runs."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import pool, toy

from stretto.core.errors import PlanError
from stretto.core.plan import Plan
from stretto.sched.bounds import plan_bound
from stretto.sched.check import check_plan
from stretto.sched.outcome import Outcome
from stretto.sched.plans import by_block, by_stage, by_step, whole
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation


def run(profile: Profile, plan: Plan, ahead: int, streams: int = 1, chunks: int = 40) -> Outcome:
    runs = [StreamRun(f"s{i}", "m", chunks=chunks, start_s=0.001 * i) for i in range(streams)]
    return Simulation({"m": Load(plan, profile)}, runs, weather=Weather(ahead=ahead), trace=True).run(math.inf)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 6),
    steps=st.integers(1, 4),
    count=st.integers(1, 4),
    ahead=st.integers(0, 3),
    streams=st.integers(1, 3),
    cap=st.integers(1, 4),
    kind=st.sampled_from([by_block, by_stage, by_step]),
)
def test_no_chunk_is_sooner_than_its_work_and_no_interval_below_the_bound(
    blocks: int, steps: int, count: int, ahead: int, streams: int, cap: int, kind: object
) -> None:
    profile = toy(blocks, steps, fixed_s=0.004)
    try:
        plan = replace(kind(profile, pool(count), batch_cap=cap), in_flight=3)  # type: ignore[operator]
    except PlanError:
        return
    outcome = run(profile, plan, ahead, streams)
    for stream in outcome.streams:
        assert [chunk for chunk, _, _ in stream.done] == list(range(40))
        assert min(stream.responses_s()) >= profile.work_s - 1e-9
        span = stream.done[-1][2] - stream.done[0][2]
        assert span / 39 >= plan_bound(profile, plan).interval_s * (1 - 3 / 40) - 1e-9


@settings(max_examples=30, deadline=None)
@given(ahead=st.integers(0, 3), streams=st.integers(1, 4), cap=st.integers(1, 4))
def test_a_device_never_runs_two_batches_at_once(ahead: int, streams: int, cap: int) -> None:
    profile = toy(6, 2, fixed_s=0.003)
    outcome = run(profile, replace(by_block(profile, pool(2), batch_cap=cap, quantum=2), in_flight=2), ahead, streams)
    assert outcome.trace is not None
    for device in ("gpu:0", "gpu:1"):
        mine = sorted((x for x in outcome.trace if x.device == device), key=lambda x: x.begin_s)
        assert all(b.begin_s >= a.end_s - 1e-12 for a, b in itertools.pairwise(mine))


def test_what_is_launched_ahead_does_not_see_who_comes_later() -> None:
    """Two streams alternate on one device: chosen when it is free they share batches, chosen ahead they miss each other."""
    profile = toy(2, 4, fixed_s=0.1, per_row_s=0.001)
    plan = replace(whole(profile, pool(1)[0], quantum=1, batch_cap=2), in_flight=1, dispatch="oldest_chunk_first")
    late, free = run(profile, plan, 1, streams=2), run(profile, plan, 0, streams=2)
    assert max(len(launch.chunks) for launch in free.trace or ()) == 2
    assert late.streams[0].interval_s(1.0) >= free.streams[0].interval_s(1.0)


def test_on_a_gpu_a_chunk_waits_for_its_next_stage_from_the_launch_of_the_last_and_on_a_cpu_from_its_end() -> None:
    """In order of arrival, a chunk that came while another ran is next on a CPU, and behind that one's next stage on a GPU."""
    gpu = toy(4, 1, fixed_s=0.1)
    order = {}
    for profile in (gpu, replace(gpu, device="CPU")):
        plan = replace(whole(profile, pool(1)[0], quantum=1), in_flight=1, ahead=0, dispatch="first_come_first_served")
        runs = [StreamRun(name, "m", chunks=1, start_s=at) for name, at in (("first", 0.0), ("second", 0.05))]
        outcome = Simulation({"m": Load(plan, profile)}, runs, trace=True).run(math.inf)
        order[profile.device] = [launch.chunks[0][0] for launch in outcome.trace or ()]
    assert order[gpu.device][:3] == ["first", "first", "second"]
    assert order["CPU"][:3] == ["first", "second", "first"]


def test_what_the_host_takes_shows_where_a_device_waits_for_it_and_hides_behind_queued_launches() -> None:
    profile = replace(toy(4, 1, fixed_s=0.1), host_s=0.01, host_stage_s=0.002)
    for ahead, seen in ((0, 4), (1, 1)):  # of four pieces; the first has nothing to hide behind
        plan = replace(whole(profile, pool(1)[0], quantum=1), in_flight=1, ahead=ahead)
        outcome = Simulation({"m": Load(plan, profile)}, [StreamRun("s", "m", chunks=3)]).run(math.inf)
        assert outcome.streams[0].responses_s()[0] == pytest.approx(profile.work_s + seen * 0.012)


def test_a_simulation_launches_as_far_ahead_as_the_plan_says() -> None:
    profile = toy(2, 4, fixed_s=0.1, per_row_s=0.001)
    plan = replace(whole(profile, pool(1)[0], quantum=1, batch_cap=2), in_flight=2, dispatch="oldest_chunk_first")
    runs = [StreamRun(f"s{i}", "m", chunks=40, start_s=0.001 * i) for i in range(2)]
    said = [Simulation({"m": Load(replace(plan, ahead=n), profile)}, runs, trace=True).run(math.inf).trace for n in (1, 2)]
    assert said == [run(profile, plan, n, streams=2).trace for n in (1, 2)]
    assert said[0] != said[1]


def test_a_plan_with_negative_launches_ahead_is_refused() -> None:
    profile = toy()
    with pytest.raises(PlanError, match="ahead: got -1"):
        check_plan(profile, replace(whole(profile, pool(1)[0]), ahead=-1))


def test_a_batch_of_rows_that_have_no_graph_of_their_own_takes_what_its_rows_take_in_turn() -> None:
    """Eight streams at one visit: pairs of them have graphs (8 + 28), sets of three would be too many."""
    profile = toy(2, 1, fixed_s=0.1, per_row_s=0.001, max_batch=8)
    plan = replace(whole(profile, pool(1)[0], quantum=2, batch_cap=8), in_flight=1, ahead=0)
    runs = [StreamRun(f"s{i}", "m", chunks=1) for i in range(8)]

    def lasts(mode: str, count: int) -> float:
        outcome = Simulation({"m": Load(replace(plan, mode=mode), profile)}, runs[:count], trace=True).run(math.inf)  # type: ignore[arg-type]
        return max((x.end_s - x.begin_s for x in outcome.trace or () if len(x.chunks) > 1), default=0.0)

    def batch_s(rows: int) -> float:
        return 2 * (0.1 + 0.001 * rows)

    assert lasts("eager", 8) == pytest.approx(batch_s(7))
    assert lasts("graph", 8) == pytest.approx(7 * batch_s(1))
    assert lasts("graph", 4) == pytest.approx(batch_s(3))


def test_streams_that_are_not_there_at_the_same_time_share_graphs() -> None:
    profile = toy(2, 1, fixed_s=0.1, per_row_s=0.001, max_batch=4)
    plan = replace(whole(profile, pool(1)[0], quantum=2, batch_cap=4), in_flight=1, ahead=0, mode="graph")
    runs = [StreamRun(f"s{i}", "m", start_s=100.0 * (i // 4), stop_s=100.0 * (i // 4) + 50.0) for i in range(40)]
    outcome = Simulation({"m": Load(plan, profile)}, runs, trace=True).run(1000.0)
    assert min(x.end_s - x.begin_s for x in outcome.trace or () if len(x.chunks) == 3) == pytest.approx(2 * 0.103)


def test_chunks_of_one_batch_are_handed_over_one_after_the_other() -> None:
    profile = toy(2, 1, fixed_s=0.1)
    plan = replace(by_block(profile, pool(2), batch_cap=3), in_flight=1, ahead=0)
    runs = [StreamRun(f"s{i}", "m", chunks=1) for i in range(4)]
    ended = {}
    for more_s in (0.0, 0.02):
        outcome = Simulation({"m": Load(plan, replace(profile, host_row_s=more_s))}, runs, trace=True).run(math.inf)
        ended[more_s] = max(x.begin_s for x in outcome.trace or () if x.device == "gpu:1" and len(x.chunks) == 3)
    assert ended[0.02] - ended[0.0] == pytest.approx(2 * 0.02)


def test_the_simulator_bounds_batches_by_the_spare_time_of_a_hurried_stream_as_the_executor_does() -> None:
    profile = toy(2, 1, per_row_s=0.010, carry="none")
    plan = replace(whole(profile, pool(1)[0], quantum=1, batch_cap=4), in_flight=1, dispatch="deadline_limited")
    patient = [StreamRun(f"p{i}", "m", interval_s=0.2, response_s=0.19, start_s=0.1) for i in range(4)]
    hurried = StreamRun("hurried", "m", interval_s=0.2, response_s=0.07)

    def largest(runs: list[StreamRun]) -> int:
        outcome = Simulation({"m": Load(plan, profile)}, runs, weather=Weather(ahead=0), trace=True).run(2.0)
        assert not any(s.refused for s in outcome.streams)
        return max(len(launch.chunks) for launch in outcome.trace or ())

    # The hurried one has 50 ms to spare; a batch of two takes 20.
    assert (largest(patient), largest([*patient, hurried])) == (4, 1)
