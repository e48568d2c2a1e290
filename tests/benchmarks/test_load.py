"""The load generator: every request is accounted for, and the two servers are what they say they are."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fleet
import load
import load_demand
import load_search
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
    trial = fleet.Trial(server, demand, 3, inputs, seed=0)
    asked = trial.run(1.0)
    assert len(asked) == len(server.deadlines)
    assert 3 * 15 <= len(asked) + len(trial.skipped) <= 3 * 21
    found = fleet.summary(asked, 3, demand, 0.0, 1.0, trial.skipped)
    assert found["refused"] == {"deadline": len(asked) // 3}
    beats = found["requests"] + found["skipped"]
    assert found["late"] + found["skipped"] + sum(found["refused"].values()) == round(found["missed"] * beats)
    for a, deadline_s in zip(asked, sorted(server.deadlines), strict=True):
        assert a.status in ("ok", "late", "refused")
        assert deadline_s < a.observed_s + 0.2


class Slow(Scripted):
    """Answers after a quarter of a second."""

    def submit(self, robot: int, inputs: Inputs, deadline_s: float) -> Future[Chunk]:
        future: Future[Chunk] = Future()
        threading.Timer(0.25, future.set_result, (chunk(),)).start()
        return future


def test_beats_that_pass_while_a_robot_waits_are_misses(inputs: list[Inputs]) -> None:
    demand = fleet.Demand(chunks_hz=10.0, deadline_ms=1000.0)
    trial = fleet.Trial(Slow(), demand, 2, inputs, seed=0)
    found = fleet.summary(trial.run(1.5), 2, demand, 0.0, 1.5, trial.skipped)
    assert found["late"] == 0
    assert found["skipped"] >= found["requests"] / 2
    assert found["missed"] == pytest.approx(found["skipped"] / (found["skipped"] + found["requests"]), abs=1e-4)


@pytest.mark.parametrize(("free_s", "beats"), [(0.5, 1), (1.0, 1), (1.2, 1), (1.99, 1), (2.0, 2), (3.7, 3)])
def test_a_robot_that_waited_observes_for_the_newest_beat_it_missed(free_s: float, beats: int) -> None:
    assert fleet.beats_passed(0.0, free_s, 1.0) == beats


def test_robots_that_do_not_wait_have_several_requests_out(ours: load.DeadlineAware, inputs: list[Inputs]) -> None:
    demand = fleet.Demand(chunks_hz=60.0, deadline_ms=20000.0, loop="open")
    asked = fleet.Trial(ours, demand, 5, inputs, seed=3).run(0.5)
    assert all(a.status == "ok" or a.reason == "superseded" for a in asked)
    assert any(b.observed_s < a.arrived_s for a in asked for b in asked if b.robot == a.robot and b.observed_s > a.observed_s)


def test_servers_of_both_precisions_live_side_by_side(inputs: list[Inputs]) -> None:
    options = load.parse(["--model", "tiny", "--device", "cpu", "--cap", "2", "--stock", "graph"])
    model = load.make_model("tiny", "cpu", "float32", ("identity",))
    bench = load.Bench(options, model, PROMPT, load_search.Report({}, None), inputs)

    def actions(precision: str) -> list[np.ndarray]:
        servers = list(bench.servers(precision))[:2]
        servers[0].join(0)
        found = [s.submit(0, inputs[0], float("inf")).result(30).outputs["x"] for s in servers]
        servers[0].leave_all()
        return found

    exact, coded, again = actions("dtype"), actions("fp8-emulated"), actions("dtype")
    bench.close()
    for before, after in zip(exact, again, strict=True):
        np.testing.assert_array_equal(before, after)
    assert 1e-6 < np.abs(coded[0] - exact[0]).max() < 0.5
    np.testing.assert_allclose(coded[0], coded[1], atol=0.1)
    told = bench.report.precisions["fp8-emulated"]
    assert told["calibration"]["observed"] == "synthetic"
    assert set(told["costs_ms"]) == set(bench.report.precisions["dtype"]["costs_ms"])


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


class Known(load_search.Search):
    """Holds up to eleven robots in a short run, and up to ten in a long one."""

    def trial(self, server: Any, robots: int, seconds: float | None = None) -> tuple[dict[str, Any], list[Any]]:
        most = 11 if seconds is None else 10
        missed = 0.0 if robots <= most else 0.5
        return {
            "robots": robots,
            "missed": missed,
            "missed_worst_kind": missed,
            "goodput_chunks_s": 10.0 * min(robots, most),
        }, []


@pytest.mark.parametrize("guess", [1, 7, 11, 12, 40])
def test_the_search_ends_at_the_largest_fleet_that_is_confirmed_wherever_it_begins(guess: int) -> None:
    nothing: Sequence[Inputs] = []
    best, tried, _ = Known(fleet.Demand(), nothing, 1.0, 2.0, most=64).largest(Scripted(), guess)
    assert (best["robots"], best["one_more"]["robots"]) == (10, 11)
    assert {11, 12} <= {t["robots"] for t in tried}
    assert len(tried) <= 8


def test_a_search_beyond_the_most_robots_ends_there() -> None:
    nothing: Sequence[Inputs] = []
    assert Known(fleet.Demand(), nothing, 1.0, 2.0, most=6).largest(Scripted(), 3)[0]["robots"] == 6


@pytest.mark.parametrize(
    "text",
    [
        "10:5",
        "10:5:100:1",
        "10:5:100:shut",
        "10:5:100:together:open",
        "0:5:100",
        "10:0:100",
        "10:5:nan",
        "ten:5:100",
        "inf:5:100",
        "10:5:100+",
        "0*10:5:100",
        "10:5:100=0",
    ],
)
def test_a_demand_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        load_demand.read_demand(text)


def test_demands_are_run_in_the_precisions_they_name_or_in_all() -> None:
    options = load.parse(["--precision", "fp8,dtype", "--demand", "10:5:100", "--demand", "10:5:200:open@fp8"])
    rows = [(d.deadline_ms, d.loop, precision) for d, precision, _ in load_demand.wanted(options)]
    assert rows == [(100.0, "closed", "fp8"), (100.0, "closed", "dtype"), (200.0, "open", "fp8")]


def test_robots_of_several_kinds_stand_in_one_fleet_in_turn() -> None:
    options = load.parse(["--demand", "2:3:60+2*2:25:500:open@dtype=46/15/2"])
    ((demand, precision, guesses),) = load_demand.wanted(options)
    assert (precision, guesses) == ("dtype", (46, 15, 2))
    assert [demand.of(robot).deadline_ms for robot in range(6)] == [60.0, 500.0, 500.0, 60.0, 500.0, 500.0]
    assert {d.loop: share for d, share in demand.kinds.items()} == {
        "closed": pytest.approx(1 / 3),
        "open": pytest.approx(2 / 3),
    }
    assert fleet.read_back(json.loads(json.dumps(asdict(demand)))) == demand
    assert str(demand) == "33% 2/s of 3 steps in 60 ms closed, 67% 2/s of 25 steps in 500 ms open"


def test_robots_of_one_trigger_observe_together_and_others_anywhere_in_their_period(inputs: list[Inputs]) -> None:
    ((demand, _, _),) = load_demand.wanted(load.parse(["--demand", "4:5:90:together+4:5:400:open@dtype", "--jitter", "0"]))
    assert str(demand) == "50% 4/s of 5 steps in 90 ms closed together, 50% 4/s of 5 steps in 400 ms open"
    assert fleet.read_back(json.loads(json.dumps(asdict(demand)))) == demand
    asked = fleet.Trial(Scripted(), demand, 12, inputs, seed=4).run(0.24)
    firsts = {a.robot: a.observed_s for a in reversed(asked)}
    together, others = ([firsts[r] for r in range(12) if r % 2 == odd] for odd in (0, 1))
    assert max(together) - min(together) < 0.03
    assert max(others) - min(others) > 0.05


def test_each_kind_of_robot_must_be_on_time_by_itself(inputs: list[Inputs]) -> None:
    # A quarter of a second suits every second robot, and not the others.
    tight = fleet.Demand(chunks_hz=2.0, deadline_ms=100.0)
    demand = replace(tight, also=(fleet.Demand(chunks_hz=2.0, deadline_ms=1000.0),))
    trial = fleet.Trial(Slow(), demand, 4, inputs, seed=0)
    found = fleet.summary(trial.run(1.5), 4, demand, 0.0, 1.5, trial.skipped)
    assert [kind["missed"] for kind in found["kinds"]] == [1.0, 0.0]
    assert found["missed_worst_kind"] == 1.0
    assert found["missed"] == pytest.approx(0.5, abs=0.15)


def test_a_precision_that_the_machine_does_not_have_and_a_lack_of_time_are_rows(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    short = ["--seconds", "0.2", "--most", "1", "--cap", "1", "--overload", "2", "--demand", "5:5:5000"]
    load.main(["--model", "tiny", "--device", "cpu", "--stock", "graph", *short, "--precision", "fp8", "--out", str(out)])
    assert "precision: got fp8 on cpu" in json.loads(out.read_text())["demands"][0]["error"]
    load.main(["--model", "tiny", "--device", "cpu", "--stock", "graph", *short, "--budget", "0", "--out", str(out)])
    assert json.loads(out.read_text())["demands"][0]["left"].startswith("no time")


def test_one_call_compares_both_servers_under_every_demand_and_overload(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    # A robot may wait a whole second: other tests may be at work beside this one.
    demands = ["--demand", "2:5:9000:together", "--demand", "1.8:10:9000:together", "--overload", "2"]
    short = ["--seconds", "0.7", "--confirm", "0.7", "--most", "1", "--cap", "2", *demands]
    load.main(["--model", "tiny", "--device", "cpu", "--stock", "graph", *short, "--out", str(out), "--traces", str(tmp_path)])
    found = json.loads(out.read_text())
    assert [row["demand"]["chunks_hz"] for row in found["demands"]] == [2.0, 1.8]
    for row in found["demands"]:
        assert set(row["robots_over"]) == {"single_flight", "single_flight_stock_torch"}
        for server in ("deadline_limited", *row["robots_over"]):
            assert row[server]["largest"]["robots"] >= 1
            assert row[server]["overload"]["2"]["goodput_kept"] > 0
            assert isinstance(row[server]["overload"]["2"]["refused"], dict)
    assert len(list(tmp_path.glob("load_*_trace.jsonl"))) == 6
