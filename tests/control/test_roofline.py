"""The Control-Time Roofline on traces whose answer is known, and traces that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.control.device import DeviceRoof, StageCost, place
from stretto.control.plots import draw_control_roofline, draw_device_roofline
from stretto.control.roofline import Point, locate, locate_files, overlapped_rate, sequential_rate
from stretto.control.trace import TraceError, parse_trace
from stretto.core.errors import ConfigError, FieldError

BASE = {"observe_s": 0.002, "transfer_s": 0.003, "queue_s": 0.001, "inference_s": 0.036, "actuate_s": 0.001}
WORLD = {"executed_steps": 10, "control_hz": 20.0, "horizon": 10}


def lines(n: int = 200, seed: int = 0, **changes: Any) -> list[str]:
    """A trace with 5 % of jitter on every part."""
    rng = np.random.default_rng(seed)
    record = {**BASE, **WORLD, **changes}
    return [json.dumps({k: v * rng.uniform(0.95, 1.05) if k in BASE else v for k, v in record.items()}) for _ in range(n)]


def point(name: str = "arm", **changes: Any) -> Point:
    return locate(name, parse_trace(lines(**changes)))


def test_the_two_curves_meet_their_definitions() -> None:
    assert sequential_rate(1.0) == 0.5
    assert overlapped_rate(0.25) == 0.25
    assert overlapped_rate(7.0) == 1.0
    # libero_spatial of the published table: 224.6 ms of world, 36.33 ms of inference.
    assert sequential_rate(224.6 / 36.33) == pytest.approx(0.86, abs=0.005)


def test_a_fast_model_with_many_actions_is_limited_by_the_world() -> None:
    p = point()
    assert p.limited_by == "world"
    assert p.x == pytest.approx(500 / 43, rel=0.03)
    assert p.y_overlap == 1.0
    assert p.y_sequential == pytest.approx(p.x / (1 + p.x))
    assert p.forms["inference_p50"].x > p.forms["critical_p50"].x > p.forms["critical_p99"].x
    assert p.margin_ms_p99 == pytest.approx(500 - 43, rel=0.02)
    assert p.gain_of_2x_overlap == 0.0
    assert "limited by the world" in p.sentence
    assert "the model takes 36 of the 43 ms" in p.sentence


def test_a_model_slowed_five_times_becomes_the_limit_and_the_sentence_says_so() -> None:
    p = point(inference_s=0.18, executed_steps=2, mode="naive")
    assert p.limited_by == "model"
    assert "limited by the model" in p.sentence
    assert "the model takes 18" in p.sentence
    assert p.gain_of_2x_overlap == pytest.approx(187 / 100 - 1, rel=0.05)
    assert "87 % more rate" in p.sentence or "86 % more rate" in p.sentence or "88 % more rate" in p.sentence


def test_a_network_of_fifty_milliseconds_is_named_and_a_faster_model_is_said_to_buy_little() -> None:
    slow = point(transfer_s=0.05, executed_steps=1)
    assert slow.limited_by == "network"
    assert "limited by the network" in slow.sentence
    assert "the network takes 50" in slow.sentence
    easy = point(transfer_s=0.05)
    assert easy.limited_by == "world"
    assert "the network takes 50" in easy.sentence


def test_a_network_as_slow_as_the_model_is_named_beside_it() -> None:
    assert "the network takes 50 and the model 36 of the" in point(transfer_s=0.05).sentence
    assert "the model takes 36 and the network 20 of the" in point(transfer_s=0.02).sentence
    assert "the model takes 36 of the" in point(transfer_s=0.017).sentence


def test_a_missed_deadline_names_the_part_that_takes_longest_at_the_tail() -> None:
    requests = parse_trace(lines(deadline_s=0.1) + lines(10, queue_s=0.3, deadline_s=0.1))
    p = locate("arm", requests)
    assert p.x > 1
    assert p.margin_ms_p50 > 0 > p.margin_ms_p99
    assert p.limited_by == "queue"
    assert p.miss_rate == pytest.approx(10 / 210)
    assert "misses its deadline of 100 ms" in p.sentence


def test_refused_requests_count_as_missed_but_not_as_latency() -> None:
    refused = json.dumps({**WORLD, "status": "refused", "reason": "deadline"})
    p = locate("arm", parse_trace([*lines(9), refused]))
    assert p.miss_rate == pytest.approx(0.1)
    assert p.requests == 10


def test_real_time_chunking_is_feasible_while_the_rest_of_the_chunk_outlasts_the_request() -> None:
    p = point(mode="rtc", executed_steps=5, horizon=10)
    assert p.rtc is not None
    assert p.rtc.feasible
    assert p.rtc.window_ms == pytest.approx(250)
    assert p.deadline_ms == pytest.approx(250)
    late = point(mode="rtc", executed_steps=9, horizon=10, inference_s=0.08)
    assert late.rtc is not None
    assert not late.rtc.feasible
    assert late.rtc.slack_p99 < 1
    assert late.limited_by == "model"


def test_a_fleet_is_limited_by_throughput_when_the_batch_cannot_feed_all_robots() -> None:
    trace = [line for r in range(40) for line in lines(8, seed=r, robot=f"r{r}", batch=4, inference_s=0.06)]
    p = locate("fleet", parse_trace(trace))
    assert p.fleet is not None
    assert (p.fleet.robots, p.fleet.batch) == (40, 4.0)
    assert p.fleet.chunks_per_s == pytest.approx(4 / 0.06, rel=0.02)
    assert p.fleet.limited_by == "throughput"
    assert p.fleet.most_robots == pytest.approx(0.5 * 4 / 0.06, abs=1)
    few = locate("few", parse_trace([line for r in range(4) for line in lines(8, seed=r, robot=f"r{r}", batch=4)]))
    assert few.fleet is not None
    assert few.fleet.limited_by == "world"
    assert few.fleet.y == 1.0


def test_a_point_is_plain_json() -> None:
    text = json.dumps({"points": [point(stage_s={"vision": 0.003, "denoise": 0.02}).to_json()]})
    back = json.loads(text)["points"][0]
    assert {"name", "x", "y_sequential", "y_overlap", "limited_by", "margin_ms_p99", "sentence"} <= set(back)
    assert back["stages_ms_p50"] == {"vision": 3.0, "denoise": 20.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inference_s", -0.1),
        ("inference_s", None),
        ("queue_s", "fast"),
        ("transfer_s", True),
        ("control_hz", 0),
        ("control_hz", -1),
        ("control_hz", None),
        ("executed_steps", 0),
        ("executed_steps", 2.5),
        ("executed_steps", 11),
        ("horizon", 0),
        ("delay_steps", 11),
        ("deadline_s", 0),
        ("env_s", -1),
        ("batch", 0),
        ("mode", "magic"),
        ("status", "fine"),
        ("stage_s", [1]),
        ("stage_s.vision", {"vision": -1}),
        ("starved_steps", -1),
    ],
)
def test_a_bad_field_is_refused_by_file_line_and_name(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    bad = json.dumps({**BASE, **WORLD, field.split(".")[0]: value})
    path.write_text("\n".join(["# two robots", *lines(1), "", bad]))
    with pytest.raises(TraceError) as e:
        locate_files([path])
    assert str(e.value).startswith(f"{path}:4: {field}: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "{", "[1]", '{"control_hz": NaN, "executed_steps": 1}', "null", "1e999"])
def test_text_that_is_no_trace_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.jsonl"):
        locate_files([path])


def test_bytes_and_mixed_traces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not text"):
        locate_files([tmp_path / "b.jsonl"])
    with pytest.raises(TraceError, match="control_hz"):
        locate("mix", parse_trace(lines(2) + lines(2, control_hz=50.0)))
    with pytest.raises(TraceError, match="none answered"):
        locate("none", parse_trace([json.dumps({**WORLD, "status": "failed"})]))


def test_stages_stand_under_the_roof_of_their_side_of_the_ridge() -> None:
    device = DeviceRoof("gpu", 800e12, 4e12)
    a, b = place([StageCost("prefix", 0.006, 4e12, 5e9), StageCost("denoise", 0.004, 0.3e12, 8e9)], device)
    assert (a.bound, b.bound) == ("compute", "memory")
    assert a.least_seconds == pytest.approx(0.005)
    assert b.share_of_roof == pytest.approx(0.5)
    with pytest.raises(FieldError, match=r"stages\[x\]\.seconds"):
        place([StageCost("x", 0.0, 1.0, 1.0)], device)
    with pytest.raises(FieldError, match=r"device\.peak_flops"):
        place([StageCost("x", 1.0, 1.0, 1.0)], DeviceRoof("g", float("nan"), 1.0))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_both_figures_are_drawn_in_full(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [point("libero"), point("far", transfer_s=0.05, executed_steps=1), point("rtc", mode="rtc", executed_steps=5)]
    draw_control_roofline(points, tmp_path / f"c.{ending}")
    device = DeviceRoof("gpu", 800e12, 4e12)
    stages = place([StageCost("prefix", 0.006, 4e12, 5e9), StageCost("denoise", 0.004, 0.3e12, 8e9)], device)
    draw_device_roofline(stages, device, tmp_path / f"d.{ending}")
    for name in ("c", "d"):
        assert (tmp_path / f"{name}.{ending}").stat().st_size > 10_000
    if ending == "svg":
        draw_control_roofline(points, tmp_path / "c2.svg")
        assert (tmp_path / "c2.svg").stat().st_size == (tmp_path / "c.svg").stat().st_size
    with pytest.raises(ConfigError, match="path"):
        draw_control_roofline(points, tmp_path / "c.bmp")
    with pytest.raises(ConfigError, match="points"):
        draw_control_roofline([], tmp_path / "c.png")
