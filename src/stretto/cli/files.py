"""Where a verb writes: looked at before the work that it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from stretto.core.errors import ConfigError


def writable(option: str, path: Path | None) -> None:
    """Make the folder of a file that will be written.

    Raises:
        ConfigError: if the file cannot be written there.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(option, got=str(path), expected=f"a file that can be written ({e.strerror})") from e
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(option, got=str(path), expected="a file that can be written")
