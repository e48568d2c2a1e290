"""Write the trained policy as a LeRobot folder: the layout, the names and the processors of a full pi0.5 checkpoint.

Weights are stored in fp16, which keeps more digits than bf16 at half the size of fp32; the loader reads either.

Usage: python recipes/metaworld/export.py --trained out/metaworld/train --out out/metaworld/pi05-metaworld
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from small_pi05 import CAMERAS, TOKEN_LIMIT

from stretto.evals.metaworld import BASE_CAMERA, STATE, WRIST_CAMERA
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_net import Pi0Net
from stretto.models.pi0_weights import weight_map

PRE, POST = "policy_preprocessor", "policy_postprocessor"
PRE_STATE = f"{PRE}_step_3_normalizer_processor.safetensors"
POST_STATE = f"{POST}_step_0_unnormalizer_processor.safetensors"

RENAMES = {BASE_CAMERA: CAMERAS[0], WRIST_CAMERA: CAMERAS[1], STATE: "observation.state"}
"""What the robot calls its cameras and state -> the names in `config.json`."""


def processors(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the two processor files of a LeRobot pi0.5 with this `config.json`."""
    norm_map = raw["normalization_mapping"]
    every = {"eps": 1e-08, "features": {**raw["input_features"], **raw["output_features"]}, "norm_map": norm_map}
    actions = {"eps": 1e-08, "features": raw["output_features"], "norm_map": norm_map}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    tokenizer = {
        "max_length": TOKEN_LIMIT,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "tokenizer.json",
    }
    relative = {"enabled": False, "exclude_joints": [], "action_names": None}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": RENAMES}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "relative_actions_processor", "config": relative},
        {"registry_name": "normalizer_processor", "config": every, "state_file": PRE_STATE},
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {"registry_name": "tokenizer_processor", "config": tokenizer},
        device,
    ]
    after = [
        {"registry_name": "unnormalizer_processor", "config": actions, "state_file": POST_STATE},
        {"registry_name": "absolute_actions_processor", "config": {"enabled": False}},
        device,
    ]
    return {"name": PRE, "steps": before}, {"name": POST, "steps": after}


def export(trained: Path, out: Path) -> int:
    """Write the folder and return its size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    raw = json.loads((trained / "config.json").read_text())
    net = Pi0Net(Pi0Config.from_lerobot(raw), torch.float32)
    net.load_state_dict(torch.load(trained / "weights.pt", map_location="cpu", weights_only=True))
    weights = {f"model.{name}": view.half().contiguous() for name, view in weight_map(net).views.items()}
    worst = max(float(w.abs().max()) for w in weights.values())
    if not np.isfinite(worst):
        raise SystemExit("a weight is not finite in fp16: nothing was exported")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    stats = {name: torch.from_numpy(value) for name, value in np.load(trained / "stats.npz").items()}
    for name in (PRE_STATE, POST_STATE):
        save_file(stats, out / name)
    for name, content in zip((PRE, POST), processors(raw), strict=True):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    shutil.copyfile(trained / "tokenizer.json", out / "tokenizer.json")
    for path in out.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {len(weights)} tensors, {size / 1e6:.2f} MB", flush=True)
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trained", default="out/metaworld/train", help="what train.py wrote")
    parser.add_argument("--out", default="out/metaworld/pi05-metaworld")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args()
    export(Path(options.trained), Path(options.out))


if __name__ == "__main__":
    main()
