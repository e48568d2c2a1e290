"""`stretto doctor`: what this machine can do, and what is missing for the rest."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
from dataclasses import dataclass
from importlib import metadata, util


@dataclass(frozen=True)
class Args:
    json: bool = False
    """Print one JSON object instead of a table."""
    port: int = 8000
    """Port that `stretto serve` would use."""


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    found: str
    advice: str = ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> list[Check]:
    if util.find_spec("torch") is None:
        return [Check("torch", False, "not installed", "pip install torch")]
    import torch

    checks = [Check("torch", True, torch.__version__)]
    if not torch.cuda.is_available():
        return [*checks, Check("cuda", False, "no device", "fine for the demo and tests; models run eagerly on the CPU")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        text = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, driver for CUDA {torch.version.cuda}"
        checks.append(Check(f"cuda:{i}", True, text))
    triton = _version("triton")
    advice = "" if triton else "pip install triton; without it the reference of every fused op runs"
    return [*checks, Check("triton", triton is not None, triton or "not installed", advice)]


def _egl() -> Check:
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError as error:
        return Check("egl", False, str(error), "apt-get install libegl1 libgl1 libgl1-mesa-dri (the simulators render with it)")
    return Check("egl", True, f"libEGL.so.1, MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset (egl is used)')}")


def _port(port: int) -> Check:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(f"port {port}", False, str(error), "choose another with --port")
    return Check(f"port {port}", True, "free on 127.0.0.1")


def _extras() -> list[Check]:
    wanted = {
        "metaworld": "pip install 'stretto[sim]' for `stretto eval` and `stretto demo`",
        "sentencepiece": "pip install 'stretto[openpi]' for PaliGemma .model tokenizers",
        "diffusers": "pip install 'stretto[world]' for the video autoencoders of world models",
        "matplotlib": "pip install 'stretto[plot]' for figures",
    }
    return [
        Check(name, _version(name) is not None, _version(name) or "not installed", advice) for name, advice in wanted.items()
    ]


def run(args: Args) -> int:
    checks = [Check("python", True, platform.python_version()), *_torch(), _egl(), _port(args.port), *_extras()]
    if args.json:
        print(json.dumps([vars(c) for c in checks], indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "", "found", "advice", box=None)
    for c in checks:
        table.add_row(c.name, "[green]ok[/]" if c.ok else "[yellow]--[/]", c.found, "" if c.ok else c.advice)
    Console().print(table)
    return 0
