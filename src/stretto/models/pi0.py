"""pi0 and pi0.5: cameras, state and an instruction in, a chunk of actions out.

The route is `vision`, `prefix`, then `denoise` visited `denoise_steps` times. Only the noisy actions change between the
denoise visits; the prefix's keys and values stay in their arenas, where the expert reads them by slot.

Shape legend: as in pi0_net.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.core.errors import ConfigError
from stretto.core.model import Buckets, Rows, Stage
from stretto.core.route import Route, StageSpec, TensorSpec, Visit
from stretto.core.weights import WeightMap
from stretto.models import pi0_weights
from stretto.models.pi0_config import GemmaDims, Pi0Config, VisionDims
from stretto.models.pi0_denoise import chunking_inputs, denoise_stage, example_chunking
from stretto.models.pi0_fp8 import Fp8Net
from stretto.models.pi0_net import Pi0Net, PrefixArena

Pixels = Literal["uint8", "float32"]
SPECS: Mapping[str, Pi0Config] = {
    "pi05": Pi0Config(family="pi05"),
    "pi0": Pi0Config(family="pi0", tokenizer_max_length=48),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class VisionStage:
    """All cameras of all rows through the image tower at once. A masked camera is computed and never read."""

    spec = StageSpec("vision", reads=("images", "image_mask"), writes=("image_tokens",))

    def __init__(self, net: Pi0Net | Fp8Net) -> None:
        self.net = net

    @torch.no_grad()
    def run(self, rows: Rows) -> None:
        rows.put("image_tokens", self.net.vision(rows.get("images")))


class PrefixStage:
    """Keys and values of image and prompt tokens, left in the row's arena slot."""

    spec = StageSpec(
        "prefix",
        reads=("image_tokens", "image_mask", "tokens", "token_count"),
        writes=("prefix_k", "prefix_v", "prefix_mask", "prefix_length", "suffix_start"),
    )

    def __init__(self, net: Pi0Net | Fp8Net) -> None:
        self.net = net

    @torch.no_grad()
    def run(self, rows: Rows) -> None:
        tokens_BL = rows.get("tokens")
        layout = self.net.prefix_layout(rows.get("image_mask"), rows.get("token_count"), tokens_BL.shape[1])
        arena = PrefixArena(rows.arena("prefix_k"), rows.arena("prefix_v"), rows.slots_B)
        self.net.prefix(rows.get("image_tokens"), tokens_BL, layout, arena)
        missing = arena.k_SNPKd.shape[2] - layout.mask_BP.shape[1]
        rows.put("prefix_mask", pad(layout.mask_BP, (0, missing)) if missing else layout.mask_BP)
        rows.put("prefix_length", layout.length_B)
        rows.put("suffix_start", layout.start_B)


