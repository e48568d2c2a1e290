"""One client's connection: it owns everything that runs for that client and ends it on every way out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from stretto.core.errors import FieldError, RefusedError, StreamClosedError, WorkerDiedError
from stretto.core.policy import PolicyReply, Session
from stretto.serve.protocol import ENGINE_DEAD, RESTARTING, TOO_BIG, TRY_LATER, Conversation, Phase, error_code, error_text
from stretto.serve.request import Exchange, read_request
from stretto.serve.trace import Served

if TYPE_CHECKING:
    from starlette.types import Message

    from stretto.serve.app import PolicyServer

MAX_REASON_BYTES = 123  # what a close frame can carry
log = logging.getLogger(__name__)


class PolicySession:
    """Reads while work runs beside it, so that a client's pings are answered and its leaving is seen.

    It does not read while a frame waits for the client to read: all that came would only be answered behind it.
    """

    def __init__(self, socket: WebSocket, server: PolicyServer, session_id: str) -> None:
        self._socket = socket
        self._server = server
        self._talk = Conversation(session_id, server.offer, server.max_message_bytes)
        self._handle: Session | None = None
        self._work: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._leaving = False
        self._given_s: float | None = None
        self.peer = f"{socket.client.host}:{socket.client.port}" if socket.client else "unknown"

    @property
    def stalled(self) -> bool:
        """Whether a frame waits for the client to read."""
        return self._sending.locked()

    async def run(self) -> None:
        """Serve the connection until either side closes it."""
        await self._socket.accept()
        self._start(self._greet())
        try:
            while (message := await self._next())["type"] == "websocket.receive":
                await self._hear(message)
            if message.get("code") == TOO_BIG:
                self._server.metrics.error("message_too_big")
        except WebSocketDisconnect:
            log.debug("session %s: %s left while it was told something", self._talk.session_id, self.peer)
        finally:
            await self._end()

    async def leave(self) -> None:
        """Close as soon as the request in flight, if any, is answered."""
        self._leaving = True
        if self._talk.phase is not Phase.BUSY:
            await self._close(RESTARTING, "the server is shutting down")

    async def die(self, reason: str) -> None:
        """Close now, because the engine is gone."""
        exchange = self._talk.current
        for task in self._work:
            task.cancel()
        if exchange is not None:
            error = WorkerDiedError(reason)
            self._server.metrics.failed(error.code, time.perf_counter() - exchange.began_s)
            await self._send(self._talk.failed(exchange, error))
        await self._close(ENGINE_DEAD, reason)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """The edge of the process: a fault nobody foresaw ends this session and no other."""
        try:
            await work
        except WebSocketDisconnect:
            self._talk.close()
        except Exception:
            log.exception("session %s (%s) ended by a fault", self._talk.session_id, self.peer)
            await self._close(ENGINE_DEAD, "the session failed inside the server")

    async def _greet(self) -> None:
        await self._server.warmed.wait()
        if self._talk.phase is Phase.CLOSED:
            return
        if self._server.service.dead is not None or self._server.warm_error is not None:
            await self._close(ENGINE_DEAD, self._server.state)
            return
        try:
            self._handle = self._server.service.open_session(self._talk.session_id, self.peer)
        except RefusedError as e:
            self._server.metrics.error(e.code)
            self._server.metrics.refused(e.reason)
            await self._close(TRY_LATER, str(e))
            return
        self._talk.greeted(time.perf_counter())
        await self._send(self._server.metadata_frame)

    async def _next(self) -> Message:
        async with self._sending:
            pass
        return await self._socket.receive()

    async def _hear(self, message: Message) -> None:
        name, now_s = self._talk.next_id(), time.perf_counter()
        binary: bytes | None = message.get("bytes")
        payload: bytes | str = message["text"] if binary is None else binary
        try:
            exchange = self._talk.request(payload, name, now_s)
        except FieldError as e:
            self._server.metrics.error(e.code)
            await self._send(error_text(e, name))
        else:
            self._start(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        metrics = self._server.metrics
        with metrics.in_flight.track_inprogress():
            try:
                await self._reply(exchange)
            except asyncio.CancelledError:
                metrics.dropped()
                raise
            except WebSocketDisconnect:
                metrics.dropped()
                raise
            except Exception as e:  # the edge again: this request fails, the session goes on
                await self._fail(exchange, e)
        if self._leaving:
            await self._close(RESTARTING, "the server is shutting down")

    async def _reply(self, exchange: Exchange) -> None:
        reply = await self._infer(exchange)
        encoding_s = time.perf_counter()
        frame = self._talk.reply(exchange, reply, encoding_s)
        sending_s = time.perf_counter()
        await self._send(frame)
        now_s = time.perf_counter()
        self._talk.replied(now_s)
        if self._given_s is not None:
            self._server.metrics.replaced(now_s - self._given_s)
        self._given_s = now_s
        own_ms = {"decode": exchange.decode_ms, "encode": (sending_s - encoding_s) * 1e3}
        self._server.metrics.answered(reply, now_s - exchange.began_s, own_ms)
        self._trace(exchange, now_s, own_ms=own_ms, reply=reply)

    async def _infer(self, exchange: Exchange) -> PolicyReply:
        """Decode, submit and wait. Decoding has its own threads: a hostile message may take long to read."""
        loop = asyncio.get_running_loop()
        started_s = time.perf_counter()
        read = loop.run_in_executor(self._server.decoders, read_request, exchange, self._talk.offer)
        observation, options = await read
        exchange.decode_ms = (time.perf_counter() - started_s) * 1e3
        exchange.options = options
        self._server.metrics.asked(options)
        if options.reset:
            self._given_s = None
        if self._handle is None:
            raise StreamClosedError("the session has no place in the policy")
        future = self._server.service.submit(observation, options, self._handle)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise StreamClosedError("the policy dropped the request") from None

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        code = error_code(error)
        if code == "internal":
            log.error("request %s of %s failed", exchange.request_id, self.peer, exc_info=error)
        else:
            log.info("request %s of %s: %s", exchange.request_id, self.peer, error)
        reason = error.reason if isinstance(error, RefusedError) else ""
        now_s = time.perf_counter()
        self._server.metrics.failed(code, now_s - exchange.began_s, reason)
        self._trace(exchange, now_s, reason=reason or code, refused=bool(reason))
        await self._send(self._talk.failed(exchange, error))
        if self._server.service.dead is not None:
            await self._close(ENGINE_DEAD, self._server.state)

    def _trace(self, exchange: Exchange, now_s: float, **found: Any) -> None:
        seconds = now_s - exchange.began_s
        who = exchange.session_id, exchange.request_id
        self._server.ended(Served(*who, exchange.began_s, seconds, exchange.options, **found))

    async def _send(self, frame: bytes | str) -> None:
        async with self._sending:
            if self._talk.phase is Phase.CLOSED:
                return
            if isinstance(frame, str):
                await self._socket.send_text(frame)
            else:
                await self._socket.send_bytes(frame)

    async def _close(self, code: int, reason: str) -> None:
        if self._talk.phase is Phase.CLOSED:
            return
        self._talk.close()
        cut = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        try:
            await self._socket.close(code, cut)
        except WebSocketDisconnect:
            log.debug("session %s: %s left before the close frame", self._talk.session_id, self.peer)

    async def _end(self) -> None:
        self._talk.close()
        work = list(self._work)
        for task in work:
            task.cancel()
        if self._handle is not None:
            self._server.service.close_session(self._handle)
        await asyncio.gather(*work, return_exceptions=True)
