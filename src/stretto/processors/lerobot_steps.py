"""The two pipeline files of a LeRobot checkpoint: their steps, in order, and the statistics that the steps name.

The statistics of a step are read from the file in its `state_file` entry: the number in such names has moved between
versions. A step that is not known is refused, because what it does to a robot's numbers is not known either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy

from stretto.core.errors import CheckpointError
from stretto.processors.spec import read_json, table

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
STEPS = {
    PRE: {
        "rename_observations_processor",
        "to_batch_processor",
        "relative_actions_processor",
        "normalizer_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "pi0_new_line_processor",
        "tokenizer_processor",
        "device_processor",
    },
    POST: {"unnormalizer_processor", "absolute_actions_processor", "device_processor"},
}
OLD_BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")


@dataclass(frozen=True)
class Steps:
    """The steps of one pipeline file, by registry name, in order."""

    path: Path
    configs: Mapping[str, dict[str, Any]]
    files: Mapping[str, str]

    def config(self, name: str) -> dict[str, Any]:
        if name not in self.configs:
            raise CheckpointError(f"{self.path}: no step {name}; found {list(self.configs)}")
        return self.configs[name]

    def stats(self, name: str) -> dict[str, dict[str, Any]]:
        """Return feature -> statistic -> array, from the step's own state file."""
        self.config(name)
        if name not in self.files:
            return {}
        path = self.path.parent / self.files[name]
        try:
            flat = safetensors.numpy.load_file(path)
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"{path}: state of step {name} cannot be read ({e})") from e
        stats: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            feature, _, stat = key.rpartition(".")
            stats.setdefault(feature, {})[stat] = value
        return stats


def read_steps(folder: Path, name: str) -> Steps:
    """Read one pipeline file.

    Raises:
        CheckpointError: if it is missing, or has steps that are unknown, repeated or malformed.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(_no_pipeline(folder, name))
    steps = read_json(path).get("steps")
    if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps):
        raise CheckpointError(f"{path}: steps: expected a list of objects")
    names = [str(s.get("registry_name") or s.get("class")) for s in steps]
    unknown = [n for n in names if n not in STEPS[name]]
    if unknown:
        raise CheckpointError(f"{path}: unknown steps {unknown}; known are {sorted(STEPS[name])}")
    twice = sorted({n for n in names if names.count(n) > 1} - {"device_processor"})
    if twice:
        raise CheckpointError(f"{path}: steps {twice} occur more than once")
    for step, step_name in zip(steps, names, strict=True):
        cast = table(path, step, "config").get("float_dtype")
        if cast not in (None, "float32", "float"):
            raise CheckpointError(f"{path}: {step_name}.float_dtype: got {cast!r}, expected float32 or none")
        state_file = step.get("state_file", "x")
        if not isinstance(state_file, str) or Path(state_file).name != state_file:
            raise CheckpointError(
                f"{path}: {step_name}.state_file: got {state_file!r}, expected a file name in the same folder"
            )
    configs = {n: table(path, s, "config") for s, n in zip(steps, names, strict=True)}
    return Steps(path, configs, {n: s["state_file"] for s, n in zip(steps, names, strict=True) if "state_file" in s})


def _no_pipeline(folder: Path, name: str) -> str:
    weights = folder / "model.safetensors"
    if weights.is_file():
        with safetensors.safe_open(weights, framework="numpy") as f:
            tensors = f.keys()
        old = sorted(k for k in tensors if any(mark in k for mark in OLD_BUFFERS))
        if old:
            return (
                f"{folder}: an old LeRobot checkpoint: no {name}, and normalisation buffers inside the weights "
                f"({old[0]}, ...). Migrate it with LeRobot's migrate_policy_normalization script first"
            )
    return f"{folder / name}: no such file, so the normalisation of this checkpoint is not known"
