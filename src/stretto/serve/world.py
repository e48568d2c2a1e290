"""Worlds over a WebSocket at `/world`: open, steer, read chunk by chunk, close. One connection may hold several sessions.

Every message is one msgpack map in a binary frame, with a `type` and, from the client, a `request` of its choice that
comes back with the answer. A `read` is answered when its chunk is there; everything else at once, in order.

    open    prompt (text or [tokens, width]), seed, size, first_frame, history, seeding   -> opened: session, world
    act     session, track, values, event, pulse                                          -> done: event
    prompt  session, prompt, event, renew                                                 -> done: event
    read    session                                                                       -> chunk: header, frames or latents
    cancel  session (`close` is the same)                                                 -> done

An error is a map too: `{type: error, code, status, message, request, session}`; 503 says that there is no room, and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from stretto.core.errors import FieldError, RefusedError, StreamClosedError, StrettoError, WorkerDiedError
from stretto.deploy.world import World
from stretto.deploy.world_session import WorldChunk, WorldSession
from stretto.serve.app import PolicyServer
from stretto.serve.protocol import ENGINE_DEAD, RESTARTING, error_code
from stretto.serve.session import MAX_REASON_BYTES
from stretto_client.codec import CodecError, pack, unpack

PATH = "/world"
FIELDS: Mapping[str, frozenset[str]] = {
    "open": frozenset({"prompt", "seed", "size", "first_frame", "history", "seeding"}),
    "act": frozenset({"session", "track", "values", "event", "pulse"}),
    "prompt": frozenset({"session", "prompt", "event", "renew"}),
    "read": frozenset({"session"}),
    "cancel": frozenset({"session"}),
    "close": frozenset({"session"}),
}
log = logging.getLogger(__name__)


class WorldMessageError(FieldError):
    """A message is not one that this path understands."""

    code = "bad_message"


def status_of(error: Exception) -> int:
    """Return the HTTP status that says the same."""
    if isinstance(error, RefusedError):
        return 503
    if isinstance(error, StreamClosedError):
        return 410
    return 400 if isinstance(error, FieldError) else 500


def header_of(chunk: WorldChunk) -> dict[str, Any]:
    """Return what a client is told of a chunk beside its pixels."""
    return {
        "index": chunk.index,
        "latent_frames": list(chunk.latent_frames),
        "pixel_frames": list(chunk.pixel_frames),
        "actions": {name: list(span) for name, span in chunk.actions.items()},
        "events": list(chunk.events),
        "prompt_version": chunk.prompt_version,
        "mode": chunk.chunk.mode,
        "queue_ms": chunk.chunk.queue_ms,
        "run_ms": chunk.chunk.run_ms,
        "stage_ms": dict(chunk.chunk.stage_ms),
    }


class WorldGuest:
    """One connection with the sessions that it opened; they end with it."""

    def __init__(self, socket: WebSocket, server: PolicyServer, world: World) -> None:
        self._socket, self._server, self._world = socket, server, world
        self._sessions: dict[int, WorldSession] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._closed = False

    @property
    def stalled(self) -> bool:
        """Whether a frame waits for the client to read."""
        return self._sending.locked()

    async def run(self) -> None:
        """Serve the connection until either side closes it."""
        await self._socket.accept()
        await self._server.warmed.wait()
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                await self._hear(message.get("bytes"))
        finally:
            self._closed = True
            await self._end()

    async def leave(self) -> None:
        """Close: a world has no end to wait for."""
        await self._close(RESTARTING, "the server is shutting down")

    async def die(self, reason: str) -> None:
        """Tell every session why, and close."""
        for name in list(self._sessions):
            await self._send_error(WorkerDiedError(reason), None, name)
        await self._close(ENGINE_DEAD, reason)

    async def _hear(self, frame: bytes | None) -> None:
        request: object = None
        session: object = None
        try:
            message = _decoded(frame)
            request, session = message.pop("request", None), message.get("session")
            _check(message)
            verb = message.pop("type")
            if verb == "read":
                self._start(self._read(self._session(session), request))
                return
            await self._send(await self._do(verb, message), request)
        except WebSocketDisconnect:
            raise
        except Exception as e:  # the edge: a message fails, its session and the others go on
            await self._send_error(e, request, session)

    async def _do(self, verb: str, given: dict[str, Any]) -> dict[str, Any]:
        if verb == "open":
            return await self._open(given)
        session = self._session(given.pop("session", None))
        if verb == "act":
            _need(given, "track", "values", "event")
            session.act(given["track"], given["values"], given["event"], pulse=bool(given.get("pulse", False)))
        elif verb == "prompt":
            _need(given, "prompt")
            embedded = await asyncio.to_thread(self._world.embed, given["prompt"])
            session.switch_prompt(embedded, given.get("event"), renew=bool(given.get("renew", False)))
        else:
            self._sessions.pop(session.id)
            await asyncio.to_thread(session.cancel)
        return {"type": "done", "session": session.id, "event": given.get("event")}

    async def _open(self, given: dict[str, Any]) -> dict[str, Any]:
        _need(given, "prompt")
        size = given.pop("size", None)
        if size is not None and (not isinstance(size, list) or [type(n) for n in size] != [int, int]):
            raise WorldMessageError("size", got=repr(size), expected="[height, width]")
        if type(given.get("seed", 0)) is not int:
            raise WorldMessageError("seed", got=repr(given["seed"]), expected="a whole number")
        opened = await asyncio.to_thread(self._world.open, size=None if size is None else (size[0], size[1]), **given)
        if self._closed:
            opened.cancel()
        self._sessions[opened.id] = opened
        return {"type": "opened", "session": opened.id, "world": self._world.describe()}

    async def _read(self, session: WorldSession, request: object) -> None:
        try:
            chunk = await asyncio.wrap_future(session.read_soon())
            pixels = {"latents": chunk.latents} if chunk.frames is None else {"frames": np.ascontiguousarray(chunk.frames)}
            self._server.metrics.showed(chunk.pixel_frames[1] - chunk.pixel_frames[0])
            await self._send({"type": "chunk", "session": session.id, "header": header_of(chunk), **pixels}, request)
        except WebSocketDisconnect:
            return
        except Exception as e:  # the edge, as in `_hear`
            await self._send_error(e, request, session.id)

    def _session(self, name: object) -> WorldSession:
        session = self._sessions.get(name) if type(name) is int else None
        if session is None:
            raise WorldMessageError("session", got=repr(name), expected=f"one that is open here: {sorted(self._sessions)}")
        return session

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _send(self, message: Mapping[str, Any], request: object) -> None:
        frame = await asyncio.to_thread(pack, {**message, "request": request})
        async with self._sending:
            if not self._closed:
                await self._socket.send_bytes(frame)

    async def _send_error(self, error: Exception, request: object, session: object) -> None:
        code = error_code(error)
        if code == "internal":
            log.error("a message on %s failed", PATH, exc_info=error)
        self._server.metrics.error(code)
        text = (
            str(error) if isinstance(error, StrettoError) else "the request failed inside the server; its log has the details"
        )
        told = {"type": "error", "code": code, "status": status_of(error), "message": text, "session": session}
        await self._send(told, request if isinstance(request, (int, str)) else None)

    async def _close(self, code: int, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._socket.close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
        except WebSocketDisconnect:
            log.debug("the client left before the close frame")

    async def _end(self) -> None:
        for session in self._sessions.values():
            await asyncio.to_thread(session.cancel)
        self._sessions.clear()
        for task in list(self._reads):
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)


def _decoded(frame: bytes | None) -> dict[str, Any]:
    if frame is None:
        raise WorldMessageError("message", got="a text frame", expected="a binary frame of msgpack")
    try:
        message = unpack(frame)
    except CodecError as e:
        raise WorldMessageError(e.path, got=e.got, expected=e.expected) from e
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise WorldMessageError("message", got=type(message).__name__, expected="a map with text keys")
    return dict(message)


def _check(message: Mapping[str, Any]) -> None:
    """Refuse a message that is not one of the protocol, naming the field."""
    verb = message.get("type")
    if not isinstance(verb, str) or verb not in FIELDS:
        raise WorldMessageError("type", got=repr(verb), expected=f"one of {sorted(FIELDS)}")
    unknown = sorted(set(message) - FIELDS[verb] - {"type"})
    if unknown:
        raise WorldMessageError(unknown[0], got="an unknown field", expected=f"{sorted(FIELDS[verb])}")


def _need(given: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in given:
            raise WorldMessageError(name, got="nothing", expected="a value")


def world_route(world: World) -> WebSocketRoute:
    """Return the route for `build_app`, where `world` is also the service."""

    async def talk(socket: WebSocket) -> None:
        server: PolicyServer = socket.app.state.server
        await server.host(socket, lambda: WorldGuest(socket, server, world))

    return WebSocketRoute(PATH, talk)
