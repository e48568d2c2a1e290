"""Real-time chunking as a policy serves it: what it offers, what a request may ask, and what the model is given for it.

A chunk continues the one that the robot is executing. The rest of that one comes with the request (`prefix`), or the
session remembers the last chunk it gave and the request says how many of its actions were executed by the time of the
observation (`executed_steps`). Both ways give the same bits: what is remembered is the chunk in the robot's units, and it
is turned into the model's space against the state of the new observation, so relative actions move to their new base.

The memory ends with the connection, with `reset`, and with a new session id. A robot that reconnects in mid-chunk, or
that has thrown away a chunk it was given, sends the prefix itself; without one it is refused rather than made to jump.

Shape legend: K actions left of the previous chunk, H action horizon, D action width of the robot, A of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.control.rtc import Guidance, Schedule, plan_row
from stretto.core.errors import ConfigError, ObservationError
from stretto.core.policy import RequestOptions

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Wish:
    """What one request asks of real-time chunking, checked."""

    mode: str
    """`none`, or a mode that the policy offers."""
    prefix_KD: Array | None = None
    delay: int = 0
    executed: int = 0


PLAIN = Wish("none")


@dataclass(frozen=True)
class Realtime:
    """What a policy offers. `modes` come in the order of preference: the first is taken where a request names none.

    Raises:
        ConfigError: on construction, if a number is out of range.
    """

    modes: tuple[str, ...]
    horizon: int
    width: int
    """Action width of the model."""
    robot_width: int
    control_hz: float | None = None
    max_delay: int | None = None
    """Longest delay in control steps; None allows all but the whole chunk."""
    schedule: Schedule = "exp"
    cap: float = 5.0

    def __post_init__(self) -> None:
        if self.control_hz is not None and not 0 < self.control_hz < math.inf:
            raise ConfigError("control_hz", got=self.control_hz, expected="a finite number above 0")
        if self.max_delay is not None and not 0 <= self.max_delay <= self.horizon:
            raise ConfigError("max_delay", got=self.max_delay, expected=f"0 to the chunk's {self.horizon} actions")
        if not 0 <= self.cap < math.inf:
            raise ConfigError("rtc_cap", got=self.cap, expected="a finite number, 0 or more")

    @property
    def most_delay(self) -> int:
        return self.horizon - 1 if self.max_delay is None else self.max_delay

    def describe(self) -> dict[str, object]:
        """Return what the handshake says."""
        said: dict[str, object] = {"rtc_modes": list(self.modes), "max_delay": self.most_delay}
        return said if self.control_hz is None else {**said, "control_hz": self.control_hz}

    def read(self, options: RequestOptions, remembered_HD: Array | None) -> Wish:
        """Check one request against what is offered and what the session remembers.

        Raises:
            ObservationError: naming the field that asks for too much or lacks its counterpart.
        """
        said = [options.prefix_KD, options.executed_steps, options.delay_steps]
        mode = options.mode or (self.modes[0] if self.modes and any(v is not None for v in said) else "none")
        if mode == "none":
            return PLAIN
        if mode not in self.modes:
            raise ObservationError("rt.mode", got=repr(mode), expected=f"one of {('none', *self.modes)}")
        executed = self._steps("rt.executed_steps", options.executed_steps or 0, self.horizon)
        delay = options.delay_steps
        if delay is None:
            raise ObservationError("rt.delay_steps", got="nothing", expected=f"a number of steps, because of mode {mode!r}")
        self._steps("rt.delay_steps", delay, self.most_delay)
        prefix_KD = self._prefix(options, executed, remembered_HD)
        left = min(len(prefix_KD), self.horizon - executed)
        if delay > left:
            raise ObservationError("rt.delay_steps", got=delay, expected=f"at most the {left} actions that are left")
        return Wish(mode, prefix_KD, delay, executed if options.executed_steps is not None else self.horizon - len(prefix_KD))

    def _prefix(self, options: RequestOptions, executed: int, remembered_HD: Array | None) -> Array:
        prefix_KD = options.prefix_KD
        if prefix_KD is not None:
            if prefix_KD.ndim != 2 or prefix_KD.shape[1] != self.robot_width or not 1 <= len(prefix_KD) <= self.horizon:
                expected = f"[1 to {self.horizon}, {self.robot_width}]"
                raise ObservationError("rt.prefix", got=f"shape {list(prefix_KD.shape)}", expected=expected)
            if not np.isfinite(prefix_KD).all():
                raise ObservationError("rt.prefix", got="NaN or infinity", expected="finite actions")
            return prefix_KD
        if options.executed_steps is None:
            raise ObservationError("rt.prefix", got="nothing", expected="prefix or executed_steps beside delay_steps")
        if remembered_HD is None:
            hint = "Send the prefix with the first request of a connection or an episode"
            raise ObservationError("rt.executed_steps", got=executed, expected="a chunk in this session", hint=hint)
        if executed >= len(remembered_HD):
            raise ObservationError(
                "rt.executed_steps", got=executed, expected=f"below the chunk's {len(remembered_HD)}: no action is left"
            )
        return remembered_HD[executed:]

    @staticmethod
    def _steps(field: str, value: int, most: int) -> int:
        if not 0 <= value <= most:
            raise ObservationError(field, got=value, expected=f"0 to {most}")
        return value

    def inputs(self, wish: Wish, encode: Callable[[Array], Array], wanted: Container[str]) -> dict[str, Array]:
        """Return what the model's denoise steps take for this row, of the names in `wanted`.

        `encode` turns robot actions into the model's space against the state of this observation.
        """
        if not self.modes:
            return {}  # then the model takes nothing of the kind
        row = self._row(wish, encode)
        steered = wish.mode in ("identity", "vjp")
        values: dict[str, Array] = {
            "rtc_target": row.target_HA.astype(np.float32, copy=False),
            "rtc_weights": (row.weights_H if steered else np.zeros_like(row.weights_H)).astype(np.float32, copy=False),
            "rtc_cap": np.asarray(row.cap, np.float32),
            "rtc_delay": np.asarray(row.delay if wish.mode == "hard" else 0, np.int32),
            "rtc_vjp": np.asarray(wish.mode == "vjp"),
        }
        return {name: value for name, value in values.items() if name in wanted}

    def _row(self, wish: Wish, encode: Callable[[Array], Array]) -> Guidance:
        prefix_KA = None if wish.prefix_KD is None else encode(wish.prefix_KD)
        return plan_row(
            prefix_KA,
            delay=wish.delay,
            executed=wish.executed,
            horizon=self.horizon,
            width=self.width,
            schedule=self.schedule,
            cap=self.cap,
        )

    def allowance_s(self, options: RequestOptions) -> float:
        """Return how long after its arrival a reply is of use: what the client says, else what its steps imply.

        A robot that promised `delay_steps` drops a chunk that comes later; any robot stops when its actions run out.
        """
        if options.deadline_ms is not None:
            return options.deadline_ms / 1e3
        if self.control_hz is None:
            return math.inf
        bounds = []
        if options.delay_steps is not None:
            bounds.append(max(1, options.delay_steps))
        if options.prefix_KD is not None:
            bounds.append(max(1, len(options.prefix_KD)))
        elif options.executed_steps is not None:
            bounds.append(max(1, self.horizon - options.executed_steps))
        return min(bounds) / self.control_hz if bounds else math.inf
