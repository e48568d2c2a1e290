"""openpi exports: `assets/<asset id>/norm_stats.json`, and what openpi keeps in code instead of in the checkpoint.

The train config's name decides in openpi whether the state is in the prompt, whether actions are offsets and how ALOHA's
joints are signed. Here each of these is a property: of the preset, of a `stretto.json` beside the weights, or an argument.

Source: openpi transforms, policies and train configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from stretto.core.errors import CheckpointError, ConfigError
from stretto.processors.lerobot import held_dimensions
from stretto.processors.presets import OPENPI_SLOTS, PRESETS, KeyMap, key_map
from stretto.processors.prompts import PromptFormat
from stretto.processors.spec import FAMILIES, Family, ProcessorSpec, positive, read_json
from stretto.processors.stats import OPENPI, Degenerate, Mode, build_normalizer
from stretto.processors.transforms import AlohaJoints, Group, Normalize, Pad, Relative, Transform

MANIFEST = "stretto.json"
MODES: dict[Family, Mode] = {"pi0": "mean_std", "pi05": "quantiles"}
TOKEN_LIMITS: dict[Family, int] = {"pi0": 48, "pi05": 200}


@dataclass(frozen=True)
class OpenpiOptions:
    """What a train config decides. None means: as the preset's public checkpoint has it, or as the files say."""

    action_dim: int | None = None
    """Width of the robot's actions."""
    action_horizon: int | None = None
    discrete_state: bool | None = None
    """The state is in the prompt (pi0.5)."""
    relative: tuple[bool, ...] | None = None
    """Which action dimensions are offsets from the state; () for none."""
    aloha_joints: bool | None = None
    """Joint signs and gripper units are ALOHA's on the wire, and the pi base models' inside."""
    token_limit: int | None = None
    image_size: int | None = None
    """Side of the model's square images; 224 where nothing else is said."""
    asset_id: str | None = None
    """Which folder under `assets`; needed only where there are several."""

    def __post_init__(self) -> None:
        for name in ("action_dim", "action_horizon", "token_limit", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, got=value, expected="a positive whole number")

    def over(self, base: OpenpiOptions) -> OpenpiOptions:
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(base, **mine)


_ARMS = (*(True,) * 6, False) * 2
PUBLIC: Mapping[tuple[Family, str], OpenpiOptions] = {
    ("pi05", "libero"): OpenpiOptions(action_dim=7, action_horizon=10, discrete_state=False, relative=()),
    ("pi0", "libero"): OpenpiOptions(action_dim=7, relative=(*(True,) * 6, False)),
    ("pi05", "droid"): OpenpiOptions(action_dim=8, action_horizon=15, relative=()),
    ("pi0", "droid"): OpenpiOptions(action_dim=8, action_horizon=10, relative=()),
    ("pi05", "aloha"): OpenpiOptions(action_dim=14, action_horizon=50, relative=_ARMS, aloha_joints=True),
    ("pi0", "aloha"): OpenpiOptions(action_dim=14, action_horizon=50, relative=_ARMS, aloha_joints=True),
}
"""The published checkpoints. pi0 on LIBERO has no horizon here: sources differ, so it must come from `config.json`."""


def find_norm_stats(folder: Path, asset_id: str | None) -> Path:
    """Return the statistics file of an export.

    Raises:
        CheckpointError: if there is none, or several and no asset id was given; it lists those found.
    """
    assets = folder / "assets"
    found = {str(p.parent.relative_to(assets)): p for p in sorted(assets.rglob("norm_stats.json"))}
    if asset_id is not None and asset_id in found:
        return found[asset_id]
    if asset_id is None and len(found) == 1:
        return next(iter(found.values()))
    raise CheckpointError(f"{assets}: asset id {asset_id!r}: expected one norm_stats.json, found those of {sorted(found)}")


def read_norm_stats(path: Path) -> dict[str, dict[str, Any]]:
    """Return `state` and `actions` -> statistic -> list of numbers.

    Raises:
        CheckpointError: naming what is missing.
    """
    table = read_json(path).get("norm_stats")
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: norm_stats: missing")
    for name in ("state", "actions"):
        if not isinstance(table.get(name), dict):
            raise CheckpointError(
                f"{path}: norm_stats.{name}: missing, so no normaliser would be active; found {sorted(table)}"
            )
    return table


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the `processor` table of `stretto.json`, or an empty one.

    Raises:
        CheckpointError: if it has keys that are not known.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    table = read_json(path).get("processor", {})
    known = {f.name for f in fields(OpenpiOptions)} | {"family", "preset", "keys"}
    if not isinstance(table, dict) or set(table) - known:
        got = sorted(set(table) - known) if isinstance(table, dict) else type(table).__name__
        raise CheckpointError(f"{path}: processor: got {got}, expected keys among {sorted(known)}")
    for f in fields(OpenpiOptions):
        _check_option(path, f.name, table.get(f.name))
    return table


def read_network_table(folder: Path) -> dict[str, int]:
    """Return the `network` table of `stretto.json`: what shapes of tensors do not tell. It may be empty.

    Raises:
        CheckpointError: if it has keys that are not known, or values that are no positive numbers.
    """
    path = folder / MANIFEST
    said = read_json(path).get("network", {}) if path.is_file() else {}
    if not isinstance(said, dict) or said.keys() - {"vision_heads"}:
        raise CheckpointError(f"{path}: network: got {said!r}, expected an object with the key 'vision_heads'")
    return {name: positive(path, said, name) for name in said}


