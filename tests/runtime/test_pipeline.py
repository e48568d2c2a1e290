"""The engine with a process for each device: the same streams, the same numbers, and one death does not end them all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Carry, CarryModel

from stretto.core.chunk import Chunk
from stretto.core.errors import StreamClosedError, WorkerDiedError
from stretto.core.model import Rows
from stretto.core.plan import Device, Placement, Plan
from stretto.runtime.engine import Engine, Stream
from stretto.runtime.fleet import Workers
from stretto.runtime.worker import Transport

STREAMS = st.lists(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=4), min_size=1, max_size=3)


def carry_model(*, device: str, only: Collection[str] | None) -> CarryModel:
    torch.set_num_threads(1)
    return CarryModel(steps=2, blocks=3)


def pipeline(cuts: dict[int, str], *, in_flight: int = 3, cap: int = 2) -> Plan:
    """Cut the toy route before each visit of `cuts`, and put what follows on its device."""
    route = carry_model(device="cpu", only=None).route
    segments = route.cut([at for at in cuts if at])
    placements = tuple(Placement(s, cuts[s.start]) for s in segments)
    devices = tuple(Device(name) for name in dict.fromkeys(cuts.values()))
    return Plan("test", devices, {"default": placements}, {d.name: cap for d in devices}, in_flight=in_flight)


def start(plan: Plan, *, transport: Transport = "peer", hang_s: float = 60.0, streams: int = 4) -> Engine:
    workers = Workers(carry_model, transport=transport, threads=1, hang_s=hang_s, beat_s=0.1)
    engine = Engine(carry_model(device="cpu", only=()), plan, streams=streams, workers=workers)  # type: ignore[arg-type]
    engine.warm()
    return engine


def feed(stream: Stream, x: float, prompt: float) -> Future[Chunk]:
    stream.set_condition("prompt", torch.tensor(float(prompt), dtype=torch.float64))
    return stream.submit({"x": np.asarray(float(x))})


def expect(futures: list[Future[Chunk]], chunks: list[tuple[int, int]]) -> None:
    want = carry_model(device="cpu", only=None).serial([float(x) for x, _ in chunks], [float(p) for _, p in chunks])
    assert [float(f.result(30).outputs["x"]) for f in futures] == want


def by_step(**options: int) -> Plan:
    return pipeline({0: "cpu:0", 3: "cpu:1"}, **options)


def circular(**options: int) -> Plan:
    """Each chunk goes around twice: blocks 0 and 1 on one device, block 2 on the other."""
    return pipeline({0: "cpu:0", 2: "cpu:1", 3: "cpu:0", 5: "cpu:1"}, **options)


PLANS = {"by_step": by_step(), "circular": circular(), "dist": circular(cap=1)}


@pytest.fixture(scope="module", params=sorted(PLANS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = start(PLANS[request.param], transport="dist" if request.param == "dist" else "peer")
    yield engine
    pids = list(engine.workers.values())
    engine.close()
    assert not any(alive(pid) for pid in pids)


@settings(max_examples=10, deadline=None)
@given(streams=STREAMS)
def test_overlapping_chunks_of_interleaved_streams_equal_the_serial_run(
    engine: Engine, streams: list[list[tuple[int, int]]]
) -> None:
    opened = [open_when_free(engine) for _ in streams]
    futures: list[list[Future[Chunk]]] = [[] for _ in streams]
    for i in range(max(map(len, streams))):
        for stream, chunks, collected in zip(opened, streams, futures, strict=True):
            if i < len(chunks):
                collected.append(feed(stream, *chunks[i]))
    for chunks, collected in zip(streams, futures, strict=True):
        expect(collected, chunks)
    for stream in opened:
        stream.close()


def test_a_chunk_says_what_every_device_on_its_way_did(engine: Engine) -> None:
    stream = open_when_free(engine)
    chunk = feed(stream, 1, 0).result(30)
    assert sum(len(name.split("+")) for name in chunk.stage_ms) >= 3
    assert chunk.run_ms > 0
    assert set(chunk.batch_sizes) == set(chunk.stage_ms)
    stream.close()


def test_a_cancelled_stream_and_a_late_one_leave_the_others_alone(engine: Engine) -> None:
    first, doomed = open_when_free(engine), open_when_free(engine)
    chunks = [(i % 5 - 2, i % 3) for i in range(20)]
    going = [feed(first, *c) for c in chunks[:10]]
    dropped = [feed(doomed, *c) for c in chunks]
    doomed.close()
    late = open_when_free(engine)
    lately = [feed(late, *c) for c in chunks[:5]]
    going += [feed(first, *c) for c in chunks[10:]]
    expect(going, chunks)
    expect(lately, chunks[:5])
    wait(dropped, 30)
    ends = [f.exception() for f in dropped]
    assert all(e is None or isinstance(e, StreamClosedError) for e in ends)
    assert isinstance(ends[-1], StreamClosedError)
    for stream in (first, late):
        stream.close()
    assert engine.in_flight == 0


def test_no_more_chunks_of_a_stream_are_under_way_than_the_plan_says(engine: Engine) -> None:
    stream = open_when_free(engine)
    futures = [feed(stream, i, 0) for i in range(12)]
    assert stream.in_flight <= 3
    assert stream.in_flight + len(stream.held) <= 12
    expect(futures, [(i, 0) for i in range(12)])
    assert stream.room == 3
    stream.close()


def test_a_killed_worker_fails_its_streams_with_the_cause_and_no_others() -> None:
    segments = carry_model(device="cpu", only=None).route.cut([3])
    both = tuple(Placement(s, f"cpu:{i}") for i, s in enumerate(segments))
    alone = tuple(Placement(s, "cpu:0") for s in segments)
    devices = (Device("cpu:0"), Device("cpu:1"))
    engine = start(Plan("test", devices, {"both": both, "alone": alone}, in_flight=2))
    try:
        hit, spared = engine.open(stream_class="both"), engine.open(stream_class="alone")
        feed(hit, 1, 0).result(30)
        before = [feed(spared, 1, 0)]
        under_way = [feed(hit, i, 0) for i in range(200)]
        os.kill(engine.workers["cpu:1"], signal.SIGKILL)
        errors = [f.exception(30) for f in under_way]
        assert isinstance(errors[-1], WorkerDiedError)
        assert "cpu:1" in str(errors[-1])
        assert "signal 9" in str(errors[-1])
        assert all(e is None or isinstance(e, WorkerDiedError) for e in errors)
        assert engine.dead is not None
        with pytest.raises(WorkerDiedError):
            feed(hit, 1, 0)
        with pytest.raises(WorkerDiedError):
            engine.open(stream_class="both")
        expect([*before, feed(spared, 2, 1)], [(1, 0), (2, 1)])
        another = open_when_free(engine, "alone")
        expect([feed(another, 3, 1)], [(3, 1)])
    finally:
        engine.close()


class Stuck(Carry):
    def run(self, rows: Rows) -> None:
        if rows.host[0].chunk == 1:
            time.sleep(600)
        super().run(rows)


def stuck_model(*, device: str, only: Collection[str] | None) -> CarryModel:
    model = carry_model(device=device, only=only)
    model.stages = {**model.stages, "carry.2": Stuck(2)}
    return model


def test_a_worker_that_hangs_is_ended_after_the_limit() -> None:
    plan = pipeline({0: "cpu:0"})
    engine = Engine(stuck_model(device="cpu", only=()), plan, workers=Workers(stuck_model, threads=1, hang_s=1.5, beat_s=0.1))  # type: ignore[arg-type]
    engine.warm()
    try:
        stream = engine.open()
        feed(stream, 1, 0).result(30)
        with pytest.raises(WorkerDiedError, match="a batch has not ended for"):
            feed(stream, 1, 0).result(30)
    finally:
        engine.close()


def broken_model(*, device: str, only: Collection[str] | None) -> CarryModel:
    if only:
        raise ValueError("no such weights")
    return carry_model(device=device, only=only)


def test_a_worker_that_cannot_start_says_why() -> None:
    engine = Engine(broken_model(device="cpu", only=()), by_step(), workers=Workers(broken_model, threads=1))  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match="no such weights"):
        engine.warm()
    engine.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_when_free(engine: Engine, stream_class: str | None = None) -> Stream:
    """Open a stream; state of one that was closed just now may still be on its way back."""
    from stretto.core.errors import CapacityError

    for _ in range(200):
        try:
            return engine.open(stream_class=stream_class)
        except CapacityError:
            time.sleep(0.01)
    return engine.open(stream_class=stream_class)
