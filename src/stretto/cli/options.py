"""Options that several verbs share, and how they become the objects below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import UseAppendAction

if TYPE_CHECKING:
    from stretto.deploy.policy import PolicyOptions


@dataclass(frozen=True)
class PolicyFlags:
    """How the policy runs."""

    device: str = "auto"
    """`cpu`, `cuda:N`, or auto."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    mode: Literal["auto", "graph", "eager"] = "auto"
    precision: Literal["dtype", "fp8", "fp8-emulated"] = "dtype"
    """fp8 multiplies in e4m3: faster on GPUs that have it, and needs scales from `stretto calibrate`.
    fp8-emulated computes the same numbers on any device, slowly."""
    fp8_scales: Path | None = None
    """With fp8: the calibration; fp8_scales.json beside the checkpoint by default."""
    fp8_shadow: int = 0
    """With fp8: run one request in so many a second time without it, and show the difference at /metrics."""
    plan: Literal["auto", "whole", "per_visit", "overlapped"] = "auto"
    """whole: one segment, the lowest latency of one robot.
    per_visit: robots join and leave batches between denoise steps.
    overlapped: the denoise loop of some beside vision and prefix of others."""
    lane_sms: tuple[int, ...] = ()
    """With overlapped on a GPU: multiprocessors of each lane while both are at work, such as 88 44; else they take turns."""
    max_batch: int = 8
    """Most robots in one batch."""
    dispatch: str | None = None
    """Order of waiting work: deadline_limited (the default), earliest_deadline_first, fill_first, ..."""
    rtc: tuple[Literal["identity", "vjp", "hard"], ...] | None = None
    """Modes of real-time chunking to offer; by default identity, and hard where the checkpoint was trained for it.
    vjp makes every denoise step slower."""
    control_hz: float | None = None
    """Control rate of the robots; deadlines then follow from the steps that requests name."""
    max_delay: int | None = None
    """Longest delay, in control steps, that a request may name."""
    robot_period_ms: float | None = None
    """How often every robot asks; with --robot-deadline-ms, a robot that would make others late is not admitted."""
    robot_deadline_ms: float | None = None
    preset: str | None = None
    """Observation keys: libero, droid, aloha, metaworld, or a key-map file. The checkpoint's own by default."""
    tokenizer: Path | None = None
    """A tokenizer.json or PaliGemma .model, where none lies beside the checkpoint."""
    default_prompt: str | None = None
    optional_camera: Annotated[tuple[str, ...], UseAppendAction] = ()
    """A camera that requests may leave out; say it again for more."""
    degenerate: Literal["refuse", "hold"] = "refuse"
    """What to do with statistics without spread."""
    pad_state_bins: bool = False
    """For a pi0.5 that LeRobot before 0.5 trained: its prompt holds the state padded to the model's width."""
    denoise_steps: int | None = None
    seed: int = 0

    def resolve(self) -> PolicyOptions:
        from stretto.deploy.policy import PolicyOptions

        return PolicyOptions(
            device=self.device,
            dtype=self.dtype,
            mode=self.mode,
            precision=self.precision,
            fp8_scales=self.fp8_scales,
            fp8_shadow=self.fp8_shadow,
            plan=self.plan,
            lane_sms=self.lane_sms,
            max_batch=self.max_batch,
            dispatch=self.dispatch,
            rtc=self.rtc,
            control_hz=self.control_hz,
            max_delay=self.max_delay,
            robot_period_ms=self.robot_period_ms,
            robot_deadline_ms=self.robot_deadline_ms,
            preset=self.preset,
            tokenizer=self.tokenizer,
            default_prompt=self.default_prompt,
            optional_cameras=self.optional_camera,
            degenerate=self.degenerate,
            pad_state_bins=self.pad_state_bins,
            denoise_steps=self.denoise_steps,
            seed=self.seed,
        )
