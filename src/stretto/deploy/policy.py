"""A policy ready for robots: a checkpoint, its processor and an engine behind one object.

The server, evaluation in process, and scripts use the same object, so an observation means the same everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.core.errors import ConfigError, ObservationError, StrettoError
from stretto.core.policy import PolicyReply, RequestOptions, Session
from stretto.deploy.admission import Gate, profile_of
from stretto.deploy.checkpoint import Loaded, load_checkpoint, open_checkpoint
from stretto.deploy.device import resolve_device, resolve_dtype
from stretto.deploy.input_rows import InputRows
from stretto.deploy.policy_options import PlanKind, PolicyOptions, plan_for
from stretto.deploy.precision import set_precision
from stretto.deploy.realtime import Realtime
from stretto.deploy.requests import Requests
from stretto.deploy.shadow import Shadow
from stretto.deploy.tickets import RobotState, Ticket
from stretto.runtime.engine import Engine
from stretto.runtime.weights import LoadReport, update_weights

__all__ = ["PlanKind", "Policy", "PolicyOptions", "load_policy", "plan_for"]


class Policy:
    """Serves observations of many sessions. Satisfies `serve.PolicyService`; `infer` is openpi's `BasePolicy`."""

    def __init__(self, loaded: Loaded, options: PolicyOptions) -> None:
        self.loaded, self.options = loaded, options
        self.processor = loaded.processor
        self.device = resolve_device(options.device)
        self._precision = set_precision(loaded, options, self.device)
        self.engine = Engine(loaded.model, plan_for(loaded.model.route, options, self.device))
        self._shadow = (
            Shadow(loaded.model, str(self.device), self.engine.plan.mode, options.fp8_shadow) if options.fp8_shadow else None
        )
        trained = loaded.trained_delay or None
        self.realtime = Realtime(
            modes=loaded.model.rtc_modes,
            horizon=self.processor.action_horizon,
            width=self.processor.spec.max_action_dim,
            robot_width=self.processor.action_dim,
            control_hz=options.control_hz,
            max_delay=trained if options.max_delay is None and "hard" in loaded.model.rtc_modes else options.max_delay,
            schedule=options.rtc_schedule,
            cap=options.rtc_cap,
        )
        rows = InputRows(loaded.model, self.processor, self.realtime)
        self._requests = Requests(
            self.engine, self.processor, self.realtime, rows, self._shadow, options.threads, lambda: self.weight_version
        )
        self._robots: dict[Session, RobotState] = {}
        self._lock = threading.Lock()
        self._own: list[Session] = []
        self._gate = Gate(options.robot_period_ms, options.robot_deadline_ms)
        self._warm = False
        self.weight_version = 0

    @property
    def metadata(self) -> Mapping[str, object]:
        return {
            "model": self.loaded.model.name,
            "action_horizon": self.processor.action_horizon,
            "action_dim": self.processor.action_dim,
            "observation": self.processor.observation_schema(),
            "mode": self.engine.plan.mode,
            "precision": self._precision,
            "rt": self.realtime.describe(),
            "policy_metadata": {},
        }

    @property
    def ready(self) -> bool:
        return self._warm and self.dead is None

    @property
    def dead(self) -> str | None:
        return self.engine.dead

    def warm(self) -> None:
        """Capture all graphs and start the engine. Blocks."""
        self.engine.warm()
        if self._shadow is not None:
            self._shadow.warm()
        if self.engine.costs:
            model, beside_s = self.loaded.model, self._shadow.seconds_per_request if self._shadow is not None else 0.0
            self._gate.open(profile_of(model.name, model.route, self.engine.plan, self.engine.costs, beside_s))
        self._warm = True

    def open_session(self, session_id: str, peer: str = "") -> Session:
        """Make room for one robot.

        Raises:
            CapacityError: if the rhythm of robots is known and they would not all be on time with one more.
        """
        session = self._open(session_id, peer)
        try:
            self._gate.enter(session.stream)
        except StrettoError:
            self.close_session(session)
            raise
        return session

    def _open(self, session_id: str, peer: str = "") -> Session:
        stream = self.engine.open(seed=self.options.seed)
        session = Session(session_id, peer, stream.id)
        with self._lock:
            self._robots[session] = RobotState(stream)
        return session

    def close_session(self, session: Session) -> None:
        with self._lock:
            robot = self._robots.pop(session, None)
        if robot is not None:
            self._gate.leave(session.stream)
            robot.stream.close()

    def submit(self, observation: Mapping[str, object], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        """Queue one observation; errors come on the future.

        Raises:
            StrettoError: at once, if the session is closed or an option asks for what this policy does not offer.
        """
        ticket = self._ticket(observation, options, session)
        self._requests.prepare_beside(ticket)
        return ticket.reply

    def _ticket(self, observation: Mapping[str, object], options: RequestOptions, session: Session) -> Ticket:
        now_s = self.engine.now_s
        with self._lock:
            robot = self._robots.get(session)
        if robot is None:
            raise ObservationError("session", got=session.session_id, expected="an open session")
        return self._requests.take(observation, options, robot, now_s)

    def infer(self, observation: Mapping[str, object], options: RequestOptions | None = None) -> dict[str, Any]:
        """Answer one observation of the one robot that calls this; returns `actions` [H, A] and `policy_timing`."""
        return self.infer_batch([observation], options)[0]

    def infer_batch(
        self, observations: Sequence[Mapping[str, object]], options: RequestOptions | None = None
    ) -> list[dict[str, Any]]:
        """Answer observations of several robots, batched; in their order.

        Raises:
            StrettoError: the first error among them.
        """
        while len(self._own) < len(observations):
            self._own.append(self._open("in process"))
        said = options or RequestOptions()
        tickets = [self._ticket(o, said, own) for o, own in zip(observations, self._own, strict=False)]
        for ticket in tickets[:-1]:
            self._requests.prepare_beside(ticket)
        for ticket in tickets[-1:]:
            self._requests.prepare(ticket)  # here, since this thread would only wait
        for ticket in tickets:
            self.engine.help(ticket.reply.done)
        replies = [ticket.reply.result() for ticket in tickets]
        return [
            {
                "actions": r.actions,
                "policy_timing": {"infer_ms": r.infer_ms},
                "stage_ms": dict(r.stage_ms),
                "weight_version": r.weight_version,
            }
            for r in replies
        ]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], *, complete: bool = False) -> LoadReport:
        """Replace weights in place, under captured graphs, as a trainer makes new ones; replies then say the next version.

        Names are a checkpoint's. Waits for the device. The caller sees to it that no request comes meanwhile.

        Args:
            complete: require every weight; otherwise those not given stay as they are.

        Raises:
            ConfigError: if a request is in flight.
            CheckpointError: naming what is not the model's; the weights are then as they were.
        """
        busy = self.engine.in_flight + (self._shadow.in_flight if self._shadow is not None else 0)
        if busy:
            raise ConfigError("update_weights", got=f"{busy} requests in flight", expected="none while weights change")
        report = update_weights(self.loaded.model, tensors, complete=complete)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # lanes have streams of their own, which do not wait for this thread's
        self.weight_version += 1
        return report

    def reset(self) -> None:
        """Begin a new episode for whoever calls `infer` and `infer_batch`."""
        for session in self._own:
            with self._robots[session].turn:
                self._robots[session].forget()

    def metrics(self) -> Mapping[str, float]:
        memory = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {
            "queue_depth": self.engine.queue_depth,
            "graph_captures_total": self.engine.captures,
            "gpu_memory_bytes": memory,
            "session_state_bytes": self._remembered_bytes(),
            "weight_version": self.weight_version,
            **(self._shadow.metrics() if self._shadow is not None else {}),
        }

    def _remembered_bytes(self) -> int:
        with self._lock:
            chunks = [robot.last_HD for robot in self._robots.values()]
        return sum(chunk.nbytes for chunk in chunks if chunk is not None)

    def close(self) -> None:
        """Stop. Queued observations fail with StreamClosedError."""
        self._requests.close()
        self.engine.close()
        if self._shadow is not None:
            self._shadow.close()


def load_policy(checkpoint: str | Path, options: PolicyOptions | None = None) -> Policy:
    """Load a checkpoint and build its engine. Call `warm` before the first request.

    Raises:
        CheckpointError: if the checkpoint cannot be used; nothing is started.
        ConfigError: if an option cannot be used.
    """
    options = options or PolicyOptions()
    return Policy(load(checkpoint, options), options)


def load(checkpoint: str | Path, options: PolicyOptions) -> Loaded:
    """Load a checkpoint as the options ask, without an engine.

    Raises:
        CheckpointError: if the checkpoint cannot be used.
        ConfigError: if an option cannot be used.
    """
    device = resolve_device(options.device)
    opened = open_checkpoint(
        checkpoint,
        preset=options.preset,
        tokenizer=options.tokenizer,
        default_prompt=options.default_prompt,
        optional_cameras=options.optional_cameras,
        degenerate=options.degenerate,
        pad_state_bins=options.pad_state_bins,
        denoise_steps=options.denoise_steps,
    )
    return load_checkpoint(opened, device=device, dtype=resolve_dtype(options.dtype, device), rtc=options.rtc)
