"""Golden files of LeRobot's pre- and post-processors, its image resize, and whole policies from observation to action."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from lerobot.configs import NormalizationMode
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.processor import tokenizer_processor
from lerobot_tiny import (
    ACTION_DIM,
    ACTION_NAMES,
    CAMERAS,
    STATE_DIM,
    as_lerobot_image,
    build_config,
    write_json,
)
from patterns import pattern_image
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

MODES = NormalizationMode
PIPELINES: dict[str, tuple[str, NormalizationMode | None, dict[str, Any]]] = {
    "pi05_quantiles": ("pi05", None, {}),
    "pi05_quantile10": ("pi05", MODES.QUANTILE10, {}),
    "pi05_min_max": ("pi05", MODES.MIN_MAX, {}),
    "pi05_identity": ("pi05", MODES.IDENTITY, {}),
    "pi05_short_prompt": ("pi05", None, {"tokenizer_max_length": 20}),
    "pi05_relative_actions": ("pi05", None, {"use_relative_actions": True, "action_feature_names": ACTION_NAMES}),
    "pi0_mean_std": ("pi0", None, {}),
    "pi0_quantiles": ("pi0", MODES.QUANTILES, {}),
    "pi0_relative_actions": ("pi0", None, {"use_relative_actions": True, "action_feature_names": ACTION_NAMES}),
}
TASKS = [
    "pick up the red block",
    "  put_the_cup\non the plate ",
    "open the drawer\n",
    "Stelle die Tasse zurück \u2013 bitte",
    "",
    "state below and above the quantiles",
    "degenerate columns off their value",
]
IMAGES = [(224, 224), (480, 640), (720, 1280), (640, 480), (240, 320), (101, 37), (60, 80), (56, 224), (3, 500)]
POLICY_CASES: dict[str, dict[str, Any]] = {
    "all_cameras": {"sizes": [(60, 80), (60, 80), (48, 48)], "present": [0, 1, 2]},
    "middle_camera_missing": {"sizes": [(60, 80), (60, 80), (48, 48)], "present": [0, 2]},
    "already_at_model_size": {"sizes": [(56, 56), (56, 56), (56, 56)], "present": [0, 1, 2]},
    "one_tall_camera": {"sizes": [(120, 40), (56, 56), (56, 56)], "present": [0]},
}


def make_stats(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw consistent statistics; the last column never moved (its quantiles, range and deviation are degenerate)."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(width, generator=generator)
    std = 0.2 + torch.rand(width, generator=generator)
    stats = {"mean": mean, "std": std, "min": mean - 3 * std, "max": mean + 2.5 * std}
    stats |= {"q01": mean - 2.2 * std, "q10": mean - 1.3 * std, "q50": mean.clone()}
    stats |= {"q90": mean + 1.2 * std, "q99": mean + 2.1 * std}
    for name in stats:
        stats[name][-1] = 0.0 if name == "std" else 0.25
    return {**stats, "count": torch.tensor([1000.0])}


STATS = {"observation.state": make_stats(STATE_DIM, 1), "action": make_stats(ACTION_DIM, 2)}


@contextmanager
def local_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Iterator[None]:
    """Let the tokenizer step load `tokenizer` instead of the gated one; its saved config still names the latter."""
    with patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda name, **_: tokenizer):
        yield


def build_pipelines(config: Any, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    make = {"pi05": make_pi05_pre_post_processors, "pi0": make_pi0_pre_post_processors}[config.type]
    with local_tokenizer(tokenizer):
        return make(config, dataset_stats=STATS)


def make_states() -> torch.Tensor:
    """[tasks, STATE_DIM] raw states: inside the statistics, at their edges, far outside, and off a degenerate column."""
    stats = STATS["observation.state"]
    generator = torch.Generator().manual_seed(3)
    spread = torch.rand(len(TASKS), STATE_DIM, generator=generator) * 1.6 - 0.8
    states = stats["mean"] + spread * 2 * stats["std"]
    states[2], states[3], states[4] = stats["q01"], stats["q99"], stats["mean"]
    states[5, ::2], states[5, 1::2] = (stats["q01"] - 1)[::2], (stats["q99"] + 1)[1::2]
    states[5, -1] = 0.25
    states[6, -1] = 0.26
    return states


def make_model_actions() -> torch.Tensor:
    """[tasks, 10, ACTION_DIM] normalised actions, well beyond [-1, 1]."""
    generator = torch.Generator().manual_seed(4)
    actions = torch.randn(len(TASKS), 10, ACTION_DIM, generator=generator)
    actions[:, 0] = torch.linspace(-1, 1, ACTION_DIM)
    actions[:, 1] = 2.5
    return actions


def write_pipeline(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Run one pre- and post-processor pair on every state, task and action chunk; save it as LeRobot does."""
    family, mode, overrides = PIPELINES[name]
    config = build_config(family, image_size=224, norm_mode=mode, **overrides)
    pre, post = build_pipelines(config, tokenizer)
    pre.save_pretrained(folder)
    post.save_pretrained(folder)
    states, actions = make_states(), make_model_actions()
    tensors = {"state": states, "model_actions": actions}
    rows: dict[str, list[torch.Tensor]] = {"model_state": [], "tokens": [], "token_mask": [], "actions": []}
    prompts = []
    for task, state, action in zip(TASKS, states, actions, strict=True):
        batch = pre({"observation.state": state.clone(), "task": task})
        rows["model_state"].append(batch["observation.state"][0])
        rows["tokens"].append(batch["observation.language.tokens"][0])
        rows["token_mask"].append(batch["observation.language.attention_mask"][0])
        prompts.append(batch["task"][0])
        rows["actions"].append(post(action[None].clone())[0])
    tensors |= {key: torch.stack(value) for key, value in rows.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, str(folder / "io.safetensors"))
    config._save_pretrained(folder)
    write_json(folder / "io.json", {"family": family, "tasks": TASKS, "prompts": prompts})


