"""The policy client against real sockets: a stock openpi server, a Stretto one, and servers that misbehave."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from stretto_client import codec
from stretto_client.errors import ConnectionLostError, FieldError, PolicyTimeoutError, ReplyError, ServerError
from stretto_client.options import Handshake, Options
from stretto_client.policy import PolicyClient

RT = {"version": 1, "horizon": 4, "action_dim": 2, "control_hz": 10.0, "rtc_modes": ["identity"], "max_delay": 3}
OBS = {"observation/state": np.zeros(3), "prompt": "pick"}


@contextlib.contextmanager
def running(handler: Callable[[ServerConnection], None], **kwargs: Any) -> Iterator[int]:
    with serve(handler, "127.0.0.1", 0, compression=None, max_size=None, close_timeout=0.2, **kwargs) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.socket.getsockname()[1]
        server.shutdown()
        thread.join()


def serving(answer: Callable[[dict[str, Any]], Any], metadata: Any) -> Callable[[ServerConnection], None]:
    def handler(ws: ServerConnection) -> None:
        ws.send(codec.pack(metadata))
        for frame in ws:
            reply = answer(codec.unpack(frame))
            ws.send(reply if isinstance(reply, (str, bytes)) else codec.pack(reply))

    return handler


def chunk(request: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"actions": np.ones((4, 2)), "seen": sorted(str(k) for k in request)}
    if "rt" in request:
        reply["rt"] = {"request_id": request["rt"]["request_id"]}
        reply["told"] = {k: v for k, v in request["rt"].items() if not isinstance(v, np.ndarray)}
    return reply


def test_a_stock_server_is_sent_nothing_it_does_not_know() -> None:
    with running(serving(chunk, {"reset_pose": [0.0]})) as port, PolicyClient("127.0.0.1", port) as client:
        client.reset()
        got = client.infer(OBS)
        assert client.metadata == {"reset_pose": [0.0]}
        assert got["seen"] == ["observation/state", "prompt"]
        assert got["actions"].shape == (4, 2)
        with pytest.raises(FieldError, match="does not advertise"):
            client.infer(OBS, Options(seed=1))


def test_extensions_and_the_reset_of_an_episode_reach_the_server_once() -> None:
    with running(serving(chunk, {"rt": RT})) as port, PolicyClient("127.0.0.1", port, session_id="arm-1") as client:
        told = client.infer(OBS, Options(seed=7, deadline_ms=80.0, executed_steps=1, delay_steps=2, mode="identity"))["told"]
        wanted = {"seed": 7, "deadline_ms": 80.0, "executed_steps": 1, "delay_steps": 2, "mode": "identity"}
        assert told == {"request_id": "1", "session_id": "arm-1", **wanted}
        client.reset()
        assert client.infer(OBS)["told"] == {"request_id": "2", "session_id": "arm-1", "reset": True}
        assert "reset" not in client.infer(OBS)["told"]


def test_the_api_key_goes_out_in_openpi_s_header() -> None:
    seen: list[str | None] = []

    def handler(ws: ServerConnection) -> None:
        assert ws.request is not None
        seen.append(ws.request.headers.get("Authorization"))
        ws.send(codec.pack({}))

    with running(handler) as port:
        PolicyClient("127.0.0.1", port, api_key="k1").close()
    assert seen == ["Api-Key k1"]


def test_a_text_frame_is_an_error_with_its_text_and_the_connection_goes_on() -> None:
    replies = iter(["[deadline] refused (deadline): 80 ms is too short (request 1)", {"actions": np.zeros((4, 2))}])
    with running(serving(lambda _: next(replies), {})) as port, PolicyClient("127.0.0.1", port) as client:
        with pytest.raises(ServerError, match="80 ms is too short") as e:
            client.infer(OBS)
        assert (e.value.code, e.value.reason) == ("deadline", "deadline")
        assert "actions" in client.infer(OBS)


def test_a_late_reply_is_never_paired_with_a_newer_request() -> None:
    release = threading.Event()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["n"] == 1:
            release.wait(5)
        return {"actions": np.full((4, 2), float(request["n"]))}

    with running(serving(answer, {})) as port, PolicyClient("127.0.0.1", port, reply_timeout_s=0.2) as client:
        with pytest.raises(PolicyTimeoutError):
            client.infer({"n": 1})
        release.set()
        for n in (2, 3):
            assert client.infer({"n": n})["actions"][0, 0] == n


def test_an_answer_to_another_request_is_refused_and_the_connection_dropped() -> None:
    wrong = iter([{"actions": np.zeros((4, 2)), "rt": {"request_id": "99"}}])
    with running(serving(lambda r: next(wrong, chunk(r)), {"rt": RT})) as port, PolicyClient("127.0.0.1", port) as client:
        with pytest.raises(ReplyError, match="request 99"):
            client.infer(OBS)
        assert client.infer(OBS)["rt"]["request_id"] == "2"


def test_a_connection_closed_while_idle_is_reopened() -> None:
    def one_shot(ws: ServerConnection) -> None:
        ws.send(codec.pack({}))
        ws.send(codec.pack(chunk(codec.unpack(ws.recv()))))

    with running(one_shot) as port, PolicyClient("127.0.0.1", port) as client:
        for _ in range(3):
            assert client.infer(OBS)["actions"].shape == (4, 2)
            time.sleep(0.05)


def test_a_connection_lost_before_the_answer_is_an_error_and_the_next_call_works() -> None:
    calls: list[int] = []

    def handler(ws: ServerConnection) -> None:
        ws.send(codec.pack({}))
        for frame in ws:
            calls.append(1)
            if len(calls) == 1:
                ws.close(1011, "engine died")
                return
            ws.send(codec.pack(chunk(codec.unpack(frame))))

    with running(handler) as port, PolicyClient("127.0.0.1", port) as client:
        with pytest.raises(ConnectionLostError, match="engine died"):
            client.infer(OBS)
        assert "actions" in client.infer(OBS)


def test_a_server_that_never_reads_costs_a_bounded_time() -> None:
    done = threading.Event()

    def deaf(ws: ServerConnection) -> None:
        ws.send(codec.pack({}))
        done.wait(10)

    big = {"image": np.zeros(60 << 20, np.uint8)}
    with running(deaf, max_queue=1) as port, PolicyClient("127.0.0.1", port, reply_timeout_s=0.3) as client:
        began = time.monotonic()
        with pytest.raises(PolicyTimeoutError):
            client.infer(big)
        assert time.monotonic() - began < 5
        done.set()


def test_a_server_that_is_not_ready_in_time_is_an_error() -> None:
    done = threading.Event()

    def mute(ws: ServerConnection) -> None:
        done.wait(5)

    with running(mute) as port:
        with pytest.raises(PolicyTimeoutError):
            PolicyClient("127.0.0.1", port, ready_timeout_s=0.1)
        done.set()


def test_no_server_is_an_error_that_names_the_address() -> None:
    with running(lambda ws: None) as port:
        pass
    with pytest.raises(ConnectionLostError, match=f"ws://127.0.0.1:{port}"):
        PolicyClient("127.0.0.1", port, wait_s=0.1)


def test_a_message_above_the_limit_of_the_handshake_is_refused_before_it_is_sent() -> None:
    metadata = {"rt": RT, "stretto": {"max_message_bytes": 2048}}
    with (
        running(serving(chunk, metadata)) as port,
        PolicyClient("127.0.0.1", port) as client,
    ):
        with pytest.raises(FieldError, match="2048"):
            client.infer({"image": np.zeros(4096, np.uint8)})
        assert "actions" in client.infer(OBS)


def test_a_server_that_comes_back_with_another_chunk_shape_is_refused() -> None:
    shapes = iter([4, 5])

    def handler(ws: ServerConnection) -> None:
        ws.send(codec.pack({"rt": {**RT, "horizon": next(shapes)}}))
        ws.recv()

    with running(handler) as port, PolicyClient("127.0.0.1", port) as client:
        with pytest.raises(ConnectionLostError):
            client.infer(OBS)
        with pytest.raises(ReplyError, match="were 4 x 2, now 5 x 2"):
            client.infer(OBS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("horizon", 0),
        ("horizon", True),
        ("horizon", 4.0),
        ("action_dim", -1),
        ("control_hz", float("nan")),
        ("control_hz", True),
        ("control_hz", 0),
        ("control_hz", "10"),
        ("max_delay", 5),
        ("version", 0),
        ("rtc_modes", "vjp"),
    ],
)
def test_a_number_of_the_handshake_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"metadata.rt.{field}"):
        Handshake.read({"rt": {**RT, field: value}})


def test_other_numbers_that_control_the_robot_are_checked_too() -> None:
    with pytest.raises(FieldError, match=r"metadata\.execution_horizon"):
        Handshake.read({"execution_horizon": 0})
    with pytest.raises(FieldError, match=r"metadata\.stretto\.max_message_bytes"):
        Handshake.read({"rt": RT, "stretto": {"max_message_bytes": 1}})


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("seed", {"seed": -1}),
        ("seed", {"seed": True}),
        ("deadline_ms", {"deadline_ms": float("nan")}),
        ("deadline_ms", {"deadline_ms": 0}),
        ("mode", {"mode": "magic"}),
        ("delay_steps", {"mode": "identity"}),
        ("delay_steps", {"executed_steps": 1}),
        ("delay_steps", {"prefix": np.zeros((2, 2))}),
        ("delay_steps", {"prefix": np.zeros((2, 2)), "delay_steps": 3}),
        ("executed_steps", {"delay_steps": 1}),
        ("executed_steps", {"delay_steps": 1, "executed_steps": -1}),
        ("prefix", {"prefix": np.zeros((0, 2)), "delay_steps": 0}),
        ("prefix", {"prefix": np.full((2, 2), np.nan), "delay_steps": 1}),
        ("prefix", {"prefix": np.zeros(3), "delay_steps": 1}),
    ],
)
def test_an_option_out_of_range_or_alone_is_refused_by_name(field: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as e:
        Options(**kwargs)
    assert e.value.field == field


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prefix", Options(prefix=np.zeros((5, 2)), delay_steps=1)),
        ("delay_steps", Options(executed_steps=3, delay_steps=2)),
        ("executed_steps", Options(executed_steps=5, delay_steps=0)),
        ("delay_steps", Options(executed_steps=0, delay_steps=5)),
    ],
)
def test_steps_beyond_the_chunk_are_refused_by_name(field: str, options: Options) -> None:
    with pytest.raises(FieldError) as e:
        options.check_horizon(4)
    assert e.value.field == field


def test_the_published_openpi_codec_and_ours_write_the_same_bytes() -> None:
    theirs = pytest.importorskip("openpi_client.msgpack_numpy")
    tree = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.int64(3),
        "c": np.float64(1.5),
        "d": [True, None, "x"],
        "e": b"y",
    }
    assert codec.pack(tree) == theirs.packb(tree)
    np.testing.assert_array_equal(theirs.unpackb(codec.pack(tree))["a"], tree["a"])
