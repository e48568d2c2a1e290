"""The client that the page on world models shows runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stretto.deploy.world import World, WorldOptions
from stretto.serve.run import ServerThread
from stretto.serve.world import world_route

PAGE = Path(__file__).parents[2] / "docs" / "world-models.md"


def test_the_client_of_the_page_steers_a_world_and_reads_its_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    world = World(WorldOptions(text_encoder="hash"))
    with ServerThread(world, routes=[world_route(world)]) as server:
        assert "ws://127.0.0.1:8000" in code
        exec(compile(code.replace("ws://127.0.0.1:8000", server.url), str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == ["[0, 1]", "[1, 5]", "[5, 9]", "[9, 13]"]
    shown = [int(n) for line in lines for n in re.findall(r"first shows \[(.*)\]", line)[0].split(", ") if n]
    assert shown == list(range(1, len(shown) + 1))
    assert shown
