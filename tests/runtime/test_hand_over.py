"""What a plan says of pace and of batches reaches the devices."""

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from toy import ToyModel

from stretto.core.model import Rows
from stretto.core.plan import Device, Placement, Plan
from stretto.core.route import Segment
from stretto.parallel.link import Values
from stretto.parallel.local import LocalLink
from stretto.parallel.order import Mark
from stretto.runtime.engine import Engine
from stretto.runtime.flow import Flow, flow_of
from stretto.runtime.passage import Arrivals

ROUTE = ToyModel().route
INPUTS = {"items": np.ones(2, np.float32), "count": np.asarray(2, np.int32), "x": np.zeros(3, np.float64)}


def two_devices() -> Plan:
    placements = (Placement(Segment(0, 1), "cpu:0"), Placement(Segment(1, len(ROUTE)), "cpu:1"))
    return Plan("test", (Device("cpu:0"), Device("cpu:1")), {"default": placements}, {"cpu:0": 4, "cpu:1": 4})


def test_chunks_that_leave_in_one_batch_start_on_the_next_device_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    send = LocalLink.send

    def slowly(self: LocalLink, header: Any, values: Values) -> None:
        time.sleep(0.005)  # enough for an idle device to begin with what it has
        send(self, header, values)

    monkeypatch.setattr(LocalLink, "send", slowly)
    engine = Engine(ToyModel(), two_devices(), slots=8)
    engine.warm()
    try:
        for _ in range(3):
            with engine.together():
                futures = [engine.open().submit(INPUTS, lengths={"items": 2}) for _ in range(4)]
            for future in futures:
                assert set(future.result(10).batch_sizes.values()) == {4}
    finally:
        engine.close()


def test_chunks_of_two_devices_do_not_wait_for_each_other() -> None:
    offered: list[list[str]] = []
    arrivals = Arrivals(lambda flows: offered.append([f"{f.stream}.{f.chunk}" for f in flows]))

    def arrive(stream: int, chunk: int, source: str, behind: int) -> None:
        placements = (Placement(Segment(0, 1), source), Placement(Segment(1, 5), "cpu:9"))
        sent = Flow(stream, chunk, placements, at=1, behind=behind)
        arrivals.receive(flow_of(sent.header(), lambda route, name: placements), {"x": torch.zeros(3)}, Mark())

    arrive(0, 0, "cpu:0", 1)
    arrive(1, 0, "cpu:1", 0)
    arrive(0, 1, "cpu:0", 0)
    assert offered == [["1.0"], ["0.0", "0.1"]]


def test_a_chunk_without_a_deadline_takes_the_pace_of_its_class() -> None:
    whole = (Placement(ROUTE.whole, "cpu:0"),)
    plan = Plan("test", (Device("cpu:0"),), {"calm": whole, "brisk": whole}, dispatch="earliest_virtual_deadline_first")
    finished: list[str] = []

    def order(plan: Plan) -> list[str]:
        engine, done = Engine(ToyModel(), plan, slots=4), threading.Event()
        finished.clear()
        engine.warm()
        try:
            with engine.together():
                for name in ("calm", "brisk"):
                    future = engine.open(stream_class=name).submit(INPUTS, lengths={"items": 2})
                    future.add_done_callback(lambda _, name=name: (finished.append(name), len(finished) < 2 or done.set()))
            assert done.wait(10)
        finally:
            engine.close()
        return list(finished)

    assert order(plan) == ["calm", "brisk"]
    assert order(replace(plan, pace_s={"calm": 10.0, "brisk": 0.5})) == ["brisk", "calm"]


def test_a_chunk_that_came_while_the_device_was_busy_keeps_its_turn() -> None:
    model, ran, may_end = ToyModel(), [], threading.Event()

    class Encode:
        spec = model.stages["encode"].spec
        run_it = model.stages["encode"].run

        def run(self, rows: Rows) -> None:
            ran.append("encode")
            assert may_end.wait(10)
            Encode.run_it(rows)

    class Refine:
        spec = model.stages["refine"].spec
        run_it = model.stages["refine"].run

        def run(self, rows: Rows) -> None:
            ran.append("refine")
            Refine.run_it(rows)

    model.stages = {"encode": Encode(), "refine": Refine()}
    placements = (Placement(Segment(0, 1), "cpu:0"), Placement(Segment(1, len(ROUTE)), "cpu:0"))
    plan = Plan("test", (Device("cpu:0"),), {"default": placements}, dispatch="first_come_first_served")
    engine = Engine(model, plan, slots=4)
    engine.warm()
    try:
        first = engine.open().submit(INPUTS, lengths={"items": 2})
        while not ran:
            time.sleep(0.001)
        second = engine.open().submit(INPUTS, lengths={"items": 2})
        may_end.set()
        first.result(10)
        second.result(10)
    finally:
        engine.close()
    assert ran[:3] == ["encode", "encode", "refine"]
