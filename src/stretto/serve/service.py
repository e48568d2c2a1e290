"""What the server needs from the thing that makes actions. It never sees a model, a device or a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from stretto.core.policy import PolicyReply, RequestOptions, Session

__all__ = ["OffersMetrics", "PolicyReply", "PolicyService", "RequestOptions", "Session"]


class PolicyService(Protocol):
    """A policy for many sessions at once.

    `warm` and `close` block and run off the event loop. All other methods return at once.
    """

    @property
    def metadata(self) -> Mapping[str, object]:
        """Required: `model`, `action_horizon`, `action_dim`, and `observation` as {key: {kind, shape, dtype, required}}.

        Optional: `policy_metadata` (shown at the top level of the handshake, e.g. `reset_pose`), `mode`, and `rt`
        (what of the real-time extension is supported: `control_hz`, `rtc_modes`, `max_delay`). Plain values only.
        """
        ...

    @property
    def ready(self) -> bool:
        """True from the end of `warm` for as long as requests can be answered."""
        ...

    @property
    def dead(self) -> str | None:
        """Why no request will ever be answered again, or None."""
        ...

    def warm(self) -> None:
        """Do everything that is slow only once: first runs, graph capture. Called once, before any session opens."""
        ...

    def open_session(self, session_id: str, peer: str = "") -> Session:
        """Make room for one client.

        Raises:
            CapacityError: if there is none.
        """
        ...

    def submit(self, observation: Mapping[str, object], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        """Queue one observation. Arrays are read-only views.

        The caller cancels the future when its client has left. So the service calls `set_running_or_notify_cancel`
        before it begins, and drops the request if that is False; after it, cancelling has no effect.

        Raises:
            StrettoError: here or on the future, if this request cannot be answered; the session goes on.
        """
        ...

    def close_session(self, session: Session) -> None:
        """Forget a client and drop its queued work. Closing twice does nothing."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class OffersMetrics(Protocol):
    """A service with numbers of its own for `/metrics`."""

    def metrics(self) -> Mapping[str, float]:
        """Return name -> value now; `_total` marks a counter. Cheap, from any thread, no device synchronisation.

        Known: `queue_depth`, `graph_captures_total`, `gpu_memory_bytes`, `session_state_bytes`, `weight_version`.
        """
        ...
