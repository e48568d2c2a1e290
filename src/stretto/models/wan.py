"""Chunk-causal Wan: a streaming video world model as a route of (denoise step, block) visits.

One chunk visits, for each denoise step, `embed`, `block.0` ... `block.{n-1}`, `head`; then `decode` where there is a
decoder. A block keeps a ring of keys and values for each (stream, ring); `KVPolicy` says which step uses which ring and
what of the previous chunk a visit waits for. `seed_route` fills the rings from given latents.

Source: Wan2.1, Wan2.2, Self-Forcing (arXiv 2506.08009), CausVid (arXiv 2412.07772).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stretto.core.errors import ObservationError, PromptTooLongError
from stretto.core.model import Buckets, Stage, StateKey
from stretto.core.route import Route, StageSpec, TensorSpec, Visit
from stretto.core.weights import WeightMap
from stretto.models.wan_actions import ActionTrack
from stretto.models.wan_config import SPECS, WanConfig, tiny_config
from stretto.models.wan_light import LightDecoder
from stretto.models.wan_net import DTYPES, WanNet
from stretto.models.wan_noise import chunk_key, noise
from stretto.models.wan_products import products_of
from stretto.models.wan_stages import CONTEXT, PLACE, BlockStage, Clocks, EmbedStage, HeadStage
from stretto.models.wan_vae import Decoder, DecodeStage
from stretto.models.wan_weights import BaseWeights, weight_map

DECODE = "decode"


class WanModel:
    """A Wan network bound to its routes.

    Args:
        config: the network and the shape of its streams.
        device: where the weights live.
        decoder: what turns latents into frames; needed exactly when the config names one.
        only: stages to hold weights for; the others stay on the meta device. None holds all.
    """

    def __init__(
        self,
        config: WanConfig,
        device: torch.device | str = "cpu",
        *,
        decoder: Decoder | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        if (decoder is None) != (config.decoder == "none"):
            raise ValueError(f"decoder: got {decoder}, expected one exactly when the config has decoder != 'none'")
        self.name, self.config = config.name, config
        self.device = torch.device(device)
        with torch.device("meta"):
            net = WanNet(config).to(DTYPES[config.dtype])
        for module in self._held(net, only):
            module.to_empty(device=self.device)
        self.net = net.eval().requires_grad_(False)
        for module in net.modules():
            _keep_tables_in_fp32(module)
        clocks = Clocks(config)
        stages: list[Stage] = [EmbedStage(net), *(BlockStage(net, i, clocks) for i in range(config.blocks))]
        for stage in stages:
            if isinstance(stage, BlockStage):
                stage.products = products_of(config, stage.block, self.device)
        stages.append(HeadStage(net, clocks))
        self.decoder = decoder
        if decoder is not None:
            stages.append(DecodeStage(config, decoder))
        self._stages = {stage.spec.name: stage for stage in stages}

    @staticmethod
    def _held(net: WanNet, only: Collection[str] | None) -> list[nn.Module]:
        if only is None:
            return [net]
        # Blocks make prompt keys from the text embedding and modulation from the time embedding.
        held: list[nn.Module] = [net.time_embedding, net.time_projection, net.text_embedding, net.actions]
        held += [block for i, block in enumerate(net.blocks) if f"block.{i}" in only]
        held += [net.patch_embedding] if "embed" in only else []
        held += [net.head] if "head" in only else []
        return held

    @property
    def module(self) -> nn.Module:
        return self.net

    @property
    def stages(self) -> Mapping[str, Stage]:
        return self._stages

    @property
    def buckets(self) -> tuple[Buckets, ...]:
        return ()

    @cached_property
    def values(self) -> Mapping[str, TensorSpec]:
        config = self.config
        frames = config.frames_per_chunk
        values = {
            "x": TensorSpec(config.latent_shape, "float32"),
            "h": TensorSpec((frames * config.tokens_per_frame, config.width), config.dtype),
            PLACE: TensorSpec((3,), "int64"),
        }
        values |= {track.value: TensorSpec((frames, track.dim), "float32") for track in config.actions}
        if self.decoder is not None:
            shape = (frames * config.time_stride, config.pixel_height, config.pixel_width, 3)
            values["frames"] = TensorSpec(shape, "uint8")
        return values

    @cached_property
    def state(self) -> Mapping[str, TensorSpec]:
        config = self.config
        ring = TensorSpec((config.window_frames, config.tokens_per_frame, config.heads, config.head_dim), config.dtype)
        prompt = TensorSpec((config.text_tokens, config.heads, config.head_dim), config.dtype)
        specs: dict[str, TensorSpec] = {}
        for stage in self._stages.values():
            if isinstance(stage, BlockStage):
                specs |= {stage.k: ring, stage.v: ring, stage.cross_k: prompt, stage.cross_v: prompt}
            elif isinstance(stage, DecodeStage):
                specs |= stage.state
        return specs

    @property
    def conditions(self) -> Mapping[str, TensorSpec]:
        config = self.config
        return {CONTEXT: TensorSpec((config.text_tokens, config.text_width), config.dtype)}

    @cached_property
    def route(self) -> Route:
        """The visits of a generated chunk."""
        policy = self.config.policy
        visits = [v for step in range(policy.denoise_steps) for v in (*self._pass(step), Visit("head", step))]
        if policy.clean_pass:
            visits += self._pass(policy.clean_step)
        if self.decoder is not None:
            # Last, so that the next chunk need not wait for pixels.
            visits.append(Visit(DECODE, policy.denoise_steps - 1))
        return self._route(visits)

    @cached_property
    def seed_route(self) -> Route:
        """The visits of a chunk whose latents are given: a clean pass for each ring, and no head.

        Seed chunks count like others: a stream that begins with n of them generates from chunk n on. Seeding is for the
        start of a stream; later, rings also hold frames that a seed chunk must not see.
        """
        policy = self.config.policy
        visits = [visit for ring in range(policy.states) for visit in self._pass(policy.seed_step + ring)]
        if self.decoder is not None:
            visits.append(Visit(DECODE, policy.denoise_steps - 1))
        return self._route(visits)

    def _pass(self, step: int) -> list[Visit]:
        return [Visit("embed", step), *(Visit(f"block.{i}", step) for i in range(self.config.blocks))]

    def _route(self, visits: list[Visit]) -> Route:
        inputs = ("x", PLACE, *(track.value for track in self.config.actions))
        outputs = ("x",) if self.decoder is None else ("x", "frames")
        return Route(self.specs, tuple(visits), inputs, outputs)

    @property
    def specs(self) -> Mapping[str, StageSpec]:
        return {name: stage.spec for name, stage in self._stages.items()}

    def state_key(self, visit: Visit) -> StateKey | None:
        """Return the ring that a block uses at this step, or the stream's one set of decoder caches."""
        if not self._stages[visit.stage].spec.state:
            return None
        return StateKey(DECODE) if visit.stage == DECODE else StateKey("ring", self.config.policy.state(visit.step))

    def carry(self, visit: Visit) -> Visit | None:
        """Return the visit of the previous chunk that must be done before this one; None if there is none.

        With `clean` and `last_step` it lies later on the route than the visit that waits.
        """
        if not self._stages[visit.stage].spec.state:
            return None
        return visit if visit.stage == DECODE else Visit(visit.stage, self.config.policy.carry(visit.step))

    def inputs(
        self,
        seed: int,
        stream: int,
        chunk: int,
        *,
        source_FChw: Tensor | None = None,
        given_KChw: Tensor | None = None,
        actions: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return the route's inputs for one chunk, each of one row's shape.

        Args:
            source_FChw: latents to start from; they show through only where the first sigma is below 1.
            given_KChw: the chunk's first K frames, known and kept as they are (the first frame of image to video).
            actions: every declared track by name, [samples, width] at its own rate.

        Raises:
            ObservationError: if the source, a given frame or a track does not fit, or a track is unknown or missing.
        """
        config, given = self.config, actions or {}
        x = noise(seed, stream, chunk, 0, config.latent_shape, self.device)
        if source_FChw is not None:
            if tuple(source_FChw.shape) != config.latent_shape:
                raise ObservationError("source", got=f"shape {tuple(source_FChw.shape)}", expected=str(config.latent_shape))
            sigma = config.levels[0].sigma
            x = ((1.0 - sigma) * source_FChw.to(x.device).double() + sigma * x.double()).float()
        known = 0 if given_KChw is None else len(given_KChw)
        if given_KChw is not None:
            if given_KChw.shape[1:] != x.shape[1:] or known > len(x):
                expected = f"up to {len(x)} frames of {config.latent_shape[1:]}"
                raise ObservationError("first_frame", got=f"shape {tuple(given_KChw.shape)}", expected=expected)
            x[:known] = given_KChw
        made = {"x": x, PLACE: torch.tensor([chunk, chunk_key(seed, stream, chunk), known], device=self.device)}
        if set(given) != {track.name for track in config.actions}:
            raise ObservationError("actions", got=sorted(given), expected=sorted(track.name for track in config.actions))
        for track in config.actions:
            values = track.to_latent_rate(given[track.name], chunk, config.frames_per_chunk, config.time_stride)
            made[track.value] = values.to(self.device)
        return made

    def example_inputs(self, batch: int, seed: int = 0) -> dict[str, Tensor]:
        """Return inputs of a first chunk for `batch` streams, with random actions."""
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for stream in range(batch):
            counts = {t: t.samples(0, self.config.frames_per_chunk, self.config.time_stride) for t in self.config.actions}
            actions = {t.name: torch.randn(n, t.dim, generator=generator) for t, n in counts.items()}
            rows.append(self.inputs(seed, stream, 0, actions=actions))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def context(self, prompt_XE: Tensor) -> Tensor:
        """Return a prompt's embeddings as the condition `context`: zeros past its end, which take part in attention.

        Raises:
            PromptTooLongError: if there are more tokens than the network was trained with.
            ObservationError: if the embeddings have another width.
        """
        config = self.config
        if prompt_XE.dim() != 2 or prompt_XE.shape[1] != config.text_width:
            raise ObservationError("prompt", got=f"shape {tuple(prompt_XE.shape)}", expected=f"[tokens, {config.text_width}]")
        if len(prompt_XE) > config.text_tokens:
            raise PromptTooLongError("prompt", got=f"{len(prompt_XE)} tokens", expected=f"at most {config.text_tokens}")
        context = torch.zeros(config.text_tokens, config.text_width, dtype=DTYPES[config.dtype], device=self.device)
        context[: len(prompt_XE)] = prompt_XE
        return context

    def seed_chunks(self, latents_FChw: Tensor) -> list[Tensor]:
        """Cut given latents into the inputs of `seed_route`, one [F, C, h, w] a chunk.

        Raises:
            ObservationError: if they are not whole chunks of this size.
        """
        frames, *rest = self.config.latent_shape
        if list(latents_FChw.shape[1:]) != rest or len(latents_FChw) % frames or not len(latents_FChw):
            expected = f"{rest} and a multiple of {frames} frames"
            raise ObservationError("latents", got=f"shape {tuple(latents_FChw.shape)}", expected=expected)
        return list(torch.split(latents_FChw.float(), frames))

    def weight_map(self) -> WeightMap:
        return weight_map(self.net)

    def refresh(self) -> None:
        self.net.refresh()
        for stage in self._stages.values():
            if isinstance(stage, BlockStage):
                stage.refresh()

    def randomize(self, seed: int) -> None:
        """Fill the model with random weights of sane scale, and refresh it. A share of a model gets what the whole has."""
        generator = torch.Generator(device=self.device)
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                if parameter.is_meta:
                    continue
                generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                if "norm" in name:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                elif parameter.dim() == 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        self.refresh()

    def base(self) -> BaseWeights:
        """Return the model as one whose checkpoints hold no action adapters."""
        return BaseWeights(self.net, self.refresh)


def _keep_tables_in_fp32(module: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if name.startswith("table_"):
            module.register_buffer(name, buffer.float(), persistent=False)


def build(
    config: WanConfig,
    *,
    device: torch.device | str = "cpu",
    decoder: Decoder | None = None,
    only: Collection[str] | None = None,
) -> WanModel:
    """Make a model on a device. Its weights are not set: load a checkpoint or call `randomize` next."""
    return WanModel(config, device, decoder=decoder, only=only)


def tiny() -> tuple[WanModel, ...]:
    """Return small models with random weights: the overlapping policy with an action track, and the reference policy."""
    camera = ActionTrack("camera", 4)
    clean = replace(tiny_config(), name="wan-tiny-clean", kv_policy="clean", frames_per_chunk=2, decoder="light")
    light = LightDecoder(16, 8, (8, 8, 8))
    models = build(replace(tiny_config(), actions=(camera,))), build(clean, decoder=light)
    for model in models:
        model.randomize(seed=0)
    return models


def presets() -> Mapping[str, Callable[..., WanModel]]:
    """Return builders with seeded random weights, by the name that users type.

    A builder takes `device`, `dtype`, `decoder`, `only` and any field of the configuration.
    """

    def builder(config: WanConfig) -> Callable[..., WanModel]:
        def build_random(
            *, device: str, dtype: str, decoder: Decoder | None = None, only: Collection[str] | None = None, **changes: Any
        ) -> WanModel:
            model = build(replace(config, dtype=dtype, **changes), device=device, decoder=decoder, only=only)
            model.randomize(seed=0)
            return model

        return build_random

    return {name: builder(config) for name, config in SPECS.items()}
