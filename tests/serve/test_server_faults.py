"""What happens when something goes wrong, or ends: each fault stays with its own request or session."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from linear_policy import LIBERO, LinearPolicy, example
from over_the_wire import OBSERVATION, NeverReads, closing, get, metric, small, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from stretto.core.errors import CheckpointError
from stretto.serve import ServerOptions, ServerThread
from stretto_client.codec import pack, unpack


def test_an_oversized_message_is_refused_with_limit_and_size_and_others_go_on() -> None:
    with ServerThread(small(), ServerOptions(port=0, max_message_bytes=100_000)) as server:
        with connect(server.url, compression=None, max_size=None) as ws, connect(server.url) as other:
            assert unpack(ws.recv(timeout=5))["stretto"]["max_message_bytes"] == 100_000
            other.recv(timeout=5)
            ws.send(b"x" * 20_000_000)
            told = str(ws.recv(timeout=5))
            assert told == "[message_too_big] message: got 20000000 bytes, expected at most 100000 bytes (request -)"
            assert closing(ws) == (1009, "frame with 20000000 bytes exceeds limit of 400000 bytes")
            other.send(pack(OBSERVATION))
            assert "actions" in unpack(other.recv(timeout=5))
        until(lambda: metric(server, "stretto_sessions") == 0)
        assert metric(server, 'stretto_errors_total{code="message_too_big"}') == 1


def test_a_message_somewhat_over_the_limit_is_refused_on_a_socket_that_stays_open() -> None:
    options = ServerOptions(port=0, max_message_bytes=100_000)
    with ServerThread(small(), options) as server, connect(server.url, compression=None) as ws:
        ws.recv(timeout=5)
        for size in (100_001, 400_000):
            ws.send(b"x" * size)
            told = str(ws.recv(timeout=5))
            assert told.startswith(f"[message_too_big] message: got {size} bytes, expected at most 100000 bytes (request ")
        ws.send(pack(OBSERVATION))
        assert "actions" in unpack(ws.recv(timeout=5))
        assert metric(server, 'stretto_errors_total{code="message_too_big"}') == 2


def test_a_claim_of_a_terabyte_is_refused_by_its_header_alone() -> None:
    with ServerThread(small()) as server, connect(server.url, compression=None) as ws:
        ws.recv(timeout=5)
        ws.socket.sendall(b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"mask")
        assert closing(ws)[0] == 1009


def test_many_small_frames_cannot_add_up_to_an_oversized_message() -> None:
    options = ServerOptions(port=0, max_message_bytes=100_000)
    with ServerThread(small(), options) as server, connect(server.url, compression=None) as ws:
        ws.recv(timeout=5)
        # Refused in the middle, so the client may learn of it while it still sends.
        with contextlib.suppress(ConnectionClosed):
            ws.send([b"x" * 30_000] * 1000)
        assert closing(ws) == (1009, "frame with 30000 bytes after reading 390000 bytes exceeds limit of 400000 bytes")


def test_a_client_that_never_reads_is_read_no_further_and_others_are_served() -> None:
    policy = talkative()
    with ServerThread(policy) as server, NeverReads(server) as deaf, connect(server.url, max_size=None) as other:
        other.recv(timeout=5)
        flood(deaf, server)
        # One answer waits for the client, and one more request had come by then.
        assert metric(server, "stretto_requests_in_flight") <= 2
        for _ in range(3):
            other.send(pack(OBSERVATION))
            assert "actions" in unpack(other.recv(timeout=5))
        assert metric(server, "stretto_requests_in_flight") <= 2


def test_a_client_that_never_reads_is_cut_off_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with (
        ServerThread(talkative(), ServerOptions(port=0, stalled_s=0.5)) as server,
        NeverReads(server) as deaf,
        connect(server.url, max_size=None) as other,
    ):
        other.recv(timeout=5)
        flood(deaf, server)
        until(lambda: metric(server, "stretto_sessions") == 1)
        assert metric(server, 'stretto_errors_total{code="stalled"}') == 1
        assert metric(server, "stretto_requests_in_flight") == 0
        other.send(pack(OBSERVATION))
        assert "actions" in unpack(other.recv(timeout=5))
    assert re.search(r"127.0.0.1:\d+ read nothing for 0.5 s, with \d+ bytes waiting for it: cut off", caplog.text)
    assert "Exception in ASGI" not in caplog.text


def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    with ServerThread(talkative(), ServerOptions(port=0, stalled_s=0.5)) as server, NeverReads(server) as slow:
        flood(slow, server)
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + 1.0:
            assert slow.socket.recv(1 << 17)
            time.sleep(0.02)
        assert metric(server, "stretto_sessions") == 1


def test_a_client_that_never_reads_does_not_hold_up_shutdown() -> None:
    server = ServerThread(talkative())
    with server, NeverReads(server) as deaf:
        flood(deaf, server)
        begin_s = time.monotonic()
        server.stop()
        assert time.monotonic() - begin_s < 5.0


def talkative() -> LinearPolicy:
    """A policy whose answers are a megabyte, so that what sockets hold is soon full."""
    return small(action_horizon=1 << 16, action_dim=2)


def flood(deaf: NeverReads, server: ServerThread) -> None:
    """Ask, mostly when the last answer was made, until answers wait in the server."""
    for _ in range(16):
        deaf.ask(pack(OBSERVATION))
        time.sleep(0.01)
    until(lambda: metric(server, "stretto_requests_in_flight") > 0)


def test_queued_work_of_a_client_that_left_is_dropped() -> None:
    policy = small(infer_s=0.4)
    with ServerThread(policy) as server, connect(server.url) as first:
        first.recv(timeout=5)
        first.send(pack({**OBSERVATION, "rt": {"request_id": "first"}}))
        until(lambda: policy.ran == ["first"])
        leaver = connect(server.url)
        with leaver:
            leaver.recv(timeout=5)
            leaver.send(pack({**OBSERVATION, "rt": {"request_id": "leaver"}}))
            until(lambda: metric(server, "stretto_requests_in_flight") == 2)
            leaver.socket.shutdown(socket.SHUT_RDWR)  # killed, not closed politely
        until(lambda: len(policy.sessions) == 1)
        assert "actions" in unpack(first.recv(timeout=5))
        first.send(pack({**OBSERVATION, "rt": {"request_id": "second"}}))
        assert unpack(first.recv(timeout=5))["rt"]["request_id"] == "second"
        assert policy.ran == ["first", "second"]
        assert metric(server, "stretto_dropped_requests_total") == 1


@pytest.mark.parametrize("workers_notice", [True, False])
def test_a_dead_engine_turns_readiness_red_and_ends_sessions_with_1011(workers_notice: bool) -> None:
    policy = small(infer_s=30.0)
    with ServerThread(policy) as server, connect(server.url) as busy, connect(server.url) as idle:
        busy.recv(timeout=5)
        idle.recv(timeout=5)
        busy.send(pack({**OBSERVATION, "rt": {"request_id": "mine"}}))
        until(lambda: policy.ran == ["mine"])
        policy.die("cuda:0 fell off the bus", workers_notice=workers_notice)
        assert re.fullmatch(r"\[worker_died\] .*fell off the bus \(request mine\)", str(busy.recv(timeout=5)))
        for ws in (busy, idle):
            assert closing(ws) == (1011, "the engine is dead: cuda:0 fell off the bus")
        assert get(f"{server.http_url}/readyz") == (503, "the engine is dead: cuda:0 fell off the bus\n")
        assert get(f"{server.http_url}/healthz")[0] == 200
        with connect(server.url) as late:
            assert closing(late)[0] == 1011


def test_a_policy_that_cannot_warm_ends_the_server_and_tells_waiting_clients() -> None:
    fault = CheckpointError("model.safetensors: is cut short")
    with pytest.raises(CheckpointError, match="cut short"), ServerThread(small(warm_fault=fault)):
        pass
    with ServerThread(small(warm_fault=fault, warm_s=0.3), wait_ready=False) as server, connect(server.url) as ws:
        assert closing(ws) == (1011, "the engine failed to start; the server's log has the details")
        with pytest.raises(CheckpointError, match="cut short"):
            server.wait_ready()


def test_stopping_finishes_the_request_in_flight_and_closes_with_1012() -> None:
    policy = small(infer_s=0.5)
    server = ServerThread(policy)
    with server, connect(server.url) as busy, connect(server.url) as idle:
        busy.recv(timeout=5)
        idle.recv(timeout=5)
        busy.send(pack(OBSERVATION))
        until(lambda: len(policy.ran) == 1)
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        assert closing(idle) == (1012, "the server is shutting down")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((server.host, server.port), timeout=1).close()
        assert "actions" in unpack(busy.recv(timeout=5))
        assert closing(busy) == (1012, "the server is shutting down")
        stopper.join(timeout=10)
        assert not stopper.is_alive()


def test_non_finite_actions_are_an_error_and_a_count_and_never_sent() -> None:
    with ServerThread(small()) as server, connect(server.url) as ws:
        ws.recv(timeout=5)
        ws.send(pack({"state": np.array([0.0, np.nan, 0.0])}))
        assert str(ws.recv(timeout=5)).startswith("[non_finite_actions] actions: got 8 of 8 values NaN or infinite")
        ws.send(pack(OBSERVATION))
        assert "actions" in unpack(ws.recv(timeout=5))
        assert metric(server, "stretto_non_finite_actions_total") == 1


def test_a_fault_inside_the_policy_is_told_without_a_traceback_and_the_session_goes_on() -> None:
    with ServerThread(small()) as server, connect(server.url) as ws:
        ws.recv(timeout=5)
        ws.send(pack({"state": "not a number", "rt": {"request_id": "r1"}}))
        told = str(ws.recv(timeout=5))
        assert told == "[internal] the request failed inside the server; its log has the details (request r1)"
        ws.send(pack(OBSERVATION))
        assert "actions" in unpack(ws.recv(timeout=5))


def test_two_hundred_observations_of_eight_clients_are_each_answered_with_their_own_actions() -> None:
    policy = LinearPolicy(LIBERO, workers=2)
    wrong: list[int] = []

    def drive(number: int, url: str) -> None:
        with connect(url, compression=None, max_size=None) as ws:
            ws.recv(timeout=5)
            for i in range(25):
                observation = example({"observation/state": LIBERO["observation/state"]}, seed=100 * number + i)
                image = np.full((8, 8, 3), number * 10 + i, np.uint8)
                observation |= {"observation/image": image, "observation/wrist_image": image}
                ws.send(pack(observation))
                reply = unpack(ws.recv(timeout=10))
                if not np.array_equal(reply["actions"], policy.act(observation)):
                    wrong.append(number)

    with ServerThread(policy) as server:
        threads = [threading.Thread(target=drive, args=(n, server.url)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong
    assert len(policy.ran) == 200


@contextlib.contextmanager
def running(folder: Path, policy: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server in a process of its own; yields it and its address once it says that it is ready."""
    script = folder / "serve.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from linear_policy import LinearPolicy
            from stretto.serve import ServerOptions, run_server
            run_server({policy}, ServerOptions(port=0))
            print("returned", flush=True)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"stretto: linear ready on (ws://127\.0\.0\.1:\d+) after [\d.]+ s\n", line)
        try:
            assert found, line
            yield process, found[1]
        finally:
            process.kill()


def test_run_server_prints_one_line_when_ready_and_returns_on_sigterm(tmp_path: Path) -> None:
    with running(tmp_path, "LinearPolicy()") as (process, url), connect(url, compression=None) as ws:
        ws.recv(timeout=5)
        ws.send(pack(example(LIBERO)))
        assert "actions" in unpack(ws.recv(timeout=5))
        process.send_signal(signal.SIGTERM)
        assert closing(ws)[0] == 1012
        assert process.stdout is not None
        assert process.stdout.read() == "returned\n"
        assert process.wait(timeout=5) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "LinearPolicy(infer_s=60.0)") as (process, url), connect(url, compression=None) as ws:
        ws.recv(timeout=5)
        ws.send(pack(example(LIBERO)))
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "returned\n"
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
