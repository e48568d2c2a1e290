"""The published openpi client, unmodified, against the server."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from linear_policy import ALOHA, DROID, LIBERO, LinearPolicy, example
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from stretto import __version__
from stretto.serve import ServerThread

# The client calls `connect` in a way that websockets 17.1 deprecates; it is the published one, so that stays.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

ROBOTS = {"libero": (LIBERO, 10, 7), "droid": (DROID, 15, 8), "aloha": (ALOHA, 50, 14)}


@pytest.fixture(params=ROBOTS)
def robot(request: pytest.FixtureRequest) -> Iterator[tuple[LinearPolicy, WebsocketClientPolicy, dict[str, Any]]]:
    schema, horizon, width = ROBOTS[request.param]
    policy = LinearPolicy(schema, action_horizon=horizon, action_dim=width, policy_metadata={"reset_pose": [0, -1.5, 1.5]})
    with ServerThread(policy) as server:
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        yield policy, client, schema
        client._ws.close()


def test_the_client_reads_what_the_policy_is_from_the_first_frame(robot: Any) -> None:
    policy, client, schema = robot
    metadata = client.get_server_metadata()
    assert metadata["reset_pose"] == [0, -1.5, 1.5]
    described = metadata["stretto"]
    assert described["version"] == __version__
    assert described["model"] == "linear"
    assert described["action_horizon"] == policy.metadata["action_horizon"]
    assert described["action_dim"] == policy.metadata["action_dim"]
    assert described["observation"] == {key: {**entry, "shape": list(entry["shape"])} for key, entry in schema.items()}
    assert described["max_message_bytes"] > 3 * 1920 * 1080
    assert metadata["rt"]["rtc_modes"] == ["hard"]


def test_the_client_completes_a_hundred_inferences_with_the_right_actions(robot: Any) -> None:
    policy, client, schema = robot
    ids = set()
    for i in range(100):
        observation = example(schema, seed=i % 3)
        result = client.infer(observation)
        np.testing.assert_array_equal(result["actions"], policy.act(observation))
        assert set(result) == {"actions", "policy_timing", "server_timing", "rt"}
        for group in ("policy_timing", "server_timing"):
            assert all(type(value) is float for value in result[group].values())
        assert ("prev_total_ms" in result["server_timing"]) == (i > 0)
        assert 0 <= result["policy_timing"]["infer_ms"] <= result["server_timing"]["infer_ms"]
        ids.add(result["rt"]["request_id"])
    assert len(ids) == 100


def test_the_action_chunk_broker_hands_out_every_step_of_every_chunk(robot: Any) -> None:
    policy, client, schema = robot
    horizon = int(policy.metadata["action_horizon"])
    broker = ActionChunkBroker(client, horizon)
    for chunk in range(2):
        observation = example(schema, seed=chunk)
        expected = policy.act(observation)
        for step in range(horizon):
            result = broker.infer(observation)
            np.testing.assert_array_equal(result["actions"], expected[step])
    assert len(policy.ran) == 2
    broker.reset()


def test_a_bad_observation_is_an_error_that_names_the_field_and_the_client_goes_on(robot: Any) -> None:
    policy, client, schema = robot
    good = example(schema)
    key = next(k for k, entry in schema.items() if entry["kind"] == "state")
    with pytest.raises(RuntimeError, match=rf"\[bad_observation\] {key}: got shape \[3\], expected shape") as caught:
        client.infer({**good, key: np.zeros(3)})
    assert "Traceback" not in str(caught.value)
    with pytest.raises(RuntimeError, match=rf"\[bad_observation\] {key}: got keys"):
        client.infer({k: v for k, v in good.items() if k != key})
    np.testing.assert_array_equal(client.infer(good)["actions"], policy.act(good))


def test_the_clients_health_check_gets_ok() -> None:
    with ServerThread(LinearPolicy()) as server, urllib.request.urlopen(f"{server.http_url}/healthz") as answer:
        assert (answer.status, answer.read()) == (200, b"OK\n")


def test_a_client_that_comes_early_waits_for_the_warm_policy() -> None:
    policy = LinearPolicy(warm_s=0.5)
    with ServerThread(policy, wait_ready=False) as server:
        began_s = time.monotonic()
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        assert time.monotonic() - began_s > 0.4
        assert client.infer(example(LIBERO))["actions"].shape == (10, 7)
        client._ws.close()


def test_any_path_and_any_host_form_reaches_the_policy() -> None:
    with ServerThread(LinearPolicy()) as server:
        client = WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}/some/robot", None)
        assert client.infer(example(LIBERO))["actions"].shape == (10, 7)
        client._ws.close()
