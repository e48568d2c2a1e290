"""Computed profiles: a roofline over a model's dimensions, for models that nobody has measured here.

One transformer block on `n` rows (chunks) of T tokens, width d, attention width a, key window W tokens, text window X:
    matrix products  2 T (parameters of the block)           at `gemm_share` of the device's peak
    attention        4 T (W + X) a                           at `attention_share` of it
    bytes            weights + n (keys and values of the window), at the memory bandwidth
    time(n) = launches + max(n * compute, bytes / bandwidth)
Everything is bf16. Modulation tables depend on the step only and are counted as folded. The decoder is not included
unless its time is given.

Source: dimensions from the published configurations of the models; the formula is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.core.errors import ConfigError
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import Hardware
from stretto.sched.profile import Profile, Provenance, StageProfile

_BATCHES = (1, 2, 4, 8)
_BLOCK_LAUNCH_S = 15e-6  # about ten kernels of a captured graph, 1.5 us from one to the next
_LIGHT_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True)
class WorldShape:
    """A causal video model at one chunk shape."""

    name: str
    blocks: int
    width: int
    attention_width: int
    block_parameters: int
    other_parameters: int
    """Embeddings, head and time network, read once a step."""
    latent_bytes_per_token: int
    tokens_per_frame: int
    frames_per_chunk: int
    window_frames: int
    """Latent frames that a query sees, its own chunk included."""
    pixel_frames_per_chunk: int
    frame_hz: float
    steps: int = 4
    text_tokens: int = 512
    decode_s: float = 0.0
    decoder_bytes: int = 0

    @property
    def tokens(self) -> int:
        return self.tokens_per_frame * self.frames_per_chunk

    @property
    def keys(self) -> int:
        return self.tokens_per_frame * self.window_frames


WORLDS: Mapping[str, WorldShape] = {
    shape.name: shape
    for shape in (
        WorldShape("wan2.1-1.3b", 30, 1536, 1536, 46_440_000, 25_800_000, 256, 3600, 3, 12, 12, 16.0),
        WorldShape("wan2.2-5b", 30, 3072, 3072, 163_660_000, 90_100_000, 768, 880, 5, 20, 20, 24.0),
        WorldShape("wan2.1-14b", 40, 5120, 5120, 351_390_000, 232_700_000, 256, 1560, 3, 12, 12, 16.0),
        WorldShape("ltx-2.5-22b", 48, 4096, 4096, 386_700_000, 430_000_000, 512, 880, 7, 28, 56, 24.0, text_tokens=1024),
        WorldShape("minimax-h3-33b", 50, 5376, 7168, 385_400_000, 850_000_000, 384, 1032, 5, 20, 17, 24.0, text_tokens=0),
    )
}
"""Chunk shapes that fill one second or so of an H200: 720p for 1.3B, 5B and 22B, 480p for 14B, 768p for 33B."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """A robot policy: a prefix once, then steps over a suffix. Parameters and FLOPs of one row."""

    name: str
    vision_flops: float
    vision_parameters: int
    prefix_flops: float
    prefix_parameters: int
    step_flops: float
    step_parameters: int
    prefix_kv_bytes: int
    steps: int
    step_launch_s: float
    """Time of a step that no batch size changes: a chain of short kernels."""


POLICIES: Mapping[str, PolicyShape] = {
    "pi0.5": PolicyShape(
        "pi0.5", 661e9, 414_000_000, 3756e9, 1_873_000_000, 38.6e9, 311_000_000, 17_800_000, 10, step_launch_s=0.25e-3
    )
}
"""pi0.5 with three cameras and 200 prompt tokens (968 prefix tokens), 50 actions."""


def names() -> list[str]:
    return sorted([*WORLDS, *POLICIES])


def computed(model: str, device: Hardware, **changes: float) -> Profile:
    """Return the computed profile of a model; `changes` replace fields of its shape (steps, frames_per_chunk, ...).

    Raises:
        ConfigError: if the model or a field is unknown, or a value is not above zero.
    """
    shape = WORLDS.get(model) or POLICIES.get(model)
    if shape is None:
        raise ConfigError("model", got=repr(model), expected=f"one of {names()}")
    unknown = sorted(set(changes) - set(type(shape).__dataclass_fields__))
    if unknown:
        raise ConfigError("shape", got=unknown, expected=f"fields of {model}: {sorted(type(shape).__dataclass_fields__)}")
    for name, value in changes.items():
        if not value > 0:
            raise ConfigError(name, got=value, expected="more than 0")
    if isinstance(shape, PolicyShape):
        return _policy(replace(shape, **changes), device)  # type: ignore[arg-type]
    shape = _rescaled(shape, changes)
    if shape.window_frames < shape.frames_per_chunk:
        raise ConfigError("window_frames", got=shape.window_frames, expected=f"at least one chunk of {shape.frames_per_chunk}")
    return _world(shape, device)


def _rescaled(shape: WorldShape, changes: Mapping[str, float]) -> WorldShape:
    """Keep pixel frames in proportion to the latent frames of a chunk."""
    frames = changes.get("frames_per_chunk", shape.frames_per_chunk)
    pixels = max(1, round(shape.pixel_frames_per_chunk * frames / shape.frames_per_chunk))
    return replace(shape, **{"pixel_frames_per_chunk": pixels, **changes})  # type: ignore[arg-type]


def roofline(device: Hardware, gemm: float, attention: float, weights: float, row_bytes: float, launch_s: float) -> BatchCost:
    """Return the time of a stage by batch size: FLOPs of one row, bytes of the weights and of one row."""
    compute = gemm / (device.flops * device.gemm_share) + attention / (device.flops * device.attention_share)
    memory = device.bandwidth_bytes_s
    points = [(n, round(launch_s + max(n * compute, (weights + n * row_bytes) / memory), 12)) for n in _BATCHES]
    return BatchCost(tuple(points))


def _world(shape: WorldShape, device: Hardware) -> Profile:
    t, d = shape.tokens, shape.width
    kv = 4 * shape.keys * shape.attention_width  # keys and values, two bytes each
    attention = 4.0 * t * (shape.keys + shape.text_tokens) * shape.attention_width
    block = roofline(
        device, 2.0 * t * shape.block_parameters, attention, 2 * shape.block_parameters, kv + 4 * t * d, _BLOCK_LAUNCH_S
    )
    per_token = d * shape.latent_bytes_per_token // 4  # a matrix from latent to width, or back; latents are float32
    ends = roofline(device, 2.0 * t * per_token, 0.0, shape.other_parameters, 4 * t * d, _LIGHT_LAUNCH_S)
    hidden, latent = 2 * t * d, t * shape.latent_bytes_per_token
    stages = {
        "embed": StageProfile(ends, weight_bytes=shape.other_parameters, crossing_bytes=hidden + latent),
        "block.*": StageProfile(block, 2 * shape.block_parameters, kv, "visit", hidden + latent),
        "head": StageProfile(ends, weight_bytes=shape.other_parameters, crossing_bytes=latent),
    }
    loop = ("embed", *(f"block.{i}" for i in range(shape.blocks)), "head")
    passes: list[tuple[tuple[str, ...], tuple[int, ...]]] = [(loop, tuple(range(shape.steps)))]
    if shape.decode_s:
        stages["decode"] = StageProfile(BatchCost.line(0.0, shape.decode_s), shape.decoder_bytes, latent, "stream")
        passes.append((("decode",), (shape.steps - 1,)))
    facts = {
        "tokens": t,
        "window_tokens": shape.keys,
        "frames_per_chunk": shape.frames_per_chunk,
        "window_frames": shape.window_frames,
        "pixel_frames_per_chunk": shape.pixel_frames_per_chunk,
        "frame_hz": shape.frame_hz,
        "decoder": "as given" if shape.decode_s else "not included",
    }
    return Profile(
        shape.name,
        device.name,
        tuple(passes),
        stages,
        Provenance("computed", note="roofline over dimensions; see sched/shapes.py"),
        memory_bytes=device.usable_bytes,
        reserved_bytes=int(2e9) + 8 * t * d * 4,
        chunk_bytes=hidden + 2 * latent,
        launch_s=30e-6,
        facts=facts,
    )


def _policy(shape: PolicyShape, device: Hardware) -> Profile:
    vision = roofline(device, shape.vision_flops, 0.0, 2 * shape.vision_parameters, 0.0, 0.6e-3)
    prefix = roofline(device, shape.prefix_flops, 0.0, 2 * shape.prefix_parameters, shape.prefix_kv_bytes, 0.5e-3)
    step = roofline(device, shape.step_flops, 0.0, 2 * shape.step_parameters, shape.prefix_kv_bytes, shape.step_launch_s)
    stages = {
        "vision": StageProfile(vision, 2 * shape.vision_parameters),
        "prefix": StageProfile(prefix, 2 * shape.prefix_parameters, crossing_bytes=shape.prefix_kv_bytes),
        "denoise": StageProfile(step, 2 * shape.step_parameters),
    }
    return Profile(
        shape.name,
        device.name,
        ((("vision", "prefix"), (0,)), (("denoise",), tuple(range(shape.steps)))),
        stages,
        Provenance("computed", note="roofline over dimensions; see sched/shapes.py"),
        carry="none",
        memory_bytes=device.usable_bytes,
        reserved_bytes=int(2e9),
        chunk_bytes=shape.prefix_kv_bytes,
        launch_s=30e-6,
    )
