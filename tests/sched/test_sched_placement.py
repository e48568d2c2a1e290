"""Placement: what is admitted fits, what equal partition takes is taken, and the same input gives the same plan."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import instances, pool, toy

from stretto.core.errors import CapacityError, ConfigError, PlanError
from stretto.core.plan import Device, Placement, Plan
from stretto.sched.admission import Admission, Refused, Variant
from stretto.sched.bounds import plan_bound, streams_bound
from stretto.sched.check import check_plan, route_of
from stretto.sched.cluster import EXCLUSIVE_CAP, SHARED_CAP, Placed, StreamSpec
from stretto.sched.columns import Columns, Rank
from stretto.sched.exact import TooLargeError, optimum, solve
from stretto.sched.pack import pack, place_all
from stretto.sched.placement import STRATEGIES, Planner
from stretto.sched.plans import by_block, check_memory, waits
from stretto.sched.profile import Profile
from stretto.sched.verify import Trial, simulate, to_plans

Instance = tuple[tuple[Device, ...], dict[str, Profile], float, int]


def specs_of(profiles: dict[str, Profile], interval_s: float, count: int, response_s: float = math.inf) -> list[StreamSpec]:
    models = itertools.cycle(profiles)
    return [StreamSpec(f"s{i}", next(models), interval_s, response_s) for i in range(count)]


def loads(placed: dict[str, Placed], profiles: dict[str, Profile]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for p in placed.values():
        columns = Columns.of(profiles[p.spec.model])
        for r in p.ranks:
            found.setdefault(r.device, []).append(columns.work_s_of(r.start, r.stop) / p.spec.interval_s)
    return found


@settings(max_examples=60, deadline=None)
@given(instance=instances(), method=st.sampled_from(["equal", "bestfit", "lds", "portfolio"]))
def test_every_admitted_plan_respects_time_memory_and_precedence(instance: Instance, method: str) -> None:
    devices, profiles, interval, count = instance
    placed = place_all(devices, profiles, specs_of(profiles, interval, count), method)
    for device, shares in loads(placed, profiles).items():
        assert sum(shares) <= (EXCLUSIVE_CAP if len(shares) == 1 else SHARED_CAP) + 1e-9, device
    for model, plan in to_plans(devices, profiles, placed).items():
        plan.validate(route_of(profiles[model]))
        for placements in plan.classes.values():
            waits(profiles[model], placements)  # raises if state is split
    needed = dict.fromkeys((d.name for d in devices), 0)
    for model, plan in to_plans(devices, profiles, placed).items():
        open_memory = Plan(plan.kind, tuple(Device(d.name) for d in plan.devices), plan.classes)
        for name, nbytes in check_memory_of(profiles[model], open_memory).items():
            needed[name] += nbytes
    for d in devices:
        assert not d.memory_bytes or needed[d.name] <= d.memory_bytes


def check_memory_of(profile: Profile, plan: Plan) -> dict[str, int]:
    return check_memory(profile, plan, dict.fromkeys(plan.classes, 1))


@settings(max_examples=60, deadline=None)
@given(instance=instances())
def test_no_stream_that_equal_partition_takes_is_refused(instance: Instance) -> None:
    devices, profiles, interval, count = instance
    planner = Planner(devices, profiles, STRATEGIES["portfolio"])
    for spec in specs_of(profiles, interval, count):
        before = planner.shadow.free_devices
        placed = planner.place(spec)
        if planner.shadow.free_devices < before:
            assert placed is not None


@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_the_portfolio_holds_at_least_as_many_streams_as_equal_partition(instance: Instance) -> None:
    devices, profiles, interval, count = instance
    specs = specs_of(profiles, interval, count)
    equal = place_all(devices, profiles, specs, "equal")
    assert equal.keys() <= place_all(devices, profiles, specs, "portfolio").keys()


@settings(max_examples=15, deadline=None)
@given(instance=instances())
def test_promises_hold_in_the_simulation_and_no_chunk_overtakes(instance: Instance) -> None:
    devices, profiles, interval, count = instance
    specs = specs_of(profiles, interval, count, response_s=12.0)
    packed = pack(devices, profiles, specs, "portfolio", Trial(20, 8))
    if packed.verified is None:
        assert not packed.placed
        return
    assert not packed.verified.broken
    equal = pack(devices, profiles, specs, "equal", Trial(20, 8))
    assert len(packed.placed) >= len(equal.placed)
    for stream in packed.verified.outcome.streams:
        assert [chunk for chunk, _, _ in stream.done] == list(range(len(stream.done)))
        plan = packed.verified.plans[stream.model]
        bound = plan_bound(profiles[stream.model], plan, stream.name)
        assert stream.promised_interval_s >= bound.interval_s * (1 - 1e-9)
        assert min(stream.responses_s()) >= bound.response_s * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(instance=instances(), method=st.sampled_from(["bestfit", "lds", "portfolio"]))
def test_the_same_input_gives_the_same_plan(instance: Instance, method: str) -> None:
    devices, profiles, interval, count = instance
    specs = specs_of(profiles, interval, count)
    first, second = (place_all(devices, profiles, specs, method) for _ in range(2))
    assert first == second
    plans = [to_plans(devices, profiles, placed) for placed in (first, second)]
    assert [p.to_json() for p in plans[0].values()] == [p.to_json() for p in plans[1].values()]


@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_nobody_beats_the_bound(instance: Instance) -> None:
    devices, profiles, interval, count = instance
    one = {"a": profiles["a"]}
    placed = place_all(devices, one, specs_of(one, interval, count), "portfolio")
    assert len(placed) <= streams_bound(one["a"], devices, interval).streams


@settings(max_examples=40, deadline=None)
@given(instance=instances(), data=st.data())
def test_arrivals_and_departures_leave_the_books_exact(instance: Instance, data: st.DataObject) -> None:
    devices, profiles, interval, count = instance
    planner = Planner(devices, profiles)
    for spec in specs_of(profiles, interval, count):
        where = dict(planner.placed)
        planner.place(spec)
        assert all(planner.placed[name] == p for name, p in where.items())  # nobody moves
        if planner.placed and data.draw(st.booleans()):
            planner.leave(data.draw(st.sampled_from(sorted(planner.placed))))
    for name in list(planner.placed):
        planner.leave(name)
    for state in planner.cluster.devices.values():
        assert (state.used_bytes, state.tenants, state.resident) == (0, {}, {})
        assert state.load == 0


def test_a_commit_that_does_not_fit_changes_nothing() -> None:
    planner = Planner(pool(1), {"a": toy(per_row_s=0.05)})
    planner.place(StreamSpec("first", "a", 1.0))
    with pytest.raises(PlanError, match="gpu:0"):
        planner.cluster.commit(Placed(StreamSpec("second", "a", 1.0), (Rank(0, 8, "gpu:0"),), "by hand"))
    assert list(planner.placed) == ["first"]
    assert planner.cluster.devices["gpu:0"].load == pytest.approx(0.8)


def test_the_exact_answer_is_near_and_never_below() -> None:
    shares = [0.3, 0.45, 0.55, 0.62, 0.7, 0.9, 1.1, 1.4]
    ratios = []
    for share, g in itertools.product(shares, (2, 3)):
        profiles = {"a": toy(8, 2, per_row_s=share / 16)}
        specs = specs_of(profiles, 1.0, math.floor(g / share) + 1)
        best, proven = optimum(pool(g), profiles, specs)
        found = len(place_all(pool(g), profiles, specs, "portfolio"))
        assert proven
        assert found <= len(best)
        ratios.append(found / len(best) if best else 1.0)
    assert sum(ratios) / len(ratios) >= 0.95


def test_an_answer_that_is_not_proven_is_not_given_as_exact() -> None:
    profiles = {"a": toy(12, 3, per_row_s=0.011), "b": toy(9, 2, per_row_s=0.017)}
    specs = [StreamSpec(f"s{i}", "ab"[i % 2], 1.0) for i in range(24)]
    with pytest.raises(TooLargeError, match="no proof within 0 s"):
        solve(pool(8), profiles, specs, limit_s=0.01)


def test_a_mix_that_keeps_what_equal_partition_takes_is_within_five_percent_of_the_exact_answer() -> None:
    ratios = []
    for seed in range(6):
        profiles = {"a": toy(8, 2, per_row_s=(0.25 + 0.07 * seed) / 16), "b": toy(4, 2, per_row_s=(1.05 - 0.06 * seed) / 8)}
        specs = specs_of(profiles, 1.0, 9)
        keep = place_all(pool(3), profiles, specs, "equal")
        best, _ = optimum(pool(3), profiles, specs, limit_s=10, keep=keep)
        ratios.append(len(place_all(pool(3), profiles, specs, "portfolio")) / len(best))
    assert sum(ratios) / len(ratios) >= 0.95


def test_memory_limits_private_state_but_weights_are_shared() -> None:
    profile = toy(4, 1, per_row_s=0.001, weight_bytes=100, state_bytes=10)
    # 400 bytes of weights once, 40 of state a stream: 15 streams in 1000 bytes.
    placed = place_all(pool(1, memory_bytes=1000), {"a": profile}, specs_of({"a": profile}, 1.0, 40), "portfolio")
    assert len(placed) == 15


@pytest.mark.parametrize(
    ("spec", "resource", "says"),
    [
        (StreamSpec("s", "a", 0.01), "interval", "no plan is faster than 80.0 ms"),
        (StreamSpec("s", "a", 1.0, 0.1), "response", "160.0 ms even alone"),
    ],
)
def test_an_impossible_promise_is_refused_with_the_bound(spec: StreamSpec, resource: str, says: str) -> None:
    answer = Admission(pool(2), {"a": toy()}).arrive(spec)
    assert isinstance(answer, Refused)
    assert answer.resource == resource
    assert says in answer.text


def test_a_stage_larger_than_any_device_is_refused_with_its_size() -> None:
    answer = Admission(pool(4, memory_bytes=10**9), {"a": toy(weight_bytes=2 * 10**9)}).arrive(StreamSpec("s", "a", 1.0))
    assert isinstance(answer, Refused)
    assert answer.resource == "memory"
    assert "one stage needs 2.0 GB, the largest device has 1.0 GB" in answer.text


def test_a_refusal_says_how_much_is_missing_and_what_would_fit() -> None:
    profiles = {"a": toy(8, 4, per_row_s=0.02), "small": toy(8, 4, per_row_s=0.003)}
    variants = {"a": [Variant("chunks of 1 latent frame", "small", 1 / 3)]}
    admission = Admission(pool(1), profiles, variants=variants)
    admission.admit(StreamSpec("first", "a", 1.0))
    answer = admission.arrive(StreamSpec("second", "a", 1.0))
    assert isinstance(answer, Refused)
    assert answer.resource == "time"
    assert "needs 0.64 devices, 0.31 are free, 0.33 missing" in answer.text
    assert answer.fits == ("an interval of 3000 ms", "1 denoise steps", "chunks of 1 latent frame")
    with pytest.raises(CapacityError, match="refused \\(time\\)"):
        admission.admit(StreamSpec("second", "a", 1.0))
    # What it said would fit does fit.
    assert not isinstance(admission.arrive(StreamSpec("third", "a", 3.0)), Refused)


@settings(max_examples=60, deadline=None)
@given(instance=instances())
def test_what_a_refusal_says_would_fit_is_taken_when_it_is_asked_for(instance: Instance) -> None:
    devices, profiles, interval_s, count = instance
    admission = Admission(devices, profiles)
    for spec in specs_of(profiles, interval_s, count):
        answer = admission.arrive(spec)
        if not isinstance(answer, Refused):
            continue
        (asked,) = [float(text.split()[3]) for text in answer.fits if text.startswith("an interval")] or [0.0]
        if asked:
            admission.leave(spec.name)
            again = admission.arrive(replace(spec, interval_s=asked / 1e3))
            assert not isinstance(again, Refused), answer.text
            admission.leave(spec.name)


def test_a_stream_that_no_pool_can_keep_is_told_what_the_empty_pool_could() -> None:
    admission = Admission(pool(2), {"a": toy(8, 4, per_row_s=0.05)})
    answer = admission.arrive(StreamSpec("s", "a", 0.7))  # 1.6 s of work on two devices
    assert isinstance(answer, Refused)
    assert answer.resource == "interval"
    assert answer.text.endswith("it would fit with an interval of 875 ms or 3 denoise steps")


def test_memory_is_named_when_only_memory_is_missing() -> None:
    profile = toy(4, 1, per_row_s=0.001, weight_bytes=100, state_bytes=100)
    admission = Admission(pool(1, memory_bytes=1000), {"a": profile})
    admission.admit(StreamSpec("first", "a", 1.0))
    answer = admission.arrive(StreamSpec("second", "a", 1.0))
    assert isinstance(answer, Refused)
    assert answer.resource == "memory"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Admission((), {"a": toy()}),
        lambda: Admission(pool(1), {"a": toy()}).arrive(StreamSpec("s", "unknown", 1.0)),
        lambda: Admission(pool(1), {"a": toy()}, device_kind="another device"),
        lambda: StreamSpec("s", "a", math.nan),
        lambda: StreamSpec("s", "a", -1.0),
        lambda: Planner(pool(1), {"a": toy()}).leave("nobody"),
    ],
)
def test_bad_input_is_an_error_that_names_the_field(make: object) -> None:
    with pytest.raises((ConfigError, PlanError)):
        make()  # type: ignore[operator]


def test_a_stream_is_promised_its_response_when_a_neighbour_asks_to_come() -> None:
    profiles = {"a": toy(8, 1, per_row_s=0.05)}
    planner = Planner(pool(1), profiles, expected=[StreamSpec("e", "a", 1.0)])
    assert planner.place(StreamSpec("tight", "a", 1.0, 0.45)) is not None  # 0.4 s alone
    assert planner.place(StreamSpec("neighbour", "a", 1.0)) is None


def test_a_plan_edited_by_hand_is_checked_for_route_precedence_and_memory() -> None:
    profile = toy(4, 2, carry="last_pass")
    plan = Plan.from_json(by_block(profile, pool(2)).to_json())
    assert set(check_plan(profile, plan)) == {"gpu:0", "gpu:1"}
    placements = plan.classes["default"]
    moved = (Placement(placements[0].segment, "gpu:1"), *placements[1:])
    with pytest.raises(PlanError, match="state never moves"):
        check_plan(profile, replace(plan, classes={"default": moved}))
    with pytest.raises(PlanError, match="visits placed"):
        check_plan(profile, replace(plan, classes={"default": placements[:-1]}))
    small = tuple(Device(d.name, d.node, 25) for d in plan.devices)
    with pytest.raises(PlanError, match="memory_bytes"):
        check_plan(profile, replace(plan, devices=small))
    with pytest.raises(ConfigError, match="dispatch"):
        check_plan(profile, plan.with_dispatch("whatever"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in_flight": "2"}, "in_flight: got '2', expected a whole number"),
        ({"devices": [{"name": ["gpu:0"]}]}, "devices[0][name]"),
        ({"devices": [{"name": "gpu:0", "memory": 5}]}, "devices[0]: got key 'memory'"),
        ({"classes": {"default": [{"segment": {"start": 0, "stop": None}, "device": "gpu:0"}]}}, "[segment][stop]: got None"),
        ({"batch_caps": 4}, "batch_caps: got 4, expected an object"),
        ({"pace_s": {"default": True}}, "pace_s[default]: got True"),
        ({"mode": "fast"}, "mode: got 'fast'"),
    ],
)
def test_a_plan_edited_by_hand_may_not_hold_values_of_another_type(change: dict[str, object], says: str) -> None:
    raw = json.loads(by_block(toy(), pool(2)).to_json())
    with pytest.raises(PlanError, match=re.escape(says)):
        Plan.from_json(json.dumps(raw | change))


def test_simulating_a_plan_twice_gives_the_same_figures() -> None:
    profiles = {"a": toy(8, 2, per_row_s=0.03)}
    specs = specs_of(profiles, 1.0, 4)
    placed = place_all(pool(3), profiles, specs, "portfolio")
    plans = to_plans(pool(3), profiles, placed)
    runs = [simulate(plans, profiles, list(specs[: len(placed)])) for _ in range(2)]
    assert runs[0].outcome.streams == runs[1].outcome.streams
