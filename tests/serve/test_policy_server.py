"""The server's ports, doors and faults, over real sockets."""

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
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_policy import LIBERO, LinearPolicy, example, state
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stretto.core.errors import CheckpointError, ConfigError
from stretto.serve import ServerOptions, ServerThread
from stretto_client.codec import pack, unpack

STATE_ONLY = {"state": state(3)}
OBSERVATION = {"state": np.arange(3.0)}


def small(**kw: Any) -> LinearPolicy:
    return LinearPolicy(STATE_ONLY, action_horizon=4, action_dim=2, **kw)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def metric(server: ServerThread, line: str) -> float:
    text = get(f"{server.http_url}/metrics")[1]
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    assert found, f"{line} is not in\n{text}"
    return float(found[1])


def until(condition: Any, timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition never came true"
        time.sleep(0.01)


def closing(ws: ClientConnection) -> tuple[int, str]:
    """Read until the server closes; return its close frame."""
    with pytest.raises(ConnectionClosed) as caught:
        for _ in ws:
            pass
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


def test_readiness_is_red_until_warm_and_liveness_is_not() -> None:
    with ServerThread(small(warm_s=0.5), wait_ready=False) as server:
        assert get(f"{server.http_url}/healthz") == (200, "OK\n")
        for path in ("/readyz", "/health"):
            assert get(server.http_url + path) == (503, "warming up\n")
        server.wait_ready()
        for path in ("/readyz", "/health"):
            assert get(server.http_url + path) == (200, "ready\n")


def test_a_request_before_the_metadata_frame_gets_an_error_and_the_handshake_still_comes() -> None:
    with ServerThread(small(warm_s=0.3), wait_ready=False) as server, connect(server.url) as ws:
        ws.send(pack(OBSERVATION))
        assert str(ws.recv(timeout=5)).startswith("[protocol] message: got a request before the metadata frame")
        assert unpack(ws.recv(timeout=5))["stretto"]["model"] == "linear"


def test_pings_and_health_are_answered_and_others_progress_while_one_client_waits() -> None:
    policy = small(infer_s=1.5, workers=2)
    with ServerThread(policy) as server, connect(server.url, ping_interval=0.1, ping_timeout=0.4) as slow:
        slow.recv(timeout=5)
        slow.send(pack(OBSERVATION))
        until(lambda: len(policy.ran) == 1)
        policy.infer_s = 0.0
        with connect(server.url) as quick:
            quick.recv(timeout=5)
            health_s = []
            for _ in range(20):
                began_s = time.perf_counter()
                assert get(f"{server.http_url}/healthz")[0] == 200
                health_s.append(time.perf_counter() - began_s)
                quick.send(pack(OBSERVATION))
                assert "actions" in unpack(quick.recv(timeout=1))
        assert np.percentile(health_s, 90) < 0.05
        with pytest.raises(TimeoutError):
            slow.recv(timeout=0.01)
        assert "actions" in unpack(slow.recv(timeout=5))


def test_a_peer_that_answers_no_ping_is_kept() -> None:
    options = ServerOptions(port=0, ping_interval_s=0.1)
    with ServerThread(small(), options) as server, connect(server.url) as ws:
        ws.recv(timeout=5)
        ws.protocol.receive_data = _without_pongs(ws.protocol.receive_data)
        time.sleep(0.5)
        ws.send(pack(OBSERVATION))
        assert "actions" in unpack(ws.recv(timeout=5))


def _without_pongs(receive: Any) -> Any:
    def filtered(data: bytes) -> None:
        if data[:1] != b"\x89":
            receive(data)

    return filtered


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the network stack has no such option")
def test_accepted_connections_inherit_the_dead_host_timeout() -> None:
    with ServerThread(small(), ServerOptions(port=0, dead_host_s=7.0)) as server, connect(server.url) as ws:
        ws.recv(timeout=5)
        accepted = [c.transport.get_extra_info("socket") for c in server._server.server_state.connections]
        assert accepted
        assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000 for s in accepted)


def test_the_default_address_is_loopback_and_the_option_is_honoured() -> None:
    assert ServerOptions().host == "127.0.0.1"
    with ServerThread(small(), ServerOptions(host="127.0.0.2", port=0)) as server:
        assert server.host == "127.0.0.2"
        assert get(f"http://127.0.0.2:{server.port}/healthz")[0] == 200
        with pytest.raises(urllib.error.URLError):
            get(f"http://127.0.0.1:{server.port}/healthz")


@pytest.mark.parametrize(("headers", "got"), [({}, "nothing"), ({"Authorization": "Api-Key wrong"}, "another value")])
def test_a_client_without_the_key_is_refused_at_the_handshake(headers: dict[str, str], got: str) -> None:
    with ServerThread(small(), ServerOptions(port=0, api_key="k")) as server:
        with pytest.raises(InvalidStatus) as caught, connect(server.url, additional_headers=headers):
            pass
        assert caught.value.response.status_code == 401
        assert f"authorization: got {got}" in bytes(caught.value.response.body or b"").decode()
        with connect(server.url, additional_headers={"Authorization": "Api-Key k"}) as ws:
            assert "stretto" in unpack(ws.recv(timeout=5))


def test_a_web_page_may_not_connect_unless_allowed() -> None:
    with ServerThread(small(), ServerOptions(port=0, allowed_origins=("http://ours",))) as server:
        with pytest.raises(InvalidStatus) as caught, connect(server.url, origin="http://evil"):
            pass
        assert caught.value.response.status_code == 403
        with connect(server.url, origin="http://ours") as ws:
            assert "stretto" in unpack(ws.recv(timeout=5))