def _check_option(path: Path, name: str, value: object) -> None:
    kinds: dict[str, type] = {"discrete_state": bool, "aloha_joints": bool, "asset_id": str, "relative": list}
    kind = kinds.get(name, int)
    wrong = not isinstance(value, kind) or (kind is int and isinstance(value, int) and (isinstance(value, bool) or value < 1))
    if kind is list and isinstance(value, list):
        wrong = not all(isinstance(v, bool) for v in value)
    if value is not None and wrong:
        raise CheckpointError(
            f"{path}: processor.{name}: got {value!r}, expected {'booleans' if kind is list else kind.__name__}"
        )


def openpi_spec(
    folder: Path,
    *,
    family: str | None = None,
    preset: str | KeyMap | Mapping[str, Any] | Path | None = None,
    options: OpenpiOptions | None = None,
    degenerate: Degenerate = "refuse",
) -> ProcessorSpec:
    """Read an openpi export.

    What `config.json` says is taken as it is; then arguments win over `stretto.json`, and that over the preset's public
    checkpoint.

    Raises:
        CheckpointError: naming the file, feature, statistic and dimension that cannot be used.
        ConfigError: if family, preset or a width is not known, or the key map does not fit.
    """
    manifest = read_manifest(folder)
    family = family or manifest.get("family")
    if family not in FAMILIES:
        raise ConfigError("family", got=repr(family), expected=f"one of {list(FAMILIES)}")
    family = cast(Family, family)
    chosen = preset or manifest.get("keys") or manifest.get("preset")
    if chosen is None:
        raise ConfigError(
            "preset", got="none", expected="a preset or a key map: an openpi export does not say what its robot sends"
        )
    keys = key_map(chosen)
    public = PUBLIC.get((family, keys.name), OpenpiOptions()) if keys is PRESETS.get(keys.name) else OpenpiOptions()
    declared: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in manifest.items() if k not in ("family", "preset", "keys")
    }
    settings = (options or OpenpiOptions()).over(OpenpiOptions(**declared).over(public))
    return _build(folder, family, keys, settings, degenerate)


def _build(folder: Path, family: Family, keys: KeyMap, settings: OpenpiOptions, degenerate: Degenerate) -> ProcessorSpec:
    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    model_dim = positive(config_path, config, "action_dim", 32)
    path = find_norm_stats(folder, settings.asset_id)
    stats = read_norm_stats(path)
    widths = [k.width for k in keys.state]
    state_dim = _robot_width("state", None if None in widths else sum(w or 0 for w in widths), stats, MODES[family], model_dim)
    action_dim = _robot_width("actions", settings.action_dim, stats, MODES[family], model_dim)
    try:
        norms = Normalize(
            *(
                build_normalizer(
                    n, MODES[family], stats[n], width=w, rule=OPENPI, padded_width=model_dim, degenerate=degenerate
                )
                for n, w in (("state", state_dim), ("actions", action_dim))
            )
        )
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from e
    discrete = family == "pi05" if settings.discrete_state is None else settings.discrete_state
    if discrete and family == "pi0":
        raise ConfigError("discrete_state", got=True, expected="False for pi0, which takes the state as a token of its own")
    limit, size = settings.token_limit or TOKEN_LIMITS[family], settings.image_size or 224
    return ProcessorSpec(
        family=family,
        source="openpi",
        keys=keys,
        slots=OPENPI_SLOTS,
        resolution=(size, size),
        resizer="pil",
        prompt=PromptFormat("task_state" if discrete else "newline_token", limit),
        group=Group((*_joints(settings, state_dim, action_dim), norms, Pad(model_dim, model_dim, action_dim)), OPENPI.dtype),
        state_dim=state_dim,
        action_dim=action_dim,
        max_state_dim=model_dim,
        max_action_dim=model_dim,
        action_horizon=_horizon(config_path, config, settings),
        held=held_dimensions(norms),
    )


def _robot_width(name: str, declared: int | None, stats: dict[str, dict[str, Any]], mode: Mode, model_dim: int) -> int:
    if declared is not None:
        return declared
    key = "mean" if mode == "mean_std" else "q01"
    values = stats[name].get(key)
    width = len(values) if isinstance(values, list) else 0
    if not 0 < width < model_dim:
        raise ConfigError(
            f"{name} width",
            got=f"statistics of width {width}",
            expected=f"a declared width: {model_dim} is the model's padded one",
        )
    return width


def _horizon(path: Path, config: dict[str, Any], settings: OpenpiOptions) -> int:
    if "action_horizon" in config:
        return positive(path, config, "action_horizon")
    if settings.action_horizon is None:
        raise ConfigError("action_horizon", got=f"none, and none in {path}", expected="the number of actions in a chunk")
    return settings.action_horizon


def _joints(settings: OpenpiOptions, state_dim: int, action_dim: int) -> tuple[Transform, ...]:
    steps: list[Transform] = []
    if settings.aloha_joints:
        if (state_dim, action_dim) != (14, 14):
            raise ConfigError("aloha_joints", got=f"state {state_dim}, actions {action_dim}", expected="14 and 14")
        steps.append(AlohaJoints())
    if settings.relative and any(settings.relative):
        if len(settings.relative) > min(state_dim, action_dim):
            raise ConfigError(
                "relative", got=f"{len(settings.relative)} flags", expected=f"at most {min(state_dim, action_dim)}"
            )
        steps.append(Relative(settings.relative))
    return tuple(steps)
