"""What travels beside the observation: the `rt` maps of request and handshake, checked at both ends.

Shape legend: K actions of the previous chunk that are not executed yet, D width of one action in environment units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stretto_client.errors import FieldError

RT = "rt"
VERSION = 1
MODES = ("none", "identity", "vjp", "hard")
MAX_CHUNK = 100_000


def check_int(field: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is an integer in [low, high]. Booleans are not integers here.

    Raises:
        FieldError: otherwise.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise FieldError(field, got=repr(value), expected=f"an integer from {low} to {high}")
    return int(value)


def check_positive(field: str, value: Any, high: float = math.inf) -> float:
    """Return `value` if it is a finite number in (0, high].

    Raises:
        FieldError: otherwise.
    """
    number = not isinstance(value, (bool, np.bool_)) and isinstance(value, (int, float, np.integer, np.floating))
    if not number or not math.isfinite(value) or not 0 < value <= high:
        below = "" if high == math.inf else f", at most {high:g}"
        raise FieldError(field, got=repr(value), expected=f"a finite number above 0{below}")
    return float(value)


@dataclass(frozen=True)
class Options:
    """Extensions of one request. All are optional; a server that knows none of them is never sent any.

    Raises:
        FieldError: on construction, if a value is out of range or comes without the one it needs.
    """

    seed: int | None = None
    deadline_ms: float | None = None
    """Time from sending until the answer is of no more use."""
    executed_steps: int | None = None
    """Actions of the previous chunk executed before this observation was taken."""
    delay_steps: int | None = None
    """Actions, counted from this observation, that will have been executed when the answer arrives."""
    prefix: np.ndarray | None = None
    """[K, D]: the rest of the previous chunk; row 0 is the command of this observation's own control step."""
    mode: str | None = None
    priority: int | None = None
    late: bool | None = None
    """Whether an answer that comes too late is better than none."""
    starved_steps: int | None = None
    """Control steps without an action since the last request."""
    path_ms: float | None = None
    """Time from observation to the command at hand, of the last request."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        if self.deadline_ms is not None:
            check_positive("deadline_ms", self.deadline_ms)
        if self.mode is not None and self.mode not in MODES:
            raise FieldError("mode", got=repr(self.mode), expected=f"one of {MODES}")
        if self.executed_steps is not None:
            check_int("executed_steps", self.executed_steps, 0, MAX_CHUNK)
        if self.delay_steps is not None:
            check_int("delay_steps", self.delay_steps, 0, MAX_CHUNK)
        if self.starved_steps is not None:
            check_int("starved_steps", self.starved_steps, 0, MAX_CHUNK)
        if self.path_ms is not None:
            check_positive("path_ms", self.path_ms)
        if self.priority is not None:
            check_int("priority", self.priority, -100, 100)
        if self.late is not None and not isinstance(self.late, bool):
            raise FieldError("late", got=repr(self.late), expected="True or False")
        self._check_together()

    def _check_together(self) -> None:
        has_prefix = self.prefix is not None
        if has_prefix:
            p = np.asarray(self.prefix)
            if p.ndim != 2 or 0 in p.shape or p.dtype.kind != "f" or not np.isfinite(p).all():
                raise FieldError(
                    "prefix", got=f"{p.dtype} {p.shape}", expected="finite real numbers [K, D], K and D at least 1"
                )
            if self.delay_steps is not None and self.delay_steps > len(p):
                raise FieldError("delay_steps", got=self.delay_steps, expected=f"at most the {len(p)} steps of prefix")
        if (has_prefix or self.executed_steps is not None) and self.delay_steps is None:
            raise FieldError("delay_steps", got=None, expected="a number of steps, since prefix or executed_steps is given")
        if self.delay_steps is not None and not has_prefix and self.executed_steps is None:
            raise FieldError("executed_steps", got=None, expected="executed_steps or prefix, since delay_steps is given")
        if self.mode not in (None, "none") and self.delay_steps is None:
            raise FieldError("delay_steps", got=None, expected=f"a number of steps, since mode is {self.mode!r}")

    def check_horizon(self, horizon: int) -> None:
        """Check the step counts against the length of a chunk.

        Raises:
            FieldError: if the delay or the executed steps reach beyond it, or the prefix is longer than it.
        """
        if self.prefix is not None and len(self.prefix) > horizon:
            raise FieldError("prefix", got=f"{len(self.prefix)} steps", expected=f"at most the chunk's {horizon}")
        executed = self.executed_steps or 0
        if executed > horizon:
            raise FieldError("executed_steps", got=executed, expected=f"at most the chunk's {horizon}")
        if self.delay_steps is not None and self.delay_steps > horizon:
            raise FieldError("delay_steps", got=self.delay_steps, expected=f"at most the chunk's {horizon}")
        if self.prefix is None and self.delay_steps is not None and executed + self.delay_steps > horizon:
            raise FieldError(
                "delay_steps",
                got=self.delay_steps,
                expected=f"at most {horizon - executed}: {executed} of {horizon} are done",
            )

    def to_wire(self) -> dict[str, Any]:
        """Return the entries that are set, for the `rt` map."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass(frozen=True)
