"""Running the app: the port, the signals, and a server in a thread for tests and tools."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from starlette.routing import BaseRoute
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode

from stretto.core.errors import ConfigError
from stretto.serve.app import PolicyServer, build_app
from stretto.serve.options import ServerOptions
from stretto.serve.protocol import MessageTooBigError, error_text
from stretto.serve.service import PolicyService

DISCARD_S = 10.0
ROOM = 4
"""A message of up to this many times the published limit is read whole and refused on an open socket; a larger one ends
the connection by its header alone, which bounds what a client can make the server hold."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
log = logging.getLogger(__name__)


class PoliteSocket(WebSocketsSansIOProtocol):
    """Tells the sender of a hopelessly oversized message why, and waits for a slow reader, but not for ever.

    The size is refused by the frame's header, and the connection then closes with 1009. What the peer has still to send is
    read and thrown away: closing at once would reset the connection under it, and the reason would be lost.

    A peer that takes nothing of what waits for it for `stalled_s` is cut off, and `on_stalled` called. There is no way to tell
    it why: the reason would wait behind all that it does not read.
    """

    _refused = False

    def __init__(self, *args: Any, stalled_s: float, on_stalled: Callable[[], None], **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._stalled_s, self._on_stalled = stalled_s, on_stalled
        self._patience: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if not self.writable.is_set():
            self.transport.abort()

    def _wait_for_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._patience = self.loop.call_later(self._stalled_s, self._look_again, waiting)

    def _look_again(self, waiting_before: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < waiting_before:
            self._wait_for_reader()
            return
        peer = f"{self.client[0]}:{self.client[1]}" if self.client else "a client"
        log.warning("%s read nothing for %g s, with %d bytes waiting for it: cut off", peer, self._stalled_s, waiting)
        self._on_stalled()
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        error, closing = self.conn.parser_exc, self.conn.close_sent
        if not isinstance(error, PayloadTooBig) or closing is None:
            super().handle_parser_exception()
            return
        self._refused = True
        told = error_text(MessageTooBigError((error.size or 0) + (error.current_size or 0), (error.max_size or 0) // ROOM), "-")
        frame = Frame(Opcode.TEXT, told.encode()).serialize(mask=False)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": closing.code, "reason": closing.reason})
        self.stop_keepalive()
        self.transport.write(frame + b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(DISCARD_S, self.transport.close)

    async def send(self, message: Any) -> None:
        if self._refused:
            raise ClientDisconnected()
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # refused, which is an answer too; uvicorn would log a fault of the app


class _Uvicorn(uvicorn.Server):
    """Uvicorn that drains sessions before it closes them, and stops when warming fails."""

    def __init__(self, config: uvicorn.Config, policy: PolicyServer) -> None:
        super().__init__(config)
        self._policy = policy

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # `run_server` handles them, so that it can return instead of dying by the signal

    async def on_tick(self, counter: int) -> bool:
        return self._policy.warm_error is not None or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._policy.drain(self._policy.options.drain_s, abandon=lambda: self.force_exit)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then leaves the app to be cancelled, which it would report as a failure
            await self.lifespan.shutdown()

    def stop(self) -> None:
        """Stop after a drain; asked a second time, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(options: ServerOptions) -> socket.socket:
    """Take the port. Called before a checkpoint is loaded, it makes a taken port an error at once.

    Accepted connections inherit the socket's options: a host that vanished is noticed by its network stack's silence,
    while one that is only busy (a simulator holding its interpreter) is never closed for a late pong.

    Raises:
        ConfigError: if the address is taken, or not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.dead_host_s * 1e3))
        listener.bind((options.host, options.port))
    except OSError as e:
        listener.close()
        expected = "a free port on an address of this machine"
        raise ConfigError("host, port", got=f"{options.host}:{options.port} ({e.strerror})", expected=expected) from e
    return listener


def _prepare(service: PolicyService, options: ServerOptions, routes: Sequence[BaseRoute]) -> tuple[_Uvicorn, PolicyServer]:
    app = build_app(service, options, routes)
    policy: PolicyServer = app.state.server
    socket_class = partial(PoliteSocket, stalled_s=options.stalled_s, on_stalled=lambda: policy.metrics.error("stalled"))
    config = uvicorn.Config(
        app,
        http="httptools",
        ws=cast("type[asyncio.Protocol]", socket_class),
        loop="asyncio",
        lifespan="on",
        ws_max_size=policy.max_message_bytes * ROOM,
        ws_ping_interval=options.ping_interval_s,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return _Uvicorn(config, policy), policy


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_server(
    service: PolicyService,
    options: ServerOptions,
    routes: Sequence[BaseRoute] = (),
    *,
    listener: socket.socket | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return. Prints one line when requests can be answered.

    `listener` is what `bind` returned earlier, if it was called.

    Raises:
        ConfigError: if the address cannot be bound, or the service describes itself incompletely.
        Exception: whatever `service.warm` raised, after clients were told.
    """
    server, policy = _prepare(service, options, routes)
    listener = bind(options) if listener is None else listener
    address, model = _address(listener), service.metadata["model"]
    if options.host not in _LOOPBACK and options.api_key is None:
        log.warning("listening on %s without an API key: whoever reaches this port can drive the policy", address)

    def ready(seconds: float) -> None:
        # What is alive now lives as long as the server; walking it stops the thread that launches for milliseconds.
        gc.collect()
        gc.freeze()
        print(f"stretto: {model} ready on ws://{address} after {seconds:.1f} s", flush=True)

    policy.on_warm = ready

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        await server.serve(sockets=[listener])

    try:
        asyncio.run(serve())
    finally:
        gc.unfreeze()
    if policy.warm_error is not None:
        raise policy.warm_error


class ServerThread:
    """A server in a thread of this process: `with ServerThread(service) as server: connect(server.port)`.

    By default on a free loopback port, and entered when requests can be answered.

    Raises:
        TimeoutError: on entry, if the service is not warm after `warm_timeout_s`.
        Exception: on entry, whatever `service.warm` raised.
    """

    def __init__(
        self,
        service: PolicyService,
        options: ServerOptions | None = None,
        *,
        routes: Sequence[BaseRoute] = (),
        wait_ready: bool = True,
        warm_timeout_s: float = 120.0,
    ) -> None:
        self.options = options or ServerOptions(port=0)
        self._server, self.policy = _prepare(service, self.options, routes)
        self._listener = bind(self.options)
        self.host, self.port = self._listener.getsockname()[:2]
        self.url, self.http_url = f"ws://{_address(self._listener)}", f"http://{_address(self._listener)}"
        self._ready = threading.Event()
        self.policy.on_warm = lambda seconds: self._ready.set()
        self._wait_ready, self._warm_timeout_s = wait_ready, warm_timeout_s
        self._thread = threading.Thread(target=self._run, name="stretto-server", daemon=True)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def wait_ready(self) -> None:
        """Return when the service is warm."""
        waited = 0.0
        while not self._ready.wait(0.05):
            waited += 0.05
            if not self._thread.is_alive():
                raise self.policy.warm_error or RuntimeError("the server thread ended before it was ready")
            if waited > self._warm_timeout_s:
                self.stop()
                raise TimeoutError(f"the service was not warm after {self._warm_timeout_s} s")

    def stop(self) -> None:
        """Drain and stop; returns when the thread has ended."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        # Clients may connect from here on: they wait in the backlog until the loop runs.
        self._listener.listen(2048)
        self._thread.start()
        if self._wait_ready:
            self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
