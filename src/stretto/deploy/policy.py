"""A policy ready for robots: a checkpoint, its processor and an engine behind one object.

The server, evaluation in process, and scripts use the same object, so an observation means the same everywhere.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stretto.core.chunk import Chunk
from stretto.core.errors import ConfigError, ObservationError, StrettoError
from stretto.core.plan import Plan, per_visit, whole
from stretto.core.policy import PolicyReply, RequestOptions, Session
from stretto.deploy.checkpoint import Loaded, load_checkpoint, open_checkpoint
from stretto.deploy.device import resolve_device, resolve_dtype, resolve_mode
from stretto.processors.policy import ModelInputs
from stretto.processors.stats import Degenerate
from stretto.runtime.engine import Engine, Stream
from stretto.runtime.noise import noise

PlanKind = Literal["auto", "whole", "per_visit"]


@dataclass(frozen=True)
class PolicyOptions:
    """How a policy is run. `auto` takes the first CUDA device with bf16 and graphs, or the CPU with fp32, eager."""

    device: str = "auto"
    dtype: str = "auto"
    mode: str = "auto"
    plan: PlanKind = "auto"
    """`whole`: one segment, the lowest latency of one robot. `per_visit`: robots join and leave batches between denoise
    steps. `auto` is `whole` for a batch of one and `per_visit` above."""
    max_batch: int = 8
    """Most robots in one batch."""
    dispatch: str | None = None
    """Dispatch policy; None takes the plan's own."""
    preset: str | None = None
    """Observation keys: `libero`, `droid`, `aloha`, `metaworld`, or a key-map file. None takes the checkpoint's."""
    tokenizer: Path | None = None
    default_prompt: str | None = None
    optional_cameras: tuple[str, ...] = ()
    """Cameras a request may leave out; their slot is masked, as in training."""
    degenerate: Degenerate = "refuse"
    """Statistics without spread: `refuse` the checkpoint, or `hold` those dimensions at their constant."""
    denoise_steps: int | None = None
    """Euler steps a chunk; None takes the checkpoint's."""
    seed: int = 0
    threads: int = min(4, os.cpu_count() or 1)
    """Threads that prepare observations."""


def plan_for(loaded: Loaded, options: PolicyOptions, device: torch.device) -> Plan:
    """Make the plan that the options ask for."""
    if options.max_batch < 1:
        raise ConfigError("max_batch", got=options.max_batch, expected="1 or more")
    mode = resolve_mode(options.mode, device)
    kind = options.plan if options.plan != "auto" else ("whole" if options.max_batch == 1 else "per_visit")
    route = loaded.model.route
    if kind == "whole":
        plan = whole(route, str(device), batch_cap=options.max_batch, mode=mode)
    else:
        plan = per_visit(route, str(device), batch_cap=options.max_batch, mode=mode)
    return plan if options.dispatch is None else plan.with_dispatch(options.dispatch)


