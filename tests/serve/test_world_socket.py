"""A client on `/world`: two sessions, actions, a prompt switch, a cancelled session, and chunks in order."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from stretto.deploy.world import World, WorldOptions
from stretto.serve.run import ServerThread
from stretto.serve.world import world_route
from stretto_client.codec import pack, unpack


class Client:
    """Speaks the protocol as its page says, and keeps answers apart by request."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.numbers = itertools.count()
        self.answers: dict[int, dict[str, Any]] = {}

    def ask(self, kind: str, **given: Any) -> int:
        request = next(self.numbers)
        self.socket.send(pack({"type": kind, "request": request, **given}))
        return request

    def answer(self, request: int) -> dict[str, Any]:
        while request not in self.answers:
            frame = self.socket.recv(timeout=60)
            assert isinstance(frame, bytes)
            message = unpack(frame)
            self.answers[message["request"]] = message
        return self.answers.pop(request)

    def do(self, kind: str, **given: Any) -> dict[str, Any]:
        return self.answer(self.ask(kind, **given))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    options = WorldOptions(text_encoder="hash", plan="by_step", devices=("cpu:0", "cpu:1"), streams=2)
    world = World(options)
    with ServerThread(world, routes=[world_route(world)]) as server:
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    with connect(server.url + "/world", max_size=None, compression=None) as socket:
        yield Client(socket)


def open_one(client: Client, **given: Any) -> int:
    """Open; a session that ended just now may still be on its way out."""
    for _ in range(300):
        opened = client.do("open", **{"prompt": "a road", **given})
        if opened["type"] == "opened":
            return int(opened["session"])
        assert opened["status"] == 503
    raise AssertionError(opened)


def test_two_sessions_act_switch_prompt_and_cancel_and_their_chunks_say_what_they_show(client: Client) -> None:
    opened = client.do("open", prompt="a road", seed=1)
    a, b = opened["session"], open_one(client, seed=2)
    assert opened["world"]["tracks"]["camera"] == {"dim": 4, "rate": "pixel", "samples": [1, 4]}
    reads: dict[int, list[dict[str, Any]]] = {a: [], b: []}
    for _ in range(3):
        asked = {s: client.ask("read", session=s) for s in (a, b)}
        for s, request in asked.items():
            reads[s].append(client.answer(request))
    assert client.do("act", session=a, track="camera", values=[1.0, 0.0, 0.0, 0.5], event=1)["type"] == "done"
    assert client.do("act", session=b, track="camera", values=np.ones((2, 4), np.float32), event=5)["event"] == 5
    assert client.do("prompt", session=a, prompt="a road at night", event=2)["type"] == "done"
    waiting = client.ask("read", session=b)
    assert client.do("cancel", session=b)["type"] == "done"
    assert client.answer(waiting)["type"] in ("chunk", "error")
    for _ in range(8):
        reads[a].append(client.do("read", session=a))
    headers = [chunk["header"] for chunk in reads[a]]
    assert [h["index"] for h in headers] == list(range(11))
    events = [e for h in headers for e in h["events"]]
    assert sorted(events) == [1, 2]
    assert min(h["index"] for h in headers if h["events"]) >= 3
    assert next(h["prompt_version"] for h in headers if 2 in h["events"]) == 1
    frames = np.concatenate([chunk["frames"] for chunk in reads[a]])
    assert frames.dtype == np.uint8
    assert frames.shape == (1 + 4 * 10, 64, 96, 3)
    assert headers[-1]["pixel_frames"] == [37, 41]
    gone = client.do("read", session=b)
    assert (gone["type"], gone["code"]) == ("error", "bad_message")


def test_a_full_server_says_so_and_has_room_again_after_a_close(client: Client) -> None:
    a, b = open_one(client), open_one(client)
    full = client.do("open", prompt="one more")
    assert (full["code"], full["status"]) == ("capacity", 503)
    assert "state slots" in full["message"]
    client.do("close", session=a)
    c = open_one(client)
    assert c not in (a, b)
    assert client.do("read", session=c)["header"]["index"] == 0


def test_sessions_end_with_their_connection(server: ServerThread) -> None:
    for _ in range(3):
        with connect(server.url + "/world", max_size=None) as socket:
            client = Client(socket)
            for session in [open_one(client), open_one(client)]:
                assert client.do("read", session=session)["type"] == "chunk"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("act", {"track": "wheel", "values": [0.0], "event": 1}, "track: got 'wheel'"),
        ("act", {"track": "camera", "values": [0.0] * 4, "event": -1}, "event: got -1"),
        ("act", {"track": "camera", "values": "left", "event": 1}, r"actions.camera: got"),
        ("act", {"track": "camera", "event": 1}, "values: got nothing"),
        ("prompt", {"prompt": "word " * 9}, "prompt: got 9 words"),
        ("open", {"prompt": "a", "size": [60, 96]}, "the nearest is 64"),
        ("open", {"prompt": "a", "sise": [64, 96]}, "sise: got an unknown field"),
        ("dance", {}, "type: got 'dance'"),
    ],
)
def test_a_bad_message_is_named_and_its_session_goes_on(client: Client, kind: str, given: dict[str, Any], message: str) -> None:
    session = open_one(client)
    assert client.do("read", session=session)["header"]["index"] == 0
    extra = {"session": session} if kind in ("act", "prompt") else {}
    error = client.do(kind, **extra, **given)
    assert (error["type"], error["status"]) == ("error", 400)
    assert message in error["message"]
    assert client.do("read", session=session)["header"]["index"] == 1


def test_a_second_reader_is_refused_and_the_first_gets_its_chunk(client: Client) -> None:
    session = open_one(client)
    requests = [client.ask("read", session=session) for _ in range(8)]
    answers = [client.answer(r) for r in requests]
    chunks = [a["header"]["index"] for a in answers if a["type"] == "chunk"]
    assert chunks == list(range(len(chunks)))
    assert all("second reader" in a["message"] for a in answers if a["type"] == "error")


def test_robots_are_told_that_this_port_makes_worlds(server: ServerThread) -> None:
    with connect(server.url) as socket:
        with pytest.raises(Exception, match="world"):
            socket.recv(timeout=30)
        assert "/world" in (socket.close_reason or "")


def test_the_server_counts_the_frames_it_sent(server: ServerThread, client: Client) -> None:
    def sent() -> float:
        with urllib.request.urlopen(f"{server.http_url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("stretto_world_frames_total"))

    before, session = sent(), open_one(client)
    spans = [client.answer(client.ask("read", session=session))["header"]["pixel_frames"] for _ in range(2)]
    client.do("cancel", session=session)
    assert sent() - before == sum(stop - start for start, stop in spans) > 0
