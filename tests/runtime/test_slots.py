"""Admission slots: chunks that go around a ring of devices come in when nobody is in their way, and come out evenly."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import torch
from toy import Carry, CarryModel

from stretto.core.model import Rows
from stretto.core.plan import Device, Placement, Plan
from stretto.runtime.engine import Engine
from stretto.runtime.slots import Slots
from stretto.sched.plans import admission_slots

STAGE_S = 0.02


class Slow(Carry):
    """A stage that takes a while on a device that waits for it."""

    def run(self, rows: Rows) -> None:
        time.sleep(STAGE_S)
        super().run(rows)


class SlowModel(CarryModel):
    def __init__(self) -> None:
        super().__init__(steps=4, blocks=2)
        self.stages = {name: Slow(i) for i, name in enumerate(self.stages)}


def ring(model: CarryModel, *, slots: bool) -> Plan:
    """Put the blocks on two devices; a chunk goes around once for each step."""
    placements = tuple(Placement(s, f"cpu:{i % 2}") for i, s in enumerate(model.route.cut(range(1, len(model.route)))))
    admission = admission_slots(4, 2) if slots else ()
    return Plan("circular", (Device("cpu:0"), Device("cpu:1")), {"default": placements}, in_flight=2, admission=admission)


def gaps(*, slots: bool, chunks: int = 9) -> list[float]:
    """Return the seconds between chunks, once as many as the plan allows are under way."""
    model = SlowModel()
    engine = Engine(model, ring(model, slots=slots), streams=1)
    done: list[float] = []
    try:
        engine.warm()
        stream = engine.open()
        stream.set_condition("prompt", torch.zeros((), dtype=torch.float64))
        futures = [stream.submit({"x": np.asarray(1.0)}) for _ in range(chunks)]
        for future in futures:
            future.add_done_callback(lambda _: done.append(time.monotonic()))
        got = [float(future.result(60).outputs["x"]) for future in futures]
    finally:
        engine.close()
    assert got == model.serial([1.0] * chunks, [0.0] * chunks)
    return [b - a for a, b in itertools.pairwise(done)][2:-1]


def test_chunks_with_slots_come_out_more_evenly_than_those_that_enter_as_soon_as_they_may() -> None:
    even, bunched = (gaps(slots=slots) for slots in (True, False))
    # In stages: 5, 3, 5, 3 against 7, 1, 7, 1.
    assert max(even) / (sum(even) / len(even)) < max(bunched) / (sum(bunched) / len(bunched)) - 0.15


def test_nothing_goes_beside_the_first_chunk_until_it_has_shown_how_long_a_slot_is() -> None:
    slots = Slots((0, 5, 8), visits=8)
    assert slots.wait_s(0.0, under_way=0) == 0.0
    slots.start(0, 0.0, under_way=0)
    assert slots.wait_s(0.1, under_way=1) == math.inf
    slots.done(0, 0.8)
    slots.start(1, 0.8, under_way=0)
    assert math.isclose(slots.wait_s(0.8, under_way=1), 0.5)
    slots.start(2, 1.3, under_way=1)
    assert slots.wait_s(1.6, under_way=1) == 0.0  # from here on each comes in as one goes out


def test_a_stream_that_stood_still_takes_its_slots_anew() -> None:
    slots = Slots((0, 5, 8), visits=8)
    for serial, begin in enumerate((0.0, 10.0)):
        slots.start(serial, begin, under_way=0)
        slots.done(serial, begin + 0.8 + serial)
    slots.start(2, 20.0, under_way=0)
    assert math.isclose(slots.wait_s(20.1, under_way=1), 0.4)  # the fastest chunk says how long a slot is
