"""Why a row of pi05_table.py misses its target: how far each stage and call is above its floor, and what of that is the clock.

Floors are at the chip's peak rates, which are of its full clock. Under load the clock falls, and what is bound by arithmetic
takes that much longer whatever its kernel: a floor at the clock seen during the row says how much.
"""

from __future__ import annotations

from typing import Any

FULL_MHZ = 1980.0
EXPLAINED = 8
Row = dict[str, Any]


def clock_of(seen: Row) -> float | None:
    """Return the median clock of what `Chip.between` said, if it said anything."""
    clocks = seen.get("sm_mhz")
    return None if clocks is None else float(clocks[1])


def missed_by(row: Row) -> Row:
    """Return how far each stage of a request is above its floor, and the calls that are furthest above theirs.

    `floor_ms` is at the full clock, `floor_at_clock_ms` at the one seen. A call whose shapes do not tell its floor has none.
    """
    whole = clock_of(row[row["measured"]]) or FULL_MHZ
    stages, calls = [], []
    for name, its in row["stages"].items():
        slower = FULL_MHZ / (clock_of(its) or whole)
        seen = its["profile_of_one_visit"]
        # Kernels that overlap add up to more than the stage takes: each counts for its share of that.
        share = min(1.0, its["ms"] * 1e3 / (seen["kernel_us"] * its["visits"]))
        ours = [_call(name, call, its["visits"], share, slower) for call in seen["calls"]]
        known = [c for c in ours if c["floor_ms"] is not None]
        floor, at_clock = (sum(c[field] for c in known) for field in ("floor_ms", "floor_at_clock_ms"))
        calls += ours
        stages.append(
            {"stage": name, "ms": its["ms"], **_above(its["ms"], its["floor_ms"], at_clock / floor if floor else 1.0)}
        )
    calls.sort(key=lambda call: -(call["ms"] if call["floor_ms"] is None else call["ms"] - call["floor_at_clock_ms"]))
    of_clock = sum(s["floor_at_clock_ms"] - s["floor_ms"] for s in stages)
    above = row["p50_ms"] - row["floor_ms"]
    return {
        "above_target_ms": round(row["p50_ms"] - row["must_ms"], 3),
        "sm_mhz": whole,
        "above_floor_ms": round(above, 3),
        "of_clock_ms": round(of_clock, 3),
        "of_kernels_ms": round(above - of_clock, 3),
        "stages": stages,
        "calls": calls[:EXPLAINED],
    }


def _call(stage: str, call: Row, visits: int, share: float, slower: float) -> Row:
    ms, floor = call["us"] * visits * share / 1e3, call["floor_us"]
    if floor is None:
        return {"stage": stage, "call": call["call"], "ms": round(ms, 3), "floor_ms": None, "floor_at_clock_ms": None}
    floor_ms = floor * visits / 1e3
    slower = slower if call.get("bound", "arithmetic") == "arithmetic" else 1.0
    return {"stage": stage, "call": call["call"], "ms": round(ms, 3), **_above(ms, floor_ms, slower)}


def _above(ms: float, floor_ms: float, slower: float) -> dict[str, float]:
    at_clock = floor_ms * slower
    return {
        "floor_ms": round(floor_ms, 3),
        "floor_at_clock_ms": round(at_clock, 3),
        "above_floor_ms": round(ms - floor_ms, 3),
        "above_at_clock_ms": round(ms - at_clock, 3),
    }


def named(call: Row) -> str:
    """Return a call with what it takes above its floor at the clock, and how many times that floor it is."""
    if call["floor_ms"] is None:
        return f"{call['call']} {call['ms']:.2f}"
    times = call["ms"] / max(call["floor_at_clock_ms"], 1e-9)
    return f"{call['call']} +{call['above_at_clock_ms']:.2f} ({times:.2f})"
