"""A policy behind a WebSocket: openpi's protocol, with time limits, request ids and checked handshakes.

One request is in flight at a time. When an answer is late, the connection is dropped and the next call opens a new one,
so an old answer can never be paired with a newer request.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from stretto_client import codec
from stretto_client.errors import ClientError, ConnectionLostError, FieldError, PolicyTimeoutError, ReplyError, ServerError
from stretto_client.options import RT, Handshake, Options, check_int, check_positive

RETRY_S = 0.2


class PolicyClient:
    """Calls a policy server, stock openpi or Stretto, through openpi's `infer` and `reset`.

    Safe to use from several threads; calls take turns. After a lost connection the next call reconnects by itself, with
    the same session id. A request is sent a second time only if it certainly never left.

    Raises:
        FieldError: if an argument, or a number in the server's handshake, cannot be used.
        ConnectionLostError: if no server answers within `wait_s`.
        PolicyTimeoutError: if the server accepts but is not ready in time.
    """

    accepts_options = True

    def __init__(
        self,
        host: str = "localhost",
        port: int | None = 8000,
        *,
        api_key: str | None = None,
        session_id: str | None = None,
        connect_timeout_s: float = 10.0,
        ready_timeout_s: float = 600.0,
        reply_timeout_s: float = 30.0,
        wait_s: float = 0.0,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._uri = host if host.startswith(("ws://", "wss://")) else f"ws://{host}"
        if port is not None:
            self._uri += f":{check_int('port', port, 1, 65535)}"
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._connect_timeout_s = check_positive("connect_timeout_s", connect_timeout_s)
        self._ready_timeout_s = check_positive("ready_timeout_s", ready_timeout_s)
        self._reply_timeout_s = check_positive("reply_timeout_s", reply_timeout_s)
        self._max_message_bytes = check_int("max_message_bytes", max_message_bytes, 1024, 2**40)
        self.session_id = session_id or uuid.uuid4().hex
        self._turn = threading.Lock()
        self._request_id = 0
        self._resets = self._resets_told = 0
        self._closed = False
        self._exit = contextlib.ExitStack()
        self._socket: ClientConnection | None = None
        self.handshake: Handshake | None = None
        self._open(0.0 if wait_s == 0 else check_positive("wait_s", wait_s))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The map that the server sent first."""
        assert self.handshake is not None
        return self.handshake.metadata

    def get_server_metadata(self) -> Mapping[str, Any]:
        """Same as `metadata`, under the name that openpi's client uses."""
        return self.metadata

    def infer(self, obs: Mapping[str, Any], options: Options | None = None) -> dict[str, Any]:
        """Send one observation and wait for its action chunk.

        Raises:
            FieldError: if an option is one this server does not offer or that does not fit its chunk.
            CodecError: if the observation holds something that has no place on the wire, or the reply is damaged.
            ServerError: if the server answered with an error text.
            PolicyTimeoutError: if no answer came in `reply_timeout_s`.
            ConnectionLostError: if the connection ended first.
            ReplyError: if the answer is no map, or answers another request.
        """
        with self._turn:
            if self._closed:
                raise ConnectionLostError("this client was closed")
            connection = self._socket or self._open(0.0)
            resets = self._resets
            frame = self._frame(obs, options, resets)
            self._send(connection, frame)
            reply = self._receive(self._reply_timeout_s)
            answer = codec.unpack(reply)
            self._check(answer)
            self._resets_told = resets
            return dict(answer)

    def reset(self) -> None:
        """Begin a new episode; the server is told with the next request."""
        self._resets += 1

    def close(self) -> None:
        """Close the connection. A call that waits for its answer ends with ConnectionLostError."""
        self._closed = True
        self._exit.close()

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, wait_s: float) -> ClientConnection:
        give_up_at = time.monotonic() + wait_s
        while True:
            try:
                self._socket = self._connect()
                break
            except InvalidURI as e:
                raise FieldError("host", got=repr(self._uri), expected="a host name or a ws:// or wss:// address") from e
            except (OSError, InvalidHandshake) as e:
                if isinstance(e, TimeoutError):
                    raise PolicyTimeoutError(f"{self._uri} did not answer within {self._connect_timeout_s} s") from e
                if isinstance(e, InvalidHandshake) or time.monotonic() >= give_up_at:
                    raise ConnectionLostError(f"cannot connect to {self._uri}: {e}") from e
                time.sleep(RETRY_S)
        try:
            self._greet(codec.unpack(self._receive(self._ready_timeout_s)))
        except (ClientError, codec.CodecError):
            self._drop()
            raise
        return self._socket

    def _connect(self) -> ClientConnection:
        # No answer to a ping is no reason to leave: a busy server is judged by the reply's own time limit.
        connection = self._exit.enter_context(
            connect(
                self._uri,
                additional_headers=self._headers,
                compression=None,
                proxy=None,
                open_timeout=self._connect_timeout_s,
                ping_interval=20,
                ping_timeout=None,
                close_timeout=0.2,
                max_size=self._max_message_bytes,
            )
        )
        _limit_send(connection.socket, self._reply_timeout_s)
        return connection

    def _greet(self, metadata: Any) -> None:
        new, old = Handshake.read(metadata), self.handshake
        if old is not None and (new.horizon, new.action_dim) != (old.horizon, old.action_dim):
            was, now = f"{old.horizon} x {old.action_dim}", f"{new.horizon} x {new.action_dim}"
            raise ReplyError(f"the server changed: chunks were {was}, now {now}; make a new client")
        self.handshake = new

    def _frame(self, obs: Mapping[str, Any], options: Options | None, resets: int) -> bytes:
        handshake = self.handshake
        assert handshake is not None
        if RT in obs:
            raise FieldError("obs.rt", got="a key of the observation", expected="extensions given as `options`")
        message = dict(obs)
        wanted = options.to_wire() if options else {}
        if wanted and not handshake.extended:
            raise FieldError("options", got=sorted(wanted), expected="none: this server does not advertise `rt`")
        if options is not None and options.mode not in (None, "none", *handshake.modes):
            raise FieldError("mode", got=repr(options.mode), expected=f"one this server offers: {('none', *handshake.modes)}")
        if options is not None and handshake.horizon is not None:
            options.check_horizon(handshake.horizon)
        if handshake.extended:
            self._request_id += 1
            message[RT] = {"request_id": str(self._request_id), "session_id": self.session_id, **wanted}
            if resets != self._resets_told:
                message[RT]["reset"] = True
        frame = codec.pack(message)
        limit = handshake.max_message_bytes or self._max_message_bytes
        if len(frame) > limit:
            raise FieldError("obs", got=f"{len(frame)} bytes", expected=f"at most {limit}, the limit for one message")
        return frame

    def _send(self, connection: ClientConnection, frame: bytes) -> None:
        sent_at = time.monotonic()
        try:
            connection.send(frame)
            return
        except ConnectionClosed as e:
            self._drop()
            if time.monotonic() - sent_at >= self._reply_timeout_s:
                raise PolicyTimeoutError(f"{self._uri} did not read the request within {self._reply_timeout_s} s") from e
        # The server closed while the robot was idle: no whole request has left, so it can be sent again.
        connection = self._open(0.0)
        try:
            connection.send(frame)
        except ConnectionClosed as e:
            self._drop()
            raise ConnectionLostError(f"{self._uri} closed the connection again: {e}") from e

    def _receive(self, timeout_s: float) -> bytes:
        connection = self._socket
        assert connection is not None
        try:
            frame = connection.recv(timeout=timeout_s)
        except TimeoutError as e:
            self._drop()
            raise PolicyTimeoutError(f"no answer from {self._uri} within {timeout_s} s; the connection was dropped") from e
        except ConnectionClosed as e:
            self._drop()
            raise ConnectionLostError(f"{self._uri} closed the connection before it answered: {e}") from e
        if isinstance(frame, str):
            raise ServerError(frame)
        return frame

    def _check(self, answer: Any) -> None:
        if not isinstance(answer, dict):
            self._drop()
            raise ReplyError(f"the answer is a {type(answer).__name__}, expected a map with `actions`")
        rt = answer.get(RT)
        echoed = rt.get("request_id") if isinstance(rt, dict) else None
        if echoed is not None and echoed != str(self._request_id):
            self._drop()
            raise ReplyError(
                f"the answer is for request {echoed}, but request {self._request_id} was asked; connection dropped"
            )

    def _drop(self) -> None:
        self._socket = None
        self._exit.close()


def _limit_send(sock: socket.socket, limit_s: float) -> None:
    """Bound how long a send may block on a server that never reads."""
    if os.name == "posix":
        whole = int(limit_s)
        value: bytes | int = struct.pack("ll", whole, int((limit_s - whole) * 1e6))
    else:
        value = int(limit_s * 1000)
    # A server that greets and leaves at once may have closed it by now; reading then tells what it said.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
