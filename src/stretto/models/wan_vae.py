"""Latents to pixels and back, chunk by chunk: the Wan VAE driven with caches of our own, and a light decoder.

A causal convolution looks back two frames; what it looks back at is a cache that belongs to the stream and lives on from
chunk to chunk. All caches start as zeros, which is the padding that the first frame sees, so their shapes never change.
The first latent frame of a stream makes one pixel frame, every other four.

Shape legend: B rows, F latent frames, P pixel frames, C latent channels, h w latent size, H W pixel size, S state slots.

Source: Wan2.1 and Wan2.2 VAE as diffusers 0.42 `AutoencoderKLWan` has them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stretto.core.errors import ConfigError, ObservationError
from stretto.core.model import Row, Rows
from stretto.core.route import StageSpec, TensorSpec
from stretto.models.wan_config import WanConfig
from stretto.models.wan_vae_fused import PaddingConv, fuse

WAN21_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
WAN21_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
WAN22_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
WAN22_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

WAN21_VAE: Mapping[str, Any] = {"base_dim": 96, "z_dim": 16, "latents_mean": WAN21_MEAN, "latents_std": WAN21_STD}
WAN22_VAE: Mapping[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16, "temperal_downsample": (False, True, True),
    "latents_mean": WAN22_MEAN, "latents_std": WAN22_STD,
}  # fmt: skip


class Decoder(Protocol):
    """What the `decode` stage runs. Caches are handed in and rewritten in place; the decoder itself keeps nothing."""

    module: nn.Module

    def caches(self, height: int, width: int) -> list[TensorSpec]:
        """Return the caches of one stream, for a latent of height x width."""
        ...

    def decode(self, latents_FChw: Tensor, caches: Sequence[Tensor], *, first: bool) -> Tensor:
        """Return frames [P, H, W, 3] in uint8. `first`: these latents begin the stream, and all caches are zeros."""
        ...


def build_vae(form: Mapping[str, Any], **changes: Any) -> nn.Module:
    """Build diffusers' `AutoencoderKLWan` with random weights; `form` is WAN21_VAE, WAN22_VAE or a config.

    Raises:
        ConfigError: if the extra `world` is not installed.
    """
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in {**form, **changes}.items()}
    module: nn.Module = _vae_class()(**settings)
    return module.eval().requires_grad_(False)


def _vae_class() -> Any:
    try:
        from diffusers import AutoencoderKLWan
    except ImportError as e:
        raise ConfigError("decoder", got="vae", expected="diffusers", hint="pip install stretto[world]") from e
    return AutoencoderKLWan


def load_vae(path: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> nn.Module:
    """Load a VAE from a folder in diffusers' layout: `vae` of a Wan pipeline. Nothing is downloaded.

    Raises:
        ConfigError: if the extra `world` is not installed or the folder holds no VAE.
    """
    _check_folder(path)
    module: nn.Module = _vae_class().from_pretrained(path, torch_dtype=dtype, local_files_only=True)
    return module.to(device).eval().requires_grad_(False)


def describe_vae(path: str | Path) -> nn.Module:
    """Return the VAE of such a folder without its weights.

    Raises:
        ConfigError: as `load_vae`.
    """
    _check_folder(path)
    with torch.device("meta"):
        module: nn.Module = _vae_class().from_config(_vae_class().load_config(path, local_files_only=True))
    return module.eval().requires_grad_(False)


def _check_folder(path: str | Path) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError("vae", got=str(path), expected="a folder with config.json and weights of AutoencoderKLWan")


class Half:
    """The encoder or the decoder of a VAE, and the caches of its convolutions in the order in which it visits them."""

    def __init__(self, half: nn.Module, first_input: int, later_input: int, *, channels_last: bool = False) -> None:
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

        self.half = half
        self._channels_last = channels_last
        self._first, self._later = first_input, later_input
        self._decodes = hasattr(half, "up_blocks")
        self._count = sum(isinstance(m, (WanCausalConv3d, PaddingConv)) for m in half.modules())
        self._conv_in = cast(nn.Conv3d, half.conv_in)
        self.late = self._late()

    def shapes(self, height: int, width: int) -> list[tuple[int, ...]]:
        """Return the shape of every cache, found by running the half without storage."""
        # Convolutions of size 1 are counted but keep nothing, so the list may be longer than what is used.
        found = [tuple(cache.shape[1:]) for cache in self._traced(height, width) if cache is not None]
        return [(*rest, channels) for channels, *rest in found] if self._channels_last else found

    def _late(self) -> tuple[bool, ...]:
        # A resampling layer in time sits out the first frame: on the way up it leaves a mark instead of frames, on the
        # way down its cache holds one frame where all others come to hold two.
        if self._decodes:
            marks = self._traced(8, 8, calls=1)
            return tuple(not isinstance(cache, Tensor) for cache in marks if cache is not None)
        return tuple(cache.shape[2] == 1 for cache in self._traced(32, 32) if cache is not None)

    def _traced(self, height: int, width: int, calls: int = 3) -> list[Any]:
        # Handing deepcopy the parameters without storage keeps it from copying the weights.
        bare = {id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in self.half.parameters()}
        half = copy.deepcopy(self.half, cast(dict[int, Any], bare))
        caches: list[Any] = [None] * self._count
        for call in range(calls):
            frames = self._later if call else self._first
            shape = (1, self._conv_in.in_channels, frames, height, width)
            x = torch.empty(shape, device="meta", dtype=self._conv_in.weight.dtype)
            half(x, feat_cache=caches, feat_idx=[0], **self._mark(call == 0))
        return caches

    def _mark(self, first: bool) -> dict[str, bool]:
        return {"first_chunk": first} if self._decodes else {}

    def run(self, x_1CPHW: Tensor, caches: Sequence[Tensor], *, first: bool) -> Tensor:
        """Run some frames and rewrite the caches, each [1, ...]."""
        if self._channels_last:
            # As the convolutions see them; joined with frames of another order they would be copied once more.
            caches = [cache.permute(0, 4, 1, 2, 3) for cache in caches]
            x_1CPHW = x_1CPHW.contiguous(memory_format=torch.channels_last_3d)
        held: list[Any] = [None if first and late else cache for cache, late in zip(caches, self.late, strict=True)]
        held += [None] * (self._count - len(held))
        out: Tensor = self.half(x_1CPHW, feat_cache=held, feat_idx=[0], **self._mark(first))
        for cache, new in zip(caches, held, strict=False):
            if isinstance(new, Tensor) and new is not cache:
                cache.copy_(new)
        return out


class Statistics:
    """Mean and spread of each latent channel: the network works on normalised latents."""

    def __init__(self, vae: nn.Module) -> None:
        config: Any = vae.config
        self._both = torch.tensor([list(config.latents_mean), list(config.latents_std)])[:, :, None, None, None]

    def raw(self, latents_1CFhw: Tensor, dtype: torch.dtype) -> Tensor:
        both = self._on(latents_1CFhw.device)
        return (latents_1CFhw.float() * both[1] + both[0]).to(dtype)

    def normalised(self, latents_1CFhw: Tensor) -> Tensor:
        both = self._on(latents_1CFhw.device)
        return (latents_1CFhw.float() - both[0]) / both[1]

    def _on(self, device: torch.device) -> Tensor:
        if self._both.device != device:
            self._both = self._both.to(device)
        return self._both


class VaeDecoder:
    """The decoder of diffusers' `AutoencoderKLWan`, Wan2.1 or Wan2.2 form.

    With `channels_last` weights, frames and caches keep the channels of a pixel side by side, as the convolutions of a GPU
    want them; the weights of `vae` are laid out anew. `fused` makes fewer passes over the frames (`wan_vae_fused`), by
    replacing parts of `vae`.
    """

    def __init__(self, vae: nn.Module, *, channels_last: bool = False, fused: bool = False) -> None:
        self.module = vae
        if fused:
            fuse(cast(nn.Module, vae.decoder))
        if channels_last:
            _lay_out_by_pixel(cast(nn.Module, vae.decoder))
        self._half = Half(cast(nn.Module, vae.decoder), 1, 1, channels_last=channels_last)
        self._statistics = Statistics(vae)
        self._post = cast(nn.Conv3d, vae.post_quant_conv)
        config: Any = vae.config
        self._patch = int(config.patch_size or 1)

    def caches(self, height: int, width: int) -> list[TensorSpec]:
        dtype = str(self._post.weight.dtype).removeprefix("torch.")
        return [TensorSpec(shape, dtype) for shape in self._half.shapes(height, width)]

    @torch.no_grad()
    def pixels(self, latents_FChw: Tensor, caches: Sequence[Tensor], *, first: bool) -> Tensor:
        """Return [P, 3, H, W] in [-1, 1], in the dtype of the VAE."""
        z = self._statistics.raw(latents_FChw.transpose(0, 1)[None], self._post.weight.dtype)
        z, own = self._post(z), [cache[None] for cache in caches]
        parts = [z[:, :, :1], z[:, :, 1:]] if first else [z]
        out = [self._half.run(part, own, first=first and i == 0) for i, part in enumerate(parts) if part.shape[2]]
        frames = torch.cat(out, dim=2)[0].transpose(0, 1)
        if self._patch > 1:
            # The column within a patch is the slower of the two.
            cut = torch.unflatten(frames, 1, (-1, self._patch, self._patch))
            frames = cut.permute(0, 1, 4, 3, 5, 2).flatten(4, 5).flatten(2, 3)
        return frames.clamp(-1.0, 1.0)

    def decode(self, latents_FChw: Tensor, caches: Sequence[Tensor], *, first: bool) -> Tensor:
        return to_bytes(self.pixels(latents_FChw, caches, first=first))


def _lay_out_by_pixel(module: nn.Module) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])


class StreamingDecoder:
    """One stream's decoder with its caches: feed it the stream's chunks in order."""

    def __init__(self, decoder: Decoder, height: int, width: int, device: torch.device | str = "cpu") -> None:
        self.decoder, self.first = decoder, True
        self.caches = new_caches(decoder.caches(height, width), device)

    def decode(self, latents_FChw: Tensor) -> Tensor:
        """Return the next frames, [P, H, W, 3] in uint8."""
        frames = self.decoder.decode(latents_FChw, self.caches, first=self.first)
        self.first = False
        return frames


class StreamingEncoder:
    """One stream's encoder with its caches: pixels to normalised latents, in order."""

    def __init__(self, vae: nn.Module, height: int, width: int, device: torch.device | str = "cpu") -> None:
        self.first = True
        config: Any = vae.config
        self._patch, unit = int(config.patch_size or 1), int(config.scale_factor_spatial)
        if height % unit or width % unit:
            raise ObservationError("pixels", got=f"{height} x {width}", expected=f"multiples of {unit}")
        self._half = Half(cast(nn.Module, vae.encoder), 1, 4)
        self._quant, self._statistics = cast(nn.Conv3d, vae.quant_conv), Statistics(vae)
        dtype = str(self._quant.weight.dtype).removeprefix("torch.")
        shapes = self._half.shapes(height // self._patch, width // self._patch)
        self.caches = new_caches([TensorSpec(shape, dtype) for shape in shapes], device)

    @torch.no_grad()
    def encode(self, frames_PHWc: Tensor) -> Tensor:
        """Return the latents [F, C, h, w] of the stream's next frames, uint8 RGB.

        Raises:
            ObservationError: if the frames are not 4k, or 1 + 4k at the start of the stream.
        """
        count = len(frames_PHWc) - self.first
        if count % 4 or count < 0:
            raise ObservationError("pixels", got=f"{len(frames_PHWc)} frames", expected="1 + 4k" if self.first else "4k")
        x = (frames_PHWc.permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0).to(self._quant.weight.dtype)
        if self._patch > 1:
            cut = torch.unflatten(torch.unflatten(x, 4, (-1, self._patch)), 3, (-1, self._patch))
            x = cut.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)
        own, parts = [cache[None] for cache in self.caches], [x[:, :, :1], x[:, :, 1:]] if self.first else [x]
        out = [self._half.run(part, own, first=self.first and i == 0) for i, part in enumerate(parts) if part.shape[2]]
        self.first = False
        mean = self._quant(torch.cat(out, dim=2)).chunk(2, dim=1)[0]
        return self._statistics.normalised(mean)[0].transpose(0, 1)


