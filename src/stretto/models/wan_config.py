"""Every dimension of the chunk-causal Wan family, the streams that it makes, and what its caches hold.

Source: Wan2.1 and Wan2.2 model configurations; the denoise lists of Self-Forcing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from stretto.core.errors import ConfigError
from stretto.models.wan_actions import ActionTrack

PolicyName = Literal["same_step", "last_step", "clean"]
DecoderName = Literal["none", "vae", "light"]
Precision = Literal["dtype", "fp8", "fp8-emulated"]


@dataclass(frozen=True, slots=True)
class Level:
    """One noise level: the timestep that the network is told, and the noise share sigma of x = (1 - sigma) x0 + sigma e."""

    timestep: float
    sigma: float


def warped(timesteps: tuple[float, ...], shift: float, table: int = 1000) -> tuple[Level, ...]:
    """Return the levels that a list of unwarped timesteps stands for.

    The reference looks the timesteps and the sigmas up in a table of `table` warped sigmas; the nearest entry counts, so
    that sigma is not exactly t / 1000. 1000, 750, 500, 250 with shift 5 is the list of Self-Forcing.
    """
    sigmas = [_warp(1.0 - i / table, shift) for i in range(table)]
    levels = []
    for t in timesteps:
        # Entry `table - t` of the table, with the timestep 0 past its end.
        at = table - round(t)
        timestep = 1000.0 * sigmas[at] if at < table else 0.0
        sigma = min(sigmas, key=lambda s: abs(1000.0 * s - timestep))
        levels.append(Level(timestep, sigma))
    return tuple(levels)


def nearest(timesteps: tuple[float, ...], shift: float, table: int = 1000) -> tuple[Level, ...]:
    """Return the levels of timesteps that are already warped: each takes the sigma nearest to it in the table (CausVid)."""
    sigmas = [_warp(1.0 - i / table, shift) for i in range(table)]
    return tuple(Level(t, min(sigmas, key=lambda s: abs(1000.0 * s - t))) for t in timesteps)


def _warp(sigma: float, shift: float) -> float:
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


SELF_FORCING = warped((1000.0, 750.0, 500.0, 250.0), shift=5.0)
CAUSVID = nearest((1000.0, 757.0, 522.0), shift=8.0)


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """Which ring a denoise step uses, and what of the previous chunk must be finished first.

    Steps 0 .. S-1 denoise. Step S, where there is one, is the clean pass: blocks only. Steps from `seed_step` on fill
    the rings from given latents. A ring page of a chunk is rewritten in place by every visit that shares the ring.
    """

    name: PolicyName
    denoise_steps: int

    @property
    def clean_pass(self) -> bool:
        return self.name == "clean"

    @property
    def states(self) -> int:
        """How many rings (state slots) one stream has in each block."""
        return self.denoise_steps if self.name == "same_step" else 1

    @property
    def clean_step(self) -> int:
        return self.denoise_steps

    @property
    def seed_step(self) -> int:
        """The step of the first seeding pass; pass k fills ring k at step `seed_step + k`."""
        return self.denoise_steps + 1

    def state(self, step: int) -> int:
        """Return which of the stream's rings a visit at `step` reads and writes."""
        if step >= self.seed_step:
            return step - self.seed_step
        return step if self.name == "same_step" else 0

    def carry(self, step: int) -> int:
        """Return the step whose visit of the same block, for the previous chunk, must be done before a visit at `step`."""
        if step >= self.seed_step or self.name == "same_step":
            return step
        return self.clean_step if self.clean_pass else self.denoise_steps - 1


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """One network and the shape of the streams it runs. Frames are latent frames; height and width are pixels.

    Raises:
        ConfigError: on construction, naming the field that does not fit.
    """

    name: str
    blocks: int
    width: int
    ffn_width: int
    heads: int
    channels: int = 16
    text_width: int = 4096
    text_tokens: int = 512
    freq_width: int = 256
    patch: int = 2
    space_stride: int = 8
    time_stride: int = 4
    eps: float = 1e-6
    rope_theta: float = 10000.0
    frame_hz: float = 16.0

    pixel_height: int = 480
    pixel_width: int = 832
    frames_per_chunk: int = 3
    window_frames: int = 21
    """Frames that a query sees: the sinks, its own chunk and the newest before it."""
    sink_frames: int = 0
    levels: tuple[Level, ...] = SELF_FORCING
    context_level: Level = Level(0.0, 0.0)
    kv_policy: PolicyName = "same_step"
    actions: tuple[ActionTrack, ...] = ()
    decoder: DecoderName = "none"
    dtype: str = "bfloat16"
    precision: Precision = "dtype"
    """Of the blocks' products. `dtype`: as the dtype says. `fp8`: e4m3 with a scale a row (a GPU of compute capability 8.9 or
    more). `fp8-emulated`: the same numbers on any device, slowly."""

    policy: KVPolicy = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", KVPolicy(self.kv_policy, len(self.levels)))
        self._check_network()
        self._check_stream()

    def _check_network(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                "heads", got=self.heads, expected=f"a divisor of the width {self.width} that leaves an even head size"
            )
        if self.freq_width % 2:
            raise ConfigError("freq_width", got=self.freq_width, expected="an even number")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError("dtype", got=repr(self.dtype), expected="float32, bfloat16 or float16")
        if self.precision not in get_args(Precision):
            raise ConfigError("precision", got=repr(self.precision), expected=f"one of {get_args(Precision)}")
        if self.kv_policy not in ("same_step", "last_step", "clean"):
            raise ConfigError("kv_policy", got=repr(self.kv_policy), expected="same_step, last_step or clean")
        names = [track.name for track in self.actions]
        if len(set(names)) != len(names):
            raise ConfigError("actions", got=names, expected="tracks of distinct names")

    def _check_stream(self) -> None:
        unit = self.pixel_unit
        for name, got in (("pixel_height", self.pixel_height), ("pixel_width", self.pixel_width)):
            if got < unit or got % unit:
                near = max(unit, round(got / unit) * unit)
                raise ConfigError(name, got=got, expected=f"a multiple of {unit}", hint=f"the nearest is {near}")
        if self.frames_per_chunk < 1:
            raise ConfigError("frames_per_chunk", got=self.frames_per_chunk, expected="1 or more")
        if self.window_frames < self.frames_per_chunk:
            raise ConfigError(
                "window_frames", got=self.window_frames, expected=f"at least one chunk of {self.frames_per_chunk}"
            )
        if self.sink_frames < 0:
            raise ConfigError("sink_frames", got=self.sink_frames, expected="0 or more")
        if self.sink_frames > self.window_frames - self.frames_per_chunk:
            room = self.window_frames - self.frames_per_chunk
            raise ConfigError("sink_frames", got=self.sink_frames, expected=f"at most {room}, the window less one chunk")
        if not self.levels:
            raise ConfigError("levels", got="none", expected="one (timestep, sigma) or more")
        sigmas = [level.sigma for level in self.levels]
        if sigmas != sorted(sigmas, reverse=True) or not all(0.0 < s <= 1.0 for s in sigmas):
            raise ConfigError("levels", got=sigmas, expected="sigmas in (0, 1] that fall from step to step")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def pixel_unit(self) -> int:
        return self.space_stride * self.patch

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens in one frame."""
        return self.pixel_height // self.pixel_unit, self.pixel_width // self.pixel_unit

    @property
    def tokens_per_frame(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Frames, channels, height and width of one chunk's latent."""
        rows, columns = self.grid
        return self.frames_per_chunk, self.channels, rows * self.patch, columns * self.patch

    @property
    def denoise_steps(self) -> int:
        return len(self.levels)

    def pixel_frames(self, chunk: int) -> int:
        """Return how many pixel frames a chunk decodes to: the first latent frame of a stream makes only one."""
        frames = self.frames_per_chunk * self.time_stride
        return frames if chunk > 0 else frames - self.time_stride + 1


SPECS: Mapping[str, WanConfig] = {
    "wan2.1-1.3b": WanConfig(name="wan2.1-1.3b", blocks=30, width=1536, ffn_width=8960, heads=12),
    "wan2.1-14b": WanConfig(name="wan2.1-14b", blocks=40, width=5120, ffn_width=13824, heads=40),
    "wan2.2-5b": WanConfig(
        name="wan2.2-5b", blocks=30, width=3072, ffn_width=14336, heads=24, channels=48, space_stride=16,
        pixel_height=704, pixel_width=1280, frame_hz=24.0,
    ),
}  # fmt: skip


def tiny_config() -> WanConfig:
    """Return a network of the same form that runs in milliseconds on a CPU."""
    return WanConfig(
        name="wan-tiny", blocks=2, width=48, ffn_width=96, heads=3, text_width=24, text_tokens=8, freq_width=16,
        pixel_height=64, pixel_width=96, frames_per_chunk=1, window_frames=6, sink_frames=1, dtype="float32",
    )  # fmt: skip
