"""`stretto serve` as a robot's owner runs it: the command in a process of its own, the published client, three robots."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from linear_policy import example
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from over_the_wire import until
from tiny_checkpoint import ROBOTS, write_checkpoint

from stretto.control.trace import read_trace

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

CAMERA = np.zeros((56, 56, 3), np.uint8)
OBSERVATIONS: dict[str, dict[str, Any]] = {
    "libero": {
        "observation/image": CAMERA,
        "observation/wrist_image": CAMERA,
        "observation/state": np.zeros(8),
        "prompt": "put the bowl on the plate",
    },
    "droid": {
        "observation/exterior_image_1_left": CAMERA,
        "observation/wrist_image_left": CAMERA,
        "observation/joint_position": np.zeros(7),
        "observation/gripper_position": np.zeros(1),
        "prompt": b"pick up the cup",
    },
    "aloha": {
        "state": np.zeros(14),
        "images": {name: np.moveaxis(CAMERA, -1, 0) for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")},
        "prompt": "open the box",
    },
}
"""As openpi's own examples send them."""


class Command:
    """A running `stretto serve`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        quick = ("--port", "0", "--device", "cpu", "--denoise-steps", "2")
        command = [sys.executable, "-m", "stretto", "serve", str(folder), *quick, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"ready on ws://127\.0\.0\.1:(\d+) after", line)
        if found is None:
            self.process.kill()
            pytest.fail(f"not ready: {line}{self.process.communicate()[1]}")
        self.port = int(found[1])

    def connect(self, **kw: Any) -> WebsocketClientPolicy:
        return WebsocketClientPolicy("127.0.0.1", self.port, **kw)

    def get(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C; return the exit code and what was said on standard error."""
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Command] = []

    def begin(robot: str, *flags: str) -> Command:
        folder = write_checkpoint(tmp_path / robot, **ROBOTS[robot])
        running.append(Command(folder, "--preset", robot, *flags))
        return running[-1]

    yield begin
    for command in running:
        command.process.kill()
        command.process.communicate()


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_published_client_gets_its_chunks_from_the_command_and_ctrl_c_ends_it(robot: str, start: Start) -> None:
    command, sizes = start(robot), ROBOTS[robot]
    assert command.get("/healthz") == (200, "OK\n")
    assert command.get("/readyz") == (200, "ready\n")
    client = command.connect()
    described = client.get_server_metadata()["stretto"]
    assert {"version", "model", "action_horizon", "action_dim", "max_message_bytes", "observation"} <= set(described)
    assert all(set(entry) == {"kind", "shape", "dtype", "required"} for entry in described["observation"].values())
    for i in range(34):
        observation = example(described["observation"], seed=i) if i % 2 else OBSERVATIONS[robot]
        result = client.infer(observation)
        assert result["actions"].shape == (sizes["horizon"], sizes["action_dim"])
        assert np.isfinite(result["actions"]).all()
    broker = ActionChunkBroker(client, 5)
    steps = [broker.infer(OBSERVATIONS[robot])["actions"] for _ in range(10)]
    assert {step.shape for step in steps} == {(sizes["action_dim"],)}
    assert 'stretto_request_latency_seconds_count{endpoint="policy",status="ok"} 36.0' in command.get("/metrics")[1]
    client._ws.close()
    code, said = command.interrupt()
    assert code == 0, said
    assert "Traceback" not in said


def raw(observation: dict[str, Any], dtype: Any) -> bytes:
    """Write an observation whose state has a dtype that no honest client sends."""
    state = {b"__ndarray__": True, b"data": bytes(64), b"shape": [8], b"dtype": dtype}
    return bytes(msgpack.packb({"prompt": observation["prompt"], "observation/state": state}))


