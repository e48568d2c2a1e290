"""Kernels in CUDA C++ as shared libraries: compiled once by the machine's nvcc, kept on disk, called through plain C.

A library is named after what it was made of: sources, compiler and options. Where there is none and none can be made, the
reason is kept, and callers take their other path.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from stretto.layers.dispatch import triton_runs_on

SOURCES = Path(__file__).parent
TOOLKITS = (Path("/usr/local/cuda/bin/nvcc"),)
ARCHITECTURE = (9, 0)
OPTIONS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")
PATIENCE_S = 120.0


class Built(NamedTuple):
    """A library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """Where the library is, or why there is none."""


class Launches(Protocol):
    """What a library's functions are called through."""

    refusal: str | None
    """Why the device does not run them."""


L = TypeVar("L", bound=Launches)


def nvcc() -> str | None:
    found = shutil.which("nvcc")
    return found or next((str(p) for p in TOOLKITS if p.is_file()), None)


def cache_folder() -> Path:
    return Path.home() / ".cache" / "stretto" / "cuda"


@functools.cache
def built(name: str, device_index: int) -> Built:
    """Return the library of `<name>.cu` for a device, compiled if need be; the answer is kept for the process.

    Compiling takes seconds: call this while a model warms up, not while a request waits.
    """
    if not triton_runs_on("cuda", device_index):
        return Built(None, "fused kernels are switched off or do not run here")
    capability = torch.cuda.get_device_capability(device_index)
    if capability != ARCHITECTURE:
        return Built(None, f"the device is sm_{capability[0]}{capability[1]}, the kernel is for sm_90")
    compiler = nvcc()
    if compiler is None:
        return Built(None, "there is no nvcc on this machine")
    try:
        return loaded(compiled(name, compiler, OPTIONS))
    except (OSError, subprocess.SubprocessError) as e:
        return Built(None, f"{compiler} failed: {_tail(e)}")


def launches_of(name: str, device_index: int, make: Callable[[ctypes.CDLL], L], missing: str) -> tuple[L | None, str]:
    """Return what `make` makes of a library, or None and a warning; and where the library is, or why there is none.

    Args:
        missing: what the warning says is not there, with `%s` for the reason, and what runs in its place.
    """
    found = built(name, device_index)
    made = None if found.library is None else make(found.library)
    if made is not None and made.refusal is None:
        return made, found.reason
    why = found.reason if made is None or made.refusal is None else made.refusal
    logging.getLogger(f"{__package__}.{name}").warning(missing, why)
    return None, why


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def launch(function: Callable[[Any, int], bytes | None], words: Sequence[int] | bytes, x: Tensor, what: str) -> None:
    """Call a library's function with eight-byte words, on the stream of x's device.

    Raises:
        RuntimeError: if it refuses; `what` names what was not launched.
    """
    queue = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    error = function(words if isinstance(words, bytes) else (ctypes.c_int64 * len(words))(*words), queue)
    if error is not None:
        raise RuntimeError(f"{what} was not launched: {error.decode()}")


def loaded(path: Path) -> Built:
    return Built(ctypes.CDLL(str(path)), str(path))


def compiled(name: str, compiler: str, options: tuple[str, ...], folder: Path | None = None) -> Path:
    """Return the path of a library, compiled unless it is there.

    Raises:
        OSError: if the compiler cannot be started or the folder not be written.
        subprocess.SubprocessError: if it fails.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE_S).stdout
    made_of = hashlib.sha256(version + repr(options).encode())
    for source in sorted(SOURCES.glob("*.cu*")):
        made_of.update(source.name.encode() + source.read_bytes())
    folder = folder or cache_folder()
    path = folder / f"{name}-{made_of.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Two processes may compile at once: each writes its own file, and a rename is whole or not at all.
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *options, "-o", made, str(SOURCES / f"{name}.cu")]
        subprocess.run(command, capture_output=True, check=True, text=True, timeout=PATIENCE_S)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _tail(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    return (said or str(error)).strip()[-400:]
