"""A small served policy and ways to look at it over its sockets."""

from __future__ import annotations

import base64
import re
import socket
import time
import urllib.error
import urllib.request
from typing import Any, Self

import numpy as np
import pytest
from linear_policy import LinearPolicy, state
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from stretto.serve import ServerThread

STATE_ONLY = {"state": state(3)}
OBSERVATION = {"state": np.arange(3.0)}


class NeverReads:
    """A client that asks and leaves all it is told in its socket, which no thread of its own empties."""

    def __init__(self, server: ServerThread) -> None:
        self.socket = socket.create_connection((server.host, server.port), timeout=10)
        key = base64.b64encode(bytes(16)).decode()
        lines = ["GET / HTTP/1.1", f"Host: {server.host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())

    def ask(self, payload: bytes) -> None:
        """Send a binary frame, masked with zeros."""
        self.socket.sendall(b"\x82\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def small(**kw: Any) -> LinearPolicy:
    return LinearPolicy(STATE_ONLY, **{"action_horizon": 4, "action_dim": 2, **kw})


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


def until(condition: Any, timeout_s: float = 30.0) -> None:
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
