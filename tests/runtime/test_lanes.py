"""Lanes of one device: side by side they give what one gives, and nothing hangs or is reused too early."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import ITEMS, submit
from toy import CarryModel, ToyModel

from stretto.core.chunk import Chunk
from stretto.core.errors import DeadlineError, PlanError, StreamClosedError, WorkerDiedError
from stretto.core.plan import Device, Placement, Plan, overlapped, whole
from stretto.models import pi0
from stretto.runtime import launcher
from stretto.runtime.engine import Engine
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane, Touched
from stretto.runtime.timing import Stamp

DISPATCH = ["earliest_deadline_first", "fill_first", "deadline_limited"]


def lane_plan(model: ToyModel, cuts: set[int], lanes: list[int], cap: int, dispatch: str) -> Plan:
    segments = model.route.cut(cuts)
    placements = tuple(Placement(s, "cpu:0", lanes[i % len(lanes)]) for i, s in enumerate(segments))
    return Plan("test", (Device("cpu:0"),), {"default": placements}, {"cpu:0": cap}, dispatch=dispatch)


class Jittery:
    """A stage that lets other threads in before it begins, for as long as a seeded draw says."""

    def __init__(self, inner: object, seed: int) -> None:
        self.inner, self.spec = inner, inner.spec  # type: ignore[attr-defined]
        self.random = random.Random(seed)

    def run(self, rows: object) -> None:
        threading.Event().wait(self.random.choice([0.0, 1e-5, 1e-3]))
        self.inner.run(rows)  # type: ignore[attr-defined]


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(ITEMS, st.integers(-9, 9).map(float)), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 4)),
    lanes=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    cap=st.integers(1, 4),
    slots=st.integers(1, 4),
    dispatch=st.sampled_from(DISPATCH),
    callers_launch=st.booleans(),
    seed=st.integers(0, 99),
)
def test_whatever_lanes_a_route_runs_in_every_stream_gets_its_own_result(
    requests: list[tuple[list[float], float]],
    cuts: set[int],
    lanes: list[int],
    cap: int,
    slots: int,
    dispatch: str,
    callers_launch: bool,
    seed: int,
) -> None:
    model = ToyModel()
    model.stages = {name: Jittery(stage, seed) for name, stage in model.stages.items()}  # type: ignore[misc]
    engine = Engine(model, lane_plan(model, cuts, lanes, cap, dispatch), slots=slots, callers_launch=callers_launch)
    engine.warm()
    try:
        futures = [submit(engine.open(), items, x) for items, x in requests]
        for (items, x), future in zip(requests, futures, strict=True):
            np.testing.assert_array_equal(future.result(20).outputs["x"], np.full(3, model.expected(items, x)))
    finally:
        engine.close()


def test_two_chunks_really_run_at_the_same_time() -> None:
    model = ToyModel()
    together = threading.Barrier(2)

    class Meeting:
        """Goes on only once a task of the other lane is here too."""

        def __init__(self, inner: object) -> None:
            self.inner, self.spec = inner, inner.spec  # type: ignore[attr-defined]

        def run(self, rows: object) -> None:
            if waits.is_set():
                together.wait(20)
            self.inner.run(rows)  # type: ignore[attr-defined]

    waits = threading.Event()
    stages = dict(model.stages)
    plan = Plan(
        "test",
        (Device("cpu:0"),),
        {str(lane): (Placement(model.route.whole, "cpu:0", lane),) for lane in (0, 1)},
    )
    model.stages = {**stages, "encode": Meeting(stages["encode"])}  # type: ignore[dict-item]
    # With callers' launches the first submit would run on this thread and wait for the second for ever.
    engine = Engine(model, plan, callers_launch=False)
    engine.warm()
    try:
        waits.set()
        first, second = (submit(engine.open(stream_class=str(lane)), [1.0], 0.0) for lane in (0, 1))
        assert float(first.result(20).outputs["x"][0]) == float(second.result(20).outputs["x"][0]) == model.expected([1.0], 0.0)
    finally:
        engine.close()


def test_a_chunk_does_not_wait_for_the_lane_that_the_one_before_it_has_gone_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of a made-up device: a launch takes no time of the host, and each stage takes its lane as long as is said."""
    device = MadeUpDevice({"encode": 4.0, "refine": 1.0})
    monkeypatch.setattr(launcher, "Stamp", device.stamp)
    monkeypatch.setattr(Lane, "turn", lambda lane, beside: device.turn(lane.number))
    model = ToyModel(steps=4)
    model.stages = {name: device.timed(stage) for name, stage in model.stages.items()}
    engine = Engine(model, overlapped(model.route, "cpu:0"))
    engine.warm()
    device.free.clear()
    try:
        # Each is handed in when the one before it has been launched to its end.
        for i in range(6):
            assert submit(engine.open(), [1.0], i).result(20).outputs["x"][0] == model.expected([1.0], i)
    finally:
        engine.close()
    # The first lane is never idle, and the second goes on beside it.
    assert device.free == {0: 6 * 4.0, 1: 6 * 4.0 + 4.0}