class Policy:
    """Serves observations of many sessions. Satisfies `serve.PolicyService`; `infer` is openpi's `BasePolicy`."""

    def __init__(self, loaded: Loaded, options: PolicyOptions) -> None:
        self.loaded, self.options = loaded, options
        self.processor = loaded.processor
        self.device = resolve_device(options.device)
        self.engine = Engine(loaded.model, plan_for(loaded, options, self.device))
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="prepare")
        self._streams: dict[Session, Stream] = {}
        self._lock = threading.Lock()
        self._own: Session | None = None
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
        self._warm = True

    def open_session(self, session_id: str, peer: str = "") -> Session:
        stream = self.engine.open(seed=self.options.seed)
        session = Session(session_id, peer, stream.id)
        with self._lock:
            self._streams[session] = stream
        return session

    def close_session(self, session: Session) -> None:
        with self._lock:
            stream = self._streams.pop(session, None)
        if stream is not None:
            stream.close()

    def submit(self, observation: Mapping[str, object], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        """Queue one observation; errors come on the future.

        Raises:
            StrettoError: at once, if the session is closed or an option asks for what this policy does not offer.
        """
        if options.mode not in (None, "none"):
            raise ObservationError("rt.mode", got=repr(options.mode), expected="none")
        with self._lock:
            stream = self._streams.get(session)
        if stream is None:
            raise ObservationError("session", got=session.session_id, expected="an open session")
        reply: Future[PolicyReply] = Future()
        self._pool.submit(self._prepare, reply, observation, options, stream, time.monotonic())
        return reply

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
        if self._own is None:
            self._own = self.open_session("in process")
        own, said = self._own, options or RequestOptions()
        replies = [f.result() for f in [self.submit(o, said, own) for o in observations]]
        return [
            {"actions": r.actions, "policy_timing": {"infer_ms": r.infer_ms}, "stage_ms": dict(r.stage_ms)} for r in replies
        ]

    def reset(self) -> None:
        """Begin a new episode. A policy without real-time chunking remembers nothing."""

    def metrics(self) -> Mapping[str, float]:
        memory = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {
            "queue_depth": self.engine.queue_depth,
            "graph_captures_total": self.engine.captures,
            "gpu_memory_bytes": memory,
            "weight_version": self.weight_version,
        }

    def close(self) -> None:
        """Stop. Queued observations fail with StreamClosedError."""
        self._pool.shutdown(cancel_futures=True)
        self.engine.close()

    def _prepare(
        self,
        reply: Future[PolicyReply],
        observation: Mapping[str, object],
        options: RequestOptions,
        stream: Stream,
        arrived_s: float,
    ) -> None:
        if not reply.set_running_or_notify_cancel():
            return
        try:
            inputs = self.processor.preprocess(observation)
            prepared_s = time.monotonic()
            deadline_s = math.inf if options.deadline_ms is None else arrived_s + options.deadline_ms / 1e3
            rows = self._rows(inputs, options, stream)
            lengths = {"prompt": inputs.token_count}
            chunk = stream.submit(rows, lengths=lengths, seed=options.seed, deadline_s=deadline_s)
        except StrettoError as error:
            reply.set_exception(error)
            return
        chunk.add_done_callback(lambda f: self._reply(reply, f, inputs, options, (prepared_s - arrived_s) * 1e3))

    def _rows(self, inputs: ModelInputs, options: RequestOptions, stream: Stream) -> dict[str, np.ndarray]:
        config = self.loaded.model.config
        shape = (config.action_horizon, config.action_dim)
        if options.noise_HD is not None:
            if options.noise_HD.shape != shape:
                raise ObservationError("rt.noise", got=f"shape {options.noise_HD.shape}", expected=f"shape {shape}")
            x = np.ascontiguousarray(options.noise_HD, np.float32)
        elif options.seed is not None:
            x = noise(shape, seed=options.seed).numpy()
        else:
            x = noise(shape, seed=stream.seed, stream=stream.id, chunk=stream.submitted).numpy()
        rows = inputs.arrays()
        rows["token_count"] = rows["token_count"].astype(np.int32)
        rows = {name: value for name, value in rows.items() if name in self.loaded.model.route.inputs}
        return {**rows, "x": x}

    def _reply(
        self,
        reply: Future[PolicyReply],
        done: Future[Chunk],
        inputs: ModelInputs,
        options: RequestOptions,
        preprocess_ms: float,
    ) -> None:
        try:
            chunk = done.result()
            begin = time.perf_counter()
            actions = self.processor.postprocess(chunk.outputs["x"], inputs.context)
        except StrettoError as error:
            reply.set_exception(error)
            return
        postprocess_ms = (time.perf_counter() - begin) * 1e3
        notes = (f"{inputs.clipped_values} pixel values were clipped to the valid range",) if inputs.clipped_values else ()
        reply.set_result(
            PolicyReply(
                actions=actions,
                infer_ms=chunk.run_ms,
                queue_ms=chunk.queue_ms,
                stage_ms={"preprocess": preprocess_ms, **chunk.stage_ms, "postprocess": postprocess_ms},
                batch_size=max(chunk.batch_sizes.values()),
                mode=chunk.mode,
                weight_version=self.weight_version,
                request_id=options.request_id,
                notes=notes,
            )
        )


def load_policy(checkpoint: str | Path, options: PolicyOptions | None = None) -> Policy:
    """Load a checkpoint and build its engine. Call `warm` before the first request.

    Raises:
        CheckpointError: if the checkpoint cannot be used; nothing is started.
        ConfigError: if an option cannot be used.
    """
    options = options or PolicyOptions()
    device = resolve_device(options.device)
    opened = open_checkpoint(
        checkpoint,
        preset=options.preset,
        tokenizer=options.tokenizer,
        default_prompt=options.default_prompt,
        optional_cameras=options.optional_cameras,
        degenerate=options.degenerate,
        denoise_steps=options.denoise_steps,
    )
    loaded = load_checkpoint(opened, device=device, dtype=resolve_dtype(options.dtype, device))
    return Policy(loaded, options)
