"""The table of all that was asked: every row is there whatever has run, with ratios and reasons where they are known."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import roofline_table
from roofline_rows import markdown, table_of
from roofline_table import Part, Run, Table

NAME = "B=4, prefix 968, bf16"


def pi05(ms: float) -> dict[str, Any]:
    call = {"call": "product 8x4x2", "ms": 5.0, "floor_ms": 2.0, "floor_at_clock_ms": 2.5, "above_at_clock_ms": 2.5}
    stage = {"stage": "denoise", "above_at_clock_ms": 4.0}
    why = {"of_clock_ms": 1.5, "of_kernels_ms": 4.0, "sm_mhz": 1890.0, "stages": [stage], "calls": [call]}
    row = {"p50_ms": ms, "must_ms": 34.0, "stretch_ms": 31.0, "floor_ms": 24.3, "met": ms <= 34.0}
    return {"rows": {NAME: row if ms <= 34.0 else row | {"missed_by": why}}}


def lanes(held: float, robots: int = 1) -> dict[str, Any]:
    closed = {"requests_per_s": held, "latency_ms": {"p99": 17.0}}
    return {
        "requests_per_s_at_p99": held,
        "stage_ms": {"vision+prefix": 8.0, "denoise": 8.5},
        "closed": closed,
        "open": [],
        "in_batches_of_one": 7 if robots == 1 else 0,
    }


def found(rows: list[dict[str, Any]], start: str) -> dict[str, Any]:
    return next(r for r in rows if r["row"].startswith(start))


def test_every_row_is_there_before_anything_has_run() -> None:
    rows = table_of({})
    assert len(rows) == 16
    assert {row["took"] for row in rows} == {None}
    assert markdown(rows).count("not measured") == 16


def test_a_row_has_the_times_of_others_over_ours_and_the_faster_stock_torch() -> None:
    stock = {"B=4, prefix 968": {"p50_ms": 80.0}, "B=4, prefix 968, compiled": {"p50_ms": 60.0}}
    others = {"stock": {"rows": stock}, "lerobot": {"rows": {"B=4, prefix 968": {"p50_ms": 300.0}}}}
    row = found(table_of({"pi05": pi05(30.0), **others}), "pi0.5 B=4, prefix 968, bf16")
    assert row["ratios"] == {"stock torch": {"ms": 60.0, "times_ours": 2.0}, "LeRobot": {"ms": 300.0, "times_ours": 10.0}}
    assert (row["met"], row["stretch_met"]) == (True, True)


def test_a_miss_is_told_with_its_calls_and_a_met_row_is_not() -> None:
    row = found(table_of({"pi05": pi05(38.0)}), "pi0.5 B=4, prefix 968, bf16")
    assert "product 8x4x2 +2.50 (2.00)" in row["why"]
    assert "| **missed** |" in markdown([row])
    assert "why" not in found(table_of({"pi05": pi05(33.0)}), "pi0.5 B=4, prefix 968, bf16")


@pytest.mark.parametrize(("per_s", "met"), [(114.9, False), (115.0, True)])
def test_more_requests_are_better_and_the_best_way_counts(per_s: float, met: bool) -> None:
    rows = {"two robots, FP8: one lane": lanes(100.0), "two robots, FP8: two lanes": lanes(per_s)}
    row = found(table_of({"pi05": {"rows": rows}}), "two overlapped requests, FP8")
    assert (row["took"], row["by"], row["met"]) == (per_s, "two lanes", met)
    assert "which allow 117.6/s" in row["why"]


def test_a_batch_of_two_allows_twice_its_rate() -> None:
    rows = {"two robots, FP8: together": lanes(100.0, robots=2)}
    assert "which allow 235.3/s" in found(table_of({"pi05": {"rows": rows}}), "two overlapped requests, FP8")["why"]


def test_a_part_is_taken_over_row_by_row_and_one_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text(
        "import json, sys\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        f"open(out, 'w').write(json.dumps({pi05(30.0)!r}))\n"
        "print('{}')\n"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit('no such device')")
    parts = (Part("lerobot", "bad.py", (), 5.0), Part("pi05", "good.py", (), 5.0))
    monkeypatch.setattr(roofline_table, "HERE", tmp_path)
    monkeypatch.setattr(roofline_table, "PARTS", parts)
    table = Table(tmp_path / "table.json", {})
    run = Run(Namespace(parts=["lerobot", "pi05"], budget=100.0, small=False, peers=None), table, tmp_path)
    run.on(None, ahead=True)
    written = json.loads((tmp_path / "table.json").read_text())
    assert "no such device" in written["errors"]["lerobot"]
    assert found(written["table"], "pi0.5 B=4, prefix 968, bf16")["took"] == 30.0


def test_parts_for_which_no_time_is_left_are_said_not_to_have_run(tmp_path: Path) -> None:
    table = Table(None, {})
    run = Run(Namespace(parts=["stock"], budget=10.0, small=True, peers=None), table, tmp_path)
    run.on(None, ahead=True)
    assert table.result["errors"] == {"stock": "not run: no time left"}
