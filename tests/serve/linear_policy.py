"""A small policy that is real: a seeded linear map of camera means and state, run by its own worker threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from stretto.core.errors import CapacityError, ObservationError, WorkerDiedError
from stretto.serve import PolicyReply, RequestOptions, Session


def camera(*shape: int, required: bool = True) -> dict[str, Any]:
    return {"kind": "image", "shape": shape, "dtype": "uint8", "required": required}


def state(width: int) -> dict[str, Any]:
    return {"kind": "state", "shape": (width,), "dtype": "float32", "required": True}


PROMPT = {"kind": "prompt", "shape": (), "dtype": "str", "required": False}

LIBERO = {
    "observation/image": camera(224, 224, 3),
    "observation/wrist_image": camera(224, 224, 3),
    "observation/state": state(8),
    "prompt": PROMPT,
}
DROID = {
    "observation/exterior_image_1_left": camera(224, 224, 3),
    "observation/wrist_image_left": camera(224, 224, 3),
    "observation/joint_position": state(7),
    "observation/gripper_position": state(1),
    "prompt": PROMPT,
}
ALOHA = {
    "images/cam_high": camera(3, 224, 224),
    "images/cam_left_wrist": camera(3, 224, 224, required=False),
    "images/cam_right_wrist": camera(3, 224, 224, required=False),
    "state": state(14),
    "prompt": PROMPT,
}


def example(schema: Mapping[str, Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """Make an observation as the robot of that schema would send it: a path that is not a literal key is nested."""
    rng = np.random.default_rng(seed)
    observation: dict[str, Any] = {}
    for key, entry in schema.items():
        if entry["kind"] == "image":
            value: Any = rng.integers(0, 256, entry["shape"], dtype=np.uint8)
        else:
            value = rng.standard_normal(entry["shape"]) if entry["kind"] == "state" else "pick up the cup"
        if key.startswith("images/"):
            observation.setdefault("images", {})[key.removeprefix("images/")] = value
        else:
            observation[key] = value
    return observation


class LinearPolicy:
    """One chunk is `W @ [camera means, state]`, the same for every step but for a ramp. Takes `infer_s` a request."""

    def __init__(
        self,
        schema: Mapping[str, Mapping[str, Any]] = LIBERO,
        *,
        action_horizon: int = 10,
        action_dim: int = 7,
        infer_s: float = 0.0,
        warm_s: float = 0.0,
        workers: int = 1,
        max_sessions: int = 64,
        warm_fault: Exception | None = None,
        policy_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.metadata: Mapping[str, object] = {
            "model": "linear",
            "action_horizon": action_horizon,
            "action_dim": action_dim,
            "observation": schema,
            "policy_metadata": policy_metadata or {},
            "rt": {"rtc_modes": ["hard"], "max_delay": 4},
        }
        self.ready, self.dead = False, None
        self.infer_s, self.warm_s, self.warm_fault = infer_s, warm_s, warm_fault
        self.max_sessions = max_sessions
        self.ran: list[str] = []
        self.seen: list[RequestOptions] = []
        self.sessions: set[Session] = set()
        self._schema, self._shape = schema, (action_horizon, action_dim)
        width = sum(1 if e["kind"] == "image" else e["shape"][0] for e in schema.values() if e["kind"] != "prompt")
        self._w = np.random.default_rng(1).standard_normal((action_dim, width))
        self._queue: queue.Queue[tuple[float, Mapping[str, Any], RequestOptions, Future[PolicyReply]] | None] = queue.Queue()
        self._wake = threading.Event()
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]

    def warm(self) -> None:
        time.sleep(self.warm_s)
        if self.warm_fault is not None:
            raise self.warm_fault
        for worker in self._workers:
            worker.start()
        self.ready = True

    def open_session(self, session_id: str, peer: str = "") -> Session:
        if len(self.sessions) >= self.max_sessions:
            raise CapacityError("sessions", f"{self.max_sessions} sessions are open")
        session = Session(session_id, peer)
        self.sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        self.sessions.discard(session)

    def submit(self, observation: Mapping[str, Any], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        if self.dead is not None:
            raise WorkerDiedError(self.dead)
        future: Future[PolicyReply] = Future()
        self._queue.put((time.perf_counter(), observation, options, future))
        return future

    def metrics(self) -> Mapping[str, float]:
        return {"queue_depth": self._queue.qsize(), "graph_captures_total": 0, "gpu_memory_bytes": 0}

    def die(self, reason: str, *, workers_notice: bool = True) -> None:
        self.dead = reason
        self.ready = False
        if workers_notice:
            self._wake.set()

    def close(self) -> None:
        self._wake.set()
        for _ in self._workers:
            self._queue.put(None)

    def act(self, observation: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Return [H, D]; what a test compares a reply with."""
        features: list[float] = []
        for key, entry in self._schema.items():
            value = self._find(observation, key, entry["required"])
            if entry["kind"] == "image":
                features.append(0.0 if value is None else float(np.mean(value)) / 255)
            elif entry["kind"] == "state":
                array = np.asarray(value, np.float64)
                if array.shape != tuple(entry["shape"]):
                    raise ObservationError(key, got=f"shape {list(array.shape)}", expected=f"shape {list(entry['shape'])}")
                features.extend(array)
        ramp = 1 + np.arange(self._shape[0], dtype=np.float64)[:, None]
        return ramp * (self._w @ np.asarray(features))[None, :]

    def _find(self, observation: Mapping[str, Any], key: str, required: bool) -> Any:
        value = observation.get(key)
        if value is None and "/" in key:
            outer, inner = key.split("/", 1)
            value = observation.get(outer, {}).get(inner)
        if value is None and required:
            raise ObservationError(key, got=f"keys {sorted(observation)}", expected="this key")
        return value

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            began_s, observation, options, future = item
            if not future.set_running_or_notify_cancel():
                continue
            queue_ms = (time.perf_counter() - began_s) * 1e3
            self.ran.append(options.request_id)
            self.seen.append(options)
            try:
                self._wake.wait(self.infer_s)
                if self.dead is not None:
                    raise WorkerDiedError(self.dead)
                actions = self.act(observation)
            except Exception as e:  # what a worker's edge does: the fault belongs to this request
                future.set_exception(e)
            else:
                infer_ms = (time.perf_counter() - began_s) * 1e3 - queue_ms
                future.set_result(PolicyReply(actions, infer_ms, queue_ms, {"preprocess": 0.1, "denoise": infer_ms}))
