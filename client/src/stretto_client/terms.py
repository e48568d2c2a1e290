"""What a broker and its policy can agree on, checked as soon as it is known."""

from __future__ import annotations

from typing import Any, Protocol

from stretto_client.errors import FieldError
from stretto_client.options import MAX_CHUNK, MODES, Handshake, check_int


class Policy(Protocol):
    """openpi's policy interface.

    One that says `accepts_options = True` takes `infer(obs, options)` too; real-time chunking needs such a one.
    """

    def infer(self, obs: Any) -> Any: ...
    def reset(self) -> None: ...


class Terms:
    """The shape of a chunk, and what the broker's settings ask of it.

    Raises:
        FieldError: if a number of steps is not an integer of at least 1.
    """

    def __init__(self, execution_horizon: int | None, min_delay_steps: int | None, held_dims: tuple[int, ...]) -> None:
        for field, steps in (("execution_horizon", execution_horizon), ("min_delay_steps", min_delay_steps)):
            if steps is not None:
                check_int(field, steps, 1, MAX_CHUNK)
        self.execution_horizon = execution_horizon
        self.sends_options = False
        self.max_delay = MAX_CHUNK
        self.horizon: int | None = None
        self.action_dim: int | None = None
        self._min_delay = min_delay_steps
        self._held_dims = held_dims

    def meet(self, policy: Policy, guidance: str | None) -> None:
        """Read what the policy says of itself; `guidance` is what real-time chunking will ask for, if anything.

        Raises:
            FieldError: if the policy does not offer it, or its chunks do not fit the settings.
        """
        handshake = getattr(policy, "handshake", None)
        self.sends_options = bool(getattr(policy, "accepts_options", False))
        offered: tuple[str, ...] = MODES[1:]
        if isinstance(handshake, Handshake):
            self.sends_options &= handshake.extended
            offered = handshake.modes
            if handshake.max_delay is not None:
                self.max_delay = handshake.max_delay
            self.learn(handshake.horizon, handshake.action_dim)
        if guidance is None:
            return
        if not self.sends_options:
            raise FieldError("mode", got="'rtc'", expected="naive, ensemble or sync: this policy takes no prefix")
        if guidance not in MODES[1:] or guidance not in offered:
            raise FieldError("guidance", got=repr(guidance), expected=f"one that the policy offers: {offered}")

    def learn(self, horizon: int | None, action_dim: int | None) -> None:
        """Take the shape of a chunk, the first time it is known.

        Raises:
            FieldError: if the execution horizon, the delay or a held entry lies beyond it.
        """
        if horizon is not None and self.horizon is None:
            self._at_most("execution_horizon", self.execution_horizon, horizon, horizon)
            self._at_most("min_delay_steps", self._min_delay, horizon - 1, horizon)
            self.horizon = horizon
        if action_dim is not None and self.action_dim is None:
            if max(self._held_dims, default=-1) >= action_dim:
                raise FieldError("held_dims", got=self._held_dims, expected=f"below {action_dim}, the width of an action")
            self.action_dim = action_dim

    @staticmethod
    def _at_most(field: str, steps: int | None, most: int, horizon: int) -> None:
        if steps is not None and steps > most:
            raise FieldError(field, got=steps, expected=f"at most {most}: chunks have {horizon} actions")
