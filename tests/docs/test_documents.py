"""Documents that run, and documents that name only files which exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from pages import PAGES, ROOT, name_of

from stretto.core.policy import PolicyReply
from stretto.processors.openpi import MANIFEST, read_manifest, read_network_table
from stretto.processors.presets import PRESETS, key_map
from stretto.serve.protocol import pack_reply
from stretto.serve.request import _FIELDS as REQUEST_KEYS
from stretto.serve.request import Exchange, Offer
from stretto_client.codec import unpack

FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_add_a_model_page_runs_as_written() -> None:
    page = ROOT / "docs" / "add-a-model.md"
    blocks = FENCE.findall(page.read_text())
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "add_a_model"})


def test_the_files_that_the_checkpoints_page_shows_are_read_as_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (tmp_path / MANIFEST).write_text(_block(page, "json"))
    said = read_manifest(tmp_path)
    assert [s.width for s in key_map(said["keys"]).state] == [7, 1]
    assert len(said["relative"]) == said["action_dim"]
    (tmp_path / "robot.toml").write_text(_block(page, "toml"))
    keys = key_map(tmp_path / "robot.toml")
    assert {"cam/front", "cam/wrist", "arm/joints", "arm/gripper", "instruction", "cam/debug"} == keys.known
    (tmp_path / MANIFEST).write_text("{" + re.findall(r'`("network": .+?)`', page)[0] + "}")
    assert read_network_table(tmp_path) == {"vision_heads": 8}


def test_the_checkpoints_page_s_policy_runs_as_written() -> None:
    page = ROOT / "docs" / "checkpoints.md"
    exec(compile(_block(page.read_text(), "python"), str(page), "exec"), {"__name__": "in_process"})


def test_the_checkpoints_page_lists_every_preset_with_its_keys() -> None:
    rows = [line.split("|") for line in (ROOT / "docs" / "checkpoints.md").read_text().splitlines()]
    for name, keys in PRESETS.items():
        (row,) = [r for r in rows if len(r) == 6 and r[1].strip() == f"`{name}`"]
        named = [set(re.findall(r"`(.+?)`", cell)) for cell in row[2:5]]
        assert named == [{i.key for i in keys.images}, {s.key for s in keys.state}, {keys.prompt}]


def test_the_real_time_page_lists_every_key_that_a_request_may_hold_and_that_a_reply_has() -> None:
    page = (ROOT / "docs" / "real-time.md").read_text()
    table, replies = page.split("## What a request may say")[1].split("## ")[0].split("Replies say")
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(REQUEST_KEYS)
    assert set(re.findall(r"`(\w+)`", replies)) - {"rt", "graph", "eager"} == set(_reply_keys())


def _reply_keys() -> list[str]:
    offer = Offer(horizon=1, width=1)
    frame = pack_reply(
        PolicyReply(np.zeros((1, 1)), 1.0), Exchange(b"", "r", "s", 0.0), offer, infer_ms=1.0, prev_total_ms=None
    )
    return list(unpack(frame)["rt"])


def _block(page: str, language: str) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:src|docs|tests|benchmarks|recipes|client|scripts)/[\w./-]+?)`", page.read_text())
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing
