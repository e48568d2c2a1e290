"""The server's doors: health, keys, limits, options and numbers, over real sockets."""

from __future__ import annotations

import logging
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
from over_the_wire import OBSERVATION, closing, get, metric, small, until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from stretto.core.errors import ConfigError
from stretto.serve import ServerOptions, ServerThread
from stretto_client.codec import pack, unpack


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
def test_a_client_without_the_key_is_refused_at_the_handshake(
    headers: dict[str, str], got: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerThread(small(), ServerOptions(port=0, api_key="k")) as server:
        with pytest.raises(InvalidStatus) as caught, connect(server.url, additional_headers=headers):
            pass
        assert caught.value.response.status_code == 401
        assert f"authorization: got {got}" in bytes(caught.value.response.body or b"").decode()
        with connect(server.url, additional_headers={"Authorization": "Api-Key k"}) as ws:
            assert "stretto" in unpack(ws.recv(timeout=5))
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(loud) == 1, loud
    assert f"was refused: authorization: got {got}" in loud[0]


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


def test_a_taken_port_is_an_error_before_anything_is_warmed() -> None:
    with ServerThread(small()) as server:
        late = small()
        with pytest.raises(ConfigError, match=r"host, port: got .*in use"):
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
