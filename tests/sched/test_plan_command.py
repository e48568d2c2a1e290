"""`stretto plan` as others script against it."""

import json
from pathlib import Path

import pytest

from stretto.cli import main


def test_json_has_the_promised_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--scenario", "seed-1gpu", "--compare", "equal,portfolio", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out) == {"scenario", "profile", "rows"}
    assert out["scenario"] == "seed-1gpu"
    (row,) = out["rows"]
    assert set(row) == {"model", "profile", "streams", "bound", "interval_ms_p99"}
    assert row["streams"]["equal"] <= row["streams"]["portfolio"] <= row["bound"]
    assert set(row["interval_ms_p99"]) == {"equal", "portfolio"}


def test_flags_a_table_a_picture_and_plans_that_check_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--gpus",
        "2",
        "--models",
        "wan2.2-5b",
        "--chunk",
        "1",
        "--steps",
        "2",
        "--interval-ms",
        "300",
        "--costs",
        "computed",
    ]
    files = ["--picture", str(tmp_path / "p.png"), "--plans", str(tmp_path), "--out", str(tmp_path / "full.json")]
    assert main(["plan", *flags, *files]) == 0
    assert "wan2.2-5b" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert "response_ms" in json.loads((tmp_path / "full.json").read_text())["rows"][0]
    plan = tmp_path / "wan2.2-5b.json"
    assert main(["plan", *flags, "--check", str(plan)]) == 0
    assert "output interval" in capsys.readouterr().out
    plan.write_text(plan.read_text().replace('"stop": ', '"stop": 1', 1))
    assert main(["plan", *flags, "--check", str(plan)]) == 2
    assert "classes[" in capsys.readouterr().err


def test_a_scenario_file_is_read_and_a_bad_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "night.toml"
    file.write_text('gpus = 2\ninterval_ms = 800.0\n[mix]\n"wan2.2-5b" = 2\n')
    assert main(["plan", "--scenario", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "night"
    file.write_text("gpus = 2\nmodles = ['wan2.2-5b']\n")
    assert main(["plan", "--scenario", str(file)]) == 2
    assert "modles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('models = "wan2.2-5b"', "models: got 'wan2.2-5b', expected a list of names"),
        ('models = ["wan2.2-5b"]\nshape = 3', "shape: got 3"),
        ('models = ["wan2.2-5b"]\n[shape]\nsteps = "x"', "shape.steps: got 'x'"),
        ('models = ["wan2.2-5b"]\n[shape]\nsteps = 2.5', "shape.steps: got 2.5"),
        ("mix = 5", "mix: got 5"),
        ('models = ["wan2.2-5b"]\ninterval_ms = "5"', "interval_ms: got '5'"),
        ("models = [", "expected a TOML or JSON file"),
        ("\xff", "expected a TOML or JSON file"),
    ],
)
def test_a_damaged_scenario_file_is_one_line_that_names_the_entry(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(f"gpus = 2\n{text}\n".encode("latin-1"))
    assert main(["plan", "--scenario", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_where_the_exact_answer_is_out_of_reach_the_other_methods_still_answer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--gpus", "40", "--models", "wan2.1-1.3b", "--interval-ms", "1600", "--intervals", "4"]
    assert main([*flags, "--compare", "equal,exact", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["streams"] == {"equal": 40}
    assert "possible ranks" in row["skipped"]["exact"]
    assert main([*flags, "--compare", "exact"]) == 2
    assert "possible ranks" in capsys.readouterr().err


def test_intervals_above_the_promise_while_queues_fill_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "24", "--models", "ltx-2.5-22b", "--interval-ms", "1600"]) == 0
    assert "ltx-2.5-22b: intervals are still above the promise by portfolio, while" in capsys.readouterr().out
    assert main(["plan", "--gpus", "2", "--models", "wan2.1-1.3b", "--interval-ms", "1600"]) == 0
    assert "above the promise" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--scenario", "nowhere"], "seed-24gpu"),
        (["--gpus", "1", "--models", "gpt"], "gpt"),
        (["--gpus", "0", "--models", "wan2.2-5b"], "empty pool"),
        (["--gpus", "1", "--models", "wan2.2-5b", "--interval-ms", "1"], "no plan is faster than"),
        (["--gpus", "1", "--models", "wan2.1-1.3b", "--chunk", "1", "--interval-ms", "96"], "or chunks of 3 latent frames"),
        (["--gpus", "1", "--models", "wan2.2-5b", "--interval-ms", "400"], "an interval of 500 ms or 3 denoise steps"),
        (["--scenario", "seed-1gpu", "--compare", "luck"], "luck"),
        (["--scenario", "seed-1gpu", "--device", "abacus"], "abacus"),
        (["--scenario", "seed-1gpu", "--response-ms", "10"], "response_ms: got 10"),
        (["--scenario", "seed-1gpu", "--interval-ms", "inf"], "interval_ms: got inf"),
        (["--scenario", "seed-1gpu", "--intervals", "0"], "intervals: got 0"),
        (["--scenario", "seed-1gpu", "--noise", "nan"], "noise: got nan"),
        (["--scenario", "seed-1gpu", "--picture", "/dev/null/p.png"], "picture: got /dev/null/p.png"),
        (["--scenario", "seed-1gpu", "--out", "/dev/null/p.json"], "out: got /dev/null/p.json"),
        (["--scenario", "seed-1gpu", "--profile", "no-such-profile.json"], "profile: got no-such-profile.json"),
        (["--scenario", "seed-1gpu", "--check", "no-such-plan.json"], "check: got no-such-plan.json"),
        ([], "--gpus"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    assert says in capsys.readouterr().err