class Handshake:
    """What a server says of itself in its first frame. Fields are None where a stock server says nothing."""

    metadata: Mapping[str, Any]
    version: int | None = None
    horizon: int | None = None
    action_dim: int | None = None
    control_hz: float | None = None
    max_delay: int | None = None
    max_message_bytes: int | None = None
    modes: tuple[str, ...] = ()

    @property
    def extended(self) -> bool:
        """Whether the server reads the `rt` map at all."""
        return self.version is not None

    @staticmethod
    def read(metadata: Any) -> Handshake:
        """Check the first frame of a server.

        Raises:
            FieldError: if it is no map, or one of its numbers has the wrong type, is not finite or is out of range.
        """
        if not isinstance(metadata, dict):
            raise FieldError("metadata", got=type(metadata).__name__, expected="a map")
        for name in ("action_horizon", "execution_horizon", "action_dim"):
            if name in metadata:
                check_int(f"metadata.{name}", metadata[name], 1, MAX_CHUNK)
        if "control_hz" in metadata:
            check_positive("metadata.control_hz", metadata["control_hz"], 1e5)
        rt = metadata.get(RT)
        if rt is None:
            return Handshake(metadata)
        if not isinstance(rt, dict):
            raise FieldError("metadata.rt", got=type(rt).__name__, expected="a map")
        return _extended(metadata, rt)


def _extended(metadata: Mapping[str, Any], rt: Mapping[str, Any]) -> Handshake:
    def integer(name: str, low: int, high: int, said: Mapping[str, Any] = rt, where: str = RT) -> int | None:
        return None if said.get(name) is None else check_int(f"metadata.{where}.{name}", said[name], low, high)

    own = metadata.get("stretto", {})
    if not isinstance(own, dict):
        raise FieldError("metadata.stretto", got=type(own).__name__, expected="a map")
    horizon = integer("horizon", 1, MAX_CHUNK)
    modes = rt.get("rtc_modes", [])
    if not isinstance(modes, list) or not all(isinstance(m, str) for m in modes):
        raise FieldError("metadata.rt.rtc_modes", got=repr(modes), expected="a list of names")
    rate = rt.get("control_hz")
    return Handshake(
        metadata,
        version=integer("version", 1, 1000) or VERSION,
        horizon=horizon,
        action_dim=integer("action_dim", 1, MAX_CHUNK),
        control_hz=None if rate is None else check_positive("metadata.rt.control_hz", rate, 1e5),
        max_delay=integer("max_delay", 0, horizon or MAX_CHUNK),
        max_message_bytes=integer("max_message_bytes", 1024, 2**40, own, "stretto"),
        modes=tuple(modes),
    )
