"""Profiles and costs: what they accept, what they refuse, and what computed ones say."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import toy

from stretto.core.errors import ConfigError, StrettoError
from stretto.core.route import Route, StageSpec, Visit
from stretto.sched.batching import worthwhile_cap
from stretto.sched.columns import Columns, split
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import H200
from stretto.sched.profile import Profile
from stretto.sched.report import rows
from stretto.sched.scenarios import BUILT_IN, Scenario, scenario_from
from stretto.sched.shapes import WORLDS, computed, names


def test_a_cost_follows_its_measured_points_and_goes_on_along_the_last_piece() -> None:
    cost = BatchCost(((1, 1.0), (2, 1.5), (4, 3.5)))
    assert [cost(n) for n in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.5, 3.5, 5.5]
    assert cost(100) == pytest.approx(3.5 + 96)
    assert cost.best_row_s(4) == pytest.approx(0.75)
    assert BatchCost(((1, 2.0),))(3) == 6.0  # of a batch that nobody measured, no gain is assumed


def test_batches_pay_as_far_as_a_row_gets_cheaper_by_more_than_noise() -> None:
    assert worthwhile_cap(toy(fixed_s=0.0, per_row_s=0.01), 4) == 1
    assert worthwhile_cap(toy(fixed_s=0.0002, per_row_s=0.01), 4) == 1  # 2 %
    assert worthwhile_cap(toy(fixed_s=0.01, per_row_s=0.01), 4) == 4
    assert worthwhile_cap(toy(fixed_s=0.001, per_row_s=0.01), 8) == 3


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, -1.0),), ((1, math.nan),), ((1, math.inf),)])
def test_a_cost_that_cannot_be_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError):
        BatchCost(points)


@pytest.mark.parametrize("model", names())
def test_a_profile_survives_json(model: str) -> None:
    profile = computed(model, H200)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.provenance.source == "computed"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda raw: raw["stages"].pop("block.*"), "stage"),
        (lambda raw: raw["stages"]["block.*"].update(cost={"fixed_ms": -1, "per_row_ms": 1}), "stages[block.*].cost.fixed"),
        (lambda raw: raw["stages"]["block.*"].update(cost={"table_ms": {"1": math.nan}}), "stages[block.*].cost[1]"),
        (lambda raw: raw["stages"]["block.*"].update(weight_bytes=-5), "stages[block.*].weight_bytes"),
        (lambda raw: raw.update(surprise=1), "profile"),
        (lambda raw: raw.pop("device"), "profile"),
        (lambda raw: raw.update(carry="sometimes"), "carry"),
    ],
)
def test_a_damaged_profile_is_refused_by_the_name_of_the_field(change: object, field: str) -> None:
    raw = json.loads(toy().to_json())
    change(raw)  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        Profile.from_json(json.dumps(raw))
    assert caught.value.field == field


def test_a_profile_of_another_device_or_route_is_refused() -> None:
    profile = toy(2, 1)
    with pytest.raises(ConfigError, match="times of one device say nothing about another"):
        profile.check_device("NVIDIA H200")
    specs = {f"block.{i}": StageSpec(f"block.{i}", (), ()) for i in range(3)}
    with pytest.raises(ConfigError, match="2 visits"):
        profile.check_route(Route(specs, tuple(Visit(s) for s in specs), (), ()))


def test_light_stages_ride_with_their_neighbours_and_each_column_counts_all_steps() -> None:
    profile = computed("wan2.2-5b", H200)
    columns = Columns.of(profile)
    assert len(columns) == 30
    assert columns.stages[0] == ("embed", "block.0")
    assert columns.stages[-1] == ("block.29", "head")
    assert sum(columns.work) == pytest.approx(profile.work_s)
    assert sum(columns.state) == 30 * 4 * profile.stage("block.0").state_bytes


@given(loads=st.lists(st.floats(0.1, 10), min_size=1, max_size=20), parts=st.integers(1, 20))
def test_a_split_has_no_empty_part_and_is_as_even_as_any(loads: list[float], parts: int) -> None:
    parts = min(parts, len(loads))
    ends = split(loads, parts)
    sums = [sum(loads[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
    assert len(ends) == parts
    assert all(b > a for a, b in zip((0, *ends), ends, strict=False))
    best = {(i, 1): sum(loads[:i]) for i in range(len(loads) + 1)}
    for k in range(2, parts + 1):
        for i in range(k, len(loads) + 1):
            best[i, k] = min(max(best[j, k - 1], sum(loads[j:i])) for j in range(k - 1, i))
    assert max(sums) <= best[len(loads), parts] * (1 + 1e-6)


def test_more_steps_a_larger_chunk_or_window_cost_more() -> None:
    base = computed("wan2.1-1.3b", H200)
    for change in ({"steps": 5}, {"frames_per_chunk": 6}, {"window_frames": 21}):
        assert computed("wan2.1-1.3b", H200, **change).work_s > base.work_s
    assert computed("wan2.1-1.3b", H200, frames_per_chunk=6).facts["pixel_frames_per_chunk"] == 24
    assert base.with_steps(2).work_s == pytest.approx(base.work_s / 2)
    assert base.with_steps(4) == base


@pytest.mark.parametrize(
    ("model", "change"),
    [("unknown", {}), ("wan2.1-1.3b", {"wings": 2}), ("wan2.1-1.3b", {"steps": 0}), ("wan2.1-1.3b", {"window_frames": 1})],
)
def test_an_unknown_model_or_shape_is_refused(model: str, change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        computed(model, H200, **change)


@pytest.mark.parametrize(
    "raw",
    [
        {"models": ["wan2.1-1.3b"]},
        {"gpus": 0, "models": ["wan2.1-1.3b"]},
        {"gpus": 1},
        {"gpus": 1, "models": ["a"], "interval_ms": -3},
        {"gpus": 1, "models": ["a"], "interval_ms": math.nan},
        {"gpus": 1, "models": ["a"], "colour": "red"},
        {"gpus": "many", "models": ["a"]},
        {"gpus": 1, "mix": {"a": 0}},
        {"gpus": 1, "models": ["a"], "device": "abacus"},
    ],
)
def test_a_scenario_that_cannot_be_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        scenario_from(raw, "test")


def test_every_row_of_a_scenario_is_above_equal_partition_and_below_the_bound() -> None:
    scenario = Scenario("small", 6, tuple(WORLDS))
    profiles = {m: computed(m, H200) for m in WORLDS}
    found = rows(scenario, profiles, ("equal", "portfolio"))
    for row in found:
        assert row.streams["equal"] <= row.streams["portfolio"] <= row.bound
        assert set(row.short()) == {"model", "profile", "streams", "bound", "interval_ms_p99"}
        assert row.refusal
    assert sum(r.streams["portfolio"] for r in found) > 1.2 * sum(r.streams["equal"] for r in found)


def test_a_mix_shares_the_pool() -> None:
    scenario = Scenario("mix", 4, mix={"wan2.1-1.3b": 3, "wan2.2-5b": 4})
    profiles = {m: computed(m, H200) for m in scenario.mix}
    found = rows(scenario, profiles, ("equal", "portfolio"))
    assert [r.streams["portfolio"] for r in found] == [3, 4]
    assert sum(r.streams["equal"] for r in found) == 4


def test_an_impossible_promise_in_a_scenario_says_the_bound() -> None:
    scenario = Scenario("fast", 2, ("wan2.1-1.3b",), interval_ms=1.0)
    with pytest.raises(StrettoError, match="no plan is faster than"):
        rows(scenario, {"wan2.1-1.3b": computed("wan2.1-1.3b", H200)}, ("equal",))


def test_the_built_in_scenarios_name_known_models() -> None:
    assert {"seed-24gpu", "seed-1gpu", "seed-2gpu", "depth-200"} <= set(BUILT_IN)
    for scenario in BUILT_IN.values():
        for model in scenario.wanted:
            computed(model, H200, **scenario.shape)
