"""The pages that users read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "client/README.md", "recipes/metaworld/README.md")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").glob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
