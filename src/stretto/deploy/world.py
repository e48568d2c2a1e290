"""Worlds as a service: one model, one engine, many sessions.

The server, the command line and scripts use the same object. It also is what a port needs to warm, watch and close it
(`serve.PolicyService`), though it answers no observations.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import ConfigError, ObservationError, RefusedError
from stretto.core.plan import Mode, Plan
from stretto.core.policy import PolicyReply, RequestOptions, Session
from stretto.core.route import Route
from stretto.deploy.device import resolve_device, resolve_dtype, resolve_mode
from stretto.deploy.world_models import WanShare, place
from stretto.deploy.world_session import RENEW, SEED, Seeding, Start, WorldSession
from stretto.deploy.world_text import encoder_of
from stretto.deploy.worlds import TINY, config_of
from stretto.models.wan import DECODE, WanModel
from stretto.models.wan_actions import ActionTrack
from stretto.runtime.engine import MAIN, Engine
from stretto.runtime.fleet import Workers
from stretto.runtime.worker import Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorldOptions:
    """How worlds are run."""

    model: str = TINY
    """`wan-tiny`, or a preset such as `wan2.1-1.3b`; its weights are random without a checkpoint."""
    checkpoint: Path | None = None
    """A `.safetensors` file or folder (original or diffusers names), or a Self-Forcing or CausVid `.pt`."""
    plan: str = "whole"
    """How a session is spread over devices; `replicas` gives each session one of them."""
    devices: tuple[str, ...] = ("auto",)
    workers: Literal["threads", "processes"] = "threads"
    transport: Transport = "peer"
    mode: str = "auto"
    dtype: str = "auto"
    batch_cap: int = 1
    streams: int = 4
    """Most sessions at a time, of each replica where there are some; memory for all of their state is taken at the start."""
    read_ahead: int = 0
    """Chunks of a session that are made before they are read; 0: as many as the plan keeps in flight."""
    ahead: int = 1
    """Chunks of a session that are admitted beyond those that compute, so that no device waits for the host."""
    vae: Path | None = None
    """A folder in diffusers' layout with the VAE that decodes (`decoder` is then `vae`)."""
    text_encoder: str | None = None
    """A folder with a UMT5 encoder and its tokenizer, or `hash` for models that know no language. None: embeddings only."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration: sizes, window, KV policy, decoder, ..."""


def routes_of(model: WanModel) -> dict[str, Route]:
    """Return the routes beside the main one: filling rings, with frames to show and without."""
    seed = model.seed_route
    quiet = replace(seed, visits=tuple(v for v in seed.visits if v.stage != DECODE), outputs=("x",))
    return {SEED: seed, RENEW: quiet}


