"""Segments whose captures depend on their rows: which key a batch has, in which order it runs, which graphs are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import CarryModel

from stretto.core.errors import CapacityError
from stretto.core.model import CapturesByRows, Row, Rows, StateKey
from stretto.core.plan import whole
from stretto.core.route import Segment
from stretto.models.wan import WanModel, tiny
from stretto.models.wan_config import tiny_config
from stretto.runtime.arena import SlotPool
from stretto.runtime.graphs import Recent
from stretto.runtime.layout import arenas_for
from stretto.runtime.program import Member, Program, Ran, batches
from stretto.runtime.residents import Seats

CPU = torch.device("cpu")


class ByRows:
    """A stage that captures by state slot, from the second chunk on, and notes the rows that it ran."""

    def __init__(self, name: str) -> None:
        inner = CarryModel(blocks=1).stages["carry.0"]
        self.spec, self.name = inner.spec, name
        self.ran: list[tuple[int, ...]] = []

    def capture_key(self, host: Sequence[Row]) -> Hashable:
        return None if any(row.chunk == 0 for row in host) else tuple(row.state_slot for row in host)

    def prepare(self, rows: Rows) -> None: ...

    def run(self, rows: Rows) -> None:
        self.ran.append(tuple(row.state_slot for row in rows.host))
        rows.put("x", rows.get("x") + 1)


class Replays:
    """In place of a captured graph: runs the work again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Notes:
    """In place of CUDA graphs: a capture runs nothing."""

    captures = 0

    def capture_live(self, run: Callable[[], None]) -> Replays:
        self.captures += 1
        return Replays(run)


def program_of(model: CarryModel, segment: Segment, graphs: Notes | None = None) -> Program:
    plan = whole(model.route, "cpu", batch_cap=4)
    arenas = arenas_for(model, plan, "cpu", CPU, slots=4, streams=2)  # type: ignore[arg-type]
    return Program(model, segment, arenas, mode="eager", batch_buckets=(1, 2, 4), graphs=graphs)  # type: ignore[arg-type]


def member(state_slot: int, *, chunk: int = 1, slot: int = 1) -> Member:
    return Member(Row(0, chunk, 0, slot), 0, (state_slot,))


def by_rows(graphs: Notes | None = None) -> tuple[Program, ByRows]:
    model = CarryModel(steps=1, blocks=1)
    stage = ByRows("carry.0")
    model.stages = {"carry.0": stage}
    return program_of(model, Segment(0, 1), graphs), stage


def test_rows_run_in_the_order_of_their_state_slots_so_that_one_set_has_one_key() -> None:
    program, stage = by_rows()
    ran = program.launch([member(3, slot=1), member(1, slot=2), member(2, slot=3)], {})
    assert ran == Ran(3, "eager")
    assert stage.ran == [(1, 2, 3)]


def test_the_key_of_a_batch_is_what_its_stages_say_and_none_if_one_says_none() -> None:
    program, _ = by_rows()
    assert program.capture_key([member(1), member(2)]) == ((1, 2),)
    assert program.capture_key([member(1), member(2)]) != program.capture_key([member(1), member(3)])
    assert program.capture_key([member(1), member(2, chunk=0)]) is None


def test_a_segment_that_captures_by_rows_captures_nothing_before_the_start() -> None:
    program, stage = by_rows()
    program.capture()
    assert stage.ran == []


def test_graphs_that_were_captured_ahead_serve_every_batch_and_none_is_captured_later() -> None:
    graphs = Notes()
    program, stage = by_rows(graphs)
    program.capture_ahead([member(s) for s in (3, 1, 2)], cap=2)
    assert graphs.captures == 3 + 3  # single rows and pairs
    stage.ran.clear()
    assert program.launch([member(2)], {}) == Ran(1, "graph")
    assert program.launch([member(3, slot=1), member(1, slot=2)], {}) == Ran(2, "graph")
    assert stage.ran == [(2,), (1, 3)]
    assert graphs.captures == 6


def test_a_batch_without_a_graph_of_its_own_replays_those_of_its_rows_in_turn() -> None:
    graphs = Notes()
    program, stage = by_rows(graphs)
    program.capture_ahead([member(s) for s in (1, 2, 3)], cap=1)
    stage.ran.clear()
    assert program.launch([member(3, slot=1), member(1, slot=2), member(2, slot=3)], {}) == Ran(3, "graph")
    assert stage.ran == [(1,), (2,), (3,)]
    assert graphs.captures == 3


