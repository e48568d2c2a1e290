"""The table of kernel choices: what is found, what is refused, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.core.errors import ConfigError
from stretto.layers import tuning
from stretto.layers.kernels import linear_gelu, rms_norm
from stretto.layers.tuning import Entry, Table, choices, load_table, tunables, tuned

CPU = torch.device("cpu")
KEY = (768, 1152, 4304)


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STRETTO_KERNEL_TABLE", raising=False)
    choices.cache_clear()
    yield
    choices.cache_clear()


def entry(config: dict[str, int | str], op: str = "linear_gelu") -> Entry:
    return Entry(op, KEY, "bfloat16", config, 10.0, 12.5, "abc")


def write(path: Path, *entries: Entry, device: str = "cpu") -> Path:
    Table(device, "2.11", "3.6", entries).save(path)
    return path


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    wanted = entry({"impl": "triton", "block_m": 128, "block_n": 128, "block_k": 64, "stages": 4, "warps": 8})
    table = load_table(write(tmp_path / "t.json", wanted, device="some card"))
    assert (table.device, table.torch, table.triton, table.commits) == ("some card", "2.11", "3.6", ["abc"])
    assert table.entries == (wanted,)


def test_a_measured_choice_holds_for_its_own_op_shape_dtype_and_device_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_KERNEL_TABLE", str(write(tmp_path / "t.json", entry({"impl": "cublas"}))))
    assert tuned("linear_gelu", KEY, torch.bfloat16, CPU) == {"impl": "cublas"}
    assert tuned("linear_gelu", (1, 2, 3), torch.bfloat16, CPU) is None
    assert tuned("linear_gelu", KEY, torch.float16, CPU) is None
    assert tuned("linear_geglu", KEY, torch.bfloat16, CPU) is None
    assert tuned("linear_gelu", KEY, torch.bfloat16, torch.device("meta")) is None


def test_a_named_table_goes_before_those_in_the_users_folder_and_they_before_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    write(tmp_path / "shipped" / "cpu.json", entry({"impl": "cublas"}))
    assert tuned("linear_gelu", KEY, torch.bfloat16, CPU) == {"impl": "cublas"}
    write(tuning.user_tables() / "mine.json", entry({"impl": "cublas_gelu"}))
    choices.cache_clear()
    assert tuned("linear_gelu", KEY, torch.bfloat16, CPU) == {"impl": "cublas_gelu"}
    named = write(tmp_path / "named.json", entry({"impl": "triton"}))
    monkeypatch.setenv("STRETTO_KERNEL_TABLE", str(named))
    choices.cache_clear()
    assert tuned("linear_gelu", KEY, torch.bfloat16, CPU) == {"impl": "triton"}
    assert choices(CPU).report()["tables"][0]["path"] == str(named)


def damaged(**changes: Any) -> dict[str, Any]:
    one = {"op": "linear_gelu", "key": list(KEY), "dtype": "bfloat16", "config": {"impl": "cublas"}}
    one |= {"us": 1.0, "rule_us": 2.0, "commit": "abc"}
    whole: dict[str, Any] = {"format": 1, "device": "cpu", "torch": "2", "triton": "3", "entries": [one]}
    for name, value in changes.items():
        (whole if name in whole else one)[name] = value
    return whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"blokc_m": 1}}, "entries[0].config.blokc_m: got an unknown field"),
        ({"config": {"block_m": 100}}, "entries[0].config.block_m: got 100"),
        ({"op": "lineer"}, "entries[0].op: got 'lineer'"),
        ({"key": ["a"]}, "entries[0].key"),
        ({"us": "fast"}, "entries[0].us: got 'fast'"),
        ({"device": None}, ": device: got nothing"),
        ({"format": 2}, ": format: got 2"),
        ({"entries": {}}, ": entries: got {}"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_file_and_field(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(damaged(**changes)))
    with pytest.raises(ConfigError) as refused:
        load_table(path)
    assert str(path) in str(refused.value)
    assert says in str(refused.value)


def test_a_file_that_is_no_json_or_is_not_there_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"t\.json: got no JSON"):
        load_table(path)
    monkeypatch.setenv("STRETTO_KERNEL_TABLE", str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="STRETTO_KERNEL_TABLE"):
        choices(CPU)


def test_what_ran_is_reported_as_table_rule_or_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNEL_TABLE", str(write(tmp_path / "t.json", entry({"impl": "cublas"}))))
    rms_norm(torch.ones(1, 8), torch.zeros(8), 1e-6)
    tuned("linear_gelu", KEY, torch.bfloat16, CPU)
    tuned("linear_geglu", KEY, torch.bfloat16, CPU)
    report = choices(CPU).report()
    assert report["ops"] == {"linear_geglu": ["rule"], "linear_gelu": ["table"], "rms_norm": ["reference"]}
    assert report["tables"][0]["commits"] == ["abc"]
    assert [c["config"] for c in report["choices"]] == [None, {"impl": "cublas"}]


def test_an_op_that_falls_back_to_its_reference_is_reported_so() -> None:
    linear_gelu(torch.ones(2, 8), torch.ones(4, 8), torch.zeros(4))
    assert choices(CPU).report()["ops"]["linear_gelu"] == ["reference"]


def test_merging_replaces_what_was_measured_again_and_keeps_the_rest() -> None:
    old = Table("cpu", "2", "3", (entry({"impl": "cublas"}), entry({"impl": "cublas"}, op="linear_geglu")))
    new = Table("cpu", "2", "3", (entry({"impl": "triton"}),))
    assert {e.op: e.config["impl"] for e in old.merged(new).entries} == {"linear_gelu": "triton", "linear_geglu": "cublas"}


SHAPES = {
    "dense": (968, 16384, 2048, 0),
    "linear_add_layer_norm": (768, 4304, 1152),
    "linear_geglu": (968, 2048, 16384),
    "folded_geglu": (400, 1024, 4096),
    "folded_rope_write": (400, 1024, 8, 1, 256),
    "linear_add_folded_norm": (400, 4096, 1024),
    "linear_gelu": KEY,
    "linear_rope_write": (968, 2048, 8, 1, 256),
    "attention": (3, 256, 256, 16, 16, 72, 0),
    "prefix_attention": (1, 968, 968, 8, 1, 256, 1),
}


@pytest.mark.parametrize("op", sorted(SHAPES))
def test_every_candidate_can_be_written_to_a_table_and_read_back(op: str, tmp_path: Path) -> None:
    found = tunables()[op].candidates(SHAPES[op])
    assert len(found) > 1
    assert len({json.dumps(dict(c), sort_keys=True) for c in found}) == len(found)
    for i, config in enumerate(found):
        path = tmp_path / f"{i}.json"
        Table("cpu", "2", "3", (Entry(op, SHAPES[op], "bfloat16", config, 1.0, 1.0, "abc"),)).save(path)
        assert load_table(path).entries[0].config == config


def test_every_shipped_table_can_be_used() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        assert load_table(path).entries
