"""Real-time execution of action chunks: the robot is answered at every control tick while inference runs behind it.

`RealtimeBroker(policy, control_hz=...)` stands where openpi's `ActionChunkBroker(policy, ...)` stood. A tick hands in the
newest observation and gets one command. Row 0 of a chunk belongs to the control step of its observation, so how many rows
are passed over is the number of steps really executed since then, never a guess.

Modes: `sync` waits for inference when the chunk is used up; `naive` switches chunks as they arrive; `rtc` also tells the
policy which actions are already committed, so that the new chunk continues them; `ensemble` averages overlapping chunks.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stretto_client.delay import DelayEstimator
from stretto_client.errors import (
    ClientError,
    ClockError,
    ConnectionLostError,
    FieldError,
    PolicyTimeoutError,
    ServerError,
    StarvedError,
)
from stretto_client.options import Options, check_int, check_positive
from stretto_client.terms import Policy, Terms
from stretto_client.timeline import Chunk, Fallback, Starvation, Timeline

Mode = Literal["sync", "naive", "rtc", "ensemble"]


@dataclass
class BrokerStats:
    """Counts since the broker was made."""

    ticks: int = 0
    executed: int = 0
    starved: int = 0
    """Ticks without an action, answered by the starvation policy."""
    chunks: int = 0
    """Chunks taken over."""
    late: int = 0
    """Chunks dropped since more steps had passed than were promised to the policy, or than the chunk has."""
    abandoned: int = 0
    """Chunks dropped because the episode was reset meanwhile."""
    failures: int = 0
    """Requests that were refused, timed out or lost; the next tick asks again."""


@dataclass(frozen=True)
class _Observed:
    obs: Mapping[str, Any]
    step: int
    at_s: float


@dataclass
class _Job:
    observed: _Observed
    epoch: int
    frozen: int | None
    """Steps promised to be executed before the chunk arrives; None where nothing was promised."""
    future: Future[Any] | None = None


class RealtimeBroker:
    """One command per control tick, with inference in the background.

    Call `infer` at `control_hz` from one thread. The first call of an episode waits for the first chunk.

    Args:
        execution_horizon: actions of a chunk to execute before the next inference starts (in `sync`: in all). Default: half
            of the chunk (in `sync`: all of it).
        guidance: in `rtc`, what the policy is asked to do with the prefix: `identity`, `vjp` or `hard`.
        min_delay_steps: never promise fewer committed steps than this; for instance what the server publishes.
        starvation, relative_actions, held_dims: see `timeline.Fallback`.
        max_failures: failed or late requests in a row after which the error is raised.
        clock: monotonic seconds. executor: runs one inference at a time.

    Raises:
        FieldError: if an argument is out of range, or the policy cannot do what the mode needs.
    """

    def __init__(
        self,
        policy: Policy,
        control_hz: float,
        *,
        mode: Mode = "rtc",
        execution_horizon: int | None = None,
        guidance: str = "identity",
        min_delay_steps: int | None = None,
        estimator: DelayEstimator | None = None,
        starvation: Starvation = "hold",
        relative_actions: bool = False,
        held_dims: Sequence[int] = (),
        ensemble_m: float = 0.01,
        max_failures: int = 5,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        self._control_hz = check_positive("control_hz", control_hz, 1e5)
        if mode not in ("sync", "naive", "rtc", "ensemble"):
            raise FieldError("mode", got=repr(mode), expected="sync, naive, rtc or ensemble")
        if not math.isfinite(ensemble_m) or ensemble_m < 0:
            raise FieldError("ensemble_m", got=ensemble_m, expected="a finite number, 0 or more")
        self._policy, self._mode, self._guidance = policy, mode, guidance
        self._terms = Terms(execution_horizon, min_delay_steps, tuple(held_dims))
        self._terms.meet(policy, guidance if mode == "rtc" else None)
        floor_s = (min_delay_steps or 0) / self._control_hz
        self.estimator = estimator or DelayEstimator(floor_s=floor_s)
        self._fallback = Fallback(starvation, relative=relative_actions, held_dims=held_dims)
        self._relative = relative_actions
        self._max_failures = check_int("max_failures", max_failures, 1, 10_000)
        self._clock = clock
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-broker")
        self._timeline = Timeline(ensemble_m if mode == "ensemble" else None)
        self.stats = BrokerStats()
        self._lock = threading.RLock()
        self._slot: _Observed | None = None
        self._job: _Job | None = None
        self._error: BaseException | None = None
        self._step = self._epoch = self._failures_in_a_row = 0
        self._reset_due = self._closed = False
        self._starved_told = 0
        self._path_ms: float | None = None
        self._last_s = -math.inf

    def infer(self, obs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Hand in the newest observation, or None where cameras are slower than control; get the command of this tick.

        The command is the policy's reply with every array cut to one step, plus `broker: {tick, step, starved}`. An older
        observation keeps the control step at which it was handed in.

        Raises:
            StarvedError: if no action is left and the starvation policy is `raise`.
            ClockError: if the clock went backwards.
            ReplyError: if the policy's chunk cannot be executed.
            Exception: whatever the policy raised, after `max_failures` in a row where asking again may help.
        """
        with self._lock:
            now_s = self._now()
            self._check_open()
            if obs is not None:
                self._slot = _Observed(obs, self._step, now_s)
            self.stats.ticks += 1
            self._start_if_due()
            must_wait = not self._timeline.remaining(self._step) and (self._mode == "sync" or self._timeline.newest is None)
        if must_wait:
            self._wait_for_chunk()
        with self._lock:
            return self._command()

    def reset(self) -> None:
        """Begin a new episode: the plan is dropped, and so is the chunk that is being computed."""
        with self._lock:
            self._epoch += 1
            self._step = self._failures_in_a_row = 0
            self._slot = self._error = None
            self._reset_due = True
            self._timeline.clear()
            self._fallback.clear()

    def close(self) -> None:
        """Stop the background thread; an inference under way ends by itself."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _now(self) -> float:
        now_s = self._clock()
        if not now_s >= self._last_s:
            raise ClockError(f"the clock went from {self._last_s} s to {now_s} s; use a monotonic clock")
        self._last_s = now_s
        return now_s

    def _check_open(self) -> None:
        if self._closed:
            raise ClientError("this broker was closed")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start_if_due(self) -> None:
        slot, chunk = self._slot, self._timeline.newest
        if slot is None or self._job is not None or self._closed:
            return
        left = self._timeline.remaining(slot.step)
        if chunk is not None and left and not self._is_due(slot, chunk):
            return
        self._slot = None
        options, frozen = self._options(slot, chunk, left)
        job = self._job = _Job(slot, self._epoch, frozen)
        reset, self._reset_due = self._reset_due, False
        job.future = self._executor.submit(self._ask, slot.obs, options, reset)
        job.future.add_done_callback(lambda _: self._collect(job))

    def _is_due(self, slot: _Observed, chunk: Chunk) -> bool:
        if self._mode == "sync":
            return False
        if self._mode == "ensemble":
            return slot.step > chunk.start
        horizon = len(chunk.actions)
        wanted = self._terms.execution_horizon or max(1, horizon // 2)
        # A long delay leaves less room: start early enough that the chunk does not run out.
        latest = max(1, horizon - self.estimator.steps(self._control_hz))
        return slot.step - chunk.start >= min(wanted, latest)

    def _options(self, slot: _Observed, chunk: Chunk | None, left: int) -> tuple[Options | None, int | None]:
        if not self._terms.sends_options or chunk is None or not left:
            return None, None
        deadline_ms = (left / self._control_hz - (self._last_s - slot.at_s)) * 1e3
        starved, self._starved_told = self.stats.starved - self._starved_told, self.stats.starved
        path_ms, self._path_ms = self._path_ms, None
        # Without an answer the robot stands still once it has run dry: a late one is better than none.
        options = Options(
            deadline_ms=deadline_ms if deadline_ms > 0 else None, late=True, starved_steps=starved or None, path_ms=path_ms
        )
        if self._mode != "rtc":
            return options, None
        frozen = min(self.estimator.steps(self._control_hz), left, self._terms.max_delay)
        executed = slot.step - chunk.start
        prefix = chunk.actions[executed:].astype(np.result_type(chunk.actions.dtype, np.float32))
        return replace(options, executed_steps=executed, delay_steps=frozen, prefix=prefix, mode=self._guidance), frozen

    def _ask(self, obs: Mapping[str, Any], options: Options | None, reset: bool) -> Any:
        if reset:
            self._policy.reset()
        return self._policy.infer(obs) if options is None else self._policy.infer(obs, options)  # type: ignore[call-arg]

    def _collect(self, job: _Job) -> None:
        future = job.future
        assert future is not None
        with self._lock:
            if self._job is not job or future.cancelled():
                return
            self._job = None
            error = future.exception()
            if job.epoch != self._epoch:
                self.stats.abandoned += 1
            elif error is not None:
                self._failed(error)
                return
            else:
                try:
                    self._arrived(job, future.result())
                except ClientError as e:
                    self._error = e
                    return
            self._start_if_due()

    def _failed(self, error: BaseException) -> None:
        passing = isinstance(error, (PolicyTimeoutError, ConnectionLostError)) or (
            isinstance(error, ServerError) and error.reason
        )
        self._failures_in_a_row += 1
        self.stats.failures += 1
        if not passing or self._timeline.newest is None or self._failures_in_a_row >= self._max_failures:
            self._error = error

    def _arrived(self, job: _Job, reply: Any) -> None:
        start = job.observed.step
        chunk = Chunk.read(start, reply, self._terms.horizon, self._terms.action_dim)
        self._terms.learn(*chunk.actions.shape)
        path_s = max(1e-9, self._now() - job.observed.at_s)
        self._path_ms = path_s * 1e3
        self.estimator.add(path_s)
        passed = self._step - start
        # A chunk that keeps fewer steps than were executed would jump. Asking again costs one more delay, and never a jump:
        # a robot that has run dry by then is answered with a chunk that begins where it stands.
        last = chunk.length - 1
        allowed = last if job.frozen is None or self._may_join(passed) else min(job.frozen, last)
        if passed > allowed:
            self._late(passed, allowed)
            return
        self._failures_in_a_row = 0
        self.stats.chunks += 1
        if self._mode == "sync" and self._terms.execution_horizon is not None:
            chunk = replace(chunk, length=self._terms.execution_horizon)
        self._timeline.commit(chunk)

    def _may_join(self, passed: int) -> bool:
        """Whether a chunk may take over at any of its steps: relative actions set out from a stop alike."""
        return self._relative and passed > 0 and not self._timeline.remaining(self._step)

    def _late(self, passed: int, allowed: int) -> None:
        self.stats.late += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            text = f"the last chunk came after {passed} steps, {allowed} allowed"
            raise PolicyTimeoutError(f"{self._failures_in_a_row} requests in a row failed or were late; {text}")

    def _wait_for_chunk(self) -> None:
        while True:
            with self._lock:
                self._check_open()
                if self._timeline.remaining(self._step):
                    return
                self._start_if_due()
                job = self._job
            if job is None or job.future is None:
                return
            with contextlib.suppress(CancelledError):
                job.future.exception()
            self._collect(job)

    def _command(self) -> dict[str, Any]:
        command = self._timeline.at(self._step)
        starved = command is None
        if command is None:
            self.stats.starved += 1
            command = self._fallback.next()
            if command is None:
                raise StarvedError(f"no action is left for control step {self._step}; {self.stats.chunks} chunks came so far")
        else:
            self._fallback.saw(command)
            self.stats.executed += 1
            self._step += 1
        step = self._step if starved else self._step - 1
        return {**command, "broker": {"tick": self.stats.ticks - 1, "step": step, "starved": starved}}
