"""The command line as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.cli import VERBS, main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stretto.cli", *args], capture_output=True, text=True, timeout=120)


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys, stretto.cli as c; c.main(['--help']); c.main([]); assert 'torch' not in sys.modules"
    best = min(_seconds([sys.executable, "-c", code]) for _ in range(3))
    assert best < 0.3 * 3  # the machine may be busy; alone it takes a tenth of this


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_imports_no_torch(verb: str) -> None:
    code = (
        "import sys, stretto.cli as c\n"
        f"try: c.main(['{verb}', '--help'])\nexcept SystemExit as e: assert e.code == 0, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"stretto {verb}" in done.stdout


def test_an_unknown_verb_is_named_and_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "unknown verb 'fly'" in capsys.readouterr().err


def test_an_unusable_checkpoint_is_one_line_on_standard_error() -> None:
    done = run("serve", "/nowhere/at/all")
    assert done.returncode == 2
    assert done.stderr.startswith("error: /nowhere/at/all: no such folder")
    assert len(done.stderr.splitlines()) == 1


def test_inspect_prints_what_a_request_must_hold(tiny_checkpoint: Path) -> None:
    done = run("inspect", str(tiny_checkpoint), "--degenerate", "hold", "--json")
    facts = json.loads(done.stdout)
    assert facts["observation"]["observation.state"] == {"kind": "state", "shape": [8], "dtype": "float32", "required": True}
    assert facts["checkpoint"]["layout"] == "lerobot"
    assert [row["batch"] for row in facts["memory"]] == [1, 4, 8, 32]


def test_doctor_reports_as_json() -> None:
    done = run("doctor", "--json", "--port", "0")
    checks = {c["name"]: c for c in json.loads(done.stdout)}
    assert checks["torch"]["ok"]
    assert "cuda" in checks or "cuda:0" in checks
