"""Writes a trace while a robot runs: one request a line, for `stretto roofline`.

Each request's round trip, on the robot's own monotonic clock, is split with what the server reports: its own time, and in
it the wait in its queue. What is left over is the transfer. No two clocks are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto_client.errors import ClientError, ServerError
from stretto_client.options import Handshake, Options, check_int, check_positive
from stretto_client.terms import Policy


class TracedPolicy:
    """Stands between a broker and its policy, and writes down every request.

    Args:
        executed_steps: actions executed per request, where the requests do not say it themselves.
        observe_s, actuate_s: time from exposure to observation, and from reply to command, measured by the robot's owner.
        extra: more fields for every line, such as `horizon`, `mode`, `robot` or `deadline_s`.

    Raises:
        FieldError: if a number is out of range.
    """

    def __init__(
        self,
        policy: Policy,
        path: Path | str,
        *,
        control_hz: float,
        executed_steps: int,
        observe_s: float = 0.0,
        actuate_s: float = 0.0,
        extra: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._clock = policy, clock
        self._fixed = {
            "control_hz": check_positive("control_hz", control_hz),
            "observe_s": observe_s if observe_s == 0 else check_positive("observe_s", observe_s),
            "actuate_s": actuate_s if actuate_s == 0 else check_positive("actuate_s", actuate_s),
            **(extra or {}),
        }
        self._executed_steps = check_int("executed_steps", executed_steps, 1, 100_000)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        self.accepts_options = bool(getattr(policy, "accepts_options", False))
        handshake = getattr(policy, "handshake", None)
        self.handshake: Handshake | None = handshake if isinstance(handshake, Handshake) else None

    def infer(self, obs: Any, options: Options | None = None) -> Any:
        """Ask the policy, write the request down, and return or raise what the policy did."""
        began_s = self._clock()
        try:
            reply = self._policy.infer(obs) if options is None else self._policy.infer(obs, options)  # type: ignore[call-arg]
        except ClientError as e:
            reason = e.reason if isinstance(e, ServerError) else None
            status = {"status": "refused", "reason": reason} if reason else {"status": "failed", "reason": type(e).__name__}
            self._write(began_s, options, status)
            raise
        self._write(began_s, options, split(reply, self._clock() - began_s))
        return reply

    def reset(self) -> None:
        self._policy.reset()

    def close(self) -> None:
        """Close the file; the policy stays open."""
        self._file.close()

    def __enter__(self) -> TracedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _write(self, began_s: float, options: Options | None, found: Mapping[str, Any]) -> None:
        line: dict[str, Any] = {**self._fixed, "t_s": began_s, "executed_steps": self._executed_steps, **found}
        if options is not None:
            if options.executed_steps:
                line["executed_steps"] = options.executed_steps
            if options.delay_steps is not None:
                line["delay_steps"] = options.delay_steps
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def split(reply: Any, round_trip_s: float) -> dict[str, Any]:
    """Split a round trip by what the reply says; that of a policy which says nothing is all inference."""
    said = reply if isinstance(reply, Mapping) else {}
    rt = _map(said.get("rt"))
    server_s = _seconds(_map(said.get("server_timing")).get("infer_ms"))
    if server_s is None:
        server_s = round_trip_s
    server_s = min(server_s, round_trip_s)
    queue_s = min(_seconds(rt.get("queue_ms")) or 0.0, server_s)
    parts: dict[str, Any] = {
        "transfer_s": round_trip_s - server_s,
        "queue_s": queue_s,
        "inference_s": server_s - queue_s,
        "batch": rt["batch_size"] if isinstance(rt.get("batch_size"), int) else 1,
    }
    stages = {str(k): _seconds(ms) for k, ms in _map(rt.get("stage_ms")).items()}
    if stages:
        parts["stage_s"] = {k: s for k, s in stages.items() if s is not None}
    return parts


def _map(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _seconds(ms: Any) -> float | None:
    good = isinstance(ms, (int, float)) and not isinstance(ms, bool) and 0 <= ms < float("inf")
    return ms / 1e3 if good else None