class World:
    """Makes worlds for sessions."""

    def __init__(self, options: WorldOptions) -> None:
        """Build the model and its engine; weights are loaded here, or in the workers.

        Raises:
            ConfigError: if an option cannot be used. CheckpointError: if a checkpoint cannot.
            PlanError: if there are more devices than parts of the route.
        """
        for name, least in (("streams", 1), ("batch_cap", 1), ("ahead", 0), ("read_ahead", 0)):
            if getattr(options, name) < least:
                raise ConfigError(name, got=getattr(options, name), expected=f"{least} or more")
        self.options = options
        names = tuple(_device(name) for name in options.devices)
        first = torch.device(names[0] if names[0].startswith("cuda") else "cpu")
        decoder = "light" if options.vae is None else "vae"
        defaults: dict[str, Any] = {"decoder": decoder, "dtype": resolve_dtype(options.dtype, first)}
        if options.model == TINY:
            defaults["actions"] = (ActionTrack("camera", 4),)
        config = config_of(options.model, **{**defaults, **options.changes})
        if options.vae is not None and config.decoder != "vae":
            raise ConfigError("vae", got=str(options.vae), expected=f"none, since the decoder is {config.decoder!r}")
        if config.decoder == "vae" and options.checkpoint is not None and options.vae is None:
            raise ConfigError(
                "vae", got="none", expected="a folder with the VAE that the checkpoint was trained with",
                hint="the decoder would have random weights",
            )  # fmt: skip
        share = WanShare(config, options.checkpoint, vae=options.vae)
        mode: Mode = resolve_mode(options.mode, first)
        self.encoder = encoder_of(config, options.text_encoder)
        described = share(device="cpu", only=())
        plan = place(described, options.plan, names, batch_cap=options.batch_cap, mode=mode)
        self.plan: Plan = replace(plan, in_flight=plan.in_flight + options.ahead)
        self.model = described
        held = described
        workers = None
        if options.workers == "processes":
            workers = Workers(share, transport=options.transport)
        elif len({torch.device(n if n.startswith("cuda") else "cpu") for n in names}) == 1:
            held = share(device=names[0], only=None)
        else:
            raise ConfigError("workers", got="threads on several GPUs", expected="processes, one for each GPU")
        self.engine = Engine(held, self.plan, streams=options.streams, routes=routes_of(described), workers=workers)
        self.read_ahead = options.read_ahead or self.plan.credit(next(iter(self.plan.classes)))
        self.sessions: dict[int, WorldSession] = {}
        self._lock = threading.Lock()
        self._warm = False
        self._kicked: queue.SimpleQueue[WorldSession | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._admit, name="admission", daemon=True)

    # What a port asks.

    @property
    def metadata(self) -> Mapping[str, object]:
        config = self.model.config
        frames = {"kind": "image", "shape": [config.pixel_height, config.pixel_width, 3], "dtype": "uint8", "required": False}
        return {
            "model": self.model.name,
            "action_horizon": config.frames_per_chunk,
            "action_dim": max(1, sum(track.dim for track in config.actions)),
            "observation": {"first_frame": frames},
            "mode": self.plan.mode,
            "policy_metadata": {"world": self.describe()},
        }

    def describe(self) -> dict[str, Any]:
        """Return what a client must know to steer and to show a world. Plain values."""
        config = self.model.config
        return {
            "model": self.model.name,
            "size": [config.pixel_height, config.pixel_width],
            "frame_hz": config.frame_hz,
            "frames_per_chunk": config.frames_per_chunk,
            "pixel_frames": [config.pixel_frames(0), config.pixel_frames(1)],
            "tracks": {
                t.name: {
                    "dim": t.dim,
                    "rate": t.rate,
                    "samples": [t.samples(c, config.frames_per_chunk, config.time_stride) for c in (0, 1)],
                }
                for t in config.actions
            },
            "shows": "frames" if self.model.decoder is not None else "latents",
            "plan": self.plan.kind,
            "devices": [d.name for d in self.plan.devices],
            "text": self.encoder is not None,
        }

    @property
    def ready(self) -> bool:
        return self._warm and self.dead is None

    @property
    def dead(self) -> str | None:
        return self.engine.ended

    def warm(self) -> None:
        """Start the engine. Blocks."""
        self.engine.warm()
        self._thread.start()
        self._warm = True

    def open_session(self, session_id: str, peer: str = "") -> Session:
        """Refuse robots.

        Raises:
            RefusedError: always.
        """
        raise RefusedError("world", "this port makes worlds; connect to /world")

    def submit(self, observation: Mapping[str, object], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        """Refuse observations.

        Raises:
            RefusedError: always.
        """
        raise RefusedError("world", "this port makes worlds; connect to /world")

    def close_session(self, session: Session) -> None:
        """There is none to close."""

    def metrics(self) -> Mapping[str, float]:
        return {"queue_depth": self.engine.queue_depth, "graph_captures_total": self.engine.captures}

    def close(self) -> None:
        """End all sessions and stop."""
        for session in list(self.sessions.values()):
            session.cancel()
        self.engine.close()
        if self._thread.is_alive():
            self._kicked.put(None)
            self._thread.join()

    # What sessions are made of.

    def open(
        self,
        prompt: str | np.ndarray | Tensor,
        *,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        first_frame: np.ndarray | Tensor | None = None,
        history: np.ndarray | Tensor | None = None,
        seeding: Seeding = "none",
    ) -> WorldSession:
        """Open a session; its first chunks are made at once.

        Args:
            prompt: text, or its embedding [tokens, width].
            size: height and width in pixels, as a check: it is that of the model.
            first_frame: known latents [K, C, h, w] with which the first chunk begins.
            history: latents [F, C, h, w] of whole chunks that came before; they fill the rings and are not shown.
            seeding: `first_chunk` makes the first chunk alone and fills the rings of all steps with it.

        Raises:
            PromptTooLongError, ObservationError: if something given does not fit.
            CapacityError: if there is no room for another session.
        """
        self._check_size(size)
        if seeding not in ("none", "first_chunk"):
            raise ObservationError("seeding", got=repr(seeding), expected="none or first_chunk")
        embedded = self.embed(prompt)
        self.model.context(embedded)
        start = Start(seed, seeding=seeding)
        if first_frame is not None:
            start.first_frames = _latents("first_frame", first_frame)
            self.model.inputs(0, 0, 0, given_KChw=start.first_frames, actions=self._no_actions())
        if history is not None:
            start.history = self.model.seed_chunks(_latents("history", history))
        stream = self.engine.open(seed=seed)
        session = WorldSession(self.model, stream, start, self.read_ahead, self._kicked.put)
        with self._lock:
            self.sessions = {i: s for i, s in self.sessions.items() if s.ended is None} | {session.id: session}
        session.switch_prompt(embedded)
        return session

    def embed(self, prompt: str | np.ndarray | Tensor) -> Tensor:
        """Return a prompt's embedding.

        Raises:
            ObservationError: if it is text and there is no encoder, or not [tokens, width].
            PromptTooLongError: if it has more tokens than the model was trained with.
        """
        if isinstance(prompt, str):
            if self.encoder is None:
                raise ObservationError("prompt", got="text", expected="an embedding, for this server has no text encoder")
            return self.encoder.encode(prompt)
        return _numbers("prompt", prompt, "text, or an embedding [tokens, width]").float()

    def _no_actions(self) -> dict[str, Tensor]:
        config = self.model.config
        samples = {t: t.samples(0, config.frames_per_chunk, config.time_stride) for t in config.actions}
        return {t.name: torch.zeros(n, t.dim) for t, n in samples.items()}

    def _check_size(self, size: tuple[int, int] | None) -> None:
        if size is None:
            return
        config = self.model.config
        # The configuration knows which sizes there are, and says the nearest.
        replace(config, pixel_height=size[0], pixel_width=size[1])
        if size != (config.pixel_height, config.pixel_width):
            made = f"{config.pixel_height} x {config.pixel_width}, the size that this server was started with"
            raise ObservationError("size", got=f"{size[0]} x {size[1]}", expected=made)

    def _admit(self) -> None:
        while (session := self._kicked.get()) is not None:
            session.admit()


def _device(name: str) -> str:
    """Return the device that a name stands for; `cpu:0`, `cpu:1`, ... are devices of their own.

    Raises:
        ConfigError: if this machine has none of this name.
    """
    found = resolve_device(name)
    if found.type not in ("cpu", "cuda"):
        raise ConfigError("devices", got=name, expected="auto, cpu, cpu:N or cuda:N")
    return name if found.type == "cpu" and name != "auto" else str(found)


def _latents(name: str, given: np.ndarray | Tensor) -> Tensor:
    found = _numbers(name, given, "latents [F, C, h, w]")
    if found.dim() != 4 or not found.is_floating_point():
        raise ObservationError(name, got=f"{found.dtype} of shape {list(found.shape)}", expected="latents [F, C, h, w]")
    return found.float()


def _numbers(name: str, given: object, expected: str) -> Tensor:
    if isinstance(given, Tensor):
        found = given
    else:
        try:
            array = np.array(given)
        except ValueError as e:
            raise ObservationError(name, got=f"{type(given).__name__} ({e})", expected=expected) from e
        if array.dtype.kind not in "fiu":
            raise ObservationError(name, got=f"{type(given).__name__} of {array.dtype}", expected=expected)
        found = torch.from_numpy(array)
    if not bool(found.isfinite().all()):
        raise ObservationError(name, got="a number that is not finite", expected="finite numbers")
    return found


__all__ = ["MAIN", "World", "WorldOptions"]
