"""One world: who steers it says what happens, and reads what comes of it, chunk by chunk.

Chunks are admitted a few ahead of the reader. What a chunk depends on is frozen when it is admitted, and it says so: its
frames, its samples of every track, and the events that it is the first to show.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.errors import ObservationError, StreamClosedError, StrettoError
from stretto.deploy.world_actions import HeldTrack
from stretto.models.wan import WanModel
from stretto.models.wan_stages import CONTEXT
from stretto.runtime.engine import MAIN, Stream

SEED, RENEW = "seed", "renew"
Seeding = Literal["none", "first_chunk"]
Span = tuple[int, int]


@dataclass(frozen=True)
class WorldChunk:
    """The next piece of a world. Spans are [start, stop) since the session began."""

    index: int
    latents: np.ndarray
    """[F, C, h, w], fp32."""
    frames: np.ndarray | None
    """[P, H, W, 3] in uint8; None where the model has no decoder."""
    latent_frames: Span
    pixel_frames: Span
    actions: Mapping[str, Span]
    """Track -> the samples that this chunk was made with."""
    events: tuple[int, ...]
    """Events that this chunk is the first to show, in order."""
    prompt_version: int
    chunk: Chunk
    """How it was made."""


@dataclass
class Admitted:
    """A chunk that is being made, and what was frozen for it."""

    index: int
    actions: Mapping[str, Tensor]
    spans: Mapping[str, Span]
    events: tuple[int, ...]
    prompt_version: int
    done: Future[Chunk]


@dataclass
class Start:
    """What a session begins with."""

    seed: int = 0
    first_frames: Tensor | None = None
    """[K, C, h, w]: known latent frames that the first chunk keeps."""
    history: list[Tensor] = field(default_factory=list)
    """Whole chunks of latents that came before; they fill the rings and are not shown."""
    seeding: Seeding = "none"


class WorldSession:
    """One stream of chunks. All methods may be called from any thread, and none waits for a device except `read`."""

    def __init__(
        self, model: WanModel, stream: Stream, start: Start, read_ahead: int, kick: Callable[[WorldSession], None]
    ) -> None:
        self.id, self.model, self._stream, self._start = stream.id, model, stream, start
        self._read_ahead, self._kick = read_ahead, kick
        self.tracks = {track.name: HeldTrack(track) for track in model.config.actions}
        self._lock = threading.RLock()
        self._admitted: deque[Admitted] = deque()
        self._recent: deque[Admitted] = deque(maxlen=-(-model.config.window_frames // model.config.frames_per_chunk))
        self._next = len(start.history)
        self._event = -1
        self._prompts: list[tuple[Tensor, int | None]] = []
        self._shown: list[int] = []
        self._version = -1
        self._renew = False
        self._wanted: Future[WorldChunk] | None = None
        self._ended: StrettoError | None = None
        self._begun = False

    # What the owner does.

    def act(self, track: str, values: ArrayLike, event: int, *, pulse: bool = False) -> None:
        """Say one value of a track, held from the next sample on, or one for each of the next samples.

        Raises:
            ObservationError: if the track is unknown, the values do not fit, or the event is not newer than the last.
            StreamClosedError: if the session has ended.
        """
        with self._lock:
            self._check_open()
            if track not in self.tracks:
                raise ObservationError("track", got=repr(track), expected=f"one of {sorted(self.tracks)}")
            self._check_event(event)
            self.tracks[track].say(values, event, pulse=pulse)
            self._event = event

    def switch_prompt(self, prompt_XE: Tensor, event: int | None = None, *, renew: bool = False) -> None:
        """Change the prompt for chunks that are admitted from now on.

        Args:
            renew: also remake the keys and values of the frames in the window under the new prompt. Chunks in flight are
                finished first.

        Raises:
            PromptTooLongError: if there are more tokens than the model was trained with.
            ObservationError: if the embeddings do not fit, or the event is not newer than the last.
        """
        context = self.model.context(prompt_XE)
        with self._lock:
            self._check_open()
            if event is not None:
                self._check_event(event)
                self._event = event
            self._prompts.append((context, event))
            self._renew |= renew
        self._kick(self)

    def read_soon(self) -> Future[WorldChunk]:
        """Ask for the next chunk; the future has it, or the reason why there is none.

        Raises:
            ObservationError: if somebody else is waiting for it.
        """
        with self._lock:
            if self._wanted is not None:
                raise ObservationError("reader", got="a second reader", expected="one; chunks are given once, in order")
            wanted: Future[WorldChunk] = Future()
            self._wanted = wanted
        self._deliver()
        self._kick(self)
        return wanted

    def read(self, timeout_s: float | None = None) -> WorldChunk:
        """Return the next chunk, in order.

        Raises:
            TimeoutError: if it is not there in time; it is not lost.
            StreamClosedError, WorkerDiedError: if there will be none.
        """
        wanted = self.read_soon()
        try:
            return wanted.result(timeout_s)
        except TimeoutError:
            with self._lock:
                if self._wanted is wanted:
                    self._wanted = None
                    raise
            return wanted.result()

    def cancel(self) -> None:
        """End the session now: what is under way is dropped, and its memory is free once the devices have let go of it."""
        self._end(StreamClosedError("the session was cancelled"))

    close = cancel

    @property
    def ended(self) -> StrettoError | None:
        """Why no more chunks will come, or None."""
        return self._ended

    # What the admission thread does.

    def admit(self) -> None:
        """Admit chunks as far ahead of the reader as is allowed."""
        try:
            while self._ended is None and self._may_admit():
                self._admit_one()
        except StrettoError as error:
            self._end(error)

    def _may_admit(self) -> bool:
        with self._lock:
            if len(self._admitted) >= self._read_ahead or self._stream.room < 1:
                return False
            if self._renew or (self._start.seeding == "first_chunk" and self._next == 1 and self._recent):
                return all(a.done.done() for a in self._recent)
            return True

    def _admit_one(self) -> None:
        if not self._begun:
            self._begin()
        with self._lock:
            shown = self._take_prompts()
            if self._renew or (self._start.seeding == "first_chunk" and self._next == 1 and self._recent):
                self._renew_rings()
            index, taken, spans = self._next, {}, {}
            for name, held in self.tracks.items():
                before = held.taken
                taken[name], events = held.take(self._samples(name, index))
                spans[name] = (before, held.taken)
                shown |= events
            self._next += 1
        fresh = shown - set(self._shown[-64:])
        self._shown += sorted(fresh)
        del self._shown[:-64]
        first = self._start.first_frames if index == 0 else None
        inputs = self.model.inputs(self._start.seed, self.id, index, given_KChw=first, actions=taken)
        done = self._submit(inputs, MAIN, None)
        admitted = Admitted(index, taken, spans, tuple(sorted(fresh)), self._version, done)
        with self._lock:
            self._admitted.append(admitted)
            self._recent.append(admitted)
        done.add_done_callback(lambda _: self._finished())

    def _begin(self) -> None:
        self._begun = True
        with self._lock:
            self._take_prompts()
        for index, latents in enumerate(self._start.history):
            actions = {name: held.take(self._samples(name, index))[0] for name, held in self.tracks.items()}
            self._submit(self._seeded(index, latents, actions), SEED, index)

    def _take_prompts(self) -> set[int]:
        shown = set()
        for context, event in self._prompts:
            self._version = self._stream.set_condition(CONTEXT, context)
            if event is not None:
                shown.add(event)
        self._prompts.clear()
        return shown

    def _renew_rings(self) -> None:
        """Run the frames of the window again, clean, under what holds now."""
        self._renew = False
        if self._start.seeding == "first_chunk" and self._next == 1:
            self._start.seeding = "none"
        for made in list(self._recent):
            latents = torch.from_numpy(made.done.result().outputs["x"])
            self._submit(self._seeded(made.index, latents, made.actions), RENEW, made.index)

    def _seeded(self, index: int, latents: Tensor, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**self.model.inputs(self._start.seed, self.id, index, actions=actions), "x": latents}

    def _submit(self, inputs: Mapping[str, Tensor], route: str, chunk: int | None) -> Future[Chunk]:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return self._stream.submit(arrays, seed=self._start.seed, route=route, chunk=chunk)

    def _samples(self, name: str, index: int) -> int:
        config = self.model.config
        return self.tracks[name].track.samples(index, config.frames_per_chunk, config.time_stride)

    # What happens when chunks are done.

    def _finished(self) -> None:
        self._deliver()
        self._kick(self)

    def _deliver(self) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None:
                return
            if self._admitted and self._admitted[0].done.done():
                error = self._admitted[0].done.exception()
                if error is None:
                    chunk = self._chunk(self._admitted.popleft())
                    self._wanted = None
                    wanted.set_result(chunk)
                    return
                self._ended = self._ended or (error if isinstance(error, StrettoError) else StreamClosedError(str(error)))
            if self._ended is None:
                return
            self._wanted = None
        wanted.set_exception(self._ended)

    def _chunk(self, made: Admitted) -> WorldChunk:
        config, chunk = self.model.config, made.done.result()
        frames = config.frames_per_chunk
        begin = 0 if made.index == 0 else config.time_stride * (made.index * frames - 1) + 1
        pixels = (begin, begin + config.pixel_frames(made.index))
        shown = chunk.outputs.get("frames")
        return WorldChunk(
            made.index,
            chunk.outputs["x"],
            None if shown is None else shown[: pixels[1] - pixels[0]],
            (made.index * frames, (made.index + 1) * frames),
            pixels,
            made.spans,
            made.events,
            made.prompt_version,
            chunk,
        )

    def _end(self, error: StrettoError) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._admitted.clear()
        self._stream.close()
        self._deliver()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise StreamClosedError(f"the session has ended: {self._ended}")

    def _check_event(self, event: int) -> None:
        if type(event) is not int or event <= self._event:
            raise ObservationError("event", got=event, expected=f"a whole number above {self._event}, the last one")
