"""The engine on a toy model: batching, cutting, closing and failing must not change what a stream gets."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import CarryModel, ToyModel

from stretto.core.chunk import Chunk
from stretto.core.errors import CapacityError, FieldError, PlanError, StreamClosedError, WorkerDiedError
from stretto.core.plan import Device, Placement, Plan, whole
from stretto.runtime.engine import Engine, Stream

CHUNKS = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=5)
ITEMS = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=8)


def plan_with_cuts(
    model: ToyModel | CarryModel, cuts: set[int], cap: int, devices: int = 1, dispatch: str = "earliest_deadline_first"
) -> Plan:
    segments = model.route.cut(cuts)
    names = [f"cpu:{i}" for i in range(devices)]
    placements = tuple(Placement(s, names[i * devices // len(segments)]) for i, s in enumerate(segments))
    return Plan("test", tuple(Device(n) for n in names), {"default": placements}, dict.fromkeys(names, cap), dispatch=dispatch)


def submit(stream: Stream, items: list[float], x: float) -> Future[Chunk]:
    inputs = {
        "items": np.asarray(items, np.float32),
        "count": np.asarray(len(items), np.int32),
        "x": np.full(stream.engine.model.values["x"].shape, x, np.float64),
    }
    return stream.submit(inputs, lengths={"items": len(items)})


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = ToyModel()
    engine = Engine(model, whole(model.route, "cpu:0", batch_cap=4))
    engine.warm()
    yield engine
    engine.close()


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(st.tuples(ITEMS, st.integers(-9, 9).map(float)), min_size=1, max_size=12),
    cuts=st.sets(st.integers(1, 4)),
    cap=st.integers(1, 5),
    devices=st.integers(1, 3),
    dispatch=st.sampled_from(["earliest_deadline_first", "fill_first", "first_come_first_served"]),
)
def test_every_stream_gets_its_own_result_however_the_route_is_cut_and_batched(
    requests: list[tuple[list[float], float]], cuts: set[int], cap: int, devices: int, dispatch: str
) -> None:
    model = ToyModel()
    engine = Engine(model, plan_with_cuts(model, cuts, cap, devices, dispatch))
    engine.warm()
    try:
        futures = [submit(engine.open(), items, x) for items, x in requests]
        for (items, x), future in zip(requests, futures, strict=True):
            np.testing.assert_array_equal(future.result(20).outputs["x"], np.full(3, model.expected(items, x)))
    finally:
        engine.close()


def test_a_chunk_says_how_it_ran(engine: Engine) -> None:
    chunk = submit(engine.open(), [1.0, 2.0], 0.0).result(5)
    assert chunk.mode == "eager"
    assert set(chunk.stage_ms) == {"encode+refine"}
    assert chunk.batch_sizes == {"encode+refine": 1}
    assert chunk.queue_ms >= 0
    assert chunk.run_ms > 0


def test_results_do_not_change_when_later_requests_reuse_the_slots(engine: Engine) -> None:
    stream = engine.open()
    first = submit(stream, [1.0], 0.0).result(5)
    kept = first.outputs["x"].copy()
    for i in range(50):
        submit(stream, [float(i)] * 8, 1.0).result(5)
    np.testing.assert_array_equal(first.outputs["x"], kept)
    np.testing.assert_array_equal(submit(stream, [1.0], 0.0).result(5).outputs["x"], kept)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"items": np.zeros(9, np.float32)}, "items"),
        ({"items": np.zeros(3, np.float64)}, "items"),
        ({"x": np.zeros((3, 1), np.float64)}, "x"),
        ({"extra": np.zeros(1)}, "inputs"),
    ],
)
def test_an_input_of_another_shape_or_dtype_is_refused_by_name(
    engine: Engine, change: dict[str, np.ndarray], field: str
) -> None:
    inputs = {"items": np.zeros(2, np.float32), "count": np.asarray(2, np.int32), "x": np.zeros(3)} | change
    with pytest.raises(FieldError) as caught:
        engine.open().submit(inputs, lengths={"items": 2})
    assert caught.value.field == field


def test_closing_a_stream_drops_its_queue_and_leaves_the_others_alone() -> None:
    model = ToyModel()
    engine = Engine(model, whole(model.route, "cpu:0", batch_cap=1))
    leaver, stayer = engine.open(), engine.open()
    queued = [submit(leaver, [1.0], 0.0) for _ in range(3)]
    other = submit(stayer, [2.0], 0.0)
    leaver.close()
    engine.warm()
    try:
        assert other.result(5).outputs["x"][0] == model.expected([2.0], 0.0)
        for future in queued:
            with pytest.raises(StreamClosedError):
                future.result(5)
        with pytest.raises(StreamClosedError):
            submit(leaver, [1.0], 0.0)
    finally:
        engine.close()


def test_a_stage_that_raises_takes_the_device_down_and_says_why() -> None:
    model = ToyModel()

    class Broken:
        spec = model.stages["refine"].spec

        def run(self, rows: object) -> None:
            raise RuntimeError("device fault")

    model.stages = {**model.stages, "refine": Broken()}
    engine = Engine(model, whole(model.route, "cpu:0"))
    engine.warm()
    try:
        with pytest.raises(WorkerDiedError, match="device fault"):
            submit(engine.open(), [1.0], 0.0).result(5)
        assert engine.dead is not None
        with pytest.raises(WorkerDiedError):
            submit(engine.open(), [1.0], 0.0).result(5)
    finally:
        engine.close()


def test_closing_the_engine_fails_what_is_still_queued() -> None:
    model = ToyModel()
    engine = Engine(model, whole(model.route, "cpu:0"))
    future = submit(engine.open(), [1.0], 0.0)
    engine.close()
    with pytest.raises(StreamClosedError):
        future.result(5)


def test_a_plan_that_does_not_cover_the_route_is_refused_with_the_place() -> None:
    model = ToyModel()
    plan = Plan("test", (Device("cpu:0"),), {"default": (Placement(model.route.cut([2])[0], "cpu:0"),)})
    with pytest.raises(PlanError, match="2 visits placed"):
        Engine(model, plan)


@settings(max_examples=25, deadline=None)
@given(
    streams=st.lists(
        st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    cuts=st.sets(st.integers(1, 5)),
    cap=st.integers(1, 4),
    devices=st.integers(1, 3),
    dispatch=st.sampled_from(["earliest_deadline_first", "fill_first", "first_come_first_served"]),
)
def test_overlapping_chunks_of_interleaved_streams_equal_the_serial_run(
    streams: list[list[tuple[int, int]]], cuts: set[int], cap: int, devices: int, dispatch: str
) -> None:
    model = CarryModel(steps=2, blocks=3)
    engine = Engine(model, plan_with_cuts(model, cuts, cap, devices, dispatch), streams=3)  # type: ignore[arg-type]
    engine.warm()
    try:
        opened = [engine.open() for _ in streams]
        futures: list[list[Future[Chunk]]] = [[] for _ in streams]
        for i in range(max(map(len, streams))):
            for stream, chunks, collected in zip(opened, streams, futures, strict=True):
                if i < len(chunks):
                    stream.set_condition("prompt", torch.tensor(float(chunks[i][1]), dtype=torch.float64))
                    collected.append(stream.submit({"x": np.asarray(float(chunks[i][0]))}))
        for chunks, collected in zip(streams, futures, strict=True):
            expected = model.serial([float(x) for x, _ in chunks], [float(p) for _, p in chunks])
            assert [float(f.result(20).outputs["x"]) for f in collected] == expected
    finally:
        engine.close()


def test_a_stream_without_room_for_its_state_is_refused_until_another_closes() -> None:
    model = CarryModel()
    engine = Engine(model, whole(model.route, "cpu:0"), streams=1)  # type: ignore[arg-type]
    engine.warm()
    try:
        first = engine.open()
        with pytest.raises(CapacityError, match="state slots"):
            engine.open()
        first.close()
        for _ in range(100):
            try:
                second = engine.open()
                break
            except CapacityError:
                threading.Event().wait(0.01)
        second.set_condition("prompt", torch.tensor(0.0, dtype=torch.float64))
        assert float(second.submit({"x": np.asarray(1.0)}).result(5).outputs["x"]) == model.serial([1.0], [0.0])[0]
    finally:
        engine.close()


def test_what_is_submitted_together_runs_in_one_batch(engine: Engine) -> None:
    streams = [engine.open() for _ in range(4)]
    with engine.together():
        futures = [submit(stream, [float(i)], 0.0) for i, stream in enumerate(streams)]
    assert [f.result(5).batch_sizes["encode+refine"] for f in futures] == [4] * 4
