"""Resolves `auto` into a device, a dtype and a mode; refuses what the machine cannot do rather than run slower."""

from __future__ import annotations

import torch

from stretto.core.errors import ConfigError
from stretto.core.plan import Mode


def resolve_device(name: str) -> torch.device:
    """Return `auto` as the first CUDA device, or the CPU where there is none.

    Raises:
        ConfigError: if the name is no device, or a CUDA device is asked for and is not there.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ConfigError("device", got=repr(name), expected="auto, cpu or cuda:N") from e
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError("device", got=name, expected=f"one of the {count} CUDA devices of this machine, or cpu")
    return torch.device("cuda", device.index or 0)


def resolve_dtype(name: str, device: torch.device) -> str:
    """Return `auto` as bfloat16 on CUDA and float32 elsewhere."""
    return ("bfloat16" if device.type == "cuda" else "float32") if name == "auto" else name


def resolve_mode(name: str, device: torch.device) -> Mode:
    """Return `auto` as graph on CUDA and eager elsewhere.

    Raises:
        ConfigError: if graphs are asked for where there are none.
    """
    if name == "auto":
        return "graph" if device.type == "cuda" else "eager"
    if name == "graph" and device.type != "cuda":
        raise ConfigError("mode", got="graph", expected="eager: a CPU has no CUDA graphs")
    return "graph" if name == "graph" else "eager"
