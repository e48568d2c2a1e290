"""What a policy keeps of each robot, and of each request on its way through."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.core.policy import PolicyReply, RequestOptions
from stretto.deploy.realtime import Wish
from stretto.runtime.arena import PackedRow
from stretto.runtime.engine import Stream


@dataclass(eq=False)
class RobotState:
    """What the policy remembers of one session."""

    stream: Stream
    asked: int = 0
    """Requests so far."""
    episode: int = 0
    last_HD: np.ndarray[Any, Any] | None = None
    """The last chunk given in this episode, in the robot's units."""
    last_chunk: int = -1
    turn: threading.Lock = field(default_factory=threading.Lock)
    noise: tuple[int, np.ndarray[Any, Any]] = (-1, np.empty(0))
    """The number of a chunk and the noise that it starts from, made while the one before it was computed."""

    def forget(self) -> None:
        self.episode += 1
        self.last_HD = None

    def remember(self, episode: int, chunk: int, actions_HD: np.ndarray[Any, Any]) -> None:
        with self.turn:
            if episode == self.episode and chunk > self.last_chunk:
                self.last_HD, self.last_chunk = actions_HD, chunk


@dataclass(eq=False)
class Ticket:
    """One request on its way through the policy."""

    reply: Future[PolicyReply]
    observation: Mapping[str, object]
    options: RequestOptions
    robot: RobotState
    number: int
    episode: int
    wish: Wish
    arrived_s: float
    deadline_s: float
    preprocess_ms: float = 0.0
    row: PackedRow | None = None
    """Memory for the request's inputs, until they are handed in."""
    overdue: bool = False
    """Refused for its deadline once, and served late because the client wants that."""