class Pi0Model:
    """A policy bound to its route; see `core.model.Model` and `core.weights.Weighted`."""

    def __init__(self, config: Pi0Config, net: Pi0Net, pixels: Pixels, rtc: Sequence[str] = ()) -> None:
        self.config, self.module, self.pixels = config, net, pixels
        self.name: str = config.family
        self.rtc_modes = tuple(rtc)
        self._chunking = chunking_inputs(config, rtc)
        self._stages: dict[str, Stage] = {}
        self._view: Fp8Net | None = None
        self.run_on(net)

    def run_on(self, net: Pi0Net | Fp8Net) -> None:
        """Let the stages run on another view of the same weights. Before an engine is made of the model."""
        self._view = net if isinstance(net, Fp8Net) else None
        stages: list[Stage] = [VisionStage(net), PrefixStage(net), denoise_stage(net, self.rtc_modes)]
        self._stages = {s.spec.name: s for s in stages}

    @property
    def stages(self) -> Mapping[str, Stage]:
        return self._stages

    @cached_property
    def route(self) -> Route:
        inputs = ("images", "image_mask", "tokens", "token_count", "x", *self._chunking)
        return Route(
            stages={name: s.spec for name, s in self._stages.items()},
            visits=(Visit("vision"), Visit("prefix"), *(Visit("denoise", i) for i in range(self.config.denoise_steps))),
            inputs=(*inputs, "state") if self.config.family == "pi0" else inputs,
            outputs=("x",),
        )

    @cached_property
    def values(self) -> Mapping[str, TensorSpec]:
        c, language = self.config, self.config.language
        compute = str(self.module.dtype).removeprefix("torch.")
        kv = TensorSpec((language.depth, c.prefix_tokens, language.kv_heads, language.head_dim), compute)
        values = {
            "images": TensorSpec((c.cameras, c.image_size, c.image_size, 3), self.pixels),
            "image_mask": TensorSpec((c.cameras,), "bool"),
            "tokens": TensorSpec((c.tokenizer_max_length,), "int64"),
            "token_count": TensorSpec((), "int32"),
            "x": TensorSpec((c.action_horizon, c.action_dim), "float32"),
            "image_tokens": TensorSpec((c.image_tokens, language.width), compute),
            "prefix_k": kv,
            "prefix_v": kv,
            "prefix_mask": TensorSpec((c.prefix_tokens,), "bool"),
            "prefix_length": TensorSpec((), "int32"),
            "suffix_start": TensorSpec((), "int32"),
            **self._chunking,
        }
        if c.family == "pi0":
            values["state"] = TensorSpec((c.state_dim,), "float32")
        return values

    @property
    def state(self) -> Mapping[str, TensorSpec]:
        return {}

    @property
    def conditions(self) -> Mapping[str, TensorSpec]:
        return {}

    def state_key(self, visit: Visit) -> None:
        return None

    def carry(self, visit: Visit) -> None:
        return None

    @cached_property
    def buckets(self) -> tuple[Buckets, ...]:
        return (Buckets("prompt", self.config.prompt_buckets, {"tokens": 0}, ("prefix",)),)

    def weight_map(self) -> WeightMap:
        return pi0_weights.weight_map(self.module)

    def refresh(self) -> None:
        """Recompute the time table, and FP8 weights where there are any, in place. Call after every change of a weight."""
        self.module.refresh()
        if self._view is not None:
            self._view.refresh()

    def randomize(self, seed: int) -> None:
        """Fill the weights with seeded random values at a scale that keeps activations sane."""
        pi0_weights.randomize(self.module, seed)
        self.refresh()

    def example_inputs(self, batch: int, seed: int = 0) -> dict[str, Tensor]:
        """Return random inputs of the route for `batch` rows, on the CPU; prompts are of different lengths."""
        g = torch.Generator().manual_seed(seed)
        c = self.config
        pixels = torch.randint(0, 256, (batch, *self.values["images"].shape), generator=g, dtype=torch.uint8)
        inputs = {
            "images": pixels if self.pixels == "uint8" else pixels / 127.5 - 1.0,
            "image_mask": torch.ones(batch, c.cameras, dtype=torch.bool),
            "tokens": torch.randint(0, c.vocab_size, (batch, c.tokenizer_max_length), generator=g),
            "token_count": torch.randint(1, c.tokenizer_max_length + 1, (batch,), generator=g, dtype=torch.int32),
            "x": torch.randn(batch, c.action_horizon, c.action_dim, generator=g),
        }
        if c.family == "pi0":
            inputs["state"] = torch.rand(batch, c.state_dim, generator=g) * 2 - 1
        return inputs | example_chunking(self._chunking, batch, g)


def build(
    config: Pi0Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.bfloat16,
    pixels: Pixels = "uint8",
    rtc: Sequence[str] = (),
) -> Pi0Model:
    """Make a policy on a device. Its weights are not set: load a checkpoint or call `randomize` next.

    `rtc` lists the modes of real-time chunking that rows may ask for; see `pi0_denoise`.

    Raises:
        ConfigError: if dtype, pixels or a mode is none of the known ones.
    """
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigError("dtype", got=dtype, expected=f"one of {sorted(DTYPES)}")
    if pixels not in ("uint8", "float32"):
        raise ConfigError("pixels", got=repr(pixels), expected="uint8 or float32")
    with torch.device("meta"):
        net = Pi0Net(config, chosen)
    net.to_empty(device=device).eval()
    return Pi0Model(config, net, pixels, rtc)


def tiny(rtc: Sequence[str] = ()) -> tuple[Pi0Model, ...]:
    """Return one small policy of each family, with random weights, on the CPU in fp32."""
    models = []
    for family in ("pi05", "pi0"):
        config = Pi0Config(
            family=family,
            cameras=2,
            image_size=28,
            action_horizon=5,
            action_dim=4,
            state_dim=6,
            tokenizer_max_length=20,
            denoise_steps=3,
            vocab_size=64,
            vision=VisionDims(width=24, depth=2, mlp=40, heads=2),
            language=GemmaDims(width=32, depth=3, mlp=48, heads=4, kv_heads=1, head_dim=8),
            expert=GemmaDims(width=16, depth=3, mlp=40, heads=4, kv_heads=1, head_dim=8),
        )
        model = build(config, dtype=torch.float32, rtc=rtc)
        model.randomize(seed=0)
        models.append(model)
    return tuple(models)


def presets() -> Mapping[str, Callable[..., Pi0Model]]:
    """Return the published shapes by name; each builds with seeded random weights."""

    def builder(config: Pi0Config) -> Callable[..., Pi0Model]:
        def build_random(*, device: str, dtype: str, pixels: Pixels = "uint8", rtc: Sequence[str] = ()) -> Pi0Model:
            model = build(config, device=device, dtype=dtype, pixels=pixels, rtc=rtc)
            model.randomize(seed=0)
            return model

        return build_random

    return {"pi0.5": builder(SPECS["pi05"]), "pi0": builder(SPECS["pi0"])}
