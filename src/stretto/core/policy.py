"""What passes between whoever has an observation (server, simulator, trainer) and whoever makes actions of it.

Shape legend: H action horizon, D action width of the robot, K steps of an action prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np


@dataclass(eq=False, slots=True)
class Session:
    """One client's place in a service; made by `open_session`, ended by `close_session`. Hashed by identity."""

    session_id: str
    peer: str = ""
    """Where the client is, for logs only."""
    stream: int = -1
    """The service's own number for it."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Everything a request may say beside its observation. `None` means not said."""

    request_id: str = ""
    reset: bool = False
    """A new episode starts with this observation: what the session remembers is dropped first."""
    seed: int | None = None
    deadline_ms: float | None = None
    """Most time from arrival to reply; later is as good as never."""
    priority: int = 0
    obs_time_ns: int | None = None
    """The client's own clock when it observed."""
    executed_steps: int | None = None
    """Control steps the client ran since the last chunk's first action."""
    delay_steps: int | None = None
    """Control steps that will pass while this request is computed; comes with `prefix_KD` or `executed_steps`."""
    prefix_KD: np.ndarray[Any, Any] | None = None
    """Actions the robot is committed to, in the robot's units; a read-only view on the message."""
    noise_HD: np.ndarray[Any, Any] | None = None
    """Initial noise in the model's space, instead of a seed."""
    mode: str | None = None
    """Real-time-chunking mode, one of those that the service advertises."""
    late: bool = False
    """Answer late rather than refuse what cannot be on time."""
    starved_steps: int = 0
    """Control steps without an action since the robot's last request, as it reports them."""
    path_ms: float | None = None
    """The critical path of the robot's last request by its own clock: from observation to the command at hand."""


@dataclass(frozen=True, slots=True)
class PolicyReply:
    """One action chunk and how it came about."""

    actions: np.ndarray[Any, Any]
    """[H, D] in the robot's units. Owned by the receiver: never a view of a graph buffer."""
    infer_ms: float
    """The model call alone."""
    queue_ms: float = 0.0
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    """Stage -> ms: `preprocess`, `vision`, `prefix`, `denoise`, `postprocess`, ... (device time where there is a device)."""
    batch_size: int = 1
    mode: Literal["graph", "eager"] = "eager"
    weight_version: int = 0
    request_id: str = ""
    prefix_steps_honoured: int = 0
    """Leading actions that this chunk was made to share with the one before it."""
    late: bool = False
    """Whether it came after its deadline."""
    notes: tuple[str, ...] = ()
    """Remarks a user should see once, such as an extra camera that was not used."""
