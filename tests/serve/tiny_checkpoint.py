"""A reduced pi0.5 checkpoint folder for a robot of any width, made of the golden one: its weights, other statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

LEROBOT = Path(__file__).parents[1] / "golden" / "lerobot"
ROBOTS: dict[str, dict[str, int]] = {
    "libero": {"cameras": 2, "state_dim": 8, "action_dim": 7, "horizon": 10},
    "droid": {"cameras": 2, "state_dim": 8, "action_dim": 8, "horizon": 15},
    "aloha": {"cameras": 3, "state_dim": 14, "action_dim": 14, "horizon": 50},
}


def write_checkpoint(folder: Path, *, cameras: int = 3, state_dim: int = 8, action_dim: int = 7, horizon: int = 10) -> Path:
    """Write a LeRobot folder with the tokenizer in it."""
    source = LEROBOT / "pi05_tiny"
    folder.mkdir(parents=True)
    for path in [*source.glob("policy_*processor*"), source / "model.safetensors", *(LEROBOT / "tokenizer").iterdir()]:
        shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    names = [name for name in config["input_features"] if ".images." in name]
    for name in names[cameras:]:
        del config["input_features"][name]
    config["input_features"]["observation.state"]["shape"] = [state_dim]
    config["output_features"]["action"]["shape"] = [action_dim]
    config |= {"chunk_size": horizon, "n_action_steps": horizon, "stretto": json.loads((source / "sizes.json").read_text())}
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("policy_*processor_step_*.safetensors"):
        save_file({name: _widen(name, value, state_dim, action_dim) for name, value in load_file(path).items()}, path)
    for path in folder.glob("policy_*processor.json"):
        path.write_text(json.dumps(_resize(json.loads(path.read_text()), config)))
    return folder


def _widen(name: str, value: np.ndarray[Any, Any], state_dim: int, action_dim: int) -> np.ndarray[Any, Any]:
    """Give every column the spread of the first, so that none is degenerate."""
    if name.endswith(".count"):
        return value
    return np.full(state_dim if name.startswith("observation.state") else action_dim, value[0], value.dtype)


def _resize(pipeline: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    known = {**config["input_features"], **config["output_features"]}
    for step in pipeline["steps"]:
        features = step["config"].get("features")
        if features is not None:
            step["config"]["features"] = {name: known[name] for name in features if name in known}
    return pipeline
