"""Benchmarks and profiles on the CPU: the figures are of the right things, and what cannot be run is said by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from stretto.core.chunk import Chunk
from stretto.core.errors import ConfigError
from stretto.core.route import Segment, Visit
from stretto.deploy.drive import Done, Measured
from stretto.deploy.profile import ProfileOptions, measure, passes_of
from stretto.deploy.world_bench_options import WorldBenchOptions, bench_world
from stretto.deploy.world_plans import ONE, SEVERAL, plan_of, predicted
from stretto.deploy.worlds import RandomWorld, config_of
from stretto.models import pi0, wan
from stretto.runtime.profiler import SETS, Bench
from stretto.sched.costs import BatchCost
from stretto.sched.profile import Profile, Provenance, StageProfile

CPU = torch.device("cpu")
FIELDS = ("chunk_frames", "window_frames", "plan", "devices", "stage_ms", "output_interval_ms", "response_latency_ms")
QUICK = WorldBenchOptions("wan-tiny", chunk_frames=(1,), window_frames=(3,), seconds=0.05, mode="eager")


def world_profile(steps: int = 4, blocks: int = 6) -> Profile:
    """A profile in which every block takes 1 ms alone and 2 ms as four rows."""
    stages = {
        "embed": StageProfile(BatchCost(((1, 1e-5), (4, 4e-5)))),
        "block.*": StageProfile(BatchCost(((1, 1e-3), (4, 2e-3))), 100, 100, "visit", 1000),
        "head": StageProfile(BatchCost(((1, 1e-5), (4, 4e-5)))),
    }
    loop = ("embed", *(f"block.{i}" for i in range(blocks)), "head")
    return Profile("w", "CPU", ((loop, tuple(range(steps))),), stages, Provenance("computed"))


def test_a_world_bench_has_a_row_for_each_plan_with_the_promised_fields() -> None:
    result = bench_world(replace(QUICK, devices=("cpu", "cpu"), steps=2))
    rows = {row["plan"]: row for row in result["rows"]}
    assert list(rows) == [*ONE, *SEVERAL]
    assert {row.get("error") for row in rows.values()} == {None}
    assert all(set(FIELDS) <= set(row) for row in rows.values())
    assert rows["serial"]["devices"] == 1
    assert rows["batched"]["largest_batch"] == 2
    assert set(rows["by_step"]["idle_share"]) == {"cpu:0", "cpu:1"}
    assert all(row["mode"] == "eager" and row["denoise_steps"] == 2 for row in rows.values())


def test_rates_are_conversions_of_the_interval() -> None:
    (row,) = bench_world(replace(QUICK, plans=("serial",), chunk_frames=(2,)))["rows"]
    assert row["frames_per_s"] == pytest.approx(8 / row["output_interval_ms"] * 1e3, rel=1e-3)
    assert row["conversions"]["action_chunks_per_s"] == pytest.approx(row["frames_per_s"] / 32, rel=1e-3)


def test_a_plan_that_does_not_fit_is_a_row_that_says_why() -> None:
    rows = bench_world(replace(QUICK, devices=("cpu",) * 3, steps=2, plans=("by_step",)))["rows"]
    assert "devices: got 3, expected 1 to 2" in rows[0]["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plans": ("sideways",)}, "plan: got \\['sideways'\\]"),
        ({"steps": 5}, "steps: got 5, expected 1 to 4"),
        ({"pixel_height": 100}, "pixel_height: got 100"),
        ({"model": "wan9"}, "model: got 'wan9'"),
        ({"devices": ("cuda:7",)}, "device: got cuda:7"),
        ({"mode": "graph"}, "mode: got graph"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused_by_name(change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_world(replace(QUICK, **change))


@pytest.mark.parametrize("model", [*wan.tiny(), pi0.tiny()[0]], ids=lambda m: m.name)
def test_a_measured_profile_is_of_the_models_own_route_and_survives_json(model: Any) -> None:
    profile = measure(model, CPU, "eager", ProfileOptions(model.name, batches=(1, 2), n=2, warmup=1))
    profile.check_route(model.route)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.provenance.source == "measured"
    assert all(stage.cost(1) > 0 for stage in profile.stages.values())
    for visit in model.route.visits:
        assert profile.waits_for(visit) == model.carry(visit)


def test_under_load_the_stages_of_a_step_add_up_to_what_a_step_takes() -> None:
    model = RandomWorld(config_of("wan-tiny", blocks=6, window_frames=2)).on(["cpu"]).first
    profile = measure(model, CPU, "eager", ProfileOptions("wan-tiny", batches=(1, 2), sustained_s=0.2))
    profile.check_route(model.route)
    assert "under load" in profile.provenance.note
    assert set(profile.stages) == {"embed", "block.*", "head"}
    step = Segment(0, len(model.route) // 4)
    bench = Bench(model, CPU, "eager", 1, chunk=2)
    bench.load(model.example_inputs(SETS))
    bench.fill(seed=1)
    took_s = bench.segment(step, {}, warmup=2, n=8).p50 / 1e3
    said_s = profile.launch_s + sum(profile.stage(v.stage).cost(1) for v in model.route.on(step))
    assert said_s == pytest.approx(took_s, rel=0.6)  # other work on the machine comes and goes


def test_codes_of_fp8_count_as_weights_of_their_block() -> None:
    found = {}
    for precision in ("dtype", "fp8-emulated"):
        config = config_of("wan-tiny", blocks=2, window_frames=2, width=128, heads=2, dtype="bfloat16", precision=precision)
        model = RandomWorld(config).on(["cpu"]).first
        found[precision] = (
            measure(model, CPU, "eager", ProfileOptions("wan-tiny", batches=(1,), n=1)).stage("block.0").weight_bytes
        )
    assert 1.3 < found["fp8-emulated"] / found["dtype"] < 1.6


def test_some_blocks_stand_for_all() -> None:
    sample = RandomWorld(config_of("wan-tiny", blocks=3, window_frames=2)).on(["cpu"]).first
    whole = wan.build(config_of("wan-tiny", blocks=9, window_frames=2), device="meta")
    profile = measure(sample, CPU, "eager", ProfileOptions("wan-tiny", batches=(1,), n=1), blocks=9)
    profile.check_route(whole.route)
    block = profile.stage("block.8")
    assert block.weight_bytes == sum(p.nbytes for p in whole.net.blocks[8].parameters())
    assert block.state_bytes == sum(whole.state[f"block.8.{part}"].nbytes for part in ("k", "v", "cross_k", "cross_v"))
    assert profile.reserved_bytes == sum(
        p.nbytes
        for m in (whole.net.time_embedding, whole.net.time_projection, whole.net.text_embedding)
        for p in m.parameters()
    )


def test_passes_are_runs_of_stages_that_are_visited_for_the_same_steps() -> None:
    visits = [Visit("vision"), Visit("prefix"), *(Visit("denoise", s) for s in range(3)), Visit("decode", 2)]
    assert passes_of(visits) == ((("vision", "prefix"), (0,)), (("denoise",), (0, 1, 2)), (("decode",), (2,)))


def test_prediction_for_one_device_is_the_work_and_batching_gains_what_the_profile_says() -> None:
    profile = world_profile()
    serial, batched = (predicted(profile, plan_of(name, profile, ["cpu:0"], "eager"), 1) for name in ("serial", "batched"))
    assert serial["output_interval_ms"] == pytest.approx(profile.work_s * 1e3, rel=1e-3)
    assert batched["output_interval_ms"] == pytest.approx(6 * 2.0 + 2 * 0.04, rel=0.02)


@pytest.mark.parametrize("name", SEVERAL)
def test_every_way_of_spreading_covers_the_route_on_all_devices(name: str) -> None:
    profile = world_profile()
    plan = plan_of(name, profile, ["cpu:0", "cpu:1"], "eager")
    placed = plan.placements("default")
    assert [p.segment.start for p in placed[1:]] == [p.segment.stop for p in placed[:-1]]
    assert placed[-1].segment.stop == len(profile.visits)
    assert {p.device for p in placed} == {"cpu:0", "cpu:1"}


def test_busy_time_shares_each_batch_out_and_is_for_one_interval() -> None:
    def done(at_s: float, shares: dict[str, float]) -> Done:
        return Done(Chunk(0, 0, {}, "graph", 0.0, 0.0, device_ms=shares), at_s - 0.25, at_s)

    rows = [[done(1.0, {"a": 99.0}), done(1.1, {"a": 30.0, "b": 10.0}), done(1.2, {"a": 50.0, "b": 10.0})]] * 2
    measured = Measured(rows, warm_chunks=3, captures=0)
    assert measured.interval_ms == pytest.approx(100.0)
    assert measured.busy_ms() == {"a": 80.0, "b": 20.0}  # two streams: two chunks an interval
    assert measured.latencies_ms == pytest.approx([250.0] * 4)


def test_rings_are_full_of_random_numbers_from_the_first_touch_and_are_not_filled_again() -> None:
    model = RandomWorld(config_of("wan-tiny", window_frames=3)).on(["cpu:0", "cpu:1"])
    bench = Bench(model.first, CPU, "eager", 1, chunk=3)
    stage, ring = model.stages["block.0"], bench.arenas["block.0.k"]

    class Touch:
        slots_B = torch.zeros(1, dtype=torch.int64)

        def arena(self, name: str) -> torch.Tensor:
            return bench.arenas[name]

    fill: Any = stage
    assert not ring.any()
    fill._fill(Touch())
    assert 0.9 < float(ring.std()) < 1.1
    before = ring.clone()
    fill._fill(Touch())
    assert torch.equal(ring, before)


def test_bench_and_profile_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from stretto.cli import main

    shape = ["--window-frames", "3", "--device", "cpu"]
    assert main(["bench", "wan-tiny", "--chunk-frames", "1", "--plan", "serial", "--seconds", "0.05", "--json", *shape]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert set(FIELDS) <= set(row)
    assert main(["profile", "wan-tiny", "--batch", "1", "--n", "1", *shape]) == 0
    assert Profile.from_json(capsys.readouterr().out).facts["window_frames"] == 3
    assert main(["profile", "pi0.5", "--chunk-frames", "1"]) == 2
    assert "expected a world model" in capsys.readouterr().err
    assert main(["bench", "wan-tiny", "--size", "wide"]) == 2
    assert "size: got 'wide'" in capsys.readouterr().err