def test_what_cannot_be_used_is_named_on_an_open_socket_and_no_other_client_notices(start: Start) -> None:
    command = start("libero")
    client, other = command.connect(), command.connect()
    good = {**OBSERVATIONS["libero"], "rt": {"seed": 1}}
    limit = client.get_server_metadata()["stretto"]["max_message_bytes"]
    frame = client._packer.pack(good)
    expected = other.infer(good)["actions"]
    without = {key: {k: v for k, v in good.items() if k != key} for key in good}
    state, camera = "observation/state", "observation/image"
    bad: dict[str, tuple[Any, str, str]] = {
        "missing camera": (without[camera], "bad_observation", camera),
        "extra camera": ({**good, "observation/third": CAMERA}, "bad_observation", "observation/third"),
        "missing state": (without[state], "bad_observation", state),
        "wide state": ({**good, state: np.zeros(9)}, "bad_observation", r"got shape \(9,\), expected \(8,\)"),
        "NaN state": ({**good, state: np.full(8, np.nan)}, "bad_observation", state),
        "infinite state": ({**good, state: np.full(8, -np.inf)}, "bad_observation", state),
        "ambiguous layout": ({**good, camera: np.zeros((3, 48, 3), np.uint8)}, "bad_observation", camera),
        "floats up to 255": ({**good, camera: np.full((56, 56, 3), 200.0)}, "bad_observation", camera),
        "long prompt": ({**good, "prompt": "move the arm " * 300}, "prompt_too_long", r"expected at most \d+"),
        "object dtype": (raw(good, dtype="|O"), "bad_message", state),
        "structured dtype": (raw(good, dtype=[["x", "<f4"]]), "bad_message", state),
        "truncated": (frame[: len(frame) // 2], "bad_message", "message"),
        "too big": (b"\xc6" + bytes(limit), "message_too_big", f"got {limit + 1} bytes, expected at most {limit} bytes"),
        "integer keys": (msgpack.packb({1: 2}), "bad_message", "int is not allowed for map key"),
        "no map": (msgpack.packb([1, 2]), "bad_message", "message"),
    }
    for what, (message, code, words) in bad.items():
        client._ws.send(message if isinstance(message, bytes) else client._packer.pack(message))
        told = client._ws.recv(timeout=10)
        assert isinstance(told, str), what
        assert told.startswith(f"[{code}] "), (what, told)
        assert re.search(words, told), (what, told)
        assert re.search(r"got .*, expected .* \(request \S+\)$", told), (what, told)
        np.testing.assert_array_equal(other.infer(good)["actions"], expected)
        np.testing.assert_allclose(client.infer(good)["actions"], expected, atol=1e-5)


def test_a_key_is_asked_for_where_one_was_set(start: Start) -> None:
    command = start("libero", "--api-key", "sesame")
    client = command.connect(api_key="sesame")
    assert "actions" in client.infer(OBSERVATIONS["libero"])
    for wrong in (None, "open"):
        with pytest.raises(Exception, match="401"):
            command.connect(api_key=wrong)
    assert command.get("/healthz")[0] == 200


def test_a_terminated_server_leaves_its_traces_whole(start: Start, tmp_path: Path) -> None:
    lines, timeline = tmp_path / "t.jsonl", tmp_path / "t.json"
    command = start("libero", "--control-hz", "10", "--trace", str(lines), str(timeline))
    client = command.connect()
    for _ in range(3):
        client.infer(OBSERVATIONS["libero"])
    until(lambda: len(read_trace(lines)) == 3)  # while it runs; a line is written just after its answer
    command.process.send_signal(signal.SIGTERM)
    _, said = command.process.communicate(timeout=60)
    assert command.process.returncode == 0, said
    assert len([e for e in json.loads(timeline.read_text()) if e["name"] == "request"]) == 3


def test_a_trace_without_a_control_rate_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "libero", **ROBOTS["libero"])
    command = [sys.executable, "-m", "stretto", "serve", str(folder), "--preset", "libero", "--port", "0"]
    done = subprocess.run([*command, "--device", "cpu", "--trace", str(tmp_path / "t.jsonl")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "control_hz" in done.stderr
    assert "Traceback" not in done.stderr
