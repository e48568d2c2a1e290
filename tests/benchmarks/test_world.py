"""The benchmark of worlds at toy size, as it is run: chosen cases in order, a file after every row."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import world


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    out = tmp_path / "world.json"
    monkeypatch.setattr(sys, "argv", ["world.py", "--small", "--gpus", "2", "--seconds", "0.05", "--out", str(out), *more])
    world.main()
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_cases_are_run_in_their_order_and_bursts_are_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, "--cases", "any/1/circular,whole")
    rows = result["rows"]
    assert [row["plan"] for row in rows] == ["circular", "whole"]
    for row in rows:
        assert "error" not in row
        assert row["chunks"] % row["in_flight"] == 0
        assert row["output_interval_ms"] > 0
        assert row["predicted"]["output_interval_ms"] > 0
        assert set(row["memory"]) == {f"cpu:{i}" for i in range(row["devices"])}
    assert result["profiles"]
    assert set(result["summary"][0]["frames_per_s"]) == {"circular", "whole"}


def test_what_cannot_end_in_time_is_listed_and_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.deploy.world_bench.START_S", 1e6)
    rows = run(tmp_path, monkeypatch, "--cases", "any/1/whole")["rows"]
    assert [(row["plan"], row["not_run"].split(":")[0]) for row in rows] == [("whole", "out of time")]


def test_a_case_says_model_frames_plans_and_what_else_is_unlike_the_usual() -> None:
    args = Namespace(small=False, windows=[21, 9], precision="dtype")
    assert world.read_case("wan2.2-5b/3/batched,by_step/w9/vae/fp8", args) == world.Shape(
        "wan2.2-5b", 3, 9, "vae", "fp8", ("batched", "by_step")
    )
    assert world.read_case("wan2.1-14b/1/whole", args) == world.Shape("wan2.1-14b", 1, 21, "none", "dtype", ("whole",))
    with pytest.raises(SystemExit, match="cannot read"):
        world.read_case("wan2.1-14b/1/whole/fast", args)
    with pytest.raises(SystemExit, match="cannot read"):
        world.read_case("wan2.1-14b/1/sideways", args)
