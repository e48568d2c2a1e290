"""The trained policy as it comes out of training, without the runtime: to steer the recipe and to check on it.

It answers like any policy of the project: `infer(observation) -> {"actions": [H, 4]}`, or many at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_pi05 import ACTION_DIM, encode_prompts, normalizer
from tokenizers import Tokenizer as Backend
from train import sample_actions

from stretto.evals.metaworld import BASE_CAMERA, STATE, WRIST_CAMERA
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_net import Pi0Net
from stretto.processors.tokenizers import Tokenizer


def load_stats(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return feature -> statistic -> values, as `prepare` of train.py stored them."""
    stats: dict[str, dict[str, np.ndarray]] = {}
    for name, value in np.load(folder / "stats.npz").items():
        feature, _, statistic = name.rpartition(".")
        stats.setdefault(feature, {})[statistic] = value
    return stats


class Reference:
    """Read from the output folder of train.py."""

    def __init__(self, folder: Path, device: str = "cpu", seed: int = 0) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.device = torch.device(device)
        self.net = Pi0Net(Pi0Config.from_lerobot(raw), torch.float32)
        self.net.load_state_dict(torch.load(folder / "weights.pt", map_location="cpu", weights_only=True))
        self.net.refresh()
        self.net.to(self.device).eval()
        self.stats = load_stats(folder)
        self.actions = normalizer("action", self.stats["action"], ACTION_DIM)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        encode = lambda text: tuple(backend.encode(text, add_special_tokens=False).ids)  # noqa: E731
        self.tokenizer = Tokenizer(backend.token_to_id("<bos>"), backend.get_vocab_size(), folder, encode)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        return self.infer_batch([obs])[0]

    def infer_batch(self, observations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        images = np.stack([np.stack([o[BASE_CAMERA], o[WRIST_CAMERA]]) for o in observations])
        states = np.stack([o[STATE] for o in observations])
        prompts = [str(o["prompt"]) for o in observations]
        tokens, counts = encode_prompts(self.tokenizer, prompts, states, self.stats["observation.state"])
        config = self.net.config
        shape = (len(images), config.action_horizon, config.action_dim)
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        pixels = torch.from_numpy(images).to(self.device)
        chunk = sample_actions(self.net, pixels, tokens.to(self.device), counts.to(self.device), noise)
        return [{"actions": self.actions.unnormalize(row)} for row in chunk.float().cpu().numpy()]
