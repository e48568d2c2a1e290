"""The same network as a lab has it today: torch's own operators, compiled one by one if asked for, none of our kernels.

The network is ours, with its fp32 sums and norms in few places; every fused op is replaced by its plain-torch reference. What
is captured into a graph inside `stock_torch` stays so, and what is captured outside is untouched, so that servers of both
kinds live in one process on the same weights.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stretto.core.env import PREFIX, TRITON
from stretto.layers import kernels
from stretto.layers.dispatch import FusedOp, triton_runs_on


def fused_ops() -> list[FusedOp[Any, Any]]:
    """Return every fused op of ours, each once."""
    found: dict[int, FusedOp[Any, Any]] = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, FusedOp):
                found[id(value)] = value
    return list(found.values())


@contextmanager
def stock_torch(*, compiled: bool) -> Iterator[None]:
    """Inside, all that is called or captured is made of torch's operators.

    `compiled` gives each op to torch.compile for its own; one that cannot be compiled runs as it is.
    """
    name = PREFIX + TRITON.name
    before, references = os.environ.get(name), [(op, op.reference) for op in fused_ops()]
    os.environ[name] = "0"
    triton_runs_on.cache_clear()
    if compiled:
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = 64
        for op, reference in references:
            op.reference = torch.compile(reference, dynamic=False)
    try:
        yield
    finally:
        for op, reference in references:
            op.reference = reference
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        triton_runs_on.cache_clear()
