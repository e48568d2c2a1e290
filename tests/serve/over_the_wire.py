"""A small served policy and ways to look at it over its sockets."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
from linear_policy import LinearPolicy, state
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from stretto.serve import ServerThread

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
