"""The overlap benchmark on a tiny model: all of its plans serve, and give the bits of a lone request."""

from __future__ import annotations

import argparse

import host_overhead
import overlap
import pytest
from overlap_plans import TOGETHER, plans

from stretto.runtime.engine import Engine

# On a CPU lanes have no parts, so what differs in them alone is one plan.
PLANS = plans(host_overhead.make(True, "cpu").route, "cpu", "eager", 2)
CPU_PLANS = [name for name in PLANS if "88" not in name and "96" not in name]


@pytest.mark.parametrize("name", CPU_PLANS)
def test_every_plan_serves_robots_and_its_chunks_are_those_of_a_lone_request(name: str) -> None:
    model = host_overhead.make(True, "cpu")
    prompt = model.config.tokenizer_max_length
    feed = host_overhead.feed_of(model, prompt)
    want = overlap.alone(model, "cpu", "eager", feed, prompt)
    together = name == TOGETHER
    args = argparse.Namespace(prompt=prompt, robots=2, seconds=0.2, rates=[20.0], closer=1, p99_ms=1e6)
    engine = Engine(model, plans(model.route, "cpu", "eager", 2)[name])
    engine.warm()
    try:
        row = overlap.measure(engine, feed, want, args, together)
    finally:
        engine.close()
    assert row["in_batches_of_one"] == row["of_them_bit_equal"]
    assert row["max_abs_of_all"] < 1e-5
    assert together or row["open"][0]["asked"] >= 2
    assert not together or row["in_batches_of_one"] == 0
    assert row["requests_per_s_at_p99"] > 0


def test_the_steps_of_a_request_add_up_to_no_more_than_its_wall_time() -> None:
    model = host_overhead.make(True, "cpu")
    prompt = model.config.tokenizer_max_length
    engine = Engine(model, plans(model.route, "cpu", "eager", 1)["one lane, whole route"], callers_launch=True)
    engine.warm()
    try:
        row = host_overhead.run(engine, host_overhead.feed_of(model, prompt), prompt, 20, "steps")
    finally:
        engine.close()
    assert list(row["steps_us"]) == ["submit", "pack", "hand in", "load", "launch", "leave", "finish", "hand back"]
    assert all(step["p50"] >= 0 for step in row["steps_us"].values())
    assert row["wall_ms"]["p50"] > row["device_ms"]["p50"]
