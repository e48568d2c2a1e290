"""The small policy: a pi0.5 of a few million weights, described once, as LeRobot describes a policy.

Its `config.json` is made here; the network, the recipe's training and the export all read their sizes from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from stretto.evals.metaworld import INSTRUCTIONS
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_net import Pi0Net
from stretto.processors.prompts import PromptFormat
from stretto.processors.stats import LEROBOT, Normalizer, build_normalizer
from stretto.processors.tokenizers import Tokenizer

CAMERAS = ("observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb")
TOKEN_LIMIT = 64
STATE_DIM = ACTION_DIM = 4
SIZES = {
    # Patches of 10 pixels: 64 tokens a camera at 80 pixels.
    "small": {
        "vision": {"width": 192, "depth": 4, "mlp": 512, "heads": 4, "patch": 10},
        "language": {"width": 256, "depth": 4, "mlp": 640, "heads": 4, "kv_heads": 1, "head_dim": 64},
        "expert": {"width": 128, "depth": 4, "mlp": 384, "heads": 4, "kv_heads": 1, "head_dim": 64},
    },
    # For tests: learns nothing, runs everything.
    "toy": {
        "vision": {"width": 32, "depth": 1, "mlp": 64, "heads": 2, "patch": 20},
        "language": {"width": 32, "depth": 2, "mlp": 64, "heads": 2, "kv_heads": 1, "head_dim": 16},
        "expert": {"width": 16, "depth": 2, "mlp": 32, "heads": 2, "kv_heads": 1, "head_dim": 16},
    },
}


def lerobot_config(size: str, image_size: int, horizon: int, vocabulary: int, max_delay: int) -> dict[str, Any]:
    """Return the content of `config.json`; what LeRobot has no field for is under `stretto`."""
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": {
            **{name: {"type": "VISUAL", "shape": [3, image_size, image_size]} for name in CAMERAS},
            "observation.state": {"type": "STATE", "shape": [STATE_DIM]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [ACTION_DIM]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": horizon,
        "n_action_steps": horizon,
        "max_state_dim": STATE_DIM,
        "max_action_dim": ACTION_DIM,
        "num_inference_steps": 10,
        "min_period": 4e-3,
        "max_period": 4.0,
        "image_resolution": [image_size, image_size],
        "empty_cameras": 0,
        "tokenizer_max_length": TOKEN_LIMIT,
        "use_relative_actions": False,
        "relative_exclude_joints": [],
        "action_feature_names": None,
        "rtc_config": None,
        "rtc_training_max_delay": max_delay,
        "stretto": {**SIZES[size], "vocab_size": vocabulary},
    }


def build_tokenizer(path: Path) -> Tokenizer:
    """Write a byte-level `tokenizer.json` with PaliGemma's special ids, which spells any text and knows our words whole."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # No digits here, so numbers stay one token a digit.
    backend.train_from_iterator([f"Task: {text}, State:;\nAction: " for text in INSTRUCTIONS.values()] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    path.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))
    return Tokenizer(2, backend.get_vocab_size(), path, lambda text: tuple(backend.encode(text, add_special_tokens=False).ids))


def statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return LeRobot's statistics of [N, D] values."""
    quantiles = {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0), **quantiles}
    out = {name: value.astype(np.float32) for name, value in found.items()}
    return {**out, "count": np.array([len(values)], np.float32)}


def normalizer(feature: str, stats: dict[str, np.ndarray], width: int) -> Normalizer:
    return build_normalizer(feature, "quantiles", stats, width=width, rule=LEROBOT)


def encode_prompts(
    tokenizer: Tokenizer, instructions: Sequence[str], states_NS: np.ndarray, stats: dict[str, np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [N, L], padded with 0 to the longest, and their counts [N]."""
    prompts = PromptFormat("task_state", TOKEN_LIMIT)
    normal = normalizer("observation.state", stats, STATE_DIM).normalize(states_NS.astype(np.float32))
    rows = [prompts.encode("prompt", tokenizer, text, state) for text, state in zip(instructions, normal, strict=True)]
    counts = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, counts


def build_net(config: Pi0Config, seed: int) -> Pi0Net:
    """Return the network in fp32 with fresh weights: identity norms, and residual branches that start closed."""
    torch.manual_seed(seed)
    net = Pi0Net(config, torch.float32)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.startswith(("prefix.attention_norms", "prefix.mlp_norms", "time.dense")):
                parameter.zero_()
            elif name == "prefix.embed":
                # The network multiplies embeddings by sqrt(width).
                parameter.normal_(std=1.0 / math.sqrt(parameter.shape[1]))
            elif name == "vision.position":
                parameter.normal_(std=0.02)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                parameter.zero_()
        # Actions enter with a range of about one, like everything else the expert adds up.
        net.action_in.weight.normal_(std=1.0 / math.sqrt(config.action_dim))
    return net
