"""Kernels that are made for a part of a device: as many programs as it holds, and choices that were measured there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.layers.kernels.language import programs
from stretto.layers.part import on_part, part
from stretto.layers.tuning import Entry, Table, choices, part_name, tuned

CPU = torch.device("cpu")
KEY = (50, 1024, 4096)
WHOLE = {"block_m": 64, "block_n": 32, "block_k": 128, "splits": 4, "warps": 4, "stages": 4}
PART = {**WHOLE, "splits": 2}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("stretto.layers.tuning.user_tables", lambda: tmp_path)
    monkeypatch.delenv("STRETTO_KERNEL_TABLE", raising=False)
    for name, config in (("cpu", WHOLE), (part_name("cpu", 28), PART)):
        Table(name, "", "", (Entry("gated_linear", KEY, "bfloat16", config, 1.0, 2.0, ""),)).save(tmp_path / f"{name}.json")
    choices.cache_clear()
    yield
    choices.cache_clear()


def test_persistent_programs_fill_the_part_and_no_more() -> None:
    x = torch.zeros(1)
    assert programs(x, 1000) == 132
    with on_part(104):
        assert (programs(x, 1000), programs(x, 3)) == (104, 3)
        with on_part(28):
            assert part() == 28
        assert part() == 104
    assert part() == 0


@pytest.mark.usefixtures("tables")
def test_a_choice_that_was_measured_on_a_part_holds_there_alone() -> None:
    found = []
    for multiprocessors in (0, 28, 44):
        with on_part(multiprocessors):
            found.append(tuned("gated_linear", KEY, torch.bfloat16, CPU))
    assert found == [WHOLE, PART, WHOLE]
