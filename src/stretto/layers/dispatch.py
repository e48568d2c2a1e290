"""Choose between a fused op's Triton kernel and its plain-torch reference.

The choice depends only on the process and the device, except that a call which needs gradients takes the reference.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from stretto.core.env import TRITON
from stretto.layers.tuning import choices

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["triton", "reference"]
MIN_CAPABILITY = (8, 0)  # bf16 tensor cores


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_runs_on(device_type: str, index: int | None) -> bool:
    """Tell whether Triton kernels run on a device; the answer is kept for the process."""
    return why_not_triton(device_type, index) is None


def why_not_triton(device_type: str, index: int | None) -> str | None:
    """Say why Triton kernels do not run on a device; None where they do."""
    if device_type != "cuda":
        return "kernels are for GPUs"
    if not TRITON.read():
        return f"STRETTO_{TRITON.name}=0 switches them off"
    if not triton_installed():
        return "triton is not installed"
    (major, minor), (least, _) = torch.cuda.get_device_capability(index), MIN_CAPABILITY
    return (
        None if (major, minor) >= MIN_CAPABILITY else f"the device is sm_{major}{minor}, kernels are for sm_{least}0 and later"
    )


class FusedOp(Generic[P, R]):
    """One fused op: callable like its reference, run by its Triton kernel wherever that is possible.

    The first argument is a tensor and decides the device. `supports`, given the same arguments, tells whether the
    kernel takes this call; it must depend on shapes, strides and dtypes only.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        kernel: Callable[P, R] | None = None,
        supports: Callable[..., bool] | None = None,
    ) -> None:
        self.name = reference.__name__.removesuffix("_reference")
        self.reference, self.kernel, self.supports = reference, kernel, supports
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = self.runs(*args, **kwargs)
        choices(_first(args).device).ran.setdefault(self.name, set()).add(kind)
        if self.kernel is not None and kind == "triton":
            return self.kernel(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def runs(self, *args: P.args, **kwargs: P.kwargs) -> Implementation:
        """Say what this very call would run."""
        if self.implementation(_first(args).device) == "reference":
            return "reference"
        if torch.is_grad_enabled() and _needs_grad(args, kwargs):
            return "reference"
        return "triton" if self.supports is None or self.supports(*args, **kwargs) else "reference"

    def implementation(self, device: torch.device) -> Implementation:
        """Say what a call without gradients runs on `device`, for shapes that the kernel supports."""
        if self.kernel is not None and triton_runs_on(device.type, device.index):
            return "triton"
        return "reference"


def implementation(op: FusedOp[Any, Any], device: torch.device | str) -> Implementation:
    """Say which implementation of `op` runs on `device`."""
    return op.implementation(torch.device(device))


def _first(args: tuple[Any, ...]) -> Tensor:
    first = args[0]
    if not isinstance(first, Tensor):
        raise TypeError(f"the first argument must be a tensor, got {type(first).__name__}")
    return first


def _needs_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(_carries_grad(a) for a in (*args, *kwargs.values()))


def _carries_grad(arg: object) -> bool:
    if isinstance(arg, tuple):
        return any(_carries_grad(a) for a in arg)
    return isinstance(arg, Tensor) and arg.requires_grad
