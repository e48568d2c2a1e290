"""One real minute: the stock client's keepalive (20 s and 20 s) cannot be shortened, so this test takes the time."""

from __future__ import annotations

import threading
import time
import urllib.request
from typing import Any

import numpy as np
import pytest
from linear_policy import LIBERO, LinearPolicy, example
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from stretto.serve import ServerThread

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
INFER_S, WARM_S = 60.0, 45.0


def test_the_stock_client_survives_a_minute_of_inference_while_health_and_others_go_on() -> None:
    policy, late = LinearPolicy(LIBERO, workers=2, infer_s=INFER_S), LinearPolicy(LIBERO, warm_s=WARM_S)
    observation = example(LIBERO)
    got: dict[str, Any] = {}
    with ServerThread(policy) as server, ServerThread(late, wait_ready=False) as warming:

        def infer_for_a_minute() -> None:
            client = WebsocketClientPolicy("127.0.0.1", server.port)
            got["slow"] = client.infer(observation)
            got["again"] = client.infer(observation)
            client._ws.close()

        def wait_for_warming() -> None:
            client = WebsocketClientPolicy("127.0.0.1", warming.port)
            got["early"] = client.infer(observation)
            client._ws.close()

        threads = [threading.Thread(target=f) for f in (infer_for_a_minute, wait_for_warming)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        while not policy.ran:
            time.sleep(0.01)
        policy.infer_s = 0.0
        quick = WebsocketClientPolicy("127.0.0.1", server.port)
        health_s: list[float] = []
        while threads[0].is_alive():
            asked_s = time.perf_counter()
            with urllib.request.urlopen(f"{server.http_url}/healthz") as answer:
                assert answer.read() == b"OK\n"
            health_s.append(time.perf_counter() - asked_s)
            quick.infer(observation)
            time.sleep(0.5)
        for thread in threads:
            thread.join()
        quick._ws.close()
    assert time.monotonic() - began_s > INFER_S
    for name in ("slow", "again", "early"):
        np.testing.assert_array_equal(got[name]["actions"], policy.act(observation))
    assert got["slow"]["server_timing"]["infer_ms"] >= INFER_S * 1e3
    assert len(health_s) > INFER_S
    # A busy CI machine may delay single answers; a blocked event loop would delay nearly all.
    assert np.percentile(health_s, 95) < 0.05
