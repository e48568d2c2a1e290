"""The simulator: intervals of known plans, circuits of waits, convoys, weather, credits and slots."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import pool, toy

from stretto.core.errors import PlanError
from stretto.core.plan import Plan
from stretto.sched.bounds import chunks_under_way, plan_bound, pool_bound
from stretto.sched.outcome import Outcome, quantile
from stretto.sched.plans import admission_slots, by_block, by_stage, by_step, circular, whole
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation


def saturate(profile: Profile, plan: Plan, streams: int = 1, chunks: int = 60, **options: object) -> Outcome:
    runs = [StreamRun(f"s{i}", "m", chunks=chunks) for i in range(streams)]
    return Simulation({"m": Load(plan, profile)}, runs, **options).run(math.inf)  # type: ignore[arg-type]


def interval(outcome: Outcome, warm: int = 20) -> float:
    done = outcome.streams[0].done
    return (done[-1][2] - done[warm][2]) / (len(done) - 1 - warm)


@pytest.mark.parametrize("make", [by_block, by_step, by_stage])
def test_a_balanced_pipeline_gives_the_work_over_the_devices(make: object) -> None:
    profile = toy(8, 4)  # 0.32 s of work
    plan = make(profile, pool(4))  # type: ignore[operator]
    assert interval(saturate(profile, replace(plan, in_flight=16), chunks=300)) == pytest.approx(0.08, rel=0.02)


def test_one_stage_a_device_gives_the_slowest_stage() -> None:
    profile = toy(5, 4)
    plan = by_stage(profile, pool(20))
    outcome = saturate(profile, plan, chunks=100)
    assert interval(outcome, 40) == pytest.approx(0.01, rel=1e-4)
    assert outcome.streams[0].responses_s()[0] == pytest.approx(0.2)


def test_a_clean_carry_makes_chunks_serial_however_many_devices() -> None:
    profile = toy(8, 4, carry="last_pass")
    plan = replace(by_block(profile, pool(4)), in_flight=16)
    bound = plan_bound(profile, plan)
    # The next chunk may begin when the first block's last pass is done: all but the tail of the last pass.
    assert bound.recurrence_s == pytest.approx(0.25)
    assert interval(saturate(profile, plan)) >= bound.interval_s - 1e-9
    with pytest.raises(PlanError, match="state never moves"):
        by_step(profile, pool(4))


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 7),
    steps=st.integers(1, 4),
    devices=st.integers(1, 5),
    fixed=st.sampled_from([0.0, 0.01, 0.1]),
    cap=st.integers(1, 4),
    flying=st.integers(1, 12),
    carry=st.sampled_from(["same_step", "last_pass", "none"]),
    dispatch=st.sampled_from(["earliest_virtual_deadline_first", "first_come_first_served", "sweep", "largest_batch_first"]),
)
def test_a_simulated_interval_is_never_below_the_bound_and_chunks_keep_their_order(
    blocks: int, steps: int, devices: int, fixed: float, cap: int, flying: int, carry: str, dispatch: str
) -> None:
    profile = toy(blocks, steps, fixed_s=fixed, carry=carry)
    g = min(devices, blocks)
    plan = by_block(profile, pool(g), batch_cap=cap, quantum=2).with_dispatch(dispatch)
    plan = replace(plan, in_flight=flying)
    outcome = saturate(profile, plan, chunks=150)
    done = outcome.streams[0].done
    bound = plan_bound(profile, plan)
    # Over n chunks with k in flight the credits allow n / k rounds, to within one round.
    assert done[-1][2] >= bound.interval_s * (150 - flying) - 1e-9
    assert bound.interval_s >= pool_bound(profile, g, in_flight=flying).interval_s - 1e-9
    if carry != "none":
        assert [c for c, _, _ in done] == list(range(150))


def test_greedy_batching_on_a_ring_forms_convoys_and_the_cap_cures_them() -> None:
    profile = toy(30, 4, fixed_s=0.00083, per_row_s=0.00061, max_batch=16)
    rates = {}
    for cap in (1, 4, 16):  # 16 chunks in flight over 4 devices
        plan = by_block(profile, pool(4), batch_cap=cap, quantum=5).with_dispatch("first_come_first_served")
        outcome = saturate(profile, replace(plan, in_flight=4), streams=4, chunks=60, weather=Weather(noise=0.03, ahead=0))
        rates[cap] = 4 / interval(outcome, 20)
    assert rates[4] > rates[1] * 1.5  # batches pay for themselves,
    assert rates[4] > rates[16] * 1.5  # but not if they leave the other devices nothing to do


def test_a_lone_stream_gains_from_batches_only_up_to_its_steps() -> None:
    profile = toy(4, 4, fixed_s=0.01, per_row_s=0.005, max_batch=8)
    plan = whole(profile, pool(1)[0], batch_cap=8)
    at = {n: interval(saturate(profile, replace(plan, in_flight=n), chunks=300)) for n in (1, 4, 8)}
    assert at[1] == pytest.approx(16 * 0.015, rel=1e-4)
    assert at[4] == pytest.approx(16 * 0.030 / 4, rel=0.1)
    assert at[8] == pytest.approx(16 * 0.030 / 4, rel=0.01)  # four steps, so four of its chunks meet at a block at most


@pytest.mark.parametrize(("steps", "devices"), [(4, 3), (4, 4), (4, 8), (2, 5), (3, 6)])
def test_circular_admission_leaves_no_slot_idle_and_no_chunk_waiting(steps: int, devices: int) -> None:
    slots = admission_slots(steps, devices)
    *entries, period = slots
    assert period == steps * devices
    taken = {(s + k) % period * devices + k % devices for s in entries for k in range(steps * devices)}
    assert len(taken) == len(entries) * steps * devices  # no two chunks on a device in one slot
    profile = toy(devices * 2, steps)
    outcome = saturate(profile, circular(profile, pool(devices)), chunks=80)
    assert interval(outcome, 16) == pytest.approx(steps * 0.02, rel=0.1)
    assert max(outcome.streams[0].responses_s()) == pytest.approx(profile.work_s, rel=0.02)


def test_admission_slots_have_room_for_what_the_host_takes() -> None:
    profile = replace(toy(8, 4), host_s=0.003, host_stage_s=0.001)
    plan = circular(profile, pool(2))
    stays = len(plan.classes["default"])
    outcome = saturate(profile, plan, chunks=60)
    alone_s = profile.work_s + stays * 0.003 + 32 * 0.001
    assert interval(outcome, 20) == pytest.approx(alone_s / 2, rel=0.02)
    assert max(outcome.streams[0].responses_s()) == pytest.approx(alone_s, rel=0.02)


def test_slots_hold_back_chunks_that_have_none() -> None:
    profile = toy(2, 1)
    plan = replace(whole(profile, pool(1)[0], batch_cap=4), in_flight=8)
    deep = saturate(profile, plan, slots=8, chunks=40)
    shallow = saturate(profile, plan, slots=1, chunks=40, trace=True)
    assert max(len(t.chunks) for t in shallow.trace or ()) == 1
    assert shallow.tasks == deep.tasks == 80


def test_links_delay_chunks_but_do_not_slow_the_pipeline() -> None:
    from stretto.sched.hardware import Link

    links = {"peer": Link(0.005, 1e18), "node": Link(0.05, 1e18)}
    profile = toy(4, 1, links=links)
    near = saturate(profile, replace(by_block(profile, pool(4)), in_flight=16))
    far = saturate(profile, replace(by_block(profile, pool(4, per_node=1)), in_flight=32))
    assert near.streams[0].responses_s()[0] == pytest.approx(0.04 + 3 * 0.005)
    assert far.streams[0].responses_s()[0] == pytest.approx(0.04 + 3 * 0.05)
    assert interval(near) == pytest.approx(interval(far), rel=0.01) == pytest.approx(0.01, rel=0.01)


def test_a_device_that_dies_takes_its_streams_and_no_others() -> None:
    profile = toy(4, 2)
    first, second = whole(profile, pool(2)[0]), whole(profile, pool(2)[1])
    plan = Plan("two", pool(2), {"a": first.classes["default"], "b": second.classes["default"]})
    runs = [StreamRun(name, "m", name, 0.1) for name in ("a", "b")]
    outcome = Simulation({"m": Load(plan, profile)}, runs, weather=Weather(fails={"gpu:0": 1.0})).run(3.0)
    dead, alive = outcome.stream("a"), outcome.stream("b")
    assert dead.ended == "worker_died"
    assert dead.done[-1][2] <= 1.0
    assert len(alive.done) in (29, 30)
    assert not alive.broken(0.5, 3.0)


def test_a_cancel_frees_the_device_for_the_others_without_a_pause() -> None:
    profile = toy(4, 2)
    plan = replace(whole(profile, pool(1)[0]), in_flight=2)
    runs = [StreamRun("stays", "m"), StreamRun("leaves", "m", stop_s=2.0)]
    outcome = Simulation({"m": Load(plan, profile)}, runs).run(4.0)
    gaps = [
        b - a
        for a, b in zip(outcome.stream("stays").done, outcome.stream("stays").done[1:], strict=False)
        for a, b in [(a[2], b[2])]
    ]
    assert max(gaps) <= 0.16 + 1e-9 + 0.08
    assert quantile(gaps[-10:], 0.5) == pytest.approx(0.08)
    assert outcome.stream("leaves").done[-1][2] <= 2.0 + 0.08


def test_a_straggler_sets_the_pace_and_noise_is_repeatable() -> None:
    profile = toy(4, 1)
    plan = replace(by_block(profile, pool(4)), in_flight=8)
    slow = saturate(profile, plan, weather=Weather(slow={"gpu:2": 2.0}))
    assert interval(slow) == pytest.approx(0.02, rel=0.01)
    noisy = [saturate(profile, plan, weather=Weather(seed=7, noise=0.05)).streams for _ in range(2)]
    other = saturate(profile, plan, weather=Weather(seed=8, noise=0.05)).streams
    assert noisy[0] == noisy[1] != other


def test_a_stream_that_asks_too_much_breaks_its_promise_and_is_named() -> None:
    profile = toy(8, 2)  # 0.16 s
    plan = replace(whole(profile, pool(1)[0]), in_flight=4)
    runs = [StreamRun("fine", "m", interval_s=0.4, response_s=0.5)]
    load = {"m": Load(plan, profile)}
    assert not Simulation(load, runs).run(20.0).broken(5.0)
    runs += [StreamRun(f"more{i}", "m", interval_s=0.2, response_s=0.5) for i in range(2)]
    assert "interval" in Simulation(load, runs).run(20.0).broken(5.0).values()


def test_chunks_handed_over_one_by_one_meet_in_smaller_batches_on_an_idle_device() -> None:
    profile = toy(4, 1, fixed_s=0.02, per_row_s=0.002, max_batch=4)
    plan = replace(by_block(profile, pool(2), batch_cap=4), in_flight=4)
    sizes = {}
    for together in (True, False):
        runs = [StreamRun(f"s{i}", "m", chunks=20, interval_s=0.2) for i in range(3)]
        outcome = Simulation({"m": Load(plan, profile)}, runs, trace=True, together=together).run(math.inf)
        second = [len(t.chunks) for t in outcome.trace or () if t.device == "gpu:1"]
        sizes[together] = sum(second) / len(second)
    assert sizes[True] > sizes[False]


def test_enough_chunks_are_under_way_for_what_hosts_take_at_every_hand_over() -> None:
    profile = replace(toy(12, 2), host_s=0.008)
    plan = by_stage(profile, pool(12))
    for flying, slowest in ((chunks_under_way(profile, plan), 0.02), (len(plan.devices), 0.028)):
        outcome = saturate(profile, replace(plan, in_flight=flying), chunks=200)
        assert interval(outcome, 60) == pytest.approx(slowest, rel=0.02)
