"""What a checkpoint says about its processing, whichever files it said it in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stretto.core.errors import CheckpointError, ConfigError
from stretto.processors.images import Resizer
from stretto.processors.presets import KeyMap
from stretto.processors.prompts import PromptFormat
from stretto.processors.transforms import Group
from stretto.processors.validate import state_widths

Family = Literal["pi0", "pi05"]
FAMILIES: tuple[Family, ...] = ("pi0", "pi05")


@dataclass(frozen=True)
class ProcessorSpec:
    """Everything between an observation and the model, resolved once at load.

    Raises:
        ConfigError: on construction, if the key map does not fit the widths or the camera slots.
    """

    family: Family
    source: Literal["lerobot", "openpi"]
    keys: KeyMap
    slots: tuple[str, ...]
    """The model's camera slots in order; those without a key are always absent."""
    resolution: tuple[int, int]
    """Height and width of the model's images."""
    resizer: Resizer
    prompt: PromptFormat
    group: Group = field(repr=False)
    state_dim: int
    action_dim: int
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    held: tuple[str, ...] = ()
    """Dimensions without spread that are held at their constant, such as `action[3]`."""

    def __post_init__(self) -> None:
        widths = state_widths(self.keys.state, self.state_dim)
        if sum(widths) != self.state_dim or min(widths) < 1:
            got = {k.key: k.width for k in self.keys.state}
            raise ConfigError("key_map.state", got=got, expected=f"widths that add up to the checkpoint's {self.state_dim}")
        lost = [i.slot for i in self.keys.images if i.slot not in self.slots]
        if lost:
            raise ConfigError("key_map.images", got=f"slots {lost}", expected=f"slots among {list(self.slots)}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise CheckpointError(f"{path}: no such file") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: not readable as JSON ({e})") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: got a JSON {type(raw).__name__}, expected an object")
    return raw


def positive(path: Path, raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive whole number of a config file.

    Raises:
        CheckpointError: naming the file and the field.
    """
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {name}: got {value!r}, expected a positive whole number")
    return value


def table(path: Path, raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a nested object of a config file; an absent one is empty.

    Raises:
        CheckpointError: naming the file and the field, if it is something else.
    """
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: {name}: got {value!r}, expected an object")
    return dict(value or {})
