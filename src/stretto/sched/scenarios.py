"""Scenarios: a pool, the models and streams that want it, and what they are promised. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from stretto.core.errors import ConfigError
from stretto.core.plan import Device
from stretto.sched.hardware import hardware

FIVE = ("wan2.1-1.3b", "wan2.2-5b", "wan2.1-14b", "ltx-2.5-22b", "minimax-h3-33b")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Scenario:
    """What to plan.

    Raises:
        ConfigError: on construction, naming the field that cannot be used.
    """

    name: str
    gpus: int
    models: tuple[str, ...] = ()
    """Models that get the pool one at a time; each row asks how many streams fit."""
    mix: Mapping[str, int] = field(default_factory=dict)
    """Model -> streams that share the pool; instead of `models`."""
    interval_ms: float = 1600.0
    response_ms: float = 8000.0
    device: str = "NVIDIA H200"
    gpus_per_node: int = 8
    shape: Mapping[str, float] = field(default_factory=dict)
    """Changes to every model's computed shape: steps, frames_per_chunk, window_frames."""
    single: bool = False
    """Also report what one stream gets from all devices, in fixed order and in batched time slices."""
    depth: bool = False
    """Also report one stream with a (step, block) a device."""

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            if not _whole(getattr(self, name)):
                raise ConfigError(name, got=repr(getattr(self, name)), expected="a whole number")
        if self.gpus < 1:
            raise ConfigError("gpus", got=self.gpus, expected="1 or more: an empty pool holds no stream")
        if self.gpus_per_node < 1:
            raise ConfigError("gpus_per_node", got=self.gpus_per_node, expected="1 or more")
        for name in ("interval_ms", "response_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
                raise ConfigError(name, got=repr(value), expected="more than 0 milliseconds")
        if math.isinf(self.interval_ms):
            raise ConfigError("interval_ms", got=self.interval_ms, expected="a finite number of milliseconds")
        for name in ("mix", "shape"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(name, got=repr(getattr(self, name)), expected="a table")
        for name, size in self.shape.items():
            if isinstance(size, bool) or not isinstance(size, int | float) or not math.isfinite(size):
                raise ConfigError(f"shape.{name}", got=repr(size), expected="a number")
            if name in ("steps", "frames_per_chunk", "window_frames") and not _whole(size):
                raise ConfigError(f"shape.{name}", got=size, expected="a whole number")
        if bool(self.models) == bool(self.mix):
            raise ConfigError("models", got=f"models {list(self.models)}, mix {dict(self.mix)}", expected="one of the two")
        for model, count in self.mix.items():
            if not _whole(count) or count < 1:
                raise ConfigError(f"mix[{model}]", got=count, expected="1 stream or more")
        hardware(self.device)

    @property
    def wanted(self) -> tuple[str, ...]:
        return self.models or tuple(self.mix)

    def pool(self, memory_bytes: int | None = None) -> tuple[Device, ...]:
        memory = hardware(self.device).usable_bytes if memory_bytes is None else memory_bytes
        return tuple(Device(f"gpu:{i}", f"node{i // self.gpus_per_node}", memory) for i in range(self.gpus))


BUILT_IN: Mapping[str, Scenario] = {
    s.name: s
    for s in (
        Scenario("seed-24gpu", 24, FIVE),
        Scenario(
            "seed-1gpu", 1, ("wan2.2-5b",), shape={"frames_per_chunk": 1}, interval_ms=400.0, response_ms=2000.0, single=True
        ),
        Scenario(
            "seed-2gpu", 2, ("wan2.1-1.3b",), shape={"frames_per_chunk": 1}, interval_ms=400.0, response_ms=2000.0, single=True
        ),
        Scenario("depth-200", 200, ("minimax-h3-33b",), depth=True),
        Scenario("robots", 2, ("pi0.5",), interval_ms=500.0, response_ms=120.0),
    )
}


def scenario_from(raw: Mapping[str, Any], name: str) -> Scenario:
    """Read a scenario from parsed TOML or JSON.

    Raises:
        ConfigError: if a key is unknown or a value cannot be used.
    """
    known = {f.name for f in fields(Scenario)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ConfigError("scenario", got=unknown, expected=f"keys among {sorted(known)}")
    if "gpus" not in raw:
        raise ConfigError("gpus", got="nothing", expected="the number of devices of the pool")
    values = {"name": name, **raw}
    models = values.get("models", ())
    if not isinstance(models, list | tuple) or not all(isinstance(model, str) for model in models):
        raise ConfigError("models", got=repr(models), expected="a list of names")
    values["models"] = tuple(models)
    try:
        return Scenario(**values)
    except TypeError as e:
        raise ConfigError("scenario", got=str(e), expected="values of the right type") from e