def test_sessions_beyond_the_limit_are_refused_and_places_come_back() -> None:
    with ServerThread(small(), ServerOptions(port=0, max_sessions=1)) as server:
        with connect(server.url) as ws:
            ws.recv(timeout=5)
            with pytest.raises(InvalidStatus) as caught, connect(server.url):
                pass
            assert caught.value.response.status_code == 503
        until(lambda: metric(server, "stretto_sessions") == 0)
        with connect(server.url) as ws:
            ws.recv(timeout=5)


def test_a_policy_without_room_says_try_again_later() -> None:
    with ServerThread(small(max_sessions=0)) as server, connect(server.url) as ws:
        assert closing(ws) == (1013, "refused (sessions): 0 sessions are open")


def test_an_oversized_message_is_refused_with_limit_and_size_and_others_go_on() -> None:
    with ServerThread(small(), ServerOptions(port=0, max_message_bytes=100_000)) as server:
        with connect(server.url, compression=None, max_size=None) as ws, connect(server.url) as other:
            assert unpack(ws.recv(timeout=5))["stretto"]["max_message_bytes"] == 100_000
            other.recv(timeout=5)
            ws.send(b"x" * 20_000_000)
            told = str(ws.recv(timeout=5))
            assert told == "[message_too_big] message: got 20000000 bytes, expected at most 100000 bytes (request -)"
            assert closing(ws) == (1009, "frame with 20000000 bytes exceeds limit of 100000 bytes")
            other.send(pack(OBSERVATION))
            assert "actions" in unpack(other.recv(timeout=5))
        until(lambda: metric(server, "stretto_sessions") == 0)
        assert metric(server, 'stretto_errors_total{code="message_too_big"}') == 1


def test_a_claim_of_a_terabyte_is_refused_by_its_header_alone() -> None:
    with ServerThread(small()) as server, connect(server.url, compression=None) as ws:
        ws.recv(timeout=5)
        ws.socket.sendall(b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"mask")
        assert closing(ws)[0] == 1009


def test_many_small_frames_cannot_add_up_to_an_oversized_message() -> None:
    options = ServerOptions(port=0, max_message_bytes=100_000)
    with ServerThread(small(), options) as server, connect(server.url, compression=None) as ws:
        ws.recv(timeout=5)
        # Refused after the third frame, so the client may learn of it while it still sends.
        with contextlib.suppress(ConnectionClosed):
            ws.send([b"x" * 30_000] * 1000)
        assert closing(ws) == (1009, "frame with 30000 bytes after reading 90000 bytes exceeds limit of 100000 bytes")


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


def test_options_reach_the_policy_and_its_answer_names_the_request() -> None:
    policy = small()
    with ServerThread(policy) as server, connect(server.url) as ws:
        ws.recv(timeout=5)
        ws.send(pack({**OBSERVATION, "rt": {"request_id": "a", "session_id": "episode 1", "seed": 5}}))
        first = unpack(ws.recv(timeout=5))["rt"]
        ws.send(pack({**OBSERVATION, "rt": {"session_id": "episode 1"}}))
        ws.recv(timeout=5)
        ws.send(pack({**OBSERVATION, "rt": {"session_id": "episode 2"}}))
        third = unpack(ws.recv(timeout=5))["rt"]
    assert (first["request_id"], first["session_id"], third["session_id"]) == ("a", "episode 1", "episode 2")
    assert [o.reset for o in policy.seen] == [True, False, True]
    assert policy.seen[0].seed == 5


def test_metrics_count_what_happened_and_belong_to_one_server() -> None:
    policy = small()
    with ServerThread(policy) as server, ServerThread(small()) as other, connect(server.url) as ws:
        ws.recv(timeout=5)
        for _ in range(3):
            ws.send(pack(OBSERVATION))
            ws.recv(timeout=5)
        ws.send(pack({"state": np.zeros(9)}))
        ws.recv(timeout=5)
        assert metric(server, 'stretto_request_latency_seconds_count{endpoint="policy",status="ok"}') == 3
        assert metric(server, 'stretto_request_latency_seconds_count{endpoint="policy",status="error"}') == 1
        assert metric(server, 'stretto_errors_total{code="bad_observation"}') == 1
        assert metric(server, "stretto_batch_size_count") == 3
        for stage in ("decode", "queue", "preprocess", "denoise", "encode"):
            assert metric(server, f'stretto_stage_seconds_count{{stage="{stage}"}}') == 3
        assert metric(server, "stretto_sessions") == 1
        assert metric(server, "stretto_graph_captures_total") == 0
        assert metric(server, "stretto_gpu_memory_bytes") == 0
        assert metric(server, "stretto_queue_depth") == 0
        assert "stretto_batch_size_count 0.0" in get(f"{other.http_url}/metrics")[1]


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
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
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


def test_a_taken_port_is_an_error_before_anything_is_warmed() -> None:
    with ServerThread(small()) as server:
        late = small()
        with pytest.raises(OSError, match="in use"):
            ServerThread(late, ServerOptions(port=server.port))
        assert not late.ready


@pytest.mark.parametrize(
    ("setting", "value"),
    [("port", 70000), ("api_key", ""), ("max_message_bytes", 5), ("max_sessions", 0), ("ping_interval_s", float("nan"))],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        ServerOptions(**{setting: value})


def test_the_key_is_not_shown_when_options_are_printed() -> None:
    assert "hush" not in repr(ServerOptions(api_key="hush"))
