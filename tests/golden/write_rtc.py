"""Golden files of LeRobot's real-time chunking: prefix weights, guided velocities, and guided sampling of the tiny models."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import RTCAttentionSchedule
from lerobot.policies.common.flow_matching import euler_integrate
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor
from lerobot_tiny import TinySizes, write_json
from safetensors.torch import save_file
from write_models import CASES, case_inputs, make_pool, sample

HORIZON, ACTION_DIM = 10, 6
WEIGHT_GRID = [(0, 10, 10), (2, 6, 10), (3, 3, 10), (5, 4, 10), (4, 10, 10), (0, 0, 10), (1, 8, 50), (2, 14, 10), (9, 10, 10)]
TIMES = (1.0, 0.9, 0.5, 0.2, 0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "default_linear": {"schedule": "LINEAR", "max_guidance_weight": 10.0, "execution_horizon": 10, "delay": 2},
    "exp_short_horizon": {"schedule": "EXP", "max_guidance_weight": 5.0, "execution_horizon": 6, "delay": 2},
    "ones": {"schedule": "ONES", "max_guidance_weight": 10.0, "execution_horizon": 7, "delay": 1},
    "zeros": {"schedule": "ZEROS", "max_guidance_weight": 10.0, "execution_horizon": 7, "delay": 3},
    "no_delay": {"schedule": "EXP", "max_guidance_weight": 3.0, "execution_horizon": 8, "delay": 0},
}
LEFT_OVERS = {"full": (10, 6), "short": (6, 6), "short_and_narrow": (4, 4)}


def make_processor(setting: dict[str, Any]) -> RTCProcessor:
    return RTCProcessor(
        RTCConfig(
            prefix_attention_schedule=RTCAttentionSchedule[setting["schedule"]],
            max_guidance_weight=setting["max_guidance_weight"],
            execution_horizon=setting["execution_horizon"],
        )
    )


def write_weights() -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Prefix weights of every schedule; `start` is the delay and `end` where the ramp ends, both in steps."""
    tensors, entries = {}, []
    for schedule, (start, end, total) in product(RTCAttentionSchedule, WEIGHT_GRID):
        setting = {"schedule": schedule.name, "max_guidance_weight": 10.0, "execution_horizon": end}
        weights = make_processor(setting).get_prefix_weights(start, end, total)
        assert schedule.name in ("LINEAR", "EXP", "ONES", "ZEROS")
        key = f"weights/{len(entries)}"
        tensors[key] = weights.clone()
        entries.append({"key": key, "schedule": schedule.name, "start": start, "end": end, "total": total})
    return tensors, entries


class LinearVelocity:
    """v(x, t) = x M + t b: simple enough to rebuild anywhere, and it depends on both arguments."""

    def __init__(self, generator: torch.Generator) -> None:
        self.matrix = 0.5 * torch.randn(ACTION_DIM, ACTION_DIM, generator=generator)
        self.bias = torch.randn(ACTION_DIM, generator=generator)

    def __call__(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix + time[:, None, None] * self.bias


def write_linear() -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Guided velocities at single times and guided Euler runs of the linear velocity."""
    generator = torch.Generator().manual_seed(21)
    velocity = LinearVelocity(generator)
    x = torch.randn(2, HORIZON, ACTION_DIM, generator=generator)
    tensors = {"linear/matrix": velocity.matrix, "linear/bias": velocity.bias, "linear/x": x}
    for name, (steps, width) in LEFT_OVERS.items():
        tensors[f"linear/left_over/{name}"] = torch.randn(2, steps, width, generator=generator)
    entries = []
    for (setting_name, setting), left_over in product(SETTINGS.items(), LEFT_OVERS):
        processor, prefix = f"linear/{setting_name}/{left_over}", tensors[f"linear/left_over/{left_over}"]
        rtc = make_processor(setting)
        guided = []
        for time in TIMES:
            at = torch.full((2,), time)
            arguments = {"prev_chunk_left_over": prefix, "inference_delay": setting["delay"], "time": time}
            guided.append(rtc.denoise_step(x, original_denoise_step_partial=lambda y, at=at: velocity(y, at), **arguments))
        tensors[f"{processor}/velocity"] = torch.stack([value.detach() for value in guided])
        sampled = euler_integrate(
            velocity,
            x,
            5,
            rtc_processor=rtc,
            rtc_enabled=True,
            inference_delay=setting["delay"],
            prev_chunk_left_over=prefix,
        )
        tensors[f"{processor}/sampled"] = sampled.detach()
        entries.append({"key": processor, "left_over": left_over, **setting})
    return tensors, entries


def write_model_runs(policies: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Guided `sample_actions` of the tiny models on the inputs of case `batch_of_two`."""
    tensors, entries = {}, []
    seed = 100 + list(CASES).index("batch_of_two")
    for family, policy in policies.items():
        pool = make_pool(TinySizes(image_size=policy.config.image_resolution[0]))
        inputs = case_inputs(CASES["batch_of_two"], pool, policy.config, seed)
        generator = torch.Generator().manual_seed(22)
        left_over = torch.randn(2, 7, policy.config.max_action_dim, generator=generator)
        tensors[f"model/{family}/left_over"] = left_over
        for name, setting in SETTINGS.items():
            policy.config.rtc_config = make_processor(setting).rtc_config
            policy.init_rtc_processor()
            key = f"model/{family}/{name}"
            tensors[key] = sample(policy, inputs, pool, inference_delay=setting["delay"], prev_chunk_left_over=left_over)
            entries.append({"key": key, "family": family, **setting})
        policy.config.rtc_config = None
        policy.init_rtc_processor()
        policy.model.rtc_processor = None
    return tensors, entries


def write_rtc(folder: Path, policies: dict[str, Any]) -> None:
    """Write `rtc.json` and `rtc.safetensors`."""
    parts = {"weights": write_weights(), "linear": write_linear(), "model": write_model_runs(policies)}
    tensors = {key: value.contiguous() for part, _ in parts.values() for key, value in part.items()}
    save_file(tensors, str(folder / "rtc.safetensors"))
    settings: dict[str, Any] = {name: entries for name, (_, entries) in parts.items()}
    write_json(folder / "rtc.json", {**settings, "linear_times": TIMES, "linear_euler_steps": 5})
