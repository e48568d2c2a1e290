"""What a server writes down of its requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_policy import example
from tiny_checkpoint import write_checkpoint

from stretto.control.roofline import locate_files
from stretto.control.trace import read_trace
from stretto.core.errors import ConfigError
from stretto.core.policy import PolicyReply, RequestOptions
from stretto.deploy.policy import PolicyOptions, load_policy
from stretto.serve import ServerThread
from stretto.serve.options import ServerOptions
from stretto.serve.trace import LEAST_BYTES, Lines, Served, Timeline, TraceFile, open_traces
from stretto_client import Options, PolicyClient, ServerError

STAGES = {"preprocess", "vision", "prefix", "denoise", "postprocess"}


def served(number: int = 0, **changes: Any) -> Served:
    stages = {"denoise": 8.0, "preprocess": 1.0, "vision": 3.0, "postprocess": 0.5}
    reply = PolicyReply(np.zeros((4, 2)), 12.0, queue_ms=2.0, stage_ms=stages, batch_size=3)
    fixed: dict[str, Any] = {"own_ms": {"decode": 1.0, "encode": 0.5}, "reply": reply}
    return Served("s", f"r{number}", 10.0 + number, 0.02, RequestOptions(), **{**fixed, **changes})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The traces of a server that answered, refused and was told nonsense."""
    folder = tmp_path_factory.mktemp("traces")
    checkpoint = write_checkpoint(folder / "arm", cameras=2)
    policy = PolicyOptions(device="cpu", preset="libero", max_batch=2, denoise_steps=2, threads=1, control_hz=2.0)
    paths = {"lines": folder / "t.jsonl", "timeline": folder / "t.json"}
    options = ServerOptions(port=0, traces=tuple(paths.values()))
    with ServerThread(load_policy(checkpoint, policy), options) as server, PolicyClient("127.0.0.1", server.port) as client:
        observation = example(client.metadata["stretto"]["observation"], 0)
        client.infer(observation)
        client.infer(observation, Options(executed_steps=2, delay_steps=1, deadline_ms=60_000.0, starved_steps=3))
        with pytest.raises(ServerError, match="deadline"):
            client.infer(observation, Options(deadline_ms=0.001))
        with pytest.raises(ServerError, match="observation"):
            client.infer({"prompt": "nothing else"})
    return paths


def test_each_request_is_a_line_with_its_critical_path(files: dict[str, Path]) -> None:
    first, second, refused, failed = read_trace(files["lines"])
    assert [r.status for r in (first, second, refused, failed)] == ["ok", "ok", "refused", "failed"]
    assert (first.mode, second.mode, second.executed_steps, second.delay_steps) == ("sync", "rtc", 2, 1)
    assert second.deadline_s == 60.0
    assert second.starved_steps == 3
    assert refused.reason == "deadline"
    for r in (first, second):
        assert set(r.stage_s) == STAGES
        assert 0 < sum(r.stage_s.values()) - r.stage_s["preprocess"] <= r.parts_s["inference_s"] * 1.01
        assert r.parts_s["transfer_s"] > 0
    assert first.t_s is not None
    assert second.t_s is not None
    assert second.t_s > first.t_s


def test_the_roofline_reads_a_server_s_trace_one_point_a_mode(files: dict[str, Path]) -> None:
    points = locate_files([files["lines"]])
    assert [(p.name, p.mode) for p in points] == [("t (sync)", "sync"), ("t (rtc)", "rtc")]


def test_the_timeline_is_an_array_of_nested_slices(files: dict[str, Path]) -> None:
    events = json.loads(files["timeline"].read_text())
    (name,) = [e for e in events if e["name"] == "thread_name"]
    assert name["args"]["name"].startswith("session ")
    requests = [e for e in events if e["name"] == "request"]
    assert [e["args"]["status"] for e in requests] == ["ok", "ok", "refused", "failed"]
    first = requests[0]
    slices = [e for e in events if e["ph"] == "X" and e["name"] != "request"]
    inner = [e for e in slices if e["ts"] < first["ts"] + first["dur"]]
    assert {e["name"] for e in inner} >= STAGES | {"decode", "queue", "encode"}
    assert all(e["ts"] + e["dur"] <= first["ts"] + first["dur"] + 1.0 for e in inner)


def test_stages_stand_in_the_order_in_which_a_request_meets_them() -> None:
    known = served().stages_s
    assert list(known) == ["decode", "preprocess", "queue", "denoise", "vision", "between stages", "postprocess", "encode"]
    assert sum(known.values()) == pytest.approx(0.02)


def test_a_line_has_the_robot_s_own_clock_where_it_was_said() -> None:
    said, unsaid = (Served("s", "r", 0.0, 0.02, RequestOptions(obs_time_ns=t)) for t in (7, None))
    assert json.loads(Lines(10.0, 4).of(said))["obs_time_ns"] == 7
    assert "obs_time_ns" not in json.loads(Lines(10.0, 4).of(unsaid))


@pytest.mark.parametrize("form", [Lines(10.0, 4), Timeline()])
def test_a_trace_never_grows_beyond_its_limit_and_keeps_what_is_new(form: Lines | Timeline, tmp_path: Path) -> None:
    path = tmp_path / ("t.jsonl" if isinstance(form, Lines) else "t.json")
    trace = TraceFile(path, form, LEAST_BYTES)
    for number in range(1000):
        trace.add(served(number))
    trace.close()
    assert path.stat().st_size + trace.older.stat().st_size <= LEAST_BYTES
    for part in (trace.older, path):
        text = part.read_text()
        if isinstance(form, Timeline):
            assert [e["name"] for e in json.loads(text) if e["ph"] == "M"] == ["thread_name", "process_name"]
        else:
            assert read_trace(part)
    assert "r999" in path.read_text()


def test_what_was_written_is_there_before_the_server_ends(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.jsonl", Lines(10.0, 4), LEAST_BYTES)
    trace.add(served())
    assert len(read_trace(trace.path)) == 1
    trace.close()
    trace.close()
    trace.add(served())
    assert len(read_trace(trace.path)) == 1


def test_a_disk_that_is_full_ends_the_trace_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceFile(Path("/dev/full"), Lines(10.0, 4), LEAST_BYTES)
    trace.add(served())
    trace.add(served())
    trace.close()
    assert ["ends here" in r.message for r in caplog.records] == [True]


@pytest.mark.parametrize(
    ("name", "control_hz", "field"),
    [("t.txt", 10.0, "trace"), ("t.jsonl", None, "control_hz"), ("absent/t.json", None, "trace")],
)
def test_a_trace_that_cannot_be_is_refused_by_name(tmp_path: Path, name: str, control_hz: float | None, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_traces([tmp_path / name], LEAST_BYTES, control_hz=control_hz, horizon=4)
    assert caught.value.field == field


def test_a_limit_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_max_mb"):
        TraceFile(tmp_path / "t.json", Timeline(), 10)
