"""The openpi conversation as a state machine without I/O: whose turn it is, what may be said, and the bytes of it.

    GREETING --metadata--> IDLE --request--> BUSY --reply or error--> IDLE        any state --> CLOSED

The server speaks first: one binary frame of metadata. Then the client sends one binary request at a time and gets one
frame back: binary with `actions`, or text for an error. A text frame never means success, and an error never ends the
conversation. What openpi does not know travels under the one key `rt`, both ways; in replies it holds only scalars,
text, lists and maps, because an openpi client slices every array of a reply by action step.

An error reads `[code] field: got ..., expected ... (request ID)`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from stretto.core.errors import FieldError, NonFiniteActionsError, StrettoError
from stretto.core.policy import PolicyReply
from stretto.serve.request import RT, Exchange, MessageError, Offer
from stretto_client.codec import pack

MAX_ERROR_CHARS = 1000
TOO_BIG, ENGINE_DEAD, RESTARTING, TRY_LATER = 1009, 1011, 1012, 1013


class Phase(Enum):
    GREETING = "greeting"
    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"


class TurnError(FieldError):
    """A message came when it was not the client's turn; it was dropped."""

    code = "protocol"


class MessageTooBigError(FieldError):
    """A message is over the limit that the metadata frame publishes."""

    code = "message_too_big"

    def __init__(self, got_bytes: int, limit_bytes: int) -> None:
        super().__init__("message", got=f"{got_bytes} bytes", expected=f"at most {limit_bytes} bytes")


class Conversation:
    """One connection's place in the protocol. Not thread-safe: one owner calls it."""

    def __init__(self, session_id: str, offer: Offer, max_message_bytes: int) -> None:
        self.session_id = session_id
        self.offer = offer
        self.phase = Phase.GREETING
        self._max_message_bytes = max_message_bytes
        self._heard = 0
        self.current: Exchange | None = None
        """The request in flight, while BUSY."""
        self._waiting_since_s = 0.0
        self._prev_total_ms: float | None = None

    def greeted(self, now_s: float) -> None:
        """Note that the metadata frame goes out now."""
        self._expect(Phase.GREETING, "the metadata frame")
        self.phase = Phase.IDLE
        self._waiting_since_s = now_s

    def next_id(self) -> str:
        """Return the name of the message that has just come, for peers that give none."""
        self._heard += 1
        return f"{self.session_id}-{self._heard}"

    def request(self, message: bytes | str, request_id: str, now_s: float) -> Exchange:
        """Take a message as the next request; its content is not read yet.

        Raises:
            TurnError: if it is not the client's turn.
            MessageError: if it is a text frame.
            MessageTooBigError: if it is over the limit.
        """
        if self.phase is Phase.GREETING:
            raise TurnError("message", got="a request before the metadata frame", expected="to wait for it")
        if self.current is not None:
            busy_with = self.current.request_id
            raise TurnError("message", got="a second request", expected=f"to wait for the reply to request {busy_with}")
        self._expect(Phase.IDLE, "a request")
        if isinstance(message, str):
            raise MessageError("message", got="a text frame", expected="a binary frame of msgpack")
        if len(message) > self._max_message_bytes:
            raise MessageTooBigError(len(message), self._max_message_bytes)
        self.phase = Phase.BUSY
        self.current = Exchange(message, request_id, self.session_id, now_s)
        return self.current

    def reply(self, exchange: Exchange, reply: PolicyReply, now_s: float) -> bytes:
        """Write the answer; the turn passes to the client.

        Raises:
            NonFiniteActionsError: instead of sending NaN or infinity.
            FieldError: if the actions are not [H, D] as published.
        """
        self._expect(Phase.BUSY, "a reply")
        infer_ms = (now_s - exchange.began_s) * 1e3
        frame = pack_reply(reply, exchange, self.offer, infer_ms=infer_ms, prev_total_ms=self._prev_total_ms)
        self.phase, self.current = Phase.IDLE, None
        self.session_id = exchange.session_id
        return frame

    def replied(self, now_s: float) -> None:
        """Note that the reply has been sent, for the timing in the next one."""
        self._prev_total_ms = (now_s - self._waiting_since_s) * 1e3
        self._waiting_since_s = now_s

    def failed(self, exchange: Exchange, error: Exception) -> str:
        """Return the error text for a request; the turn passes to the client."""
        self._expect(Phase.BUSY, "an error")
        self.phase, self.current = Phase.IDLE, None
        return error_text(error, exchange.request_id)

    def close(self) -> None:
        self.phase, self.current = Phase.CLOSED, None

    def _expect(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise TurnError("conversation", got=f"{what} while {self.phase.value}", expected=f"it while {phase.value}")


def pack_reply(reply: PolicyReply, exchange: Exchange, offer: Offer, *, infer_ms: float, prev_total_ms: float | None) -> bytes:
    """Write one reply. `infer_ms` is the whole of the server's work, `reply.infer_ms` the model's part of it.

    Raises:
        NonFiniteActionsError: if an action is NaN or infinite.
        FieldError: if the actions are not [H, D].
    """
    actions = np.asarray(reply.actions)
    if actions.shape != (offer.horizon, offer.width):
        want = [offer.horizon, offer.width]
        raise FieldError(
            "actions", got=f"shape {list(actions.shape)}", expected=f"shape {want}", hint="the policy broke its word"
        )
    bad = actions.size - int(np.count_nonzero(np.isfinite(actions)))
    if bad:
        raise NonFiniteActionsError(f"actions: got {bad} of {actions.size} values NaN or infinite, expected none; withheld")
    server_timing = {"infer_ms": float(infer_ms)}
    if prev_total_ms is not None:
        server_timing["prev_total_ms"] = float(prev_total_ms)
    rt: dict[str, Any] = {
        "request_id": exchange.request_id,
        "session_id": exchange.session_id,
        "weight_version": int(reply.weight_version),
        "prefix_steps_honoured": int(reply.prefix_steps_honoured),
        "late": int(reply.late),
        "queue_ms": float(reply.queue_ms),
        "batch_size": int(reply.batch_size),
        "mode": str(reply.mode),
        "stage_ms": {"decode": exchange.decode_ms, **{str(name): float(ms) for name, ms in reply.stage_ms.items()}},
        "notes": [str(note) for note in reply.notes],
    }
    timing = {"policy_timing": {"infer_ms": float(reply.infer_ms)}, "server_timing": server_timing}
    return pack({"actions": actions, **timing, RT: rt})


def error_code(error: Exception) -> str:
    """Return the stable word for an error."""
    return error.code if isinstance(error, StrettoError) else "internal"


def error_text(error: Exception, request_id: str) -> str:
    """Return what a client is told. Faults of our own say where to look, and nothing about the inside."""
    told = str(error) if isinstance(error, StrettoError) else "the request failed inside the server; its log has the details"
    if len(told) > MAX_ERROR_CHARS:
        told = told[: MAX_ERROR_CHARS - 3] + "..."
    return f"[{error_code(error)}] {told} (request {request_id})"