def write_images(folder: Path, policy_224: Any) -> None:
    """Run LeRobot's image path on whole frames; keep every fifth row and column, and each channel's mean."""
    tensors, entries = {}, []
    for seed, (height, width) in enumerate(IMAGES):
        image = as_lerobot_image(pattern_image(height, width, seed))
        batch = {f"observation.images.{CAMERAS[0]}": image[None]}
        out = policy_224._preprocess_images(batch)[0][0][0]
        tensors[f"{seed}"] = out[:, ::5, ::5].contiguous()
        means = out.to(torch.float64).mean((1, 2)).tolist()
        entries.append({"height": height, "width": width, "seed": seed, "channel_means": means})
    save_file(tensors, str(folder / "images.safetensors"))
    write_json(folder / "images.json", {"model_size": 224, "stride": 5, "images": entries})


@torch.no_grad()
def write_policy_cases(folder: Path, policy: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Run a whole policy from raw observation to robot actions; saves its processors beside the checkpoint."""
    pre, post = build_pipelines(policy.config, tokenizer)
    pre.save_pretrained(folder)
    post.save_pretrained(folder)
    states, tensors, entries = make_states(), {}, {}
    for index, (name, case) in enumerate(POLICY_CASES.items()):
        generator = torch.Generator().manual_seed(40 + index)
        noise = torch.randn(1, policy.config.chunk_size, policy.config.max_action_dim, generator=generator)
        observation: dict[str, Any] = {"observation.state": states[index], "task": TASKS[index]}
        images = {}
        for slot in case["present"]:
            height, width = case["sizes"][slot]
            seed = 10 * index + slot
            observation[f"observation.images.{CAMERAS[slot]}"] = as_lerobot_image(pattern_image(height, width, seed))
            images[CAMERAS[slot]] = {"height": height, "width": width, "seed": seed}
        batch = pre(observation)
        model_actions = policy.predict_action_chunk(batch, noise=noise.clone())
        outputs = {
            "state": states[index],
            "noise": noise[0],
            "model_actions": model_actions[0],
            "actions": post(model_actions)[0],
        }
        outputs |= {"tokens": batch["observation.language.tokens"][0], "model_state": batch["observation.state"][0]}
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in outputs.items()}
        entries[name] = {"task": TASKS[index], "prompt": batch["task"][0], "images": images}
    save_file(tensors, str(folder / "policy_cases.safetensors"))
    write_json(folder / "policy_cases.json", entries)
