"""Golden files of the reduced pi0 and pi0.5 networks: a LeRobot checkpoint folder, inputs and sampled actions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot_tiny import TinySizes, sizes_as_dict, write_json
from safetensors.torch import save_file

IMAGE_POOL = 6


@dataclass(frozen=True)
class ModelCase:
    """One call of `sample_actions`. `slots` holds a pool index per row and camera slot; -1 is an absent camera."""

    slots: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    prompt_width: int
    denoise_steps: int = 10


CASES = {
    "one_camera": ModelCase(((0,),), (5,), 8),
    "two_cameras": ModelCase(((0, 1),), (8,), 8),
    "three_cameras": ModelCase(((0, 1, 2),), (11,), 16),
    "middle_camera_absent": ModelCase(((0, -1, 2),), (11,), 16),
    "only_first_of_three": ModelCase(((3, -1, -1),), (1,), 16),
    "batch_of_two": ModelCase(((0, 1, 2), (3, -1, 4)), (14, 3), 16),
    "long_prompt_no_padding": ModelCase(((4, 5),), (24,), 24),
    "three_denoise_steps": ModelCase(((0, 1, 2),), (11,), 16, denoise_steps=3),
}


def make_pool(sizes: TinySizes) -> torch.Tensor:
    """uint8 [pool, 3, image, image]; the model input is pool / 255 * 2 - 1."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (IMAGE_POOL, 3, sizes.image_size, sizes.image_size), generator=generator, dtype=torch.uint8)


def pool_to_model(pool: torch.Tensor) -> torch.Tensor:
    return pool.to(torch.float32) / 255 * 2 - 1


def case_inputs(case: ModelCase, pool: torch.Tensor, config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Draw prompt, state and noise; absent cameras are -1 images with mask 0."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor(case.slots)
    rows = slots.shape[0]
    tokens = torch.randint(4, 300, (rows, case.prompt_width), generator=generator)
    token_mask = torch.arange(case.prompt_width)[None] < torch.tensor(case.prompt_lengths)[:, None]
    return {
        "image_index": slots,
        "image_mask": slots >= 0,
        "tokens": tokens * token_mask,
        "token_mask": token_mask,
        "state": torch.randn(rows, config.max_state_dim, generator=generator).clamp(-1, 1),
        "noise": torch.randn(rows, config.chunk_size, config.max_action_dim, generator=generator),
    }


def camera_lists(inputs: dict[str, torch.Tensor], pool: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Build LeRobot's per-camera lists of [B, 3, H, W] images and [B] masks."""
    images = pool_to_model(pool)[inputs["image_index"].clamp(min=0)]
    images = torch.where(inputs["image_mask"][:, :, None, None, None], images, torch.tensor(-1.0))
    return list(images.unbind(1)), list(inputs["image_mask"].unbind(1))


def sample(policy: Any, inputs: dict[str, torch.Tensor], pool: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Call LeRobot's `sample_actions` with the case's noise."""
    images, masks = camera_lists(inputs, pool)
    arguments = [images, masks, inputs["tokens"], inputs["token_mask"]]
    if policy.name == "pi0":
        arguments.append(inputs["state"])
    return policy.model.sample_actions(*arguments, noise=inputs["noise"].clone(), **kwargs)


class FirstVelocity:
    """Records what the network returned at the first denoise step, at t = 1."""

    def __init__(self, model: Any) -> None:
        self.model, self.value, self.original = model, None, model.denoise_step

    def __enter__(self) -> FirstVelocity:
        def record(*args: Any, **kwargs: Any) -> torch.Tensor:
            velocity = self.original(*args, **kwargs)
            self.value = velocity.clone() if self.value is None else self.value
            return velocity

        self.model.denoise_step = record
        return self

    def __exit__(self, *error: object) -> None:
        del self.model.denoise_step


@torch.no_grad()
def write_models(folder: Path, policy: Any, sizes: TinySizes) -> None:
    """Write the checkpoint, `sizes.json`, `cases.json` and `cases.safetensors` under `folder`."""
    policy.save_pretrained(folder)
    write_json(folder / "sizes.json", sizes_as_dict(sizes))
    pool = make_pool(sizes)
    tensors = {"image_pool": pool, "image_features": policy.model.paligemma_with_expert.embed_image(pool_to_model(pool))}
    actions = {}
    for seed, (name, case) in enumerate(CASES.items(), start=100):
        inputs = case_inputs(case, pool, policy.config, 102 if name == "three_denoise_steps" else seed)
        images, masks = camera_lists(inputs, pool)
        prefix, prefix_mask, _ = policy.model.embed_prefix(images, masks, inputs["tokens"], inputs["token_mask"])
        with FirstVelocity(policy.model) as first:
            actions[name] = sample(policy, inputs, pool, num_steps=case.denoise_steps)
        outputs = {"prefix_embeddings": prefix, "prefix_mask": prefix_mask, "velocity_0": first.value, "actions": actions[name]}
        if policy.name == "pi05":
            del inputs["state"]
        tensors |= {f"{name}/{key}": value.contiguous() for key, value in {**inputs, **outputs}.items()}
    save_file(tensors, str(folder / "cases.safetensors"))
    write_json(folder / "cases.json", {name: {"denoise_steps": case.denoise_steps} for name, case in CASES.items()})
    _check_discriminating(policy, pool)


def _check_discriminating(policy: Any, pool: torch.Tensor) -> None:
    """A fixture that ignores an input proves nothing about it: each input must move the actions well above tolerance."""
    inputs = case_inputs(CASES["three_cameras"], pool, policy.config, 102)
    base = sample(policy, inputs, pool)
    changed = {
        "prompt token": {"tokens": inputs["tokens"].index_fill(1, torch.tensor([3]), 7)},
        "third camera": {"image_index": torch.tensor([[0, 1, 5]])},
        "camera mask": {"image_mask": torch.tensor([[True, False, True]])},
        "prompt mask": {"token_mask": torch.arange(16)[None] < 12},
    }
    if policy.name == "pi0":
        changed["state"] = {"state": inputs["state"] + 0.1}
    print(policy.name, "action std", f"{base.std():.3f}", "max", f"{base.abs().max():.3f}")
    for label, change in changed.items():
        moved = (sample(policy, inputs | change, pool) - base).abs().max().item()
        print(policy.name, f"{label}: moves actions by {moved:.4f}")
        assert moved > 5e-3, (label, moved)
