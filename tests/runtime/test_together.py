"""Chunks that leave the last device in one batch: what follows them can share one, whoever is the first to ask."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import torch
from toy import CarryModel

from stretto.core.chunk import Chunk
from stretto.core.plan import whole
from stretto.runtime.engine import Engine, Stream

CHUNKS = 40


class Owner:
    """Asks for the next chunk of its stream as soon as one is there, after a while of its own."""

    def __init__(self, stream: Stream, wait_s: float) -> None:
        self.stream, self.wait_s = stream, wait_s
        self.batches: list[int] = []
        self.done = threading.Event()
        stream.set_condition("prompt", torch.tensor(1.0, dtype=torch.float64))

    def ask(self) -> None:
        self.stream.submit({"x": np.asarray(1.0)}).add_done_callback(self._came)

    def _came(self, future: Future[Chunk]) -> None:
        self.batches.append(max(future.result().batch_sizes.values()))
        if len(self.batches) == CHUNKS:
            self.done.set()
            return
        threading.Event().wait(self.wait_s)
        self.ask()


def test_streams_that_shared_a_batch_go_on_sharing_it_although_one_asks_before_the_other() -> None:
    model = CarryModel(steps=2, blocks=2)
    engine = Engine(model, whole(model.route, "cpu:0", batch_cap=2), streams=2)
    engine.warm()
    try:
        owners = [Owner(engine.open(), wait_s) for wait_s in (0.0, 0.002)]
        with engine.together():
            for owner in owners:
                owner.ask()
        assert all(owner.done.wait(30.0) for owner in owners)
    finally:
        engine.close()
    assert [owner.batches for owner in owners] == [[2] * CHUNKS] * 2
