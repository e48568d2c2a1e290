"""The denoise steps of pi0 and pi0.5: plain, and steered so that a chunk continues the one that the robot is executing.

Real-time chunking is data of each row, so one captured graph serves rows of every mode and delay. A row whose weights and
delay are zero is plain sampling, bit for bit.

| mode | what a row brings | needs |
|---|---|---|
| `identity` | target and weights | nothing |
| `vjp` | target and weights, `rtc_vjp` set | gradients through the expert in every step, for all rows of the batch |
| `hard` | target and delay; its first `rtc_delay` actions are given clean | a policy trained with given actions |

Shape legend: as in pi0_net.
Source: as `control.rtc`, whose NumPy functions this equals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.core.errors import ConfigError
from stretto.core.model import Rows
from stretto.core.route import StageSpec, TensorSpec
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_fp8 import Fp8Net
from stretto.models.pi0_net import Condition, Pi0Net, PrefixKV, euler_schedule

RTC_MODES = ("identity", "vjp", "hard")


class DenoiseStage:
    """One Euler step of the action flow, for rows that may each be at another step."""

    def __init__(self, net: Pi0Net | Fp8Net, more_reads: tuple[str, ...] = ()) -> None:
        self.net = net
        self.dt = euler_schedule(net.config.denoise_steps)[0][1]
        self.has_state = net.config.family == "pi0"
        reads = ("x", "prefix_k", "prefix_v", "prefix_mask", "prefix_length", "suffix_start", *more_reads)
        self.spec = StageSpec("denoise", reads=(*reads, "state") if self.has_state else reads, writes=("x",))

    @torch.no_grad()
    def run(self, rows: Rows) -> None:
        x_BHA = rows.get("x")
        rows.put("x", torch.add(x_BHA, self.velocity(rows, x_BHA, self.net.tabled(rows.steps_B)), alpha=self.dt))

    def velocity(self, rows: Rows, x_BHA: Tensor, condition: Condition) -> Tensor:
        prefix = PrefixKV(
            rows.arena("prefix_k"),
            rows.arena("prefix_v"),
            rows.slots_B,
            rows.get("prefix_mask"),
            rows.get("prefix_length"),
            rows.get("suffix_start"),
        )
        return self.net.velocity(x_BHA, condition, prefix, rows.get("state") if self.has_state else None)


class ChunkingDenoiseStage(DenoiseStage):
    """One Euler step towards a chunk that continues the previous one, each row in its own mode."""

    def __init__(self, net: Pi0Net | Fp8Net, modes: Sequence[str]) -> None:
        self.modes = frozenset(modes)
        super().__init__(net, tuple(chunking_inputs(net.config, modes)))
        # Per denoise step: flow time, and the strength of a correction before its cap (without bound at t=1).
        lines = [(t, ((1 - t) ** 2 + t**2) / (t * (1 - t)) if t < 1.0 else float("inf")) for t, _ in self._steps()]
        self.lines = torch.tensor(lines, dtype=torch.float32, device=net.table.device)

    def _steps(self) -> tuple[tuple[float, float], ...]:
        return euler_schedule(self.net.config.denoise_steps)

    @torch.no_grad()
    def run(self, rows: Rows) -> None:
        x_BHA, target_BHA, steps = rows.get("x"), rows.get("rtc_target"), rows.steps_B
        inside_BH1 = None
        if "hard" in self.modes:
            inside_BH1 = self._given(rows.get("rtc_delay"))
            x_BHA = torch.where(inside_BH1, target_BHA, x_BHA)
            steps = torch.where(inside_BH1[..., 0], self.net.config.denoise_steps, steps[:, None])
        condition = self.net.tabled(steps)
        if "vjp" in self.modes:
            velocity_BHA = self._pulled_back(rows, x_BHA, target_BHA, condition)
        elif "identity" in self.modes:
            velocity_BHA = self._guided(rows, x_BHA, target_BHA, self.velocity(rows, x_BHA, condition))
        else:
            velocity_BHA = self.velocity(rows, x_BHA, condition)
        x_BHA = torch.add(x_BHA, velocity_BHA, alpha=self.dt)
        rows.put("x", x_BHA if inside_BH1 is None else torch.where(inside_BH1, target_BHA, x_BHA))

    def _given(self, delay_B: Tensor) -> Tensor:
        """Return [B, H, 1]: which actions are given clean."""
        return (torch.arange(self.net.config.action_horizon, device=delay_B.device) < delay_B[:, None])[..., None]

    def _guided(self, rows: Rows, x_BHA: Tensor, target_BHA: Tensor, velocity_BHA: Tensor) -> Tensor:
        weights_BH1, t_B11, strength_B11 = self._guidance(rows)
        error_BHA = (target_BHA - (x_BHA - t_B11 * velocity_BHA)) * weights_BH1
        # Not `v - 0`: that would turn -0 into 0.
        return torch.where(weights_BH1 > 0, velocity_BHA - strength_B11 * error_BHA, velocity_BHA)

    def _guidance(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        line_B2 = self.lines[rows.steps_B]
        strength_B = torch.minimum(line_B2[:, 1], rows.get("rtc_cap"))
        return rows.get("rtc_weights")[..., None], line_B2[:, 0, None, None], strength_B[:, None, None]

    def _pulled_back(self, rows: Rows, x_BHA: Tensor, target_BHA: Tensor, condition: Condition) -> Tensor:
        """Guide with the error carried back through the predicted chunk: (d x1 / d x)^T error."""
        # The runtime runs stages in inference mode, whose tensors autograd refuses: everything it may keep is copied.
        with torch.inference_mode(False), torch.enable_grad():
            weights_BH1, t_B11, strength_B11 = (v.clone() for v in self._guidance(rows))
            x = x_BHA.clone().requires_grad_()
            lines = None if condition.rows is None else condition.rows.clone()
            velocity_BHA = self.velocity(rows, x, Condition(condition.table, lines, condition.shifts))
            chunk_BHA = x - t_B11 * velocity_BHA
            error_BHA = ((target_BHA - chunk_BHA) * weights_BH1).detach()
            (pulled_BHA,) = torch.autograd.grad(chunk_BHA, x, error_BHA)
            velocity_BHA = velocity_BHA.detach()
        wants_B11 = rows.get("rtc_vjp")[:, None, None]
        touched = torch.where(wants_B11, (weights_BH1 > 0).any(1, keepdim=True), weights_BH1 > 0)
        correction_BHA = torch.where(wants_B11, pulled_BHA, error_BHA)
        return torch.where(touched, velocity_BHA - strength_B11 * correction_BHA, velocity_BHA)


def denoise_stage(net: Pi0Net | Fp8Net, modes: Sequence[str]) -> DenoiseStage:
    """Return the stage for the modes that a policy offers; none is plain sampling and costs nothing.

    Raises:
        ConfigError: if a mode is unknown or named twice.
    """
    unknown = [m for m in modes if m not in RTC_MODES]
    if unknown or len(set(modes)) != len(modes):
        raise ConfigError("rtc", got=list(modes), expected=f"distinct modes among {RTC_MODES}")
    return ChunkingDenoiseStage(net, modes) if modes else DenoiseStage(net)


def chunking_inputs(config: Pi0Config, modes: Sequence[str]) -> dict[str, TensorSpec]:
    """Return what a row brings for the modes that a policy offers, in the model's normalised space.

    `rtc_target` [H, A], `rtc_weights` [H] in 0..1, `rtc_cap` of the correction, `rtc_delay` given actions, `rtc_vjp`.
    """
    if not modes:
        return {}
    horizon = config.action_horizon
    specs = {"rtc_target": TensorSpec((horizon, config.action_dim), "float32")}
    if "identity" in modes or "vjp" in modes:
        specs |= {"rtc_weights": TensorSpec((horizon,), "float32"), "rtc_cap": TensorSpec((), "float32")}
    if "hard" in modes:
        specs["rtc_delay"] = TensorSpec((), "int32")
    if "vjp" in modes:
        specs["rtc_vjp"] = TensorSpec((), "bool")
    return specs


def example_chunking(specs: Mapping[str, TensorSpec], batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random rows of these inputs, each of another delay."""
    made: dict[str, Tensor] = {}
    for name, spec in specs.items():
        shape = (batch, *spec.shape)
        if name == "rtc_delay":
            made[name] = torch.arange(batch, dtype=torch.int32) % 3
        elif name == "rtc_vjp":
            made[name] = torch.arange(batch) % 2 == 0
        elif name == "rtc_target":
            made[name] = torch.randn(shape, generator=generator)
        else:
            made[name] = torch.rand(shape, generator=generator) * (5.0 if name == "rtc_cap" else 1.0)
    return made
