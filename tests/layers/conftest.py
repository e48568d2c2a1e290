"""Set up Triton's interpreter where the tests run in it; build kernels of CUDA C++ for the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.layers.cuda import build

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        # Triton 3.6 takes int() of an array of one element for loop bounds, which NumPy 2.4 refuses.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2


@pytest.fixture(scope="session")
def library_on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Return what compiles a source of `cuda_on_host` by name; skips where there is no compiler."""
    folder, here = tmp_path_factory.mktemp("cuda"), Path(__file__).parent / "cuda_on_host"

    def library(name: str) -> ctypes.CDLL:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip(f"there is no g++ to build {name} for the host")
        made = folder / f"{name}.so"
        # g++ 12 takes functions of different cuts for the same, and they are not.
        options = ["-O2", "-fno-ipa-icf", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{here}", f"-I{build.SOURCES}"]
        subprocess.run([compiler, *options, str(here / f"{name}.cpp"), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made))

    return library
