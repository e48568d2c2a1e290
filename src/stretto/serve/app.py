"""One port for robots, probes and scrapers, as an ASGI app around a policy service.

`/healthz` says that the process lives, `/readyz` and `/health` that a request sent now would be answered. Every
WebSocket path that nothing else claims speaks openpi. The model never runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from stretto.serve.metadata import build_metadata
from stretto.serve.metrics import CONTENT_TYPE, ServerMetrics
from stretto.serve.options import ServerOptions
from stretto.serve.request import Offer
from stretto.serve.service import PolicyService
from stretto.serve.session import PolicySession
from stretto.serve.trace import Served, open_traces
from stretto_client.codec import pack

WATCH_S = 0.2
LEAVE_S = 1.0  # what clients that do not read are waited for at the end
log = logging.getLogger(__name__)


class Guest(Protocol):
    """One WebSocket connection that a server hosts, whatever it speaks."""

    @property
    def stalled(self) -> bool:
        """Whether a frame waits for the client to read."""
        ...

    async def run(self) -> None:
        """Serve it until either side closes it."""

    async def leave(self) -> None:
        """Close when the work in flight is done."""

    async def die(self, reason: str) -> None:
        """Close now, because the engine is gone."""


class PolicyServer:
    """What all connections of one server share."""

    def __init__(self, service: PolicyService, options: ServerOptions) -> None:
        self.service = service
        self.options = options
        self.metrics = ServerMetrics(service)
        metadata = build_metadata(
            service.metadata, max_message_bytes=options.max_message_bytes, ping_interval_s=options.ping_interval_s
        )
        self.metadata_frame = pack(metadata)
        described = metadata["stretto"]
        modes = tuple(metadata["rt"].get("rtc_modes", ()))
        self.offer = Offer(described["action_horizon"], described["action_dim"], modes)
        self.max_message_bytes: int = described["max_message_bytes"]
        rate = metadata["rt"].get("control_hz")
        self.traces = open_traces(
            options.traces, int(options.trace_max_mb * 2**20), control_hz=rate, horizon=self.offer.horizon
        )
        self.decoders = ThreadPoolExecutor(2, thread_name_prefix="stretto-decode")
        self.warmed = asyncio.Event()
        self.warm_error: BaseException | None = None
        self.on_warm: Callable[[float], None] | None = None
        """Called on the event loop with the seconds that warming took."""
        self._guests: set[Guest] = set()
        self._draining = False

    @property
    def state(self) -> str:
        """`ready`, or what is in the way."""
        if self.warm_error is not None:
            return "the engine failed to start; the server's log has the details"
        if self.service.dead is not None:
            return f"the engine is dead: {self.service.dead}"
        if self._draining:
            return "shutting down"
        if not self.warmed.is_set() or not self.service.ready:
            return "warming up"
        return "ready"

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Warm the service beside the open port, and watch over it."""
        self._warm_in_background()
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            await self.drain(0.0)
            await asyncio.to_thread(self.service.close)
            for trace in self.traces:
                trace.close()
            self.decoders.shutdown(wait=False, cancel_futures=True)

    def _warm_in_background(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = time.monotonic()

        def done(error: BaseException | None) -> None:
            self.warm_error = error
            self.warmed.set()
            if error is None and self.on_warm is not None:
                self.on_warm(time.monotonic() - started_s)

        def warm() -> None:
            error: BaseException | None = None
            try:
                self.service.warm()
            except Exception as e:  # the edge of the process: reported by `run_server` and told to clients
                log.exception("warming failed")
                error = e
            if not loop.is_closed():
                loop.call_soon_threadsafe(done, error)

        # A daemon: interrupting a server that still warms must not wait for the warming to end.
        threading.Thread(target=warm, name="stretto-warm", daemon=True).start()

    async def _watch(self) -> None:
        """End all sessions when the engine dies, also those that wait for no reply."""
        while self.service.dead is None:
            await asyncio.sleep(WATCH_S)
        reason = self.state
        log.error("%s; %d sessions end", reason, len(self._guests))
        await asyncio.gather(*(guest.die(reason) for guest in list(self._guests)))

    async def talk(self, socket: WebSocket) -> None:
        """Serve one openpi connection."""
        await self.host(socket, lambda: PolicySession(socket, self, secrets.token_hex(4)))

    async def host(self, socket: WebSocket, make: Callable[[], Guest]) -> None:
        """Run a guest on a connection that has not been accepted yet, or refuse it with an HTTP status.

        For routes of other protocols on the same port: they get the same key, limits, shutdown and metrics.
        """
        refusal = self._refusal(socket)
        if refusal is not None:
            status, text = refusal
            self.metrics.error(f"http_{status}")
            peer = f"{socket.client.host}:{socket.client.port}" if socket.client else "a client"
            log.warning("%s was refused: %s", peer, text)
            await socket.send_denial_response(PlainTextResponse(text + "\n", status))
            return
        guest = make()
        self._guests.add(guest)
        self.metrics.sessions.inc()
        try:
            await guest.run()
        finally:
            self.metrics.sessions.dec()
            self._guests.discard(guest)

    def _refusal(self, socket: WebSocket) -> tuple[int, str] | None:
        origin, key = socket.headers.get("origin"), self.options.api_key
        if origin is not None and origin not in self.options.allowed_origins:
            return 403, f"origin: got {origin}, expected no web page or one of {list(self.options.allowed_origins)}"
        if key is not None:
            given = socket.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Api-Key {key}".encode()):
                got = "another value" if given else "nothing"
                return 401, f"authorization: got {got}, expected 'Api-Key <key>' with this server's key"
        if self._draining:
            return 503, self.state
        if len(self._guests) >= self.options.max_sessions:
            return 503, f"sessions: got one more, expected at most {self.options.max_sessions}"
        return None

    def ended(self, served: Served) -> None:
        """Write down a request that was answered or refused."""
        for trace in self.traces:
            trace.add(served)

    async def drain(self, timeout_s: float, abandon: Callable[[], bool] = lambda: False) -> None:
        """Take no new sessions, let requests in flight end for up to `timeout_s` or until `abandon`; close all sessions."""
        self._draining = True
        begun_s = time.monotonic()
        leaving = [asyncio.create_task(guest.leave()) for guest in list(self._guests)]
        if leaving:
            await asyncio.wait(leaving, timeout=LEAVE_S)
        while self._guests and time.monotonic() < begun_s + timeout_s and not abandon():
            if time.monotonic() > begun_s + LEAVE_S and all(guest.stalled for guest in self._guests):
                break
            await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        for fault in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(fault, Exception):
                log.error("a session could not be asked to leave", exc_info=fault)


def build_app(service: PolicyService, options: ServerOptions, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the ASGI app; the `PolicyServer` behind it is `app.state.server`.

    `routes` are asked first, so they may claim paths of their own. Under a server other than `run_server`, turn off
    message compression and the pong timeout there.

    Raises:
        ConfigError: if the service describes itself incompletely.
    """
    server = PolicyServer(service, options)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("OK\n")

    async def readyz(request: Request) -> Response:
        state = server.state
        return PlainTextResponse(state + "\n", 200 if state == "ready" else 503)

    def metrics(request: Request) -> Response:  # not async, so that it runs in a thread
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)

    own = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/health", readyz),
        Route("/metrics", metrics),
        WebSocketRoute("/{path:path}", server.talk),
    ]
    app = Starlette(routes=[*routes, *own], lifespan=server.lifespan)
    app.state.server = server
    return app
