"""Reduced pi0 and pi0.5 policies built from LeRobot's own classes, for the golden files.

Only sizes differ from the released models: every module, key name and code path is LeRobot's. Needs the environment that
`make_lerobot_golden.py` names; the fixtures it writes are read by tests that need none of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
STATE_DIM, ACTION_DIM = 8, 7
VOCAB_SIZE = 300
ACTION_NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]


@dataclass(frozen=True)
class TinySizes:
    """Every size that the released config.json implies by a variant name, spelled out for the reduced model."""

    vocab_size: int = VOCAB_SIZE
    image_size: int = 56
    patch_size: int = 14
    vision_width: int = 32
    vision_depth: int = 2
    vision_heads: int = 2
    vision_mlp_dim: int = 64
    lm_width: int = 64
    lm_mlp_dim: int = 128
    expert_width: int = 32
    expert_mlp_dim: int = 64
    depth: int = 3
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 16


def as_lerobot_image(image_HWC: np.ndarray[Any, Any]) -> torch.Tensor:
    """Turn a uint8 image into what LeRobot's environment code hands to the policy: float [3, H, W] in [0, 1]."""
    return torch.from_numpy(image_HWC).permute(2, 0, 1).contiguous().to(torch.float32) / 255


def build_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Train and save a 300-token byte-level tokenizer with PaliGemma's special ids (pad 0, eos 1, bos 2, unk 3)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        "Task: pick up the red block, State: 128 127 255 0 12;\nAction: ",
        "put the cup on the plate\n",
        "open the drawer",
    ]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    assert len(fast) == VOCAB_SIZE, len(fast)
    fast.save_pretrained(str(folder))
    return fast


def build_config(family: str, *, image_size: int, norm_mode: NormalizationMode | None = None, **overrides: Any) -> Any:
    """Make a LeRobot policy config with three cameras; `norm_mode` replaces the default of the family."""
    config_class = {"pi05": PI05Config, "pi0": PI0Config}[family]
    features = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size)) for name in CAMERAS
    }
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    config = config_class(
        device="cpu",
        dtype="float32",
        chunk_size=10,
        n_action_steps=10,
        image_resolution=(image_size, image_size),
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        **overrides,
    )
    if norm_mode is not None:
        config.normalization_mapping = {"VISUAL": NormalizationMode.IDENTITY, "STATE": norm_mode, "ACTION": norm_mode}
    return config


def _shrink(module: ModuleType, sizes: TinySizes) -> None:
    """Replace the size lookups of a LeRobot modelling module; the network code itself stays as released."""
    full_paligemma = modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma
    full_expert = modeling_pi05.PiGemmaForCausalLM

    def paligemma(config: Any) -> Any:
        config.vocab_size = config.text_config.vocab_size = sizes.vocab_size
        config.projection_dim = config.vision_config.projection_dim = sizes.lm_width
        config.hidden_size = sizes.lm_width
        config.vision_config.hidden_size = sizes.vision_width
        config.vision_config.num_hidden_layers = sizes.vision_depth
        config.vision_config.num_attention_heads = sizes.vision_heads
        config.vision_config.intermediate_size = sizes.vision_mlp_dim
        return full_paligemma(config)

    def expert(config: Any) -> Any:
        config.vocab_size = sizes.vocab_size
        return full_expert(config)

    def gemma_config(variant: str) -> Any:
        width, mlp = {
            "gemma_2b": (sizes.lm_width, sizes.lm_mlp_dim),
            "gemma_300m": (sizes.expert_width, sizes.expert_mlp_dim),
        }[variant]
        return module.GemmaConfig(width, sizes.depth, mlp, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)

    module.PaliGemmaForConditionalGenerationWithPiGemma = paligemma
    module.PiGemmaForCausalLM = expert
    module.get_gemma_config = gemma_config


def _randomise(policy: torch.nn.Module, seed: int) -> None:
    """Fill every parameter so that no term is silent: norms, biases and adaRMS projections are all non-zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(policy.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if ".vision_tower." in name and "norm" in name and name.endswith("weight"):
            value = 1 + 0.2 * noise
        elif "norm" in name and ".dense." not in name:
            value = 0.2 * noise
        elif "position_embedding" in name or name.endswith("bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = noise / parameter.shape[-1] ** 0.5
        else:
            value = noise / parameter[0].numel() ** 0.5
        parameter.data.copy_(value)


def build_policy(family: str, sizes: TinySizes, *, seed: int, **config_overrides: Any) -> Any:
    """Build a reduced `PI05Policy` or `PI0Policy` in fp32 on the CPU with seeded weights."""
    module = {"pi05": modeling_pi05, "pi0": modeling_pi0}[family]
    original = {
        name: getattr(module, name)
        for name in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM", "get_gemma_config")
    }
    _shrink(module, sizes)
    try:
        policy_class = {"pi05": modeling_pi05.PI05Policy, "pi0": modeling_pi0.PI0Policy}[family]
        policy = policy_class(build_config(family, image_size=sizes.image_size, **config_overrides))
    finally:
        for name, value in original.items():
            setattr(module, name, value)
    _randomise(policy, seed)
    return policy.eval()


def write_json(path: Path, content: Any) -> None:
    """Write stable, readable JSON."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def sizes_as_dict(sizes: TinySizes) -> dict[str, Any]:
    """Spell the sizes as the `stretto` object that a checkpoint of unreleased size carries in its config.json."""
    heads = {"heads": sizes.num_heads, "kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim, "depth": sizes.depth}
    return {
        "vocab_size": sizes.vocab_size,
        "vision": {
            "width": sizes.vision_width,
            "depth": sizes.vision_depth,
            "mlp": sizes.vision_mlp_dim,
            "heads": sizes.vision_heads,
            "patch": sizes.patch_size,
        },
        "language": {"width": sizes.lm_width, "mlp": sizes.lm_mlp_dim, **heads},
        "expert": {"width": sizes.expert_width, "mlp": sizes.expert_mlp_dim, **heads},
    }
