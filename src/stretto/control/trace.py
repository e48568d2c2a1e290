"""Traces: one request a line, as JSON, written by a robot's client, a simulator or a load generator.

| field | type | meaning |
|---|---|---|
| `observe_s` | seconds | from the cameras' exposure to the observation handed to the client |
| `transfer_s` | seconds | client's round trip less the server's time: wire, packing, kernel |
| `queue_s` | seconds | in the server, before the model began |
| `inference_s` | seconds | the model's own time for the batch that held this request, processors included |
| `actuate_s` | seconds | from the reply to the command handed to the controller |
| `executed_steps` | integer | actions executed per request, the executed horizon |
| `control_hz` | per second | control rate |
| `env_s` | seconds, optional | measured time that the world took for those actions; default `executed_steps / control_hz` |
| `horizon` | integer, optional | actions in the chunk |
| `delay_steps` | integer, optional | actions executed while this request was computed |
| `deadline_s` | seconds, optional | allowed time from observation to handoff |
| `batch` | integer, default 1 | requests in the same batch |
| `robot` | text, default "0" | which robot asked; `t_s` seconds, optional: when, on one monotonic clock |
| `mode` | text, default `sync` | `sync`, `naive`, `ensemble`, or `rtc` |
| `status` | text, default `ok` | `ok`, `late` (answered after its deadline), `refused`, `failed` |
| `reason` | text, optional | why it was refused |
| `starved_steps` | integer, default 0 | control steps without an action since the last request |
| `stage_s` | map, optional | stage -> seconds, inside `inference_s` |

A request that was refused or failed may leave the five times out. Other fields are allowed and are left alone.
Empty lines and lines that start with `#` are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.core.errors import FieldError

PARTS = ("observe_s", "transfer_s", "queue_s", "inference_s", "actuate_s")
MODES = ("sync", "naive", "ensemble", "rtc")
STATUSES = ("ok", "late", "refused", "failed")


class TraceError(FieldError):
    """A line of a trace cannot be used; the field is named as file:line: field."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace, checked."""

    executed_steps: int
    control_hz: float
    env_s: float
    parts_s: Mapping[str, float]
    """The five parts of the critical path; empty where the request was not answered."""
    horizon: int | None = None
    delay_steps: int | None = None
    deadline_s: float | None = None
    batch: int = 1
    robot: str = "0"
    t_s: float | None = None
    mode: str = "sync"
    status: str = "ok"
    reason: str = ""
    starved_steps: int = 0
    stage_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        return bool(self.parts_s)

    @property
    def critical_s(self) -> float:
        """Observation to handoff."""
        return sum(self.parts_s.values())

    @property
    def missed(self) -> bool:
        """Not answered, answered late by its own word, or later than its deadline."""
        over = self.deadline_s is not None and self.answered and self.critical_s > self.deadline_s
        return self.status != "ok" or over


def read_trace(path: Path) -> tuple[Request, ...]:
    """Read a trace.

    Raises:
        TraceError: naming file, line and field of the first thing that cannot be used, or if there is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as e:
        raise TraceError(str(path), got=f"bytes that are not text ({e.reason})", expected="JSON lines") from e
    return parse_trace(lines, str(path))


def parse_trace(lines: Iterable[str], source: str = "trace") -> tuple[Request, ...]:
    """Read the lines of a trace; `source` is its name in errors.

    Raises:
        TraceError: as for `read_trace`.
    """
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            requests.append(_parse(line, f"{source}:{number}"))
    if not requests:
        raise TraceError(source, got="no request", expected="one JSON object a line")
    return tuple(requests)


def _parse(line: str, where: str) -> Request:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as e:
        raise TraceError(where, got=f"text that is not JSON ({e.msg} at column {e.colno})", expected="a JSON object") from e
    if not isinstance(raw, dict):
        raise TraceError(where, got=type(raw).__name__, expected="a JSON object")
    read = _Reader(raw, where)
    status = read.word("status", "ok", STATUSES)
    control_hz = read.number("control_hz", above=0.0)
    executed = read.integer("executed_steps", 1)
    assert control_hz is not None
    assert executed is not None
    horizon = read.integer("horizon", 1, needed=False)
    if horizon is not None and executed > horizon:
        raise TraceError(f"{where}: executed_steps", got=executed, expected=f"at most the horizon, {horizon}")
    delay = read.integer("delay_steps", 0, needed=False)
    if horizon is not None and delay is not None and delay > horizon:
        raise TraceError(f"{where}: delay_steps", got=delay, expected=f"at most the horizon, {horizon}")
    env_s = read.number("env_s", above=0.0, needed=False)
    return Request(
        executed_steps=executed,
        control_hz=control_hz,
        env_s=executed / control_hz if env_s is None else env_s,
        parts_s=read.parts(may_lack=status in ("refused", "failed")),
        horizon=horizon,
        delay_steps=delay,
        deadline_s=read.number("deadline_s", above=0.0, needed=False),
        batch=read.integer("batch", 1, needed=False) or 1,
        robot=str(raw.get("robot", "0")),
        t_s=read.number("t_s", needed=False),
        mode=read.word("mode", "sync", MODES),
        status=status,
        reason=str(raw.get("reason", "")),
        starved_steps=read.integer("starved_steps", 0, needed=False) or 0,
        stage_s=read.stages(),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    raw: Mapping[str, Any]
    where: str

    def number(self, name: str, *, above: float = -math.inf, needed: bool = True) -> float | None:
        return self._number(name, self.raw.get(name), above, needed)

    def _number(self, name: str, value: Any, above: float, needed: bool = True) -> float | None:
        if value is None and not needed:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= above:
            bound = (
                "a finite number" if above == -math.inf else "a finite number above 0" if above == 0 else "seconds, 0 or more"
            )
            raise TraceError(f"{self.where}: {name}", got="nothing" if value is None else repr(value), expected=bound)
        return float(value)

    def integer(self, name: str, low: int, *, needed: bool = True) -> int | None:
        value = self.raw.get(name)
        if value is None and not needed:
            return None
        if type(value) is not int or value < low:
            got = "nothing" if value is None else repr(value)
            raise TraceError(f"{self.where}: {name}", got=got, expected=f"an integer, {low} or more")
        return value

    def word(self, name: str, default: str, known: tuple[str, ...]) -> str:
        value = self.raw.get(name, default)
        if value not in known:
            raise TraceError(f"{self.where}: {name}", got=repr(value), expected=f"one of {known}")
        return str(value)

    def parts(self, *, may_lack: bool) -> dict[str, float]:
        if may_lack and any(self.raw.get(name) is None for name in PARTS):
            return {}
        return {name: self._number(name, self.raw.get(name), -1e-12) or 0.0 for name in PARTS}

    def stages(self) -> dict[str, float]:
        value = self.raw.get("stage_s", {})
        if not isinstance(value, dict):
            raise TraceError(f"{self.where}: stage_s", got=type(value).__name__, expected="a map of stage -> seconds")
        return {name: self._number(f"stage_s.{name}", s, -1e-12) or 0.0 for name, s in value.items()}
