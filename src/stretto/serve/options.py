"""How one server is set up. Resolved once, before the port is bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server.

    Raises:
        ConfigError: naming the setting that cannot be used.
    """

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only."""
    port: int = 8000
    """0 takes a free one."""
    api_key: str | None = field(default=None, repr=False)
    """If set, a client must send `Authorization: Api-Key <key>`."""
    max_message_bytes: int | None = None
    """Largest message a client may send. None derives it from the cameras that the policy declares."""
    max_sessions: int = 256
    drain_s: float = 30.0
    """On shutdown, how long requests in flight may still take."""
    ping_interval_s: float = 20.0
    """How often a client is pinged. A late pong never ends a session; a host that is gone does."""
    dead_host_s: float = 60.0
    """A connection ends when the peer's network stack has acknowledged nothing for this long."""
    stalled_s: float = 30.0
    """A client that takes none of what waits for it for this long is cut off; it is not read meanwhile."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may connect. Robots send no `Origin`; without this any page open on the machine could drive one."""

    traces: tuple[Path, ...] = ()
    """Files to write every request to: `.jsonl` for `stretto roofline`, `.json` for Perfetto."""
    trace_max_mb: float = 64.0
    """Most that one trace may take on disk; what is older goes."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", got=self.port, expected="0 to 65535")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()):
            raise ConfigError("api_key", got="an empty or non-ASCII key", expected="printable ASCII")
        if self.max_message_bytes is not None and self.max_message_bytes < 1024:
            raise ConfigError("max_message_bytes", got=self.max_message_bytes, expected="1024 or more")
        if self.max_sessions < 1:
            raise ConfigError("max_sessions", got=self.max_sessions, expected="1 or more")
        if not math.isfinite(self.trace_max_mb) or self.trace_max_mb <= 0:
            raise ConfigError("trace_max_mb", got=self.trace_max_mb, expected="a positive number of megabytes")
        for name in ("drain_s", "ping_interval_s", "dead_host_s", "stalled_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(name, got=value, expected="a positive number of seconds")
