"""What an installed package holds beside its modules: a checkpoint, tables and sources that code looks for at run time."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [(ROOT / "pyproject.toml", "stretto"), (ROOT / "client" / "pyproject.toml", "stretto_client")]


@pytest.mark.parametrize(("project", "package"), PACKAGES, ids=[name for _, name in PACKAGES])
def test_every_file_beside_the_modules_is_packaged_and_every_pattern_finds_one(project: Path, package: str) -> None:
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"][package]
    folder = project.parent / "src" / package
    packaged = {pattern: set(folder.glob(pattern)) for pattern in patterns}
    assert all(packaged.values()), "a pattern without a file"
    there = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there == set().union(*packaged.values())
