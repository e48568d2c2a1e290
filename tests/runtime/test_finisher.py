"""Who waits for a chunk may wait for the device itself, but never for a chunk that is not its own once it has its own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from stretto.core.plan import Placement
from stretto.core.route import Segment
from stretto.runtime import passage
from stretto.runtime.flow import Flow
from stretto.runtime.passage import Courier, Finisher, Passage
from stretto.runtime.timing import Stamp

DEVICE = torch.device("cpu")


def left(stream: int) -> Flow:
    """Return a chunk that has passed its only segment."""
    flow = Flow(stream, 0, (Placement(Segment(0, 1), "cpu:0"),), at=1, started_s=0.0)
    flow.spans.append(("stage", Stamp(DEVICE), Stamp(DEVICE), 1))
    return flow


def test_a_helper_whose_chunk_another_has_finished_does_not_wait_for_the_next_one() -> None:
    told: list[tuple[int, int]] = []
    inside, go_on, mine = threading.Event(), threading.Event(), threading.Event()

    def passed(flow: Flow, passage: Passage) -> None:
        if flow.stream == 1:
            inside.set()
            go_on.wait(20)
            mine.set()  # what the other helper waits for
        told.append((flow.stream, threading.get_ident()))

    finisher = Finisher(passed)
    finisher.put([left(1)], None, Stamp(DEVICE))
    finisher.put([left(2)], None, Stamp(DEVICE))
    first = threading.Thread(target=finisher.help, args=(lambda: bool(told),))
    first.start()
    assert inside.wait(20)
    second = threading.Thread(target=finisher.help, args=(mine.is_set,))
    second.start()
    second.join(0.05)  # it stands behind the first helper now
    go_on.set()
    first.join(20)
    second.join(20)
    assert [stream for stream, _ in told] == [1]
    finisher.start()
    finisher.close()
    assert [stream for stream, _ in told] == [1, 2]


class Later(Stamp):
    """A point that the device reaches when it is told."""

    __slots__ = ("_reached",)

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        assert self._reached.wait(20)


def test_a_helper_gets_its_chunk_while_the_one_that_finished_it_waits_for_the_next() -> None:
    told: list[int] = []
    begun = threading.Event()
    finisher = Finisher(lambda flow, passage: told.append(flow.stream))
    ends = [Later(), Later()]
    for stream, end in enumerate(ends):
        finisher.put([left(stream)], None, end)

    def after_both() -> bool:
        begun.set()
        return len(told) == 2

    first = threading.Thread(target=finisher.help, args=(after_both,))
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=finisher.help, args=(lambda: bool(told),))
    second.start()
    second.join(0.05)  # it stands behind the first helper now, who waits for the chunk of the second
    ends[0].reach()
    second.join(5)
    assert (second.is_alive(), told) == (False, [0])
    ends[1].reach()
    first.join(20)
    assert told == [0, 1]


def test_what_nobody_waits_for_is_finished_by_the_finishers_own_thread() -> None:
    told = threading.Event()
    finisher = Finisher(lambda flow, passage: told.set())
    finisher.start()
    finisher.put([left(1)], None, Stamp(DEVICE))
    assert told.wait(20)
    finisher.close()


def test_the_mark_that_a_reader_of_outputs_waits_for_is_behind_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def copied(rows: Tensor) -> Tensor:
        order.append("copy")
        return rows

    def marked(device: torch.device) -> Stamp:
        order.append("mark")
        return Stamp(device)

    monkeypatch.setattr(passage, "_to_host", copied)
    monkeypatch.setattr(passage, "Stamp", marked)
    flow = left(1)
    finisher = Finisher(lambda flow, passed: None)
    Courier({flow.route: ["x", "y"]}, {}, finisher).depart([flow], {"x": torch.zeros(1, 2), "y": torch.zeros(1, 2)})
    assert order == ["copy", "copy", "mark"]


@pytest.mark.gpu
def test_outputs_are_read_when_they_are_on_the_host() -> None:
    device, told = torch.device("cuda"), []
    flow = Flow(1, 0, (Placement(Segment(0, 1), "cuda:0"),), at=1, started_s=0.0)
    finisher = Finisher(lambda flow, passed: told.append(passed.outputs))
    courier = Courier({flow.route: ["x"]}, {}, finisher)
    for turn in range(1, 9):
        flow.spans = [("stage", Stamp(device), Stamp(device), 1)]
        # Some milliseconds of copying, into memory that the last turn has used.
        courier.depart([flow], {"x": torch.full((1, 2**25), float(turn), device=device)})
        finisher.help(lambda: False)
        assert (told.pop()["x"] == turn).all()
