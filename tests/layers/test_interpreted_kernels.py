"""Run the kernel tests on the CPU. Triton decides at import whether it interprets, so they run in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = (
    "test_kernels.py",
    "test_expert_kernels.py",
    "test_prefix_kernels.py",
    "test_fp8_kernels.py",
    "test_coded_prefix.py",
    "test_folded_kernels.py",
    "test_wan_kernels.py",
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_agrees_with_its_reference_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-o", "addopts="]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = str(Path(__file__).with_name(file))
    run = subprocess.run([*command, tests], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    # A run that leaves all of them out proves nothing.
    assert re.search(r"^\d+ passed(, \d+ deselected)?( in|,)", run.stdout, re.MULTILINE), run.stdout
