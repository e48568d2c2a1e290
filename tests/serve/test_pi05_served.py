"""A reduced pi0.5 checkpoint, end to end: observation bytes in, actions out, through the published openpi client."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from linear_policy import example
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from tiny_checkpoint import ROBOTS, write_checkpoint

from stretto.core.policy import RequestOptions
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.serve import ServerThread

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")


class Served:
    """One robot's policy behind a running server."""

    def __init__(self, robot: str, policy: Policy, server: ServerThread) -> None:
        self.robot, self.policy, self.server = robot, policy, server
        self.sizes = ROBOTS[robot]

    def connect(self) -> WebsocketClientPolicy:
        return WebsocketClientPolicy("127.0.0.1", self.server.port)


@pytest.fixture(scope="module", params=ROBOTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / request.param, **ROBOTS[request.param])
    options = PolicyOptions(device="cpu", preset=request.param, max_batch=4, denoise_steps=3, threads=1)
    policy = load_policy(folder, options)
    with ServerThread(policy) as server:
        yield Served(request.param, policy, server)


@pytest.fixture
def client(served: Served) -> Iterator[WebsocketClientPolicy]:
    connected = served.connect()
    yield connected
    connected._ws.close()


def observe(client: WebsocketClientPolicy, seed: int = 0) -> dict[str, Any]:
    """Make an observation from nothing but the handshake, as a robot's owner would."""
    return example(client.get_server_metadata()["stretto"]["observation"], seed)


def test_a_hundred_inferences_give_finite_actions_of_the_published_shape(served: Served, client: WebsocketClientPolicy) -> None:
    for i in range(100):
        result = client.infer(observe(client, seed=i % 5))
        assert result["actions"].shape == (served.sizes["horizon"], served.sizes["action_dim"])
        assert np.isfinite(result["actions"]).all()
        assert set(result["policy_timing"]) == {"infer_ms"}
        assert set(result["server_timing"]) == ({"infer_ms", "prev_total_ms"} if i else {"infer_ms"})
    assert {"decode", "preprocess", "vision", "prefix", "denoise", "postprocess"} <= set(result["rt"]["stage_ms"])
    assert result["rt"]["mode"] == "eager"


def test_the_broker_walks_through_the_policys_chunk(served: Served, client: WebsocketClientPolicy) -> None:
    broker = ActionChunkBroker(client, served.sizes["horizon"])
    observation = {**observe(client), "rt": {"seed": 11}}
    chunk = client.infer(observation)["actions"]
    for step in range(served.sizes["horizon"]):
        np.testing.assert_array_equal(broker.infer(observation)["actions"], chunk[step])


def test_served_actions_equal_in_process_ones_bit_for_bit(served: Served, client: WebsocketClientPolicy) -> None:
    observation = observe(client, seed=3)
    remote = client.infer({**observation, "rt": {"seed": 5}})["actions"]
    local = served.policy.infer(observation, RequestOptions(seed=5))["actions"]
    np.testing.assert_array_equal(remote, local)
    for i in range(20):
        client.infer(observe(client, seed=i))
    np.testing.assert_array_equal(client.infer({**observation, "rt": {"seed": 5}})["actions"], remote)


def test_eight_clients_at_once_get_what_they_would_get_alone(served: Served, client: WebsocketClientPolicy) -> None:
    observations = [{**observe(client, seed=i), "rt": {"seed": i}} for i in range(8)]
    alone = [client.infer(o)["actions"] for o in observations]
    together: dict[int, list[Any]] = {i: [] for i in range(8)}

    def drive(i: int) -> None:
        mine = served.connect()
        together[i] = [mine.infer(observations[i]) for _ in range(3)]
        mine._ws.close()

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        assert len(together[i]) == 3
        for result in together[i]:
            np.testing.assert_allclose(result["actions"], alone[i], atol=1e-4)
    assert max(result["rt"]["batch_size"] for results in together.values() for result in results) > 1


def spoilt(observation: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield what is wrong, the observation with it, and the words that the error must hold."""
    images = [key for key, entry in schema.items() if entry["kind"] == "image"]
    state = next(key for key, entry in schema.items() if entry["kind"] == "state")
    width = schema[state]["shape"][0]
    flat = {key: observation["images"][key[7:]] if key.startswith("images/") else observation[key] for key in schema}
    camera = images[0]
    yield "missing camera", {k: v for k, v in flat.items() if k != camera}, camera
    yield "unknown camera", {**flat, "images/cam_new": flat[camera]}, "cam_new"
    yield "missing state", {k: v for k, v in flat.items() if k != state}, state
    yield "wrong state width", {**flat, state: np.zeros(width + 1)}, str(width)
    yield "NaN in the state", {**flat, state: np.full(width, np.nan)}, state
    yield "infinity in the state", {**flat, state: np.full(width, np.inf)}, state
    yield "ambiguous layout", {**flat, camera: np.zeros((3, 48, 3), np.uint8)}, camera
    yield "floats up to 255", {**flat, camera: np.full((56, 56, 3), 200.0)}, camera
    yield "text for a camera", {**flat, camera: "picture"}, camera
    yield "long prompt", {**flat, "prompt": "move the arm " * 300}, "200"


def test_each_bad_observation_is_named_and_the_same_socket_goes_on(served: Served, client: WebsocketClientPolicy) -> None:
    good = observe(client)
    for what, bad, words in spoilt(good, client.get_server_metadata()["stretto"]["observation"]):
        with pytest.raises(RuntimeError) as caught:
            client.infer(bad)
        text = str(caught.value)
        assert "[bad_observation]" in text or "[prompt_too_long]" in text, (what, text)
        assert words in text, (what, text)
        assert "got" in text, (what, text)
        assert "expected" in text, (what, text)
        assert "actions" in client.infer(good), what


def test_a_client_killed_in_the_middle_of_a_request_leaves_nothing_behind(
    served: Served, client: WebsocketClientPolicy
) -> None:
    for _ in range(10):
        victim = served.connect()
        victim._ws.send(victim._packer.pack(observe(client)))
        victim._ws.socket.shutdown(socket.SHUT_RDWR)  # killed, not closed politely
        assert "actions" in client.infer(observe(client))
    end_s = time.monotonic() + 5
    while (found := scraped(served.server))["stretto_sessions"] > 1 and time.monotonic() < end_s:
        time.sleep(0.02)
    assert found["stretto_sessions"] == 1
    assert found["stretto_requests_in_flight"] == 0
    assert found["stretto_queue_depth"] == 0
    assert found["stretto_graph_captures_total"] == 0


def scraped(server: ServerThread) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.http_url}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