def new_caches(specs: Sequence[TensorSpec], device: torch.device | str) -> list[Tensor]:
    return [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs]


def to_bytes(pixels_P3HW: Tensor) -> Tensor:
    """Return [P, H, W, 3] in uint8 from pixels in [-1, 1]."""
    return ((pixels_P3HW.float() + 1.0) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class DecodeStage:
    """Latents of finished chunks to frames; its caches stay with it, one set a stream."""

    def __init__(self, config: WanConfig, decoder: Decoder) -> None:
        self.config, self.decoder, self.modules = config, decoder, (decoder.module,)
        specs = decoder.caches(*config.latent_shape[2:])
        self.state = {f"decode.{i}": spec for i, spec in enumerate(specs)}
        self.spec = StageSpec("decode", reads=("x",), writes=("frames",), state=tuple(self.state))

    def capture_key(self, host: Sequence[Row]) -> Hashable:
        """Return whose caches a capture bakes in; None for a stream's first chunk, which decodes in another way."""
        return None if any(row.chunk == 0 for row in host) else tuple(row.state_slot for row in host)

    def prepare(self, rows: Rows) -> None:
        """Nothing is needed before a replay."""

    def run(self, rows: Rows) -> None:
        """Decode each row; frames that the first chunk does not have are zeros at the end."""
        config, x = self.config, rows.get("x")
        shape = (config.frames_per_chunk * config.time_stride, config.pixel_height, config.pixel_width, 3)
        out = torch.zeros((rows.size, *shape), dtype=torch.uint8, device=x.device)
        for i, row in enumerate(rows.host):
            caches = [rows.arena(name)[row.state_slot] for name in self.state]
            if row.chunk == 0:
                for cache in caches:
                    cache.zero_()
            frames = self.decoder.decode(x[i], caches, first=row.chunk == 0)
            out[i, : len(frames)] = frames
        rows.put("frames", out)
