"""World models for streams of real sessions: built whole, or as the share of one worker process, and placed by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stretto.core.errors import CheckpointError, ConfigError
from stretto.core.plan import Device, Mode, Plan
from stretto.deploy.profile import facts_of, passes_of
from stretto.deploy.worlds import decoder_of
from stretto.models.wan import DECODE, WanModel, build
from stretto.models.wan_config import WanConfig
from stretto.models.wan_vae import Decoder, VaeDecoder, describe_vae, load_vae
from stretto.models.wan_weights import detect, read_pt
from stretto.runtime.weights import load_weights, tensor_shapes, update_weights
from stretto.sched import plans
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import CPU
from stretto.sched.measured import find
from stretto.sched.profile import Carry, Profile, Provenance, StageProfile

KINDS = ("whole", "by_step", "by_block", "by_stage", "circular")
"""Ways to spread one stream over devices."""
REPLICAS = "replicas"
"""The whole route on each device, for streams of its own; what happens to one device is nothing to the others."""


@dataclass(frozen=True)
class WanShare:
    """Builds a Wan model, or the stages of it that a device runs. Satisfies `runtime.worker.ModelFactory`.

    Without a checkpoint the weights are random, and the same in every process.
    """

    config: WanConfig
    checkpoint: Path | None = None
    seed: int = 0
    vae: Path | None = None
    """A folder in diffusers' layout with the VAE that decodes; random weights without one."""

    def __call__(self, *, device: str, only: Collection[str] | None) -> WanModel:
        """Build on a device with the weights of the stages in `only`; none of them: only describe the model.

        Raises:
            CheckpointError: if the checkpoint is damaged, incomplete or of another model.
        """
        place = torch.device(device if device.startswith("cuda") else "cpu")
        model = build(self.config, device=place, decoder=self._decoder(place, only), only=only)
        if only is None or only:
            with torch.no_grad():
                self._fill(model)
        return model

    def _decoder(self, place: torch.device, only: Collection[str] | None) -> Decoder | None:
        if self.config.decoder == "none":
            return None
        here = only is None or DECODE in only
        if self.vae is not None and self.config.decoder == "vae":
            return self._loaded(self.vae, place if here else torch.device("meta"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return decoder_of(self.config, str(place) if here else "meta")

    def _loaded(self, path: Path, place: torch.device) -> Decoder:
        config, dtype = self.config, getattr(torch, self.config.dtype)
        vae: Any = describe_vae(path).to(dtype) if place.type == "meta" else load_vae(path, dtype=dtype, device=place)
        has = {"z_dim": int(vae.config.z_dim), "scale_factor_spatial": int(vae.config.scale_factor_spatial)}
        wanted = {"z_dim": config.channels, "scale_factor_spatial": config.space_stride}
        if has != wanted:
            raise ConfigError("vae", got=f"{path} with {has}", expected=f"{wanted}, as {config.name} has")
        return VaeDecoder(vae, fused=True, channels_last=True)

    def _fill(self, model: WanModel) -> None:
        if self.checkpoint is None:
            model.randomize(self.seed)
        elif self.checkpoint.suffix in (".pt", ".pth"):
            tensors = read_pt(self.checkpoint)
            self._check_variant(tensors)
            update_weights(model, tensors.items(), complete=True)
        else:
            self._check_variant(tensor_shapes(self.checkpoint))
            load_weights(model, self.checkpoint)

    def _check_variant(self, names: Iterable[str]) -> None:
        """Say of another kind of Wan what it is, before hundreds of its tensors are named."""
        try:
            detect(names)
        except CheckpointError as e:
            raise CheckpointError(f"{self.checkpoint}: {e}") from e


def even_profile(model: WanModel) -> Profile:
    """Return a profile in which all blocks cost the same and what lies between them next to nothing.

    It is enough to cut a route evenly; a measured one also weighs the decoder.
    """
    stages = {}
    for name in model.stages:
        key = model.state_key(next(v for v in model.route.visits if v.stage == name))
        heavy = name.startswith("block.") or name == DECODE
        stages[name] = StageProfile(
            BatchCost.line(0.0, 1e-3 if heavy else 1e-6),
            state_bytes=sum(model.state[s].nbytes for s in model.stages[name].spec.state),
            state_of="stream" if key is not None and key.pool == DECODE else "visit",
            crossing_bytes=model.values["h"].nbytes,
        )
    carry: Carry = "same_step" if model.config.kv_policy == "same_step" else "last_pass"
    made = Provenance("computed", note="every block alike")
    return Profile(model.name, "any", passes_of(model.route.visits), stages, made, carry=carry)


def profile_of(model: WanModel, devices: Sequence[str]) -> Profile:
    """Return what cuts are weighed by: the measured profile of this model on these devices if one ships, else an even one."""
    kinds = {torch.cuda.get_device_name(d) if d.startswith("cuda") else CPU.name for d in devices}
    measured = measured_profile(model, kinds.pop()) if len(kinds) == 1 else None
    return measured or even_profile(model)


def measured_profile(model: WanModel, device_kind: str) -> Profile | None:
    """Return the profile that ships for exactly this model on a device kind, if there is one.

    Raises:
        ConfigError: if it is of another route: the file is then of another version of the model.
    """
    if model.config.kv_policy != "same_step":
        return None
    found = find(model.name, device_kind, facts_of(model.config))
    if found is None:
        return None
    profile = found.with_steps(model.config.denoise_steps)
    profile.check_route(model.route)
    return profile


def place(model: WanModel, kind: str, devices: Sequence[str], *, batch_cap: int = 1, mode: Mode = "eager") -> Plan:
    """Spread a model's route over devices.

    Raises:
        ConfigError: if the kind is unknown, or `whole` is asked for several devices.
        PlanError: if there are more devices than parts.
    """
    if kind not in (*KINDS, REPLICAS):
        raise ConfigError("plan", got=repr(kind), expected=f"one of {(*KINDS, REPLICAS)}")
    profile, places = profile_of(model, devices), [Device(name) for name in devices]
    if kind == "whole" and len(places) > 1:
        raise ConfigError("devices", got=list(devices), expected="one device for the plan `whole`, or the plan `replicas`")
    if kind == REPLICAS:
        each = [place(model, "whole", (name,), batch_cap=batch_cap, mode=mode) for name in devices]
        classes = {name: plan.classes["default"] for name, plan in zip(devices, each, strict=True)}
        caps = dict.fromkeys(devices, batch_cap)
        return replace(each[0], kind=REPLICAS, devices=tuple(places), classes=classes, batch_caps=caps)
    if kind == "whole":
        plan = plans.whole(profile, places[0], quantum=len(model.route), batch_cap=batch_cap)
    elif kind == "circular":
        plan = plans.circular(profile, places)
    elif kind == "by_block":
        plan = plans.by_block(profile, places, batch_cap=batch_cap)
    elif kind == "by_step":
        plan = plans.by_step(profile, places, batch_cap=batch_cap)
    else:
        plan = plans.by_stage(profile, places, batch_cap=batch_cap)
    return replace(plan, mode=mode)
