"""Scripts of streams that come and go, on the engine and in the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_crowd import crowd
from stretto.deploy.world_plans import plan_of
from stretto.deploy.world_rig import Run, run
from stretto.deploy.world_trial import Entry, Script, Track, comparison, figures, pooled
from stretto.deploy.worlds import TINY, config_of
from stretto.sched.costs import BatchCost


@pytest.fixture(scope="module")
def bench() -> Iterator[WorldBench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    case = WorldCase(("cpu:0",), "eager", streams=3, profile_n=3, batches=(1, 2))
    yield WorldBench(config_of(TINY, frames_per_chunk=1, window_frames=2, decoder="none", dtype="float32"), case)
    torch.set_num_threads(threads)


def test_a_script_runs_on_the_engine_and_in_the_simulator(bench: WorldBench) -> None:
    plan = replace(plan_of("batched", bench.profile, ("cpu:0",), "eager"), in_flight=2)
    entries = [Entry(), Entry(start_s=0.5), Entry(stop_s=0.6)]
    done = run(bench, plan, Script(entries, 1.2, ((0.1, 0.5), (0.7, 1.2))))
    for tracks in (done.measured, done.expected):
        first, late, cancelled = tracks
        assert first.out[-1][1] > 0.9
        assert late.out[0][1] > 0.5
        assert cancelled.out[-1][1] <= 0.65
        assert all(out >= due for track in tracks for due, out in track.out)
    assert done.account()["all_chunks"] == sum(len(t.out) for t in done.measured)
    assert "failed" not in done.account()
    rows = comparison(done.measured, done.expected, done.script.spans)
    assert {(row["stream"], row["span_s"][0]) for row in rows} <= {(0, 0.1), (0, 0.7), (1, 0.7), (2, 0.1)}


def test_as_many_streams_as_the_planner_admits_run_under_its_plan(bench: WorldBench) -> None:
    # What this machine takes just now is not what is tested, so costs are made up.
    made_up = {name: replace(stage, cost=BatchCost.line(0.0, 0.002)) for name, stage in bench.profile.stages.items()}
    steady = replace(bench.profile, stages=made_up, launch_s=0.0)
    facts = {**steady.facts, "frame_hz": 1.0 / (2.5 * steady.work_s), "pixel_frames_per_chunk": 1}
    slow, bench.profile = bench.profile, replace(steady, facts=facts)
    try:
        row = crowd(bench)
    finally:
        bench.profile = slow
    assert 1 <= row["streams"] <= row["bound"]
    assert len(row["interval_ms"]) == row["streams"]
    assert row["predicted"]["late_streams"] == 0


def track(*out: float) -> Track:
    return Track([(t - 1.0, t) for t in out])


def test_intervals_are_of_the_span_alone_and_need_four_chunks() -> None:
    one = track(0.0, 1.0, 2.0, 3.0, 4.0, 4.5)
    assert one.interval_s((0.5, 4.2)) == pytest.approx(1.0)
    assert math.isnan(one.interval_s((0.5, 3.2)))
    assert one.response_s((0.0, 5.0)) == pytest.approx(1.0)
    (row,) = pooled([one], [track(0.0, 2.0, 4.0, 6.0)], [(0.0, 6.0)])
    assert row["measured"] > row["simulated"]


def test_chunks_that_come_in_bursts_are_compared_whole_bursts_apart() -> None:
    bursts = Track([(0.0, t) for t in (0.0, 0.01, 1.0, 1.01, 2.0, 2.01)], burst=2)
    assert bursts.interval_s((0.0, 2.5)) == pytest.approx(0.5)


def test_a_stream_that_stands_still_for_most_of_a_span_has_not_the_interval_of_its_last_burst() -> None:
    stalls = track(0.9, 0.91, 0.92, 0.93, 0.94)
    assert stalls.interval_s((0.0, 1.0)) == pytest.approx(0.2)


def test_idle_time_is_of_the_spans_that_are_looked_at() -> None:
    busy = Track([(0.0, t) for t in (0.5, 1.0, 1.5, 2.0)], busy_ms=[{"d": 250.0}] * 4)
    assert Run(Script([], 3.0, ((0.9, 2.1),)), [busy], [], 0, 0, "local").idle_share() == {"d": pytest.approx(0.375, abs=1e-3)}


def test_a_stream_that_a_player_would_wait_for_is_late() -> None:
    steady, stalls = track(*range(10)), track(0, 1, 2, 3, 4, 7.5, 8, 9)
    assert figures([steady], (0.0, 9.0), 1.0)["late_streams"] == 0
    assert figures([stalls], (0.0, 9.0), 1.0)["late_streams"] == 1
    assert figures([Track()], (0.0, 9.0), 1.0)["late_streams"] == 1
