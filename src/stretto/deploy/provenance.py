"""What every published number carries: device, commit and versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from stretto.core import env


def commit() -> str:
    """Return the git commit of this source tree, marked when it has changes; `unknown` outside a checkout.

    STRETTO_COMMIT says it where a tree was copied without its repository.
    """
    told = env.commit()
    if told is not None:
        return told
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def provenance(device: torch.device) -> dict[str, str]:
    return {"device": device_name(device), "commit": commit(), "torch": torch.__version__}
