"""Dimensions of pi0 and pi0.5 and how they are read from LeRobot's and openpi's checkpoints.

A LeRobot `config.json` names its two language models (`gemma_2b`, `gemma_300m`); a checkpoint of other sizes says so in
an extra `stretto` object: {"vision": {...}, "language": {...}, "expert": {...}, "vocab_size": n}, with the field names of
`VisionDims` and `GemmaDims`. Times run from t=1 (noise) to t=0 (actions).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from stretto.core.errors import ConfigError

Family = Literal["pi0", "pi05"]
FAMILIES: dict[str, Family] = {"pi0": "pi0", "pi05": "pi05"}


@dataclass(frozen=True, slots=True)
class GemmaDims:
    """One Gemma-shaped transformer."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class VisionDims:
    """The SigLIP image tower; attention heads are width / heads wide."""

    width: int = 1152
    depth: int = 27
    mlp: int = 4304
    heads: int = 16
    patch: int = 14


GEMMA = {
    "gemma_2b": GemmaDims(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": GemmaDims(1024, 18, 4096, 8, 1, 256),
}
PROMPT_BUCKETS = (16, 48, 112, 200)


@dataclass(frozen=True, slots=True)
class Pi0Config:
    """Every dimension of one pi0 or pi0.5 checkpoint.

    Raises:
        ConfigError: on construction, naming the field that does not fit the others.
    """

    family: Family
    cameras: int = 3
    image_size: int = 224
    action_horizon: int = 50
    action_dim: int = 32
    state_dim: int = 32
    """Width of the state token's input; pi0.5 has its state in the prompt."""
    tokenizer_max_length: int = 200
    denoise_steps: int = 10
    min_period: float = 4e-3
    max_period: float = 4.0
    vocab_size: int = 257152
    vision: VisionDims = VisionDims()
    language: GemmaDims = GEMMA["gemma_2b"]
    expert: GemmaDims = GEMMA["gemma_300m"]
    rope_theta: float = 1e4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("family", got=repr(self.family), expected="pi0 or pi05")
        counts = ("cameras", "image_size", "action_horizon", "action_dim", "state_dim", "tokenizer_max_length")
        for name in (*counts, "denoise_steps", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, got=getattr(self, name), expected="1 or more")
        if not 0 < self.min_period < self.max_period:
            raise ConfigError("min_period", got=self.min_period, expected=f"between 0 and max_period {self.max_period}")
        if self.image_size % self.vision.patch:
            raise ConfigError("image_size", got=self.image_size, expected=f"a multiple of the patch {self.vision.patch}")
        if self.vision.width % self.vision.heads:
            raise ConfigError("vision.width", got=self.vision.width, expected=f"a multiple of {self.vision.heads} heads")
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            a, b = getattr(self.language, name), getattr(self.expert, name)
            if a != b:
                raise ConfigError(f"expert.{name}", got=b, expected=f"{a}, as in the language model whose keys it reads")
        if self.expert.width % 2 or self.language.head_dim % 2:
            raise ConfigError("expert", got=self.expert, expected="an even width and an even head_dim")

    @property
    def tokens_per_camera(self) -> int:
        return (self.image_size // self.vision.patch) ** 2

    @property
    def image_tokens(self) -> int:
        return self.cameras * self.tokens_per_camera

    @property
    def prefix_tokens(self) -> int:
        return self.image_tokens + self.tokenizer_max_length

    @property
    def suffix_tokens(self) -> int:
        return self.action_horizon + (self.family == "pi0")

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        short = tuple(n for n in PROMPT_BUCKETS if n < self.tokenizer_max_length)
        return (*short, self.tokenizer_max_length)

    @staticmethod
    def from_lerobot(raw: Mapping[str, Any]) -> Pi0Config:
        """Read the content of a LeRobot `config.json` of type `pi0` or `pi05`.

        Raises:
            ConfigError: naming the field that is absent, of the wrong type, or asks for what is not supported.
        """
        family = FAMILIES.get(_field(raw, "type", str, None))
        if family is None:
            raise ConfigError("type", got=repr(raw["type"]), expected=f"one of {sorted(FAMILIES)}")
        _refuse_unsupported(raw)
        resolution = _field(raw, "image_resolution", list, [224, 224])
        if len(resolution) != 2 or resolution[0] != resolution[1] or type(resolution[0]) is not int:
            raise ConfigError("image_resolution", got=resolution, expected="two equal integers")
        extra = _field(raw, "stretto", dict, {})
        known = {"vision", "language", "expert", "vocab_size"}
        if set(extra) - known:
            raise ConfigError("stretto", got=sorted(extra), expected=f"keys among {sorted(known)}")
        return Pi0Config(
            family=family,
            cameras=_cameras(raw),
            image_size=resolution[0],
            action_horizon=_field(raw, "chunk_size", int, 50),
            action_dim=_field(raw, "max_action_dim", int, 32),
            state_dim=_field(raw, "max_state_dim", int, 32),
            tokenizer_max_length=_field(raw, "tokenizer_max_length", int, 200 if family == "pi05" else 48),
            denoise_steps=_field(raw, "num_inference_steps", int, 10),
            min_period=float(_field(raw, "min_period", float, 4e-3)),
            max_period=float(_field(raw, "max_period", float, 4.0)),
            vocab_size=_field(extra, "vocab_size", int, 257152),
            vision=_dims(extra, "vision", VisionDims()),
            language=_dims(extra, "language", _variant(raw, "paligemma_variant", "gemma_2b")),
            expert=_dims(extra, "expert", _variant(raw, "action_expert_variant", "gemma_300m")),
        )

    @staticmethod
    def from_openpi(shapes: Mapping[str, tuple[int, ...]], *, vision_heads: int | None = None, **changes: Any) -> Pi0Config:
        """Read the dimensions of an openpi export, which has no description beside its tensors, from their shapes.

        Args:
            shapes: tensor name -> shape, as the checkpoint's headers declare them.
            vision_heads: attention heads of the image tower, which no shape tells; may be left out at the published width.
            changes: fields that shapes do not tell (action_horizon, cameras, denoise_steps, ...).

        Raises:
            ConfigError: if the tensors are neither pi0 nor pi0.5, or a needed one is absent, or the heads are not known.
        """
        family = family_of(shapes)
        expert_width, action_dim = _shape(shapes, "action_in_proj.weight", 2)
        state_dim = _shape(shapes, "state_proj.weight", 2)[1] if family == "pi0" else 32
        vision = VisionDims()
        patches = _shape(shapes, "vision_model.embeddings.position_embedding.weight", 2)[0]
        width, _, patch, _ = _shape(shapes, "vision_model.embeddings.patch_embedding.weight", 4)
        vision = replace(
            vision,
            width=width,
            patch=patch,
            depth=_depth(shapes, "vision_model.encoder.layers."),
            mlp=_shape(shapes, "vision_model.encoder.layers.0.mlp.fc1.weight", 2)[0],
            heads=_vision_heads(width, vision_heads),
        )
        config = Pi0Config(
            family=family,
            image_size=patch * round(patches**0.5),
            action_dim=action_dim,
            state_dim=state_dim,
            tokenizer_max_length=200 if family == "pi05" else 48,
            vocab_size=_vocabulary(shapes),
            vision=vision,
            language=_gemma_from(shapes, "language_model.", GEMMA["gemma_2b"]),
            expert=_gemma_from(shapes, "gemma_expert.model.", GEMMA["gemma_300m"]),
        )
        if config.expert.width != expert_width:
            raise ConfigError("action_in_proj.weight", got=expert_width, expected=f"the expert's width {config.expert.width}")
        unknown = set(changes) - {f.name for f in fields(Pi0Config)}
        if unknown:
            raise ConfigError("changes", got=sorted(unknown), expected="fields of Pi0Config")
        return replace(config, **changes)


def family_of(names: Mapping[str, Any]) -> Family:
    """Tell pi0 from pi0.5 by the tensors that only one of them has.

    Raises:
        ConfigError: if the names are of neither.
    """
    if any(n.endswith("time_mlp_in.weight") and not n.endswith("action_time_mlp_in.weight") for n in names):
        return "pi05"
    if any(n.endswith("state_proj.weight") for n in names):
        return "pi0"
    raise ConfigError("checkpoint", got=f"{len(names)} tensors", expected="time_mlp_in (pi0.5) or state_proj (pi0)")


T = TypeVar("T")


def _field(raw: Mapping[str, Any], name: str, kind: type[T], default: T | None) -> T:
    value = raw.get(name, default)
    accepted: tuple[type, ...] = {float: (float, int), list: (list, tuple)}.get(kind, (kind,))
    if value is None and name in raw and default is not None:
        return default
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(name, got=repr(raw.get(name, "nothing")), expected=kind.__name__)
    return value  # type: ignore[return-value]


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if _field(raw, "n_obs_steps", int, 1) != 1:
        raise ConfigError("n_obs_steps", got=raw["n_obs_steps"], expected=1)
    for name, value in raw.items():
        if name.startswith("use_") and "memory" in name and value:
            raise ConfigError(name, got=value, expected="false", hint="Policies that remember past frames are not supported.")


def _cameras(raw: Mapping[str, Any]) -> int:
    features = _field(raw, "input_features", dict, None)
    visual = [n for n, f in features.items() if isinstance(f, Mapping) and f.get("type") == "VISUAL"]
    # LeRobot writes its empty cameras among the features too, once the policy was built.
    empty = sum("empty_camera" in name for name in visual)
    cameras = len(visual) - empty + max(empty, _field(raw, "empty_cameras", int, 0))
    if not cameras:
        raise ConfigError("input_features", got=sorted(features), expected="at least one feature of type VISUAL")
    return cameras


def _variant(raw: Mapping[str, Any], name: str, default: str) -> GemmaDims:
    variant = _field(raw, name, str, default)
    if variant not in GEMMA:
        raise ConfigError(name, got=repr(variant), expected=f"one of {sorted(GEMMA)}")
    return GEMMA[variant]


D = TypeVar("D", GemmaDims, VisionDims)


def _dims(extra: Mapping[str, Any], name: str, default: D) -> D:
    given = _field(extra, name, dict, {})
    known = {f.name for f in fields(default)}
    for key, value in given.items():
        if key not in known or type(value) is not int or value < 1:
            raise ConfigError(f"stretto.{name}.{key}", got=repr(value), expected=f"a positive int, key among {sorted(known)}")
    return replace(default, **given)


def _find(shapes: Mapping[str, tuple[int, ...]], part: str) -> str:
    for name in shapes:
        if name.endswith(part) or part in name:
            return name
    raise ConfigError(part, got="no such tensor", expected="a pi0 or pi0.5 checkpoint")


def _shape(shapes: Mapping[str, tuple[int, ...]], part: str, ndim: int) -> tuple[int, ...]:
    name = _find(shapes, part)
    if len(shapes[name]) != ndim:
        raise ConfigError(name, got=list(shapes[name]), expected=f"{ndim} axes")
    return shapes[name]


def _depth(shapes: Mapping[str, tuple[int, ...]], part: str) -> int:
    pattern = re.compile(re.escape(part) + r"(\d+)\.")
    found = [int(m.group(1)) for n in shapes if (m := pattern.search(n))]
    if not found:
        raise ConfigError(part, got="no such tensor", expected="numbered layers")
    return max(found) + 1


def _vision_heads(width: int, said: int | None) -> int:
    published = VisionDims()
    if said is None and width != published.width:
        raise ConfigError(
            "vision_heads",
            got=f"none for an image tower {width} wide",
            expected="a number of heads",
            hint='No tensor tells it: say {"network": {"vision_heads": n}} in the checkpoint\'s stretto.json.',
        )
    return published.heads if said is None else said


def _vocabulary(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Read the rows of the language model's embedding, which some writers store only as the head that it is tied to."""
    for name, shape in shapes.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and "gemma_expert." not in name:
            return shape[0]
    raise ConfigError("embed_tokens.weight", got="no such tensor", expected="a pi0 or pi0.5 checkpoint")


def _gemma_from(shapes: Mapping[str, tuple[int, ...]], root: str, known: GemmaDims) -> GemmaDims:
    """Read a Gemma's shapes; how q splits into heads is not in a shape, so the published head_dim is tried first."""
    root = root if any(f"{root}layers.0." in n for n in shapes) else f"{root}model."
    q, width = _shape(shapes, f"{root}layers.0.self_attn.q_proj.weight", 2)
    k, _ = _shape(shapes, f"{root}layers.0.self_attn.k_proj.weight", 2)
    mlp, _ = _shape(shapes, f"{root}layers.0.mlp.gate_proj.weight", 2)
    head_dim = known.head_dim if q % known.head_dim == 0 and k % known.head_dim == 0 else k
    return GemmaDims(width, _depth(shapes, f"{root}layers."), mlp, q // head_dim, k // head_dim, head_dim)
