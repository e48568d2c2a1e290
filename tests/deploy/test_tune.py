"""Choosing kernels by measurement."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.deploy import tune
from stretto.deploy.tune import TuneOptions, measured, table_at, tune_model
from stretto.layers.tuning import Config, Entry, Key, Table, Tunable, load_table
from stretto.models.pi0 import tiny

CPU = torch.device("cpu")


def run(choice: Config | None, x: Tensor) -> Tensor:
    """Double x: slowly by the rule, at once, wrongly, or not at all."""
    how = "slow" if choice is None else choice["how"]
    if how == "slow":
        time.sleep(0.003)
    if how == "broken":
        raise RuntimeError("out of registers")
    return x * (3 if how == "wrong" else 2)


def candidates(key: Key) -> list[Config]:
    return [{"how": how} for how in ("slow", "fast", "wrong", "broken")]


HOW = ("slow", "fast", "wrong", "broken")
DOUBLE = Tunable("double", {"how": HOW}, candidates, lambda key, dtype, device: (torch.ones(key, dtype=dtype),), run)


@pytest.fixture(autouse=True)
def _one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "tunables", lambda: {"double": DOUBLE})


def test_the_fastest_choice_that_is_right_wins_and_the_others_say_what_is_wrong() -> None:
    [(row, entry)] = measured([("double", (4,), "float32")], CPU, time.monotonic() + 60)
    assert entry is not None
    assert entry.config == {"how": "fast"}
    assert entry.us < entry.rule_us
    assert row["best"] == "how=fast"
    assert "wrong: off by 0.5" in row["choices"]["how=wrong"]
    assert "out of registers" in row["choices"]["how=broken"]


def test_what_no_time_was_left_for_is_said_and_not_written() -> None:
    [(row, entry)] = measured([("double", (4,), "float32")], CPU, time.monotonic() - 1)
    assert entry is None
    assert row["left"] == "no time was left"


def test_tuning_a_policy_writes_a_table_of_the_shapes_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "build_policy", lambda *args: tiny()[0])
    monkeypatch.setattr(tune, "wanted_by", lambda *args: [("double", (4,), "float32"), ("double", (8,), "float32")])
    said: list[str] = []
    result = tune_model(TuneOptions(device="cpu", out=tmp_path / "t.json"), lambda row: said.append(row["op"]))
    assert said == ["double", "double"]
    assert result["device"] == "cpu"
    monkeypatch.setattr("stretto.layers.tuning.tunables", lambda: {"double": DOUBLE})
    assert {e.key for e in load_table(tmp_path / "t.json").entries} == {(4,), (8,)}


def test_shapes_come_from_running_every_stage_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "build_policy", lambda *args: tiny()[0])
    monkeypatch.setattr(tune, "tunables", dict)
    # On a CPU every op runs its reference, so no shape asks for a choice.
    assert tune.wanted_by(TuneOptions(device="cpu", batches=(1, 2)), CPU, "float32") == []
    assert {"linear_geglu", "linear_gelu", "linear_rope_write"} <= set(tune.choices(CPU).ran)


def test_a_table_of_another_device_or_other_versions_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Table("another card", torch.__version__, "3", ()).save(path)
    with pytest.raises(ConfigError, match=r"t\.json: device: got another card, expected cpu"):
        table_at(path, "cpu")
    assert table_at(tmp_path / "new.json", "cpu").entries == ()


def test_an_entry_says_what_the_rule_took() -> None:
    entry = Entry("double", (4,), "float32", {"how": "fast"}, 1.0, 2.0, "abc")
    assert entry.place == ("double", (4,), "float32")
