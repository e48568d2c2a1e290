"""From a name or a folder to a loaded model and its processor. Everything is checked before anything is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from stretto.core.errors import CheckpointError, ConfigError
from stretto.models.pi0 import Pi0Model, build
from stretto.models.pi0_config import Pi0Config
from stretto.processors.openpi import OpenpiOptions, read_manifest, read_network_table
from stretto.processors.policy import PolicyProcessor, Preset
from stretto.processors.spec import positive, read_json
from stretto.processors.stats import Degenerate
from stretto.runtime.weights import LoadReport, load_weights, tensor_shapes

Layout = Literal["lerobot", "openpi"]
EMBEDDED = Path(__file__).resolve().parent.parent / "checkpoints"
"""Checkpoints that come with the package, by folder name."""


@dataclass(frozen=True)
class Loaded:
    """A policy checkpoint in memory."""

    model: Pi0Model
    processor: PolicyProcessor
    report: LoadReport
    path: Path
    layout: Layout
    trained_delay: int = 0
    """Most leading actions that were given clean in training; 0 where there were none or nobody says."""


def embedded() -> list[str]:
    return sorted(p.name for p in EMBEDDED.iterdir() if p.is_dir()) if EMBEDDED.is_dir() else []


def find_checkpoint(name: str | Path) -> Path:
    """Return the folder of a checkpoint: a path, or the name of one that comes with the package.

    Raises:
        CheckpointError: if there is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if str(name) in embedded():
        return EMBEDDED / str(name)
    raise CheckpointError(f"{name}: no such folder, and not one of the embedded checkpoints {embedded()}")


