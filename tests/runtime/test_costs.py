"""Costs that look-ahead dispatch holds against deadlines, and how long a stream's use of the device is remembered."""

from __future__ import annotations

import pytest

from stretto.core.plan import per_visit
from stretto.models import pi0
from stretto.runtime.costs import HALF_LIFE_S, Backlog, Served, progress
from stretto.runtime.engine import Engine


def test_every_piece_of_a_plan_is_measured_at_every_batch_size() -> None:
    model = pi0.tiny(("identity",))[0]
    plan = per_visit(model.route, "cpu", batch_cap=3).with_dispatch("deadline_limited")
    engine = Engine(model, plan)
    assert not engine.costs
    engine.warm()
    try:
        assert set(engine.costs) == {("vision",), ("prefix",), ("denoise",)}
        for seconds in engine.costs.values():
            assert len(seconds) == 3
            assert min(seconds) > 0
    finally:
        engine.close()


def test_a_plan_that_does_not_look_ahead_measures_nothing() -> None:
    model = pi0.tiny()[0]
    engine = Engine(model, per_visit(model.route, "cpu"))
    engine.warm()
    assert not engine.costs
    engine.close()


def test_progress_goes_by_time_where_it_is_known_and_by_visits_else() -> None:
    route = pi0.tiny()[0].route
    placements = per_visit(route, "cpu").classes["default"]
    by_time = progress(route, placements, [4.0, 3.0, 1.0, 1.0, 1.0])
    assert by_time[0] == (0.4, 6.0)
    assert by_time[-1] == (1.0, 0.0)
    assert progress(route, placements, [0.0] * 5)[0] == (pytest.approx(0.2), 0.0)


def test_the_past_is_forgotten_by_halves() -> None:
    served = Served()
    served.add(1, 0.8, now_s=10.0)
    assert served.of(1, 10.0 + HALF_LIFE_S) == pytest.approx(0.4)
    served.add(1, 0.1, now_s=10.0 + HALF_LIFE_S)
    assert served.of(1, 10.0 + HALF_LIFE_S) == pytest.approx(0.5)
    assert served.of(2, 10.0) == 0.0
    served.forget(1)
    assert served.of(1, 10.0) == 0.0


def test_the_device_is_free_when_all_that_was_handed_over_is_done() -> None:
    backlog = Backlog()
    assert backlog.free_s(5.0) == 5.0
    backlog.give(0.2, 5.0)
    backlog.give(0.3, 5.1)
    assert backlog.free_s(5.1) == pytest.approx(5.5)
    backlog.reach(True, 5.25)  # slower than its cost says: the rest is put off
    assert backlog.free_s(5.3) == pytest.approx(5.55)
    backlog.reach(False, 5.5)  # ended before anyone looked
    assert backlog.free_s(5.6) == 5.6
