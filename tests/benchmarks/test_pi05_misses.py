"""A miss is told by what the clock takes and by what kernels take above their floors at that clock."""

from __future__ import annotations

import pytest
from pi05_misses import missed_by, named


def row(mhz: float) -> dict[str, object]:
    calls = [
        {"call": "product 8x4x2", "us": 1500.0, "floor_us": 1000.0, "bound": "arithmetic"},
        {"call": "norm 8x2", "us": 400.0, "floor_us": 100.0, "bound": "memory"},
        {"call": "aten::copy_", "us": 50.0, "floor_us": None, "bound": "memory"},
    ]
    stage = {"ms": 4.0, "visits": 2, "floor_ms": 2.2, "profile_of_one_visit": {"kernel_us": 1950.0, "calls": calls}}
    rested = {"p50_ms": 4.0, "sm_mhz": [mhz - 100, mhz, 1980.0]}
    return {
        "measured": "rested",
        "rested": rested,
        "p50_ms": 4.0,
        "must_ms": 3.0,
        "floor_ms": 2.2,
        "met": False,
        "stages": {"prefix": stage},
    }


def test_arithmetic_follows_the_clock_and_memory_does_not() -> None:
    why = missed_by(row(1485.0))
    product, norm = (next(c for c in why["calls"] if c["call"].startswith(name)) for name in ("product", "norm"))
    assert (product["floor_ms"], product["floor_at_clock_ms"]) == (2.0, pytest.approx(2.0 * 1980 / 1485, abs=1e-3))
    assert norm["floor_at_clock_ms"] == norm["floor_ms"] == pytest.approx(0.2)
    assert why["of_clock_ms"] == pytest.approx(2.0 * (1980 / 1485 - 1), abs=2e-3)
    assert why["of_clock_ms"] + why["of_kernels_ms"] == pytest.approx(why["above_floor_ms"], abs=2e-3)


def test_at_the_full_clock_all_of_a_miss_is_kernels() -> None:
    why = missed_by(row(1980.0))
    assert (why["of_clock_ms"], why["of_kernels_ms"]) == (0.0, pytest.approx(1.8))
    assert [c["call"] for c in why["calls"]] == ["product 8x4x2", "norm 8x2", "aten::copy_"]


def test_kernels_that_overlap_count_for_their_share() -> None:
    its = row(1980.0)
    its["stages"]["prefix"]["profile_of_one_visit"]["kernel_us"] = 4000.0  # type: ignore[index]
    product = next(c for c in missed_by(its)["calls"] if c["call"].startswith("product"))
    assert product["ms"] == pytest.approx(1.5 * 2 * 0.5)


def test_a_call_is_named_with_what_it_takes_above_its_floor() -> None:
    calls = missed_by(row(1485.0))["calls"]
    assert [named(call) for call in calls] == ["norm 8x2 +0.60 (4.00)", "product 8x4x2 +0.33 (1.12)", "aten::copy_ 0.10"]