def layout_of(path: Path) -> Layout:
    """Tell which writer a checkpoint folder is from.

    Raises:
        CheckpointError: if it is of neither known layout; it lists what was found.
    """
    if (path / "config.json").is_file() and "type" in read_json(path / "config.json"):
        return "lerobot"
    if (path / "assets").is_dir():
        return "openpi"
    found = sorted(p.name for p in path.iterdir())[:12]
    raise CheckpointError(
        f"{path}: not a known layout: expected a LeRobot folder (config.json with `type`) or an openpi export "
        f"(model.safetensors and assets/<id>/norm_stats.json), found {found}"
    )


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files were read, all but the weights."""

    config: Pi0Config
    processor: PolicyProcessor
    path: Path
    layout: Layout
    trained_delay: int = 0


def open_checkpoint(
    name: str | Path,
    *,
    preset: Preset = None,
    tokenizer: str | Path | None = None,
    default_prompt: str | None = None,
    optional_cameras: Sequence[str] = (),
    degenerate: Degenerate = "refuse",
    pad_state_bins: bool = False,
    denoise_steps: int | None = None,
) -> Opened:
    """Read and check everything of a checkpoint but its weights.

    `pad_state_bins` is for a pi0.5 that LeRobot before 0.5 trained, whose prompt holds the state padded to the model's width.

    Raises:
        CheckpointError: if a file or statistic is missing, damaged or does not fit.
        ConfigError: if an option does not fit the checkpoint.
    """
    path = find_checkpoint(name)
    layout = layout_of(path)
    said = {"preset": preset, "tokenizer": tokenizer, "default_prompt": default_prompt, "degenerate": degenerate}
    if layout == "lerobot":
        only = {"optional_cameras": optional_cameras, "pad_state_bins": pad_state_bins}
        config, processor, trained_delay = _open_lerobot(path, denoise_steps, **said, **only)
    else:
        _refuse_for_openpi(optional_cameras, pad_state_bins)
        (config, processor), trained_delay = _open_openpi(path, denoise_steps, **said), 0
    _agree(config, processor, path)
    return Opened(config, processor, path, layout, trained_delay)


def _open_lerobot(path: Path, denoise_steps: int | None, **options: Any) -> tuple[Pi0Config, PolicyProcessor, int]:
    processor = PolicyProcessor.from_lerobot(path, **options)
    steps = {} if denoise_steps is None else {"num_inference_steps": denoise_steps}
    raw = read_json(path / "config.json")
    config = Pi0Config.from_lerobot({**raw, **steps})
    return config, processor, _trained_delay(raw, config)


def _open_openpi(path: Path, denoise_steps: int | None, **options: Any) -> tuple[Pi0Config, PolicyProcessor]:
    network, said = Pi0Config.from_openpi(tensor_shapes(path), **read_network_table(path)), read_manifest(path)
    processor = PolicyProcessor.from_openpi(
        path,
        family=said.get("family", network.family),
        options=OpenpiOptions(image_size=said.get("image_size", network.image_size)),
        **options,
    )
    config = replace(
        network,
        action_horizon=processor.spec.action_horizon,
        cameras=len(processor.spec.slots),
        tokenizer_max_length=processor.spec.prompt.token_limit,
        denoise_steps=network.denoise_steps if denoise_steps is None else denoise_steps,
    )
    return config, processor


def _refuse_for_openpi(optional_cameras: Sequence[str], pad_state_bins: bool) -> None:
    if optional_cameras:
        hint = "An openpi export's robot says `required = false` in its key map."
        raise ConfigError("optional_cameras", got=list(optional_cameras), expected="none", hint=hint)
    if pad_state_bins:
        raise ConfigError("pad_state_bins", got=True, expected="False for an openpi export, whose state is never padded")


def read_network(name: str | Path) -> Pi0Config:
    """Read the dimensions of a checkpoint's network; statistics and a tokenizer are not asked for.

    Raises:
        CheckpointError: if there is no such checkpoint, or a file of it is damaged.
        ConfigError: naming the dimension that is absent or not supported.
    """
    path = find_checkpoint(name)
    raw = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if layout_of(path) == "lerobot":
        return Pi0Config.from_lerobot(raw)
    said = {**raw, **read_manifest(path)}
    if "action_horizon" not in said:
        raise ConfigError("action_horizon", got=f"none in {path}", expected="one in config.json or stretto.json")
    told = read_network_table(path) | ({"tokenizer_max_length": said["token_limit"]} if "token_limit" in said else {})
    return Pi0Config.from_openpi(tensor_shapes(path), action_horizon=positive(path, said, "action_horizon"), **told)


def load_checkpoint(opened: Opened, *, device: torch.device, dtype: str, rtc: Sequence[str] | None = None) -> Loaded:
    """Build the network and load its weights, all of them or none.

    `rtc` names the modes of real-time chunking to offer; None takes `identity`, and before it `hard` if it was trained for.

    Raises:
        ConfigError: if a mode is unknown.
        CheckpointError: naming every tensor and file that is missing, unexpected, misshapen or damaged.
    """
    if rtc is None:
        rtc = ("hard", "identity") if opened.trained_delay else ("identity",)
    pixels: Literal["uint8", "float32"] = "uint8" if opened.processor.spec.resizer == "pil" else "float32"
    model = build(opened.config, device=device, dtype=dtype, pixels=pixels, rtc=rtc)
    report = load_weights(model, opened.path)
    return Loaded(model, opened.processor, report, opened.path, opened.layout, opened.trained_delay)


def _trained_delay(raw: Mapping[str, Any], config: Pi0Config) -> int:
    value = raw.get("rtc_training_max_delay") or 0
    if type(value) is not int or not 0 <= value < config.action_horizon:
        expected = f"an integer from 0 to {config.action_horizon - 1}"
        raise ConfigError("rtc_training_max_delay", got=repr(value), expected=expected)
    return value


def _agree(config: Pi0Config, processor: PolicyProcessor, path: Path) -> None:
    """Refuse a checkpoint whose network and processor were made for different inputs."""
    spec = processor.spec
    pairs = {
        "family": (config.family, spec.family),
        "cameras": (config.cameras, len(spec.slots)),
        "image size": (config.image_size, spec.resolution[0]),
        "token limit": (config.tokenizer_max_length, spec.prompt.token_limit),
        "action width": (config.action_dim, spec.max_action_dim),
        "action horizon": (config.action_horizon, spec.action_horizon),
    }
    wrong = [f"{name}: network {a}, processor {b}" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise CheckpointError(f"{path}: network and processor disagree: {'; '.join(wrong)}")
    if processor.tokenizer.vocabulary > config.vocab_size:
        raise ConfigError(
            "tokenizer", got=f"{processor.tokenizer.vocabulary} tokens", expected=f"at most the network's {config.vocab_size}"
        )
