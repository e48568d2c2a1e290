"""Actions by absolute control step. No threads and no clock: the broker's bookkeeping, testable by itself.

A control step is counted when an action of a chunk is executed. A tick on which the robot had to wait is not counted,
so after a pause the plan goes on from where the robot really is.

Shape legend: H actions of a chunk, D width of one action, m decay rate of the ensemble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stretto_client.errors import FieldError, ReplyError

Starvation = Literal["hold", "decelerate", "raise"]
DECAY = 0.5
"""Share of its speed that a decelerating robot keeps from one tick to the next."""


@dataclass(frozen=True)
class Chunk:
    """One reply of the policy; `actions[i]` is meant for control step `start + i`."""

    start: int
    reply: Mapping[str, Any]
    actions: np.ndarray
    length: int
    """Actions that may be executed, from the first on."""

    @staticmethod
    def read(start: int, reply: Any, horizon: int | None, action_dim: int | None) -> Chunk:
        """Check a reply and place it in time.

        Raises:
            ReplyError: if `actions` is missing, not [H, D] as before, or not finite.
        """
        actions = reply.get("actions") if isinstance(reply, Mapping) else None
        if not isinstance(actions, np.ndarray) or actions.ndim != 2 or 0 in actions.shape or actions.dtype.kind not in "fiu":
            got = "nothing" if actions is None else f"{type(actions).__name__} {getattr(actions, 'shape', '')}"
            raise ReplyError(f"actions: got {got}, expected an array [H, D] of numbers")
        want = (horizon or actions.shape[0], action_dim or actions.shape[1])
        if actions.shape != want:
            raise ReplyError(f"actions: got shape {actions.shape}, expected {want}, as in the handshake and the chunks before")
        if not np.isfinite(actions).all():
            raise ReplyError("actions: got NaN or infinity; nothing of this chunk is executed")
        return Chunk(start, reply, actions, len(actions))

    @property
    def end(self) -> int:
        return self.start + self.length

    def covers(self, step: int) -> bool:
        return self.start <= step < self.end

    def at(self, step: int) -> dict[str, Any]:
        """Return the reply for one step: every array that runs along the chunk is cut to that step."""
        cut = _cut(self.reply, step - self.start, len(self.actions))
        assert isinstance(cut, dict)
        return cut


class Timeline:
    """The committed actions: the newest chunk, or in an ensemble every chunk that still reaches into the future."""

    def __init__(self, ensemble_m: float | None = None) -> None:
        self._ensemble_m = ensemble_m
        self._chunks: list[Chunk] = []

    @property
    def newest(self) -> Chunk | None:
        return self._chunks[-1] if self._chunks else None

    def commit(self, chunk: Chunk) -> None:
        self._chunks = [*self._chunks, chunk] if self._ensemble_m is not None else [chunk]

    def clear(self) -> None:
        self._chunks = []

    def remaining(self, step: int) -> int:
        """Return how many actions are left from `step` on."""
        return max(0, self._chunks[-1].end - step) if self._chunks else 0

    def at(self, step: int) -> dict[str, Any] | None:
        """Return the command for a step, or None if no chunk reaches it."""
        self._chunks = [c for c in self._chunks[:-1] if c.end > step] + self._chunks[-1:]
        covering = [c for c in self._chunks if c.covers(step)]
        if not covering:
            return None
        command = covering[-1].at(step)
        if self._ensemble_m is not None:
            weights = np.exp(-self._ensemble_m * np.arange(len(covering)))
            rows = np.stack([c.actions[step - c.start] for c in covering])
            command["actions"] = (weights @ rows / weights.sum()).astype(np.result_type(rows.dtype, np.float32))
        return command


class Fallback:
    """What the robot is told when no action is left.

    Args:
        policy: `hold` stays where the last command led, `decelerate` goes on with ever smaller steps, `raise` gives up.
        relative: whether actions are changes or speeds (then standing still is zero) rather than positions.
        held_dims: entries that keep their last value whatever the kind, such as a gripper.

    Raises:
        FieldError: if the policy is unknown or an entry is negative.
    """

    def __init__(self, policy: Starvation, *, relative: bool, held_dims: Sequence[int] = ()) -> None:
        if policy not in ("hold", "decelerate", "raise"):
            raise FieldError("starvation", got=repr(policy), expected="hold, decelerate or raise")
        if any(isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in held_dims):
            raise FieldError("held_dims", got=list(held_dims), expected="indices of action entries, 0 or more")
        self.policy = policy
        self._relative = relative
        self._held = list(held_dims)
        self.clear()

    def clear(self) -> None:
        self._last: dict[str, Any] | None = None
        self._speed: np.ndarray | None = None

    def saw(self, command: dict[str, Any]) -> None:
        """Remember a command that the robot was given."""
        now = np.asarray(command["actions"], dtype=np.float64)
        if self._relative:
            self._speed = now
        else:
            self._speed = np.zeros_like(now) if self._last is None else now - self._last["actions"]
        self._last = command

    def next(self) -> dict[str, Any] | None:
        """Return the command for a tick without an action; None if the policy is to raise, or nothing was commanded yet."""
        if self.policy == "raise" or self._last is None or self._speed is None:
            return None
        last = np.asarray(self._last["actions"])
        self._speed = self._speed * (DECAY if self.policy == "decelerate" else 0.0)
        actions = (self._speed if self._relative else last + self._speed).astype(last.dtype)
        actions[self._held] = last[self._held]
        self._last = {**self._last, "actions": actions}
        return dict(self._last)


def _cut(value: Any, index: int, horizon: int) -> Any:
    if isinstance(value, np.ndarray):
        return np.array(value[index]) if value.ndim and value.shape[0] == horizon else value
    if isinstance(value, Mapping):
        return {key: _cut(inner, index, horizon) for key, inner in value.items()}
    return value
