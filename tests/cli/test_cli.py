"""The command line as a user meets it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.cli import VERBS, main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stretto", *args], capture_output=True, text=True, timeout=120)


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
    state = facts["statistics"]["observation.state"]
    assert (state["mode"], state["width"], len(state["q01"]), len(state["q99"])) == ("quantiles", 8, 8, 8)
    assert all(low <= high for low, high in zip(state["q01"], state["q99"], strict=True))


def test_inspect_shows_the_statistics_in_the_robots_units() -> None:
    done = run("inspect", "pi05-metaworld")
    assert done.returncode == 0, done.stderr
    assert "observation.state  quantiles" in done.stdout
    assert "q01 -1" in done.stdout


def test_doctor_reports_as_json() -> None:
    done = run("doctor", "--json", "--port", "0")
    checks = {c["name"]: c for c in json.loads(done.stdout)}
    assert checks["torch"]["ok"]
    assert "cuda" in checks or "cuda:0" in checks
    assert {"driver", "egl", "port 0"} <= set(checks)
    assert "triton" in checks["fused ops"]["found"]


def test_bench_times_a_checkpoint_at_the_checkpoints_own_shapes() -> None:
    quick = ("--checkpoint", "pi05-metaworld", "--n", "2", "--warmup", "0", "--device", "cpu")
    done = run("bench", "pi0.5", *quick, "--json")
    result = json.loads(done.stdout)
    assert set(result) == {"device", "commit", "torch", "rows", "kernels"}
    assert result["kernels"]["ops"]["linear_geglu"] == ["reference"]
    (row,) = result["rows"]
    assert (row["model"], row["batch"], row["dtype"], row["mode"]) == ("pi0.5", 1, "float32", "eager")
    assert row["prefix_tokens"] == 2 * 8**2 + 64
    assert set(row["stages"]) == {"vision", "prefix", "denoise"}
    assert min(row[k] for k in ("gpu_ms_p50", "gpu_ms_p99", "wall_ms_p50", "wall_ms_p99", "memory_bytes")) > 0
    done = run("bench", "pi0", *quick)
    assert done.returncode == 2
    assert "checkpoint: got a pi05 in pi05-metaworld, expected pi0" in done.stderr


def test_tuning_on_a_cpu_is_refused_before_a_model_is_built() -> None:
    done = run("bench", "pi0.5", "--tune", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr == "error: device: got cpu, expected a GPU: elsewhere plain torch runs, and there is no choice\n"


def test_a_taken_port_is_one_line_on_standard_error_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "pi05-metaworld", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert done.stderr.startswith("error: host, port: got 127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_line_on_standard_error() -> None:
    done = run("eval", "ws://127.0.0.1:1", "--client", "openpi", "--episodes", "1", "--task", "drawer-open")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: server: got")
