"""The precision of a policy's products: as its dtype says, or FP8 with the scales of a calibration.

A calibration is a file beside the checkpoint. It says how large the input of every product became over all observations and
denoise steps, and of which weights: those of another checkpoint are refused.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from stretto.core.errors import ConfigError
from stretto.deploy.checkpoint import Loaded
from stretto.deploy.policy_options import PolicyOptions
from stretto.layers.dispatch import triton_runs_on
from stretto.layers.fp8 import HEADROOM, Fp8Linear
from stretto.layers.kernels.fp8_activation import fp8_chip
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_fp8 import quantised

FILE = "fp8_scales.json"
FORMAT = "stretto fp8 scales, 1"
Precision = Literal["dtype", "fp8", "fp8-emulated"]
"""`dtype`: as the dtype says. `fp8`: products in e4m3. `fp8-emulated`: the same numbers on any device, slowly."""
Kind = Literal["recorded", "simulated", "synthetic"]
"""What was observed: a robot's own observations, those of a simulator, or random numbers."""
SAMPLES = 8
WITHIN_GATES = ("pi05",)
"""Families whose actions in FP8 stayed within the gates: cosine to fp32 of 0.995 or more, 0.999 in the mean. Those of pi0 did
not with random weights."""


@dataclass(frozen=True)
class Calibration:
    """The largest absolute input of every product of one checkpoint."""

    model: str
    weights: str
    """Of which weights; see `fingerprint`."""
    observed: Kind
    observations: int
    """Requests, each of all denoise steps."""
    denoise_steps: int
    input_max: Mapping[str, float]
    headroom: float = HEADROOM
    """How many times larger an input may become before it is cut."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Calibration:
        """Read a file that `write` made.

        Raises:
            ConfigError: naming the field that is missing or cannot be used.
        """
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            hint = "`stretto calibrate CHECKPOINT` makes one"
            raise ConfigError("fp8_scales", got=f"no {path}", expected="a calibration", hint=hint) from None
        except (OSError, ValueError) as e:
            raise ConfigError("fp8_scales", got=f"{path}: {e}", expected="a calibration in JSON") from e
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise ConfigError("fp8_scales.format", got=str(path), expected=repr(FORMAT))
        names = {f.name for f in fields(Calibration)}
        if set(raw) != names:
            wrong = sorted(set(raw) ^ names)[0]
            raise ConfigError(
                f"fp8_scales.{wrong}", got="unknown" if wrong in raw else "none", expected=f"exactly {sorted(names)}"
            )
        calibration = Calibration(**raw)
        calibration.check()
        return calibration

    def check(self) -> None:
        if self.observed not in get_args(Kind):
            raise ConfigError("fp8_scales.observed", got=repr(self.observed), expected=f"one of {get_args(Kind)}")
        if not isinstance(self.input_max, dict):
            raise ConfigError("fp8_scales.input_max", got=type(self.input_max).__name__, expected="a map of layer to number")
        numbers = {f"input_max[{name}]": value for name, value in self.input_max.items()} | {"headroom": self.headroom}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"fp8_scales.{name}", got=value, expected="a finite number above 0")

    def fits(self, model: Pi0Model) -> None:
        """Check that this is a calibration of the model as it is loaded.

        Raises:
            ConfigError: naming what differs.
        """
        hint = "calibrate this checkpoint: `stretto calibrate CHECKPOINT`"
        if self.model != model.name:
            raise ConfigError("fp8_scales.model", got=self.model, expected=model.name, hint=hint)
        weights = fingerprint(model)
        if self.weights != weights:
            raise ConfigError(
                "fp8_scales.weights", got=self.weights, expected=f"{weights}, those of this checkpoint", hint=hint
            )

    def describe(self) -> dict[str, object]:
        """Return what whoever uses the policy should know of it."""
        told = {"observed": self.observed, "observations": self.observations, "headroom": self.headroom}
        return told | ({"warning": "random inputs, not a robot's"} if self.observed == "synthetic" else {})


@torch.no_grad()
def fingerprint(model: Pi0Model) -> str:
    """Return a short name of the model's weights: of a few numbers of each, rounded to bf16, so any dtype gives the same."""
    views = model.weight_map().views
    taken = [view.flatten()[:: max(1, view.numel() // SAMPLES)][:SAMPLES].bfloat16() for view in views.values()]
    numbers = torch.cat(taken).float().cpu().numpy().tobytes()
    return f"{zlib.crc32(numbers, zlib.crc32(' '.join(views).encode())):08x}"


def check_precision(precision: str, device: torch.device, dtype: str) -> None:
    """Refuse a precision that the machine would run slower than asked.

    Raises:
        ConfigError: naming the option.
    """
    if precision not in get_args(Precision):
        raise ConfigError("precision", got=repr(precision), expected=f"one of {get_args(Precision)}")
    if precision != "fp8":
        return
    if not fp8_chip(device) or not triton_runs_on(device.type, device.index):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        expected = "a GPU of compute capability 8.9 or more, with Triton"
        hint = "fp8-emulated computes the same numbers on any device, slowly"
        raise ConfigError("precision", got=f"fp8 on {name}", expected=expected, hint=hint)
    if dtype != "bfloat16":
        raise ConfigError("dtype", got=dtype, expected="bfloat16 with precision fp8")


def check_accuracy(family: str, shadow: int) -> None:
    """Refuse FP8 where it was not shown to be accurate, unless the run beside it tells how accurate it is.

    Raises:
        ConfigError: naming the option.
    """
    if family not in WITHIN_GATES and not shadow:
        hint = "--fp8-shadow 100 runs one request in 100 a second time without FP8, and /metrics says how far apart they are"
        expected = f"a number with FP8 on {family}, which was not shown to keep actions as near as on {WITHIN_GATES[0]}"
        raise ConfigError("fp8_shadow", got=shadow, expected=expected, hint=hint)


def use_fp8(model: Pi0Model, calibration: Calibration) -> int:
    """Let a model's stages run in FP8; returns the bytes that the coded weights take beside those that stay.

    Raises:
        ConfigError: if the calibration is of other weights, or does not fit the network.
    """
    calibration.fits(model)
    view = quantised(model.module, calibration.input_max, headroom=calibration.headroom)
    model.run_on(view)
    return sum(layer.nbytes for layer in view.readers.values() if isinstance(layer, Fp8Linear))


def set_precision(loaded: Loaded, options: PolicyOptions, device: torch.device) -> dict[str, Any]:
    """Bring a loaded checkpoint to the precision that the options ask for; returns what the handshake says of it.

    Raises:
        ConfigError: if the machine or the calibration cannot be used, naming the field.
    """
    model = loaded.model
    check_precision(options.precision, device, str(model.module.dtype).removeprefix("torch."))
    if options.precision == "dtype":
        for name in ("fp8_scales", "fp8_shadow"):
            if getattr(options, name):
                raise ConfigError(name, got=getattr(options, name), expected="precision fp8 with it")
        return {"name": "dtype"}
    check_accuracy(model.config.family, options.fp8_shadow)
    calibration = Calibration.read(options.fp8_scales or loaded.path / FILE)
    coded_bytes = use_fp8(model, calibration)
    return {"name": options.precision, "coded_bytes": coded_bytes, "calibration": calibration.describe()}
