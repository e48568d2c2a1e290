"""Fixtures shared by packages: one small checkpoint in LeRobot's layout."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

# A shell that starts its jobs in the background has them ignore Ctrl-C, and every process that a test starts inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEROBOT = Path(__file__).parent / "golden" / "lerobot"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pi0.5 folder as LeRobot saved it, with its sizes in `config.json` and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "pi05"
    source = LEROBOT / "pi05_tiny"
    folder.mkdir()
    for name in ("model.safetensors", *(p.name for p in source.glob("policy_p*processor*"))):
        shutil.copy(source / name, folder / name)
    shutil.copy(LEROBOT / "tokenizer" / "tokenizer.json", folder / "tokenizer.json")
    config = json.loads((source / "config.json").read_text())
    config["stretto"] = json.loads((source / "sizes.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder
