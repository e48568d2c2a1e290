"""One implementation of observation -> model inputs and model actions -> robot actions, in process and behind a server.

Shape legend: C camera slots, R the model's image side, L the token limit, S state width of the model, H actions of a
chunk, A width of an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from stretto.core.errors import ConfigError, NonFiniteActionsError, ObservationError
from stretto.processors.images import DTYPES, blacken, resize_into
from stretto.processors.lerobot import Stats, lerobot_spec
from stretto.processors.openpi import OpenpiOptions, openpi_spec
from stretto.processors.presets import KeyMap
from stretto.processors.spec import ProcessorSpec
from stretto.processors.stats import Array, Degenerate
from stretto.processors.tokenizers import Tokenizer, load_tokenizer
from stretto.processors.transforms import ActionContext
from stretto.processors.validate import check_observation, state_widths

Preset = str | KeyMap | Mapping[str, Any] | Path | None


class FieldSchema(TypedDict):
    """One field of an observation, as published to clients."""

    kind: str
    """`image`, `state` or `prompt`."""
    shape: list[int]
    """An example that is taken; images may have any size, in either layout."""
    dtype: str
    required: bool


@dataclass(frozen=True)
class ModelInputs:
    """One observation as the model takes it; the arrays belong to the caller, who may have brought the pictures' own."""

    images: Array
    """[C, R, R, 3]: uint8 (openpi), or float32 in -1..1 (LeRobot)."""
    image_mask: Array
    """[C] bool: False where a camera is absent."""
    tokens: Array
    """[L] int64: the prompt, zero-padded on the right."""
    token_count: int
    state: Array
    """[S] float32: normalised, zero-padded."""
    context: ActionContext
    """Decodes the actions of this observation, and of no other."""
    clipped_values: int
    """Pixel values outside 0..1 that were clipped."""

    def arrays(self) -> dict[str, Array]:
        """Return what the model reads, by name; `token_count` as an int64 scalar."""
        return {
            "images": self.images,
            "image_mask": self.image_mask,
            "tokens": self.tokens,
            "token_count": np.asarray(self.token_count, np.int64),
            "state": self.state,
        }


@dataclass(frozen=True)
class PolicyProcessor:
    """Both directions between one robot and one checkpoint. Stateless: any thread may call it."""

    spec: ProcessorSpec
    tokenizer: Tokenizer
    default_prompt: str | None = None

    @property
    def action_dim(self) -> int:
        return self.spec.action_dim

    @property
    def action_horizon(self) -> int:
        return self.spec.action_horizon

    @staticmethod
    def from_lerobot(
        folder: str | Path,
        *,
        preset: Preset = None,
        tokenizer: str | Path | None = None,
        default_prompt: str | None = None,
        optional_cameras: Sequence[str] = (),
        stats: Stats | None = None,
        degenerate: Degenerate = "refuse",
        pad_state_bins: bool = False,
    ) -> PolicyProcessor:
        """Load from a LeRobot folder; see `lerobot_spec` for the options.

        Raises:
            CheckpointError: if a file, step or statistic cannot be used.
            ConfigError: if the preset or the tokenizer does not fit.
        """
        spec = lerobot_spec(
            Path(folder),
            preset=preset,
            optional_cameras=optional_cameras,
            stats=stats,
            degenerate=degenerate,
            pad_state_bins=pad_state_bins,
        )
        return PolicyProcessor(spec, load_tokenizer(Path(tokenizer or folder)), default_prompt)

    @staticmethod
    def from_openpi(
        folder: str | Path,
        *,
        family: str | None = None,
        preset: Preset = None,
        options: OpenpiOptions | None = None,
        tokenizer: str | Path | None = None,
        default_prompt: str | None = None,
        degenerate: Degenerate = "refuse",
    ) -> PolicyProcessor:
        """Load from an openpi export; see `openpi_spec` for the options.

        Raises:
            CheckpointError: if a file or statistic cannot be used.
            ConfigError: if family, preset, a width or the tokenizer is missing or does not fit.
        """
        spec = openpi_spec(Path(folder), family=family, preset=preset, options=options, degenerate=degenerate)
        return PolicyProcessor(spec, load_tokenizer(Path(tokenizer or folder)), default_prompt)

    def preprocess(self, observation: Mapping[str, object], images: Array | None = None) -> ModelInputs:
        """Check one observation and turn it into what the model takes; into `images`, where the caller has room for them.

        Raises:
            ObservationError: naming the field, what was given and what was expected.
            PromptTooLongError: with the token counts.
        """
        spec = self.spec
        checked = check_observation(observation, spec.keys, spec.state_dim, self.default_prompt)
        if images is None:
            images = np.empty((len(spec.slots), *spec.resolution, 3), DTYPES[spec.resizer])
        names = {i.slot: i.key for i in spec.keys.images}
        for image, slot in zip(images, spec.slots, strict=True):
            if slot in checked.pictures:
                resize_into(image, names[slot], checked.pictures[slot].pixels_HWC, spec.resizer)
            else:
                blacken(image, spec.resizer)
        context, state = self._model_state(checked.state_S)
        # The last step pads, so the state before it is the normalised one at the robot's own width.
        ids = spec.prompt.encode(spec.keys.prompt, self.tokenizer, checked.prompt, context.states[-2])
        tokens = np.zeros(spec.prompt.token_limit, np.int64)
        tokens[: len(ids)] = ids
        return ModelInputs(
            images=images,
            image_mask=np.array([slot in checked.pictures for slot in spec.slots]),
            tokens=tokens,
            token_count=len(ids),
            state=state,
            context=context,
            clipped_values=sum(p.clipped for p in checked.pictures.values()),
        )

    def postprocess(self, actions_model: Array, context: ActionContext) -> Array:
        """Turn a chunk of the model, [H, model width], into robot actions, [H, A], in the robot's units.

        `actions_model` is left as it is, and stays the chunk in model space. The result is float32 where the statistics
        are (LeRobot), float64 where they are (openpi).

        Raises:
            NonFiniteActionsError: if a value that would be sent is NaN or infinite.
            ConfigError: if the chunk does not have the model's width.
        """
        actions = np.asarray(actions_model)
        if actions.ndim != 2 or actions.shape[1] != self.spec.max_action_dim:
            raise ConfigError("actions", got=f"shape {actions.shape}", expected=f"[H, {self.spec.max_action_dim}]")
        self._require_finite("model", actions[:, : self.action_dim])
        robot = self.spec.group.to_robot(actions, context)
        self._require_finite("robot", robot)
        return robot

    def encode_actions(self, actions_robot: Array, context: ActionContext) -> Array:
        """Turn robot actions, [K, A], into model space, [K, model width], relative to the same observation's state.

        Raises:
            ConfigError: if the actions do not have the robot's width.
        """
        actions = np.asarray(actions_robot)
        if actions.ndim != 2 or actions.shape[1] != self.action_dim:
            raise ConfigError("actions", got=f"shape {actions.shape}", expected=f"[K, {self.action_dim}]")
        return self.spec.group.to_model(actions, context)

    def observation_schema(self) -> dict[str, FieldSchema]:
        """Return what a request holds: key -> kind, an example shape and dtype, and whether it must be there."""
        height, width = self.spec.resolution
        shapes = {"hwc": [height, width, 3], "chw": [3, height, width]}
        keys = self.spec.keys
        schema: dict[str, FieldSchema] = {
            i.key: {"kind": "image", "shape": shapes[i.layout], "dtype": "uint8", "required": i.required} for i in keys.images
        }
        for key, size in zip(keys.state, state_widths(keys.state, self.spec.state_dim), strict=True):
            schema[key.key] = {"kind": "state", "shape": [size], "dtype": "float32", "required": True}
        schema[keys.prompt] = {"kind": "prompt", "shape": [], "dtype": "str", "required": self.default_prompt is None}
        return schema

    def _model_state(self, state_S: Array) -> tuple[ActionContext, Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            context = self.spec.group.forward(state_S)
            state = context.states[-1].astype(np.float32)
        if not np.isfinite(state).all():
            field = ", ".join(k.key for k in self.spec.keys.state)
            raise ObservationError(field, got=f"values up to {np.abs(state_S).max():.3g}", expected="numbers that fit float32")
        return context, state

    def _require_finite(self, where: str, actions_HA: Array) -> None:
        finite = np.isfinite(actions_HA)
        if not finite.all():
            bad = np.argwhere(~finite)
            step, dim = bad[0].tolist()
            raise NonFiniteActionsError(
                f"actions: got {len(bad)} NaN or infinite values of {actions_HA.size} ({where} space, first at step {step}, "
                f"dimension {dim}), expected finite numbers. The chunk was withheld"
            )
