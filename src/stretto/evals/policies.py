"""Who answers observations: one policy in this process for all robots together, or one connection a robot.

Anything with openpi's `infer(observation) -> {"actions": [H, A], ...}` is a policy. With `infer_batch(observations)` as
well, whatever is waiting is answered at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stretto.core.errors import ConfigError, ObservationError
from stretto.evals.env import Observation


class Policy(Protocol):
    def infer(self, obs: Any) -> Mapping[str, Any]: ...


@runtime_checkable
class BatchPolicy(Protocol):
    def infer_batch(self, observations: Sequence[Observation]) -> Sequence[Mapping[str, Any]]: ...


Connect = Callable[[], Policy]
"""Makes a connection of its own for one robot; called again after one was lost."""


class Asker(Protocol):
    """One robot's way to its actions."""

    def actions(self, observation: Observation) -> NDArray[np.floating]: ...
    def new_episode(self) -> None: ...
    def lost(self) -> None:
        """Forget the connection, if there is one; the next question opens another."""
        ...

    def close(self) -> None: ...


class Shared:
    """One policy for all robots. Questions that wait together are one batch, if the policy takes batches."""

    def __init__(self, policy: Policy, max_batch: int) -> None:
        self._policy, self._max_batch = policy, max_batch
        self._waiting: queue.SimpleQueue[tuple[Observation, Future[Mapping[str, Any]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    def actions(self, observation: Observation) -> NDArray[np.floating]:
        answer: Future[Mapping[str, Any]] = Future()
        self._waiting.put((observation, answer))
        return read_actions(answer.result())

    def new_episode(self) -> None:
        """Nothing to do: a shared policy remembers no robot."""

    def lost(self) -> None:
        """Nothing to do: there is no connection."""

    def close(self) -> None:
        """Answer what is waiting and stop."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, stop = [first], False
            while len(batch) < self._max_batch and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    stop = True
                    break
                batch.append(following)
            # The edge between the policy and the robots: its error is the answer to each of them.
            try:
                for (_, answer), reply in zip(batch, self._infer([o for o, _ in batch]), strict=True):
                    answer.set_result(reply)
            except Exception as e:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(e)
            if stop:
                return

    def _infer(self, observations: Sequence[Observation]) -> Sequence[Mapping[str, Any]]:
        if isinstance(self._policy, BatchPolicy):
            return self._policy.infer_batch(observations)
        return [self._policy.infer(o) for o in observations]


class Connected:
    """A connection of its own for one robot."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._policy: Policy | None = None

    def open(self) -> Policy:
        if self._policy is None:
            self._policy = self._connect()
        return self._policy

    def actions(self, observation: Observation) -> NDArray[np.floating]:
        return read_actions(self.open().infer(observation))

    def new_episode(self) -> None:
        reset = getattr(self._policy, "reset", None)
        if reset is not None:
            reset()

    def lost(self) -> None:
        self.close()

    def close(self) -> None:
        close = getattr(self._policy, "close", None)
        self._policy = None
        if close is not None:
            close()


def read_actions(reply: Mapping[str, Any]) -> NDArray[np.floating]:
    """Return the action chunk [H, A] of a reply.

    Raises:
        ObservationError: if the reply holds no finite [H, A] array under `actions`.
    """
    actions = np.asarray(reply.get("actions", ()))
    if actions.ndim != 2 or not actions.size or actions.dtype.kind != "f" or not np.isfinite(actions).all():
        got = f"{actions.dtype} {actions.shape}, keys {sorted(map(str, reply))}"
        raise ObservationError("actions", got=got, expected="a finite float array [H, A]")
    return actions


def connect_to(url: str, *, api_key: str | None = None, wait_s: float = 0.0) -> Connect:
    """Return a factory of connections to a policy server at `ws://host:port` or `wss://...`."""

    def connect() -> Policy:
        from stretto_client.policy import PolicyClient

        return PolicyClient(url, None, api_key=api_key, wait_s=wait_s)

    return connect


def connect_stock(url: str, *, api_key: str | None = None) -> Connect:
    """Return a factory of connections by the openpi client from PyPI, as robots that know nothing of us have it.

    Raises:
        ConfigError: if `openpi-client` is not installed.
    """
    try:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy
        from websockets.exceptions import InvalidHandshake
    except ImportError as e:
        hint = "pip install --no-deps openpi-client dm-tree (it pins numpy below 2)"
        raise ConfigError("client", got=f"openpi without its package ({e.name})", expected="openpi-client", hint=hint) from e

    def connect() -> Policy:
        # Its own reader of `host` takes a whole URL when there is no port.
        try:
            policy: Policy = WebsocketClientPolicy(url, None, api_key)
        except InvalidHandshake as e:
            raise ConnectionRefusedError(str(e)) from e
        return policy

    return connect
