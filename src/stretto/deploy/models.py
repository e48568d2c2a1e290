"""Finds models by name. A model is a module of `stretto.models` that offers `presets()`; there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import stretto.models
from stretto.core.errors import ConfigError
from stretto.core.model import Model


class Build(Protocol):
    """Makes a model of one preset on a device, with seeded random weights."""

    def __call__(self, *, device: str, dtype: str, **options: Any) -> Model: ...


def presets() -> Mapping[str, Build]:
    """Return every preset of every model, by the name that users type."""
    found: dict[str, Build] = {}
    for info in pkgutil.iter_modules(stretto.models.__path__):
        module = importlib.import_module(f"stretto.models.{info.name}")
        offers: Callable[[], Mapping[str, Build]] | None = getattr(module, "presets", None)
        if offers is not None:
            found |= offers()
    return found


def build_preset(name: str, *, device: str, dtype: str, **options: Any) -> Model:
    """Build a model at its true shapes with seeded random weights.

    Raises:
        ConfigError: if no model has a preset of that name.
    """
    known = presets()
    if name not in known:
        raise ConfigError("model", got=repr(name), expected=f"one of {sorted(known)}")
    return known[name](device=device, dtype=dtype, **options)
