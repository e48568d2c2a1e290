"""LeRobot folders: `config.json`, `policy_preprocessor.json`, `policy_postprocessor.json` and the files that they name.

Source: LeRobot 0.6.1 processor pipelines of pi0 and pi0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.core.errors import CheckpointError, ConfigError
from stretto.processors.lerobot_steps import POST, PRE, Steps, read_steps
from stretto.processors.presets import ImageKey, KeyMap, StateKey, key_map
from stretto.processors.prompts import PromptFormat, Style
from stretto.processors.spec import FAMILIES, ProcessorSpec, positive, read_json, table
from stretto.processors.stats import LEROBOT, Degenerate, Mode, Normalizer, Rule, build_normalizer
from stretto.processors.transforms import Group, Normalize, Pad, Relative, Transform

STATE, ACTION = "observation.state", "action"
MODES: dict[str, Mode] = {
    "IDENTITY": "identity",
    "MEAN_STD": "mean_std",
    "MIN_MAX": "min_max",
    "QUANTILES": "quantiles",
    "QUANTILE10": "quantile10",
}
Stats = Mapping[str, Mapping[str, Any]]


def lerobot_spec(
    folder: Path,
    *,
    preset: str | KeyMap | Mapping[str, Any] | Path | None = None,
    optional_cameras: Sequence[str] = (),
    stats: Stats | None = None,
    degenerate: Degenerate = "refuse",
    pad_state_bins: bool = False,
) -> ProcessorSpec:
    """Read a LeRobot folder.

    `preset` lays a robot's keys onto the checkpoint's cameras; without one the checkpoint's own feature names are the keys.
    `stats` replaces the checkpoint's statistics. `pad_state_bins` is for pi0.5 checkpoints trained before LeRobot 0.5.

    Raises:
        CheckpointError: naming the file, step, feature, statistic and dimension that cannot be used.
        ConfigError: if the preset does not fit the checkpoint's cameras or state.
    """
    path, config = folder / "config.json", read_json(folder / "config.json")
    family = config.get("type")
    if family not in FAMILIES:
        raise CheckpointError(f"{path}: type: got {family!r}, expected one of {list(FAMILIES)}")
    pre, post = read_steps(folder, PRE), read_steps(folder, POST)
    state_dim, action_dim = _width(path, config, "input_features", STATE), _width(path, config, "output_features", ACTION)
    max_state, max_action = (positive(path, config, f"max_{n}_dim", 32) for n in ("state", "action"))
    for name, width, limit in (("state", state_dim, max_state), ("action", action_dim, max_action)):
        if width > limit:
            raise CheckpointError(f"{path}: {name} is {width} wide, more than max_{name}_dim {limit}")
    norms = Normalize(
        _normalizer(path, config, pre, "normalizer_processor", STATE, "STATE", state_dim, stats, degenerate),
        _normalizer(path, config, post, "unnormalizer_processor", ACTION, "ACTION", action_dim, stats, degenerate),
    )
    _require_identity_images(path, config, pre)
    steps: list[Transform] = [*_relative(pre, post, state_dim, action_dim), norms, Pad(max_state, max_action, action_dim)]
    slots, required = _cameras(path, config, optional_cameras)
    own = _own_keys(pre, slots, required)
    keys = own if preset is None else key_map(preset).onto([s for s in slots if ".empty_camera_" not in s], required)
    return ProcessorSpec(
        family=family,
        source="lerobot",
        keys=keys,
        slots=tuple(slots),
        resolution=_resolution(path, config),
        resizer="torch",
        prompt=_prompt_format(pre, max_state if pad_state_bins else 0),
        group=Group(tuple(steps), LEROBOT.dtype),
        state_dim=state_dim,
        action_dim=action_dim,
        max_state_dim=max_state,
        max_action_dim=max_action,
        action_horizon=positive(path, config, "chunk_size"),
        held=held_dimensions(norms),
    )


def held_dimensions(norms: Normalize) -> tuple[str, ...]:
    """Name the dimensions that a normaliser holds at a constant."""
    return tuple(f"{n.feature}[{i}]" for n in (norms.state_stats, norms.action_stats) for i in n.held.nonzero()[0])


def _width(path: Path, config: dict[str, Any], group: str, name: str) -> int:
    feature = table(path, config, group).get(name)
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise CheckpointError(f"{path}: {group}.{name}: got {feature!r}, expected a feature with a shape of one number")
    return shape[0]


def _normalizer(
    path: Path,
    config: dict[str, Any],
    steps: Steps,
    step: str,
    feature: str,
    kind: str,
    width: int,
    stats: Stats | None,
    degenerate: Degenerate,
) -> Normalizer:
    own = steps.config(step)
    declared = table(path, config, "normalization_mapping").get(kind)
    used = table(steps.path, own, "norm_map").get(kind)
    if not isinstance(used, str) or used not in MODES:
        raise CheckpointError(f"{steps.path}: {step}.norm_map.{kind}: got {used!r}, expected one of {list(MODES)}")
    if declared is not None and declared != used:
        raise CheckpointError(f"{steps.path}: {step} uses {used} for {kind}, but {path} declares {declared}")
    only = own.get("normalize_observation_keys")
    listed = table(steps.path, own, "features")
    if MODES[used] != "identity" and (feature not in listed or (only is not None and kind != "ACTION" and feature not in only)):
        raise CheckpointError(
            f"{steps.path}: {step} declares {used} for {kind} but would skip {feature}; it lists {sorted(listed)}"
        )
    shape = table(steps.path, listed, feature).get("shape")
    if shape is not None and shape != [width]:
        raise CheckpointError(f"{steps.path}: {step}.features.{feature}: got shape {shape}, but {path} says [{width}]")
    found = stats if stats is not None else steps.stats(step)
    eps = own.get("eps", LEROBOT.eps)
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise CheckpointError(f"{steps.path}: {step}.eps: got {eps!r}, expected a small number")
    rule = Rule(LEROBOT.name, float(eps), LEROBOT.always, LEROBOT.dtype)
    try:
        return build_normalizer(feature, MODES[used], found.get(feature), width=width, rule=rule, degenerate=degenerate)
    except CheckpointError as e:
        raise CheckpointError(f"{steps.path} ({steps.files.get(step, 'no state_file')}): {e}") from e


def _require_identity_images(path: Path, config: dict[str, Any], pre: Steps) -> None:
    for where, raw, name in (
        (path, config, "normalization_mapping"),
        (pre.path, pre.config("normalizer_processor"), "norm_map"),
    ):
        mode = table(where, raw, name).get("VISUAL", "IDENTITY")
        if mode != "IDENTITY":
            raise CheckpointError(f"{where}: VISUAL normalisation: got {mode}, expected IDENTITY for pi0 and pi0.5")


def _relative(pre: Steps, post: Steps, state_dim: int, action_dim: int) -> list[Transform]:
    step = pre.configs.get("relative_actions_processor", {})
    on = bool(step.get("enabled")), bool(post.configs.get("absolute_actions_processor", {}).get("enabled"))
    if on[0] != on[1]:
        raise CheckpointError(f"{pre.path}: relative actions are {on[0]} before the model but {on[1]} after it ({post.path})")
    if not on[0]:
        return []
    excluded, names = ([n.lower() for n in _names(pre.path, step, key)] for key in ("exclude_joints", "action_names"))
    excluded = [n for n in excluded if n]
    mask = [not any(part in name for part in excluded) for name in names[:action_dim]]
    mask += [True] * (action_dim - len(mask))
    if state_dim < action_dim:
        raise CheckpointError(f"{pre.path}: relative actions need a state of at least {action_dim} numbers, got {state_dim}")
    return [Relative(tuple(mask))]


def _names(path: Path, step: dict[str, Any], key: str) -> list[str]:
    names = step.get(key) or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise CheckpointError(f"{path}: relative_actions_processor.{key}: got {names!r}, expected a list of names")
    return names


def _cameras(path: Path, config: dict[str, Any], optional: Sequence[str]) -> tuple[list[str], list[str]]:
    features, count = table(path, config, "input_features"), config.get("empty_cameras") or 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 16:
        raise CheckpointError(f"{path}: empty_cameras: got {count!r}, expected a small whole number")
    slots = [k for k, f in features.items() if isinstance(f, dict) and f.get("type") == "VISUAL"]
    empty = [f"observation.images.empty_camera_{i}" for i in range(count)]
    slots += [e for e in empty if e not in slots]
    real = [s for s in slots if s not in empty]
    if not real:
        raise CheckpointError(f"{path}: input_features: no camera among {sorted(features)}")
    unknown = [o for o in optional if o not in real]
    if unknown:
        raise ConfigError("optional_cameras", got=unknown, expected=f"cameras of the checkpoint: {real}")
    return slots, [s for s in real if s not in optional]


def _own_keys(pre: Steps, slots: Sequence[str], required: Sequence[str]) -> KeyMap:
    renamed = table(pre.path, pre.configs.get("rename_observations_processor", {}), "rename_map")
    if not all(isinstance(v, str) for v in renamed.values()):
        raise CheckpointError(f"{pre.path}: rename_map: got {renamed}, expected names")
    before = {new: old for old, new in renamed.items()}
    if len(before) != len(renamed):
        raise CheckpointError(f"{pre.path}: rename_map: got {renamed}, expected each new name once")
    images = tuple(ImageKey(before.get(s, s), s, s in required) for s in slots if ".empty_camera_" not in s)
    return KeyMap("lerobot", images, (StateKey(before.get(STATE, STATE)),), prompt="task", prompt_aliases=("prompt",))


def _resolution(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    size = config.get("image_resolution", [224, 224])
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{path}: image_resolution: got {size!r}, expected [height, width]")
    return size[0], size[1]


def _prompt_format(pre: Steps, pad_state_to: int) -> PromptFormat:
    names = list(pre.configs)
    styles: dict[str, Style] = {
        "pi05_prepare_state_tokenizer_processor_step": "task_state",
        "pi0_new_line_processor": "newline_text",
    }
    found = [n for n in names if n in styles]
    if len(found) != 1:
        raise CheckpointError(f"{pre.path}: got prompt steps {found}, expected exactly one of {list(styles)}")
    if names.index("tokenizer_processor" if "tokenizer_processor" in names else found[0]) <= names.index(found[0]):
        raise CheckpointError(f"{pre.path}: expected a tokenizer_processor after {found[0]}, got {names}")
    if styles[found[0]] == "task_state" and names.index("normalizer_processor") > names.index(found[0]):
        raise CheckpointError(f"{pre.path}: the state is binned before it is normalised: {names}")
    tokenizer = pre.config("tokenizer_processor")
    if tokenizer.get("padding_side", "right") != "right":
        raise CheckpointError(
            f"{pre.path}: tokenizer_processor.padding_side: got {tokenizer['padding_side']!r}, expected 'right'"
        )
    return PromptFormat(styles[found[0]], positive(pre.path, tokenizer, "max_length"), pad_state_to)
