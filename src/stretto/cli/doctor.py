"""`stretto doctor`: what this machine can do, and what is missing for the rest."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.layers.tuning import Table

DRIVER = Path("/proc/driver/nvidia/version")


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


def _driver() -> Check:
    try:
        found = DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except OSError:
        return Check("driver", False, "no NVIDIA driver", "fine for the demo and tests; models run eagerly on the CPU")
    return Check("driver", True, found)


def _torch() -> list[Check]:
    if util.find_spec("torch") is None:
        return [Check("torch", False, "not installed", "pip install torch")]
    import torch

    checks = [Check("torch", True, torch.__version__)]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        text = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, torch built for CUDA {torch.version.cuda}"
        checks.append(Check(f"cuda:{i}", True, text))
    if len(checks) == 1:
        advice = "a torch without CUDA? pip install one of https://download.pytorch.org/whl" if DRIVER.exists() else ""
        checks.append(Check("cuda", False, "no device", advice))
    device = "cuda:0" if len(checks) > 1 and checks[1].ok else "cpu"
    return [
        *checks,
        _fused_ops(device),
        _expert_kernel(device),
        _gated_kernel(device),
        _prefix_kernel(device),
        _suffix_kernel(device),
        *_kernel_tables(device),
    ]


def _fused_ops(device: str) -> Check:
    """Say which fused ops run as Triton kernels on a device, and which by their plain-torch reference."""
    from stretto.layers import kernels
    from stretto.layers.dispatch import FusedOp, implementation

    ops = {name: op for name in kernels.__all__ if isinstance(op := getattr(kernels, name), FusedOp)}
    fused = [name for name, op in ops.items() if implementation(op, device) == "triton"]
    plain = [name for name in ops if name not in fused]
    said = [f"{kind}: {', '.join(names)}" for kind, names in (("triton", fused), ("torch", plain)) if names]
    if len(said) == 1:
        said = [f"all {len(ops)} run as {'triton kernels' if fused else 'plain torch'}"]
    why, version = _why_not_triton(device), _version("triton")
    advice = "pip install triton" if device != "cpu" and version is None else ""
    text = f"on {device}, triton {version or 'not installed'}; {'; '.join(said)}{f': {why}' if why else ''}"
    return Check("fused ops", bool(fused), text, advice)


def _expert_kernel(device: str) -> Check:
    """Say whether the layers of pi0.5's expert run in CUDA C++; compiles them if that is still to do."""
    from stretto.layers.cuda.chain import expert_chain
    from stretto.layers.kernels.expert_layers import CHAINED_UNTIL

    if device == "cpu":
        return Check("expert kernel", False, "none on cpu; layers run as separate ops")
    chain, said = expert_chain(0)
    if chain is not None:
        where = f"up to batch {CHAINED_UNTIL}, or as a kernel table says"
        return Check("expert kernel", True, f"CUDA C++, {where}: {said}")
    advice = "put nvcc of CUDA 12 or later on the PATH" if "nvcc" in said else ""
    return Check("expert kernel", False, f"none: {said}; layers run as separate ops", advice)


def _gated_kernel(device: str) -> Check:
    """Say whether gated products of many rows may run in CUDA C++; compiles them if that is still to do."""
    from stretto.layers.cuda.gated import gated_product

    if device == "cpu":
        return Check("gated kernel", False, "none on cpu; torch multiplies")
    return _in_cuda("gated kernel", "at shapes that a kernel table names", *gated_product(0))


def _suffix_kernel(device: str) -> Check:
    """Say whether attention of the denoise loop runs in CUDA C++ for batches; compiles it if that is still to do."""
    from stretto.layers.cuda.suffix import suffix_attention

    if device == "cpu":
        return Check("suffix kernel", False, "none on cpu; torch attends")
    return _in_cuda("suffix kernel", "from batch 2, or as a kernel table says", *suffix_attention(0))


def _in_cuda(name: str, where: str, found: object | None, said: str, instead: str = "Triton's runs") -> Check:
    if found is not None:
        return Check(name, True, f"CUDA C++, {where}: {said}")
    advice = "put nvcc of CUDA 12 or later on the PATH" if "nvcc" in said else ""
    return Check(name, False, f"none: {said}; {instead}", advice)


def _prefix_kernel(device: str) -> Check:
    """Say whether a prefix in FP8 attends in CUDA C++; compiles that if it is still to do."""
    from stretto.layers.cuda.coded_prefix import coded_prefix

    if device == "cpu":
        return Check("prefix kernel", False, "none on cpu; torch attends")
    return _in_cuda("prefix kernel", "for FP8", *coded_prefix(0), "FP8's prefix attends in bf16")


def _kernel_tables(device: str) -> list[Check]:
    """Say which tables choose kernels on a device, from where, and which ops go by their own rule."""
    import torch

    from stretto.core.errors import ConfigError
    from stretto.layers.tuning import choices, tunables

    advice = "`stretto bench --tune` measures this device" if device != "cpu" else ""
    try:
        known = choices(torch.device(device))
    except ConfigError as error:
        return [Check("kernel choice", False, str(error), "correct the table or remove it")]
    counts = {op: sum(place[0] == op for place in known.known) for op in sorted(tunables())}
    checks = [_kernel_table(table) for table in known.tables]
    said = ", ".join(f"{op}: {f'{n} shapes from the table' if n else 'rule'}" for op, n in counts.items())
    why = _why_not_triton(device)
    kind = f"the reference ({why})" if why else said or "no op can be tuned"
    return [*checks, Check("kernel choice", bool(known.tables), f"on {device}: {kind}", "" if why else advice)]


def _kernel_table(table: Table) -> Check:
    import torch

    said = f"{table.path}: {table.device}, commit {', '.join(table.commits)}, torch {table.torch}, triton {table.triton}"
    # A choice of another version is right all the same, but a place in cuBLASLt's list may be another kernel there.
    same = (table.torch, table.triton) == (torch.__version__, _version("triton"))
    return Check("kernel table", same, said, "made with other versions; `stretto bench --tune` measures with those at hand")


def _why_not_triton(device: str) -> str | None:
    import torch

    from stretto.layers.dispatch import why_not_triton

    place = torch.device(device)
    return why_not_triton(place.type, place.index)


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
    checks = [Check("python", True, platform.python_version()), _driver(), *_torch(), _egl(), _port(args.port), *_extras()]
    if args.json:
        print(json.dumps([vars(c) for c in checks], indent=1))
        return 0
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Columns

    table = Columns("check", "", "found", "advice", box=None)
    for c in checks:
        table.add_row(c.name, "[green]ok[/]" if c.ok else "[yellow]--[/]", escape(c.found), "" if c.ok else escape(c.advice))
    Console().print(table)
    return 0
