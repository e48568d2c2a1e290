"""What a server writes down of each request: one line for `stretto roofline`, or a timeline for Perfetto and chrome://tracing.

A line (`FILE.jsonl`) has the fields of `control.trace`, as far as a server can know them: `transfer_s` is its own reading
and packing of messages, not the wire; observing and acting are the robot's own, and zero here. `executed_steps` is what the
request says, else the whole chunk. A timeline (`FILE.json`) has one track a session; the stages of a request stand in their
order from its arrival, and `between stages` is the rest of the time that the model had it.

Files never grow beyond a limit: at half of it what is there moves to `FILE.1.jsonl`, in place of what was there before.
Every request is on disk when it is answered, so a server that is killed leaves its trace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.core.errors import ConfigError
from stretto.core.policy import PolicyReply, RequestOptions

LEAST_BYTES = 64 * 1024
BEFORE, AFTER = ("decode", "preprocess", "queue"), ("postprocess", "encode")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """One request that has ended. Times in seconds, on one monotonic clock."""

    session_id: str
    request_id: str
    began_s: float
    seconds: float
    """From its arrival to the reply on its way."""
    options: RequestOptions
    own_ms: Mapping[str, float] = field(default_factory=dict)
    """Stages of the server itself: `decode`, `encode`."""
    reply: PolicyReply | None = None
    reason: str = ""
    """Why it was refused, or the code of its error."""
    refused: bool = False

    @property
    def status(self) -> str:
        if self.reply is None:
            return "refused" if self.refused else "failed"
        return "late" if self.reply.late else "ok"

    @property
    def stages_s(self) -> dict[str, float]:
        """Every stage that is known, in the order in which a request meets them."""
        if self.reply is None:
            return {}
        known = {**self.own_ms, **self.reply.stage_ms, "queue": self.reply.queue_ms}
        model = [name for name in known if name not in BEFORE + AFTER]
        ordered = {name: known[name] / 1e3 for name in (*BEFORE, *model, *AFTER) if name in known}
        rest_s = self.seconds - sum(ordered.values())
        if rest_s <= 0:
            return ordered
        after = {name: ordered.pop(name) for name in AFTER if name in ordered}
        return {**ordered, "between stages": rest_s, **after}


@dataclass(frozen=True, slots=True)
class Lines:
    """The trace that `stretto roofline` reads."""

    control_hz: float
    horizon: int
    opening = ""
    closing = ""

    def of(self, served: Served) -> str:
        options = served.options
        chunking = options.delay_steps is not None
        line: dict[str, Any] = {
            "t_s": round(served.began_s, 6),
            "robot": served.session_id,
            "request_id": served.request_id,
            "executed_steps": min(options.executed_steps or self.horizon, self.horizon),
            "control_hz": self.control_hz,
            "horizon": self.horizon,
            "mode": "rtc" if chunking else "sync",
            "status": served.status,
        }
        if chunking:
            line["delay_steps"] = min(options.delay_steps or 0, self.horizon)
        if options.deadline_ms is not None:
            line["deadline_s"] = options.deadline_ms / 1e3
        if options.obs_time_ns is not None:
            line["obs_time_ns"] = options.obs_time_ns
        if options.starved_steps:
            line["starved_steps"] = options.starved_steps
        if served.reason:
            line["reason"] = served.reason
        if (reply := served.reply) is not None:
            own_s, queue_s = sum(served.own_ms.values()) / 1e3, reply.queue_ms / 1e3
            inference_s = max(0.0, served.seconds - own_s - queue_s)
            line |= {"observe_s": 0.0, "transfer_s": own_s, "queue_s": queue_s, "inference_s": inference_s, "actuate_s": 0.0}
            line |= {"batch": reply.batch_size, "stage_s": {name: ms / 1e3 for name, ms in reply.stage_ms.items()}}
        return json.dumps(line) + "\n"


class Timeline:
    """The JSON array of trace events; one that was cut short is read by Perfetto as well."""

    opening = "[\n"
    closing = '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "stretto"}}]\n'

    def __init__(self) -> None:
        self._tracks: dict[str, int] = {}

    def of(self, served: Served) -> str:
        track, events = self._track(served.session_id)
        whole: dict[str, Any] = {"request": served.request_id, "status": served.status}
        if served.reason:
            whole["reason"] = served.reason
        if served.reply is not None:
            whole |= {"batch": served.reply.batch_size, "mode": served.reply.mode}
        events.append(_slice("request", track, served.began_s, served.seconds, whole))
        at_s = served.began_s
        for name, seconds in served.stages_s.items():
            events.append(_slice(name, track, at_s, seconds))
            at_s += seconds
        return "".join(json.dumps(event) + ",\n" for event in events)

    def _track(self, session_id: str) -> tuple[int, list[dict[str, Any]]]:
        if session_id in self._tracks:
            return self._tracks[session_id], []
        track = self._tracks[session_id] = len(self._tracks) + 1
        name = {"name": f"session {session_id}"}
        return track, [{"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": name}]


def _slice(name: str, track: int, at_s: float, seconds: float, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"name": name, "ph": "X", "pid": 1, "tid": track, "ts": round(at_s * 1e6, 1)}
    event["dur"] = round(seconds * 1e6, 1)
    return event if told is None else {**event, "args": dict(told)}


class TraceFile:
    """One bounded file. Not for several threads.

    Raises:
        ConfigError: on construction, if the file cannot be written or the limit is too small.
    """

    def __init__(self, path: Path, form: Lines | Timeline, max_bytes: int) -> None:
        if max_bytes < LEAST_BYTES:
            raise ConfigError("trace_max_mb", got=f"{max_bytes} bytes", expected=f"at least {LEAST_BYTES} bytes")
        self.path, self._form, self._half = path, form, max_bytes // 2 - len(form.closing)
        self.older = path.with_name(f"{path.stem}.1{path.suffix}")
        self._open_file()

    def _open_file(self) -> None:
        try:
            # Unbuffered, so that what was answered is on disk, and a full disk leaves nothing behind to fail later.
            self._file = self.path.open("wb", buffering=0)
        except OSError as e:
            expected = "a file that can be written"
            raise ConfigError("trace", got=f"{self.path} ({e.strerror})", expected=expected) from e
        self._size, self._failed = 0, False

    def add(self, served: Served) -> None:
        """Write one request down. A disk that is full ends the trace, not the server."""
        if self._failed or self._file.closed:
            return
        text = ("" if self._size else self._form.opening) + self._form.of(served)
        try:
            if self._size + len(text) > self._half:
                self.close()
                self.path.replace(self.older)
                if isinstance(self._form, Timeline):
                    self._form = Timeline()  # each file names its tracks itself
                self._open_file()
                text = self._form.opening + self._form.of(served)
            self._file.write(text.encode())
        except (OSError, ConfigError) as e:
            self._failed = True
            log.error("the trace %s ends here: %s", self.path, e)
        else:
            self._size += len(text)

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with self._file:
                ending = self._form.closing if self._size else self._form.opening + self._form.closing
                if ending and not self._failed:
                    self._file.write(ending.encode())
        except OSError as e:
            log.error("the trace %s could not be closed: %s", self.path, e)


def open_traces(paths: Sequence[Path], max_bytes: int, *, control_hz: float | None, horizon: int) -> tuple[TraceFile, ...]:
    """Begin a trace a path, by its ending; what was in the files is gone.

    Raises:
        ConfigError: if an ending is not known, a file cannot be written, or a line would lack the control rate.
    """
    forms: list[Lines | Timeline] = []
    for path in paths:
        if path.suffix == ".json":
            forms.append(Timeline())
        elif path.suffix != ".jsonl":
            raise ConfigError("trace", got=str(path), expected="a name that ends in .jsonl (roofline) or .json (timeline)")
        elif control_hz is None:
            hint = "The time of the world follows from it; or write a timeline, FILE.json."
            raise ConfigError("control_hz", got="nothing", expected=f"the robots' control rate, for {path}", hint=hint)
        else:
            forms.append(Lines(control_hz, horizon))
    return tuple(TraceFile(path, form, max_bytes) for path, form in zip(paths, forms, strict=True))