def test_a_row_that_was_not_captured_ahead_runs_eagerly_once_and_says_so() -> None:
    graphs = Notes()
    program, _ = by_rows(graphs)
    program.capture_ahead([member(1)], cap=1)
    assert program.launch([member(2)], {}) == Ran(1, "eager")
    assert program.launch([member(2)], {}) == Ran(1, "graph")
    assert program.launch([member(1, chunk=0)], {}) == Ran(1, "eager")
    assert graphs.captures == 2


@given(count=st.integers(1, 80), cap=st.integers(1, 6))
def test_batches_to_capture_are_bounded_and_of_each_size_all_or_none(count: int, cap: int) -> None:
    members = [member(s) for s in range(count)]
    sizes = [len(b) for b in batches(members, cap, bound=40)]
    assert len(sizes) <= 40
    assert sizes == sorted(sizes)
    assert sizes.count(1) == min(count, 40)
    assert all(sizes.count(n) in (0, comb(count, n)) for n in range(2, cap + 1))
    assert max(sizes) <= cap


def test_a_stream_takes_the_state_slots_that_the_one_before_it_left_together() -> None:
    one, two = StateKey("p", 0), StateKey("p", 1)
    seats = Seats({"p": SlotPool(4, "slots")}, {"both": (one, two), "first": (one,)})
    reserved = seats.reserve("both", 2)
    assert [set(seat.values()) for seat in reserved] == [{1, 2}, {3, 4}]
    a, b = seats.take("both"), seats.take("both")
    seats.give("both", b)
    seats.give("both", a)
    assert [seats.take("both")[1], seats.take("both")[1]] == reserved
    seats.give("both", b)
    assert set(seats.take("first")[1]) == {one}  # a free seat of another class gives way
    with pytest.raises(CapacityError):
        seats.take("both")


def test_a_world_models_block_has_one_key_once_its_ring_is_full() -> None:
    model = WanModel(tiny_config())
    model.randomize(seed=0)
    at = next(i for i, v in enumerate(model.route.visits) if v.stage == "block.0")
    plan = whole(model.route, "cpu", batch_cap=2)
    arenas = arenas_for(model, plan, "cpu", CPU, slots=2, streams=2)
    program = Program(model, Segment(at, at + 2), arenas, mode="eager", batch_buckets=(1, 2))

    def key(chunk: int, slots: tuple[int, ...]) -> Hashable:
        return program.capture_key([Member(Row(0, chunk, 0, i + 1), at, (s, s)) for i, s in enumerate(slots)])

    full = model.config.window_frames - 1  # chunks of one frame
    assert [key(chunk, (1,)) for chunk in range(full)] == [None] * full
    assert key(full, (1, 2)) == key(full + 50, (1, 2)) == ((1, 2),)  # two blocks, alike
    assert key(full, (1, 2)) != key(full, (1, 3))


def test_blocks_and_decoders_offer_captures_by_rows_and_the_other_stages_do_not() -> None:
    offers = {name.split(".")[0] for model in tiny() for name, s in model.stages.items() if isinstance(s, CapturesByRows)}
    assert offers == {"block", "decode"}


def test_what_was_used_longest_ago_makes_room_once_it_is_idle() -> None:
    kept: Recent[str] = Recent(bound=2, idle=3)
    kept.put("a", "A")
    kept.put("b", "B")
    assert kept.get("a") == "A"
    assert not kept.has_room()
    assert [kept.get("a") for _ in range(2)] == ["A", "A"]
    assert kept.has_room()
    kept.put("c", "C")
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("A", None, "C")


@settings(max_examples=50, deadline=None)
@given(keys=st.integers(1, 12), bound=st.integers(1, 6), rounds=st.integers(2, 12))
def test_more_keys_in_turn_than_there_is_room_for_do_not_push_each_other_out(keys: int, bound: int, rounds: int) -> None:
    kept: Recent[int] = Recent(bound, idle=8 * 12)
    captures = 0
    for _ in range(rounds):
        for key in range(keys):
            if kept.get(key) is None and kept.has_room():
                kept.put(key, key)
                captures += 1
    assert captures == len(kept) == min(keys, bound)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_eager_launch_says_that_it_was_eager(cut: int) -> None:
    model = CarryModel(steps=2, blocks=2)
    program = program_of(model, Segment(0, cut))
    conditions = {"prompt": (0, torch.tensor(0.0, dtype=torch.float64))}
    assert program.launch([Member(Row(0, 0, 0, 1), 0, (1,) * cut, conditions)], {}) == Ran(1, "eager")
