"""World models with random weights for measurements: on one device, on several of this process, or in processes.

Rings are filled with random numbers when they are first touched, so that a stream can begin at a chunk whose rings count
as full: steady state is reached at once, and the chip does not save power on zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.core.errors import ConfigError
from stretto.core.model import CapturesByRows, Row, Rows, Stage
from stretto.models import wan_vae
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig, tiny_config
from stretto.models.wan_light import LightDecoder
from stretto.models.wan_vae import Decoder

TINY = "wan-tiny"
NAMES = (*SPECS, TINY)
_VAES: Mapping[int, Mapping[str, Any]] = {16: wan_vae.WAN21_VAE, 48: wan_vae.WAN22_VAE}
_SMALL_VAE = {"base_dim": 8, "dim_mult": (1, 1, 1, 1), "num_res_blocks": 1, "decoder_base_dim": 8}


def config_of(name: str, **changes: Any) -> WanConfig:
    """Return the configuration of a preset, or of the tiny model, with some fields changed; None leaves a field.

    Raises:
        ConfigError: if the model or a field is unknown, or a value does not fit.
    """
    if name not in NAMES:
        raise ConfigError("model", got=repr(name), expected=f"one of {NAMES}")
    wanted = {k: v for k, v in changes.items() if v is not None}
    unknown = sorted(set(wanted) - {f.name for f in fields(WanConfig) if f.init})
    if unknown:
        raise ConfigError("model", got=f"unknown fields {unknown}", expected="fields of the model's configuration")
    return replace(tiny_config() if name == TINY else SPECS[name], **wanted)


class AnywhereStage:
    """One stage as every device of this process has it; runs where the rows are."""

    def __init__(self, by_device: Mapping[torch.device, Stage]) -> None:
        self._by_device = dict(by_device)
        self._any = next(iter(self._by_device.values()))
        self.spec = self._any.spec
        modules = getattr(self._any, "modules", None)
        if modules is not None:
            self.modules = modules
        self._filled = WeakTensorKeyDictionary()

    def _here(self, rows: Rows) -> Stage:
        return self._by_device[rows.slots_B.device]

    def _fill(self, rows: Rows) -> None:
        for name in self.spec.state:
            arena = rows.arena(name)
            if arena not in self._filled:
                self._filled[arena] = True
                generator = torch.Generator(device=arena.device).manual_seed(len(name))
                arena.normal_(generator=generator)

    def run(self, rows: Rows) -> None:
        self._fill(rows)
        self._here(rows).run(rows)


class AnywhereByRows(AnywhereStage):
    """The same for a stage that captures by its rows."""

    @property
    def alike(self) -> Hashable:
        return getattr(self._any, "alike", id(self))

    def capture_key(self, host: Sequence[Row]) -> Hashable:
        assert isinstance(self._any, CapturesByRows)
        return self._any.capture_key(host)

    def prepare(self, rows: Rows) -> None:
        here = self._here(rows)
        assert isinstance(here, CapturesByRows)
        self._fill(rows)
        here.prepare(rows)


class AnywhereModel:
    """A world model with its weights on several devices of this process. Everything but weights is that of the first."""

    def __init__(self, models: Mapping[torch.device, WanModel]) -> None:
        self.models = dict(models)
        first = self.first = next(iter(self.models.values()))
        self.name, self.config, self.module, self.route = first.name, first.config, first.module, first.route
        self.values, self.state, self.conditions, self.buckets = first.values, first.state, first.conditions, first.buckets
        self.state_key, self.carry = first.state_key, first.carry
        self.stages: Mapping[str, Stage] = {name: self._stage(name) for name in first.stages}

    def _stage(self, name: str) -> Stage:
        by_device = {device: model.stages[name] for device, model in self.models.items()}
        offers = isinstance(self.first.stages[name], CapturesByRows)
        return AnywhereByRows(by_device) if offers else AnywhereStage(by_device)

    @property
    def weight_bytes(self) -> Mapping[str, int]:
        """Device -> bytes of weights there, the decoder's included."""
        return {str(device): _weights(model) for device, model in self.models.items()}


def _weights(model: WanModel) -> int:
    decoder = [] if model.decoder is None else list(model.decoder.module.parameters())
    return sum(p.nbytes for p in [*model.net.parameters(), *decoder] if not p.is_meta)


@dataclass(frozen=True)
class RandomWorld:
    """Builds a world model with random weights; also in a worker process, with the share of the stages it needs."""

    config: WanConfig

    def __call__(self, *, device: str, only: Collection[str] | None) -> AnywhereModel:
        place = torch.device("cpu" if device.startswith("cpu") else device)  # arenas of `cpu:1` are on `cpu`
        needs = self.config.decoder != "none"
        decoder = decoder_of(self.config, str(place) if only is None or "decode" in only else "meta") if needs else None
        model = build(self.config, device=place, decoder=decoder, only=only)
        if place.type != "meta" and only != ():
            with torch.no_grad():
                model.randomize(seed=0)
        return AnywhereModel({place: model})

    def on(self, devices: Sequence[str]) -> AnywhereModel:
        """Build it on several devices of this process."""
        places = dict.fromkeys("cpu" if name.startswith("cpu") else name for name in devices)
        models = [self(device=place, only=None).models for place in places]
        return AnywhereModel({device: model for some in models for device, model in some.items()})


def decoder_of(config: WanConfig, device: str) -> Decoder:
    """Build the decoder that a configuration names, with random weights."""
    dtype = getattr(torch, config.dtype)
    if config.decoder == "light":
        widths = (256, 128, 64) if config.space_stride == 8 else (256, 128, 64, 64)
        if config.name == TINY:
            widths = (8, 8, 8)
        light = LightDecoder(config.channels, config.space_stride, widths, dtype=dtype)
        light.module.to(device)
        return light
    changes = _SMALL_VAE if config.name == TINY else {}
    with torch.device(device):  # random weights of gigabytes are slow to make on the host
        vae = wan_vae.build_vae(_VAES[config.channels], **changes).to(dtype=dtype)
    return wan_vae.VaeDecoder(vae, fused=True, channels_last=True)
