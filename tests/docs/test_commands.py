"""Commands that the pages show: every verb exists, and has the flags that it is given there."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from pages import PAGES, name_of

from stretto.cli import VERBS, main

COMMAND = re.compile(r"(?:^|`)stretto ([a-z]\w*)((?:[^\n`|#]|\\\n)*)", re.MULTILINE)


@cache
def flags_of(verb: str, under: str) -> frozenset[str]:
    """Return the flags that the help of a verb, or of a verb under it, names."""
    with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        main([verb, *([under] if under else []), "--help"])
    assert ended.value.code == 0
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", said.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_has_its_verb_and_its_flags(page: Path) -> None:
    for verb, rest in COMMAND.findall(page.read_text()):
        assert verb in VERBS, f"stretto {verb}"
        under = next(iter(re.findall(r"^ (run|serve|verify)\b", rest)), "") if verb == "world" else ""
        unknown = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest)) - flags_of(verb, under)
        assert not unknown, f"stretto {verb} {under}: no {unknown}"
