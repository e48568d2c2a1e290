"""The load generator: every request is accounted for, and the two servers are what they say they are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fleet
import load
import numpy as np
import pytest
from fcfs_single_flight import Inputs, SingleFlight

from stretto.control.roofline import locate
from stretto.control.trace import parse_trace
from stretto.core.chunk import Chunk
from stretto.core.errors import DeadlineError
from stretto.models import pi0

PROMPT = 12


@pytest.fixture(scope="module")
def model() -> pi0.Pi0Model:
    return load.make_model("tiny", "cpu", "float32", ("identity",))


@pytest.fixture(scope="module")
def inputs(model: pi0.Pi0Model) -> list[Inputs]:
    return load.make_inputs(model, PROMPT)


@pytest.fixture(scope="module")
def ours(model: pi0.Pi0Model) -> Iterator[load.DeadlineAware]:
    server = load.DeadlineAware(model, "cpu", "eager", prompt=PROMPT, plan="stages", cap=4, buckets=(1, 2))
    yield server
    server.close()


@pytest.fixture(scope="module")
def theirs(model: pi0.Pi0Model) -> Iterator[SingleFlight]:
    server = SingleFlight(model, "cpu", "eager", prompt=PROMPT)
    yield server
    server.close()


def chunk(**changes: Any) -> Chunk:
    base = {"stream": 0, "index": 0, "outputs": {}, "mode": "eager", "queue_ms": 2.0, "run_ms": 10.0}
    return Chunk(**{**base, "stage_ms": {"denoise": 8.0}, "batch_sizes": {"denoise": 2}, **changes})


class Scripted:
    """Answers at once, or refuses every third request."""

    name = "scripted"

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    def join(self, robot: int) -> None: ...
    def leave_all(self) -> None: ...
    def close(self) -> None: ...
    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]:
        self.deadlines.append(deadline_s)
        future: Future[Chunk] = Future()
        if len(self.deadlines) % 3 == 0:
            future.set_exception(DeadlineError("deadline", "too late"))
        else:
            future.set_result(chunk())
        return future


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_robots_ask_at_their_rate_and_every_request_ends_in_one_way(loop: str, inputs: list[Inputs]) -> None:
    demand = fleet.Demand(chunks_hz=20.0, loop=loop)
    server = Scripted()
    asked = fleet.Trial(server, demand, 3, inputs, seed=0).run(1.0)
    assert len(asked) == len(server.deadlines)
    assert 3 * 15 <= len(asked) <= 3 * 21
    found = fleet.summary(asked, 3, demand, 0.0, 1.0)
    assert found["refused"] == {"deadline": len(asked) // 3}
    assert found["late"] + sum(found["refused"].values()) == round(found["missed"] * len(asked))
    for a, deadline_s in zip(asked, sorted(server.deadlines), strict=True):
        assert a.status in ("ok", "late", "refused")
        assert deadline_s < a.observed_s + 0.2


def test_the_trace_of_a_trial_can_be_placed_on_the_roofline(inputs: list[Inputs]) -> None:
    demand = fleet.Demand(chunks_hz=20.0)
    asked = fleet.Trial(Scripted(), demand, 2, inputs, seed=1).run(0.5)
    requests = parse_trace(fleet.trace_lines(asked, demand, horizon=10))
    assert len(requests) == len(asked)
    point = locate("scripted", requests)
    assert point.control_hz == 100.0
    assert point.fleet is not None
    assert {r.status for r in requests} >= {"refused"}


def test_single_flight_answers_one_request_at_a_time_in_order(theirs: SingleFlight, inputs: list[Inputs]) -> None:
    order: list[int] = []
    futures = [theirs.submit(i, inputs[i], 0.0) for i in range(4)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))
    done = [future.result(30) for future in futures]
    assert order == [0, 1, 2, 3]
    assert all(max(c.batch_sizes.values()) == 1 for c in done)
    assert [c.queue_ms for c in done] == sorted(c.queue_ms for c in done)


def test_both_servers_give_the_same_actions(theirs: SingleFlight, ours: load.DeadlineAware, inputs: list[Inputs]) -> None:
    for robot in range(3):
        ours.join(robot)
    a = [ours.submit(i, inputs[i], float("inf")) for i in range(3)]
    b = [theirs.submit(i, inputs[i], 0.0) for i in range(3)]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.result(30).outputs["x"], y.result(30).outputs["x"], atol=1e-5)
    ours.leave_all()


def test_a_fleet_beyond_the_limit_is_refused_with_reasons_and_the_rest_is_on_time(
    ours: load.DeadlineAware, inputs: list[Inputs]
) -> None:
    demand = fleet.Demand(chunks_hz=20.0, deadline_ms=25.0, network_ms=0.5, network_jitter_ms=0.0)
    asked = fleet.Trial(ours, demand, 24, inputs, seed=2).run(1.0)
    found = fleet.summary(asked, 24, demand, 0.0, 1.0)
    assert set(found["refused"]) <= {"deadline", "superseded"}
    assert found["refused"].get("deadline", 0) > 0


class Known(load.Search):
    """Holds up to eleven robots in a short run, and up to ten in a long one."""

    def trial(self, server: Any, robots: int, seconds: float | None = None) -> tuple[dict[str, Any], list[Any]]:
        most = 11 if seconds is None else 10
        return {"robots": robots, "missed": 0.0 if robots <= most else 0.5, "goodput_chunks_s": 10.0 * min(robots, most)}, []


@pytest.mark.parametrize("guess", [1, 7, 11, 12, 40])
def test_the_search_ends_at_the_largest_fleet_that_is_confirmed_wherever_it_begins(guess: int) -> None:
    nothing: Sequence[Inputs] = []
    best, tried, _ = Known(fleet.Demand(), nothing, 1.0, most=64).largest(Scripted(), guess)
    assert best["robots"] == 10
    assert {11, 12} <= {t["robots"] for t in tried}
    assert len(tried) <= 8


def test_a_search_beyond_the_most_robots_ends_there() -> None:
    nothing: Sequence[Inputs] = []
    assert Known(fleet.Demand(), nothing, 1.0, most=6).largest(Scripted(), 3)[0]["robots"] == 6


@pytest.mark.parametrize("text", ["10:5", "10:5:100:1", "0:5:100", "10:0:100", "10:5:nan", "ten:5:100", "inf:5:100"])
def test_a_demand_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        load.read_demand(text)


def test_one_call_compares_both_servers_under_every_demand_and_overload(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    short = [
        "--seconds",
        "0.3",
        "--most",
        "3",
        "--cap",
        "2",
        "--demand",
        "5:5:5000",
        "--demand",
        "4:10:5000",
        "--overload",
        "2",
    ]
    load.main(["--model", "tiny", "--device", "cpu", *short, "--out", str(out), "--traces", str(tmp_path)])
    found = json.loads(out.read_text())
    assert [row["demand"]["chunks_hz"] for row in found["demands"]] == [5.0, 4.0]
    for row in found["demands"]:
        for server in ("deadline_limited", "single_flight"):
            assert row[server]["largest"]["robots"] >= 1
            assert row[server]["overload"]["2"]["goodput_kept"] > 0
            assert isinstance(row[server]["overload"]["2"]["refused"], dict)
    assert len(list(tmp_path.glob("load_*_trace.jsonl"))) == 4
