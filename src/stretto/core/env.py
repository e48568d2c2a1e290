"""All environment variables that Stretto reads. They are debug switches; a bad value is an error, not a default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stretto.core.errors import ConfigError

PREFIX = "STRETTO_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One on/off variable: `1` or `0`."""

    name: str
    default: bool
    help: str

    def read(self) -> bool:
        """Read the variable now.

        Raises:
            ConfigError: if it is set to something other than 0 or 1.
        """
        raw = os.environ.get(PREFIX + self.name)
        if raw is None:
            return self.default
        if raw not in ("0", "1"):
            raise ConfigError(PREFIX + self.name, got=repr(raw), expected="0 or 1")
        return raw == "1"


TRITON = Flag("TRITON", True, "use Triton kernels where they exist; 0 takes the reference of every fused op")
OVERLAP = Flag("OVERLAP", True, "let a kernel start before the one ahead of it ends, where the device can (sm_90)")


def commit() -> str | None:
    """Return STRETTO_COMMIT: the commit of a source tree that travels without its repository."""
    return os.environ.get(PREFIX + "COMMIT")


def kernel_table() -> Path | None:
    """Return STRETTO_KERNEL_TABLE: a table of measured kernel choices that goes before those in the user's folder.

    Raises:
        ConfigError: if it names no file.
    """
    raw = os.environ.get(PREFIX + "KERNEL_TABLE")
    if raw is None:
        return None
    path = Path(raw)
    if not path.is_file():
        raise ConfigError(PREFIX + "KERNEL_TABLE", got=repr(raw), expected="a file that `stretto bench --tune` wrote")
    return path
