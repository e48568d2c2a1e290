"""`stretto roofline`: traces in; a table, a sentence, JSON and figures out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main


def write(path: Path, **changes: Any) -> Path:
    line = {"observe_s": 0.002, "transfer_s": 0.004, "queue_s": 0.001, "inference_s": 0.03, "actuate_s": 0.001}
    line |= {"executed_steps": 10, "control_hz": 50.0, "horizon": 25, **changes}
    path.write_text("".join(json.dumps(line | {"t_s": 0.2 * i}) + "\n" for i in range(20)))
    return path


def test_one_point_a_trace_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = write(tmp_path / "fast.jsonl"), write(tmp_path / "slow.jsonl", inference_s=0.5)
    far = write(tmp_path / "far.jsonl", transfer_s=0.4)
    assert main(["roofline", str(fast), str(slow), str(far), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(p["name"], p["limited_by"]) for p in points] == [("fast", "world"), ("slow", "model"), ("far", "network")]
    for p in points:
        assert {"x", "y_sequential", "y_overlap", "margin_ms_p99"} <= set(p)
    assert points[0]["x"] == pytest.approx(0.2 / 0.038)


def test_the_table_ends_with_a_sentence_that_names_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", str(write(tmp_path / "arm.jsonl", transfer_s=0.4, mode="rtc"))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "arm is limited by the network" in out
    assert "a model twice as fast would buy" in out
    assert "the rest of a chunk, 300 ms, does not last" in out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_figure_is_drawn_where_asked(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / f"out.{ending}"
    assert main(["roofline", str(write(tmp_path / "a.jsonl")), "--figure", str(figure)]) == 0
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize("bad", [{"control_hz": 0.0}, {"control_hz": -5.0}, {"horizon": 0}, {"executed_steps": 30}])
def test_a_trace_that_cannot_be_used_is_named_by_file_line_and_field(
    tmp_path: Path, bad: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roofline", str(write(tmp_path / "bad.jsonl", **bad))]) == 2
    assert f"bad.jsonl:1: {next(iter(bad))}" in capsys.readouterr().err


def test_no_file_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