class MadeUpDevice:
    """A clock for each lane, which is far behind the host."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.free = seconds, {}
        self.here = threading.local()

    def turn(self, lane: int) -> None:
        self.here.lane = lane

    def add(self, seconds: float, not_before: float = 0.0) -> float:
        lane = getattr(self.here, "lane", 0)
        self.free[lane] = max(self.free.get(lane, 0.0), not_before) + seconds
        return self.free[lane]

    def timed(self, stage: object) -> Timed:
        return Timed(self, stage)

    def stamp(self, device: torch.device, stream: object = None) -> Later:
        return Later(self, device)


class Timed:
    def __init__(self, device: MadeUpDevice, inner: object) -> None:
        self.device, self.inner, self.spec = device, inner, inner.spec  # type: ignore[attr-defined]

    def run(self, rows: object) -> None:
        self.device.add(self.device.seconds[self.spec.name])
        self.inner.run(rows)  # type: ignore[attr-defined]


class Later(Stamp):
    """A point that the made-up device has not reached yet."""

    __slots__ = ("at", "made_up")

    def __init__(self, made_up: MadeUpDevice, device: torch.device) -> None:
        super().__init__(device)
        self.made_up, self.at = made_up, made_up.add(0.0)

    def reached(self) -> bool:
        return False

    def hold(self) -> None:
        self.made_up.add(0.0, self.at)


def test_the_overlapped_plan_cuts_before_the_stage_that_is_visited_again() -> None:
    model = ToyModel(steps=3)
    plan = overlapped(model.route, "cpu:0", between_visits=True)
    assert [(p.segment.start, p.lane) for p in plan.placements("default")] == [(0, 0), (1, 1), (2, 1), (3, 1)]
    assert Plan.from_json(plan.to_json()) == plan
    confined = replace(plan, lane_sms={"cpu:0": (96, 0)})
    assert Plan.from_json(confined.to_json()) == confined
    with pytest.raises(PlanError, match="visited more than once"):
        overlapped(ToyModel(steps=1).route, "cpu:0")


@pytest.mark.parametrize("sms", [(8,), (8, -1), (8, 8, 8)])
def test_parts_of_a_device_that_do_not_fit_its_lanes_are_refused(sms: tuple[int, ...]) -> None:
    model = ToyModel()
    plan = replace(overlapped(model.route, "cpu:0"), lane_sms={"cpu:0": sms})
    with pytest.raises(PlanError, match="a number for each lane"):
        plan.validate(model.route)


def test_lanes_are_refused_for_a_model_whose_state_would_change_lanes() -> None:
    model = CarryModel()
    segments = model.route.cut({2})
    plan = Plan("test", (Device("cpu:0"),), {"default": tuple(Placement(s, "cpu:0", i) for i, s in enumerate(segments))})
    with pytest.raises(PlanError, match="keeps state"):
        Engine(model, plan)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(close_at=st.integers(0, 6), cancel=st.sets(st.integers(0, 9)), callers_launch=st.booleans(), seed=st.integers(0, 99))
def test_closing_and_cancelling_in_the_middle_ends_every_chunk_and_leaves_the_others_right(
    close_at: int, cancel: set[int], callers_launch: bool, seed: int
) -> None:
    model = ToyModel()
    model.stages = {name: Jittery(stage, seed) for name, stage in model.stages.items()}  # type: ignore[misc]
    engine = Engine(model, overlapped(model.route, "cpu:0", batch_cap=2, between_visits=True), callers_launch=callers_launch)
    engine.warm()
    try:
        leaver, stayer = engine.open(), engine.open()
        left: list[Future[Chunk]] = []
        stayed: list[tuple[float, Future[Chunk]]] = []
        for i in range(10):
            if i == close_at:
                leaver.close()
            if i < close_at:
                left.append(submit(leaver, [1.0], float(i)))
            stayed.append((float(i), submit(stayer, [float(i)], float(i))))
            if i in cancel:
                stayed[-1][1].cancel()
        for x, future in stayed:
            try:
                assert float(future.result(20).outputs["x"][0]) == model.expected([x], x)
            except CancelledError:
                assert int(x) in cancel
        for i, future in enumerate(left):
            error = future.exception(20)
            assert isinstance(error, StreamClosedError) or float(future.result().outputs["x"][0]) == model.expected([1.0], i)
    finally:
        engine.close()


@pytest.mark.parametrize("callers_launch", [False, True])
def test_a_stage_that_raises_in_one_lane_ends_the_chunks_of_all_lanes(callers_launch: bool) -> None:
    model = ToyModel()
    calls = iter(range(100))

    class Broken:
        spec = model.stages["refine"].spec

        def run(self, rows: object) -> None:
            if next(calls) >= 5:
                raise RuntimeError("lane fault")
            threading.Event().wait(1e-3)

    model.stages = {**model.stages, "refine": Broken()}
    engine = Engine(model, overlapped(model.route, "cpu:0", between_visits=True), callers_launch=callers_launch)
    engine.warm()
    try:
        futures = [submit(engine.open(), [1.0], 0.0) for _ in range(8)]
        wait(futures, 20)
        failed = [f.exception(0) for f in futures if f.exception(0) is not None]
        assert failed
        assert all(isinstance(e, WorkerDiedError) for e in failed)
        assert engine.dead is not None
        assert "lane fault" in engine.dead
    finally:
        engine.close()


@pytest.mark.parametrize("lanes", [[0], [0, 1]])
def test_a_callers_own_launch_never_runs_the_callbacks_of_failed_chunks(lanes: list[int]) -> None:
    model = ToyModel()
    engine = Engine(model, lane_plan(model, {1}, lanes, 2, "deadline_limited"), callers_launch=True)
    engine.warm()
    told: Future[int] = Future()
    try:
        stream = engine.open()
        inputs = {"items": np.ones(1, np.float32), "count": np.asarray(1, np.int32), "x": np.zeros(3)}
        with engine.together():
            late = stream.submit(inputs, lengths={"items": 1}, deadline_s=engine.now_s - 1.0)
            late.add_done_callback(lambda _: told.set_result(threading.get_ident()))
        with pytest.raises(DeadlineError):
            late.result(20)
        assert submit(stream, [2.0], 0.0).result(20).outputs["x"][0] == model.expected([2.0], 0.0)
        assert told.result(20) != threading.get_ident()
    finally:
        engine.close()


@settings(max_examples=10, deadline=None)
@given(robots=st.integers(1, 4), callers_launch=st.booleans(), two=st.booleans())
def test_robots_that_wait_without_a_time_limit_all_get_their_own_chunks(robots: int, callers_launch: bool, two: bool) -> None:
    model = ToyModel()
    plan = overlapped(model.route, "cpu:0", batch_cap=2) if two else lane_plan(model, set(), [0], 2, "earliest_deadline_first")
    engine = Engine(model, plan, callers_launch=callers_launch)
    engine.warm()
    wrong: list[object] = []

    def robot(number: int) -> None:
        stream = engine.open()
        for i in range(6):
            got = submit(stream, [float(number), float(i)], 1.0).result().outputs["x"][0]
            if got != model.expected([float(number), float(i)], 1.0):
                wrong.append((number, i, got))

    try:
        threads = [threading.Thread(target=robot, args=(n,)) for n in range(robots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
    finally:
        engine.close()


@pytest.fixture(scope="module")
def on_gpu() -> tuple[pi0.Pi0Model, list[dict[str, np.ndarray]]]:
    model = pi0.build(pi0.tiny()[0].config, device="cuda:0", dtype="bfloat16")
    model.randomize(seed=0)
    batch = model.example_inputs(8, seed=3)
    return model, [{name: value[i].numpy() for name, value in batch.items()} for i in range(8)]


def asked(model: pi0.Pi0Model, feed: list[dict[str, np.ndarray]], plan: Plan) -> list[np.ndarray]:
    engine = Engine(model, plan, slots=3)
    engine.warm()
    streams = [engine.open() for _ in feed]
    lengths = [{"prompt": int(x["token_count"])} for x in feed]
    futures = [streams[i % 8].submit(feed[i % 8], lengths=lengths[i % 8]) for i in range(80)]
    found = [f.result(60).outputs["x"] for f in futures]
    engine.close()
    return found


@pytest.mark.gpu
def test_lanes_of_a_gpu_give_the_bits_of_a_lone_request(on_gpu: tuple[pi0.Pi0Model, list[dict[str, np.ndarray]]]) -> None:
    model, feed = on_gpu
    plans = (whole(model.route, "cuda:0", mode="graph"), overlapped(model.route, "cuda:0", mode="graph"))
    for one, two in zip(*(asked(model, feed, plan) for plan in plans), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.gpu
def test_lanes_on_parts_of_a_gpu_give_what_a_lone_request_gets(
    on_gpu: tuple[pi0.Pi0Model, list[dict[str, np.ndarray]]],
) -> None:
    model, feed = on_gpu
    count = torch.cuda.get_device_properties(0).multi_processor_count
    first = count * 2 // 3 // 8 * 8
    parted = replace(
        overlapped(model.route, "cuda:0", mode="graph", between_visits=True), lane_sms={"cuda:0": (first, count - first)}
    )
    plans = (whole(model.route, "cuda:0", mode="graph"), parted)
    for one, two in zip(*(asked(model, feed, plan) for plan in plans), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=2e-2)


def test_a_lane_is_at_work_beyond_what_one_waits_for_while_somebody_waits_there() -> None:
    device = torch.device("cpu")
    lane, other = (Lane(i, device, clock=time.monotonic) for i in (0, 1))
    assert not other.at_work_beyond(())
    end = Unreached(device)
    other.gave(end, 0.0)
    assert other.at_work_beyond(())
    assert not other.at_work_beyond([end])
    touched = Touched(2)
    flow = Flow(0, 0, (), slot=1)
    touched.note(other, [1], end)
    assert (list(touched.ends(lane, [flow])), list(touched.ends(other, [flow]))) == ([end], [])
    other.waiting = [flow]
    assert other.at_work_beyond([end])


class Unreached(Stamp):
    """A point that the device does not reach."""

    def reached(self) -> bool:
        return False
