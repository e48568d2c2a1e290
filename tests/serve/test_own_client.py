"""Our own client against our own server: what goes beyond openpi."""

from __future__ import annotations

import numpy as np
import pytest
from linear_policy import LinearPolicy, state

from stretto.core.errors import DeadlineError
from stretto.serve import ServerThread
from stretto_client.errors import ServerError
from stretto_client.options import Options
from stretto_client.policy import PolicyClient

OBSERVATION = {"state": np.arange(3.0)}


def test_options_resets_and_errors_pass_between_client_and_server() -> None:
    policy = LinearPolicy({"state": state(3)}, action_horizon=4, action_dim=2)
    with ServerThread(policy) as server, PolicyClient("127.0.0.1", server.port, session_id="arm") as client:
        assert client.handshake is not None
        assert (client.handshake.horizon, client.handshake.action_dim, client.handshake.modes) == (4, 2, ("hard",))
        chunk = client.infer(OBSERVATION)["actions"]
        wanted = Options(seed=3, deadline_ms=500.0, executed_steps=1, delay_steps=2, prefix=chunk[1:], mode="hard", priority=1)
        reply = client.infer(OBSERVATION, wanted)
        client.reset()
        client.infer(OBSERVATION)
        with pytest.raises(ServerError, match=r"\[bad_observation\] state: got shape \[5\], expected shape \[3\]"):
            client.infer({"state": np.zeros(5)})
        np.testing.assert_array_equal(client.infer(OBSERVATION)["actions"], chunk)
    assert (reply["rt"]["request_id"], reply["rt"]["session_id"]) == ("2", "arm")
    assert [o.reset for o in policy.seen] == [True, False, True, False, False]
    said = policy.seen[1]
    assert (said.seed, said.deadline_ms, said.executed_steps, said.delay_steps) == (3, 500.0, 1, 2)
    assert (said.mode, said.priority) == ("hard", 1)
    np.testing.assert_array_equal(said.prefix_KD, chunk[1:])


def test_a_refusal_reaches_the_client_with_its_reason() -> None:
    class Late(LinearPolicy):
        def act(self, observation: object) -> np.ndarray:
            raise DeadlineError("deadline", "3 ms left, the model needs 20")

    with (
        ServerThread(Late({"state": state(3)}, action_horizon=4, action_dim=2)) as server,
        PolicyClient("127.0.0.1", server.port) as client,
    ):
        with pytest.raises(ServerError, match="3 ms left, the model needs 20") as caught:
            client.infer(OBSERVATION)
        assert caught.value.reason == "deadline"
