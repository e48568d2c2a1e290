"""Runs one request in N a second time as the dtype says, and measures how far FP8 is from it.

The second run uses the weights that FP8 is coded from, which stay in memory anyway, and an engine of its own with a batch of
one. It starts when the robot has its answer, so it costs the others the time of one run, and one at a time is in flight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from stretto.core.chunk import Chunk
from stretto.core.errors import ConfigError, StrettoError
from stretto.core.plan import Mode, whole
from stretto.models.pi0 import Pi0Model
from stretto.runtime.engine import Engine

GATE = 0.995
"""Least cosine of a chunk in FP8 and the same chunk without, both in the model's normalised space."""
log = logging.getLogger(__name__)


class Shadow:
    """Compares requests with their run as the dtype says. Thread-safe."""

    def __init__(self, model: Pi0Model, device: str, mode: Mode, every: int) -> None:
        if every < 1:
            raise ConfigError("fp8_shadow", got=every, expected="1 or more: one request in so many")
        plain = Pi0Model(model.config, model.module, model.pixels, model.rtc_modes)
        # What it costs is measured where dispatch looks ahead.
        self._engine = Engine(plain, whole(plain.route, device, mode=mode).with_dispatch("deadline_limited"))
        self._every = every
        self._lock = threading.Lock()
        self._seen = self._compared = self._skipped = self._beyond = 0
        self._busy = False
        self._worst, self._sum, self._max_abs = 1.0, 0.0, 0.0

    def warm(self) -> None:
        self._engine.warm()
        self._stream = self._engine.open()

    @property
    def seconds_per_request(self) -> float:
        """What the second runs add to each request on average; 0 before `warm`."""
        return sum(seconds[0] for seconds in self._engine.costs.values()) / self._every

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    def close(self) -> None:
        self._engine.close()

    def offer(self, rows: Mapping[str, np.ndarray], lengths: Mapping[str, int], x_HA: np.ndarray) -> None:
        """Take an answered request: what went in, and the chunk that came out. Returns at once."""
        with self._lock:
            self._seen += 1
            if (self._seen - 1) % self._every:
                return
            if self._busy:
                self._skipped += 1
                return
            self._busy = True
        try:
            chunk: Future[Chunk] = self._stream.submit(rows, lengths=lengths)
        except StrettoError as error:  # the robot has its answer; only the comparison is lost
            self._lost(error)
            return
        chunk.add_done_callback(lambda done: self._compare(done, x_HA))

    def metrics(self) -> dict[str, float]:
        with self._lock:
            mean = self._sum / self._compared if self._compared else 1.0
            return {
                "fp8_shadow_compared_total": self._compared,
                "fp8_shadow_skipped_total": self._skipped,
                "fp8_shadow_beyond_gate_total": self._beyond,
                "fp8_shadow_cosine_worst": self._worst,
                "fp8_shadow_cosine_mean": mean,
                "fp8_shadow_max_abs": self._max_abs,
            }

    def _compare(self, done: Future[Chunk], x_HA: np.ndarray) -> None:
        error = done.exception() if not done.cancelled() else None
        if done.cancelled() or error is not None:
            self._lost(error)
            return
        want_HA = done.result().outputs["x"]
        likeness, apart = cosine(x_HA, want_HA), float(np.abs(x_HA - want_HA).max())
        with self._lock:
            self._busy = False
            self._compared += 1
            self._sum += likeness
            self._worst, self._max_abs = min(self._worst, likeness), max(self._max_abs, apart)
            beyond = not likeness >= GATE
            self._beyond += beyond
        if beyond:
            log.warning("FP8 is off: cosine %.5f to the run without it (gate %.3f), at most %.3g apart", likeness, GATE, apart)

    def _lost(self, error: BaseException | None) -> None:
        with self._lock:
            self._busy = False
            self._skipped += 1
        log.warning("the run beside FP8 was lost: %s", error)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))
