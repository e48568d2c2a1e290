"""Documents that run, and documents that name only files which exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_add_a_model_page_runs_as_written() -> None:
    page = ROOT / "docs" / "add-a-model.md"
    blocks = FENCE.findall(page.read_text())
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "add_a_model"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:src|docs|tests|benchmarks|recipes|client|scripts)/[\w./-]+?)`", page.read_text())
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing
