"""Where prompts become embeddings: an encoder on this machine, embeddings made elsewhere, or a stand-in for tiny models."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.core.errors import ConfigError, PromptTooLongError
from stretto.models.wan_config import WanConfig
from stretto.models.wan_text import load_text_encoder


class Encoder(Protocol):
    """Makes the embeddings that a world model reads."""

    def encode(self, prompt: str) -> Tensor:
        """Return [tokens, width].

        Raises:
            PromptTooLongError: if the prompt has more tokens than the model was trained with.
        """
        ...


class HashEncoder:
    """One pseudo-random vector a word: no language at all, for models with random weights, which know none either."""

    def __init__(self, width: int, text_tokens: int) -> None:
        self.width, self.text_tokens = width, text_tokens

    def encode(self, prompt: str) -> Tensor:
        words = prompt.split()
        if len(words) > self.text_tokens:
            raise PromptTooLongError("prompt", got=f"{len(words)} words", expected=f"at most {self.text_tokens}")
        rows = [self._vector(word) for word in words]
        return torch.stack(rows) if rows else torch.zeros(0, self.width)

    def _vector(self, word: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")
        return torch.randn(self.width, generator=torch.Generator().manual_seed(seed))


def encoder_of(config: WanConfig, source: str | None) -> Encoder | None:
    """Return the encoder that an option names: `hash`, or a folder with a UMT5 encoder and its tokenizer. None: none.

    Raises:
        ConfigError: if the folder holds no encoder, or transformers is not installed.
    """
    if source is None:
        return None
    if source == "hash":
        return HashEncoder(config.text_width, config.text_tokens)
    encoder = load_text_encoder(source)
    encoder.text_tokens = config.text_tokens
    return encoder


def read_embedding(path: str | Path) -> Tensor:
    """Read [tokens, width] from `.npy`, or from a `.safetensors` that holds one tensor.

    Raises:
        ConfigError: if the file is absent or holds something else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            found = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            tensors = load_file(path)
            if len(tensors) != 1:
                raise ConfigError("prompt", got=f"{path.name} with {sorted(tensors)}", expected="one tensor")
            found = next(iter(tensors.values()))
    except (OSError, ValueError) as e:
        raise ConfigError("prompt", got=f"{path} ({e})", expected="a .npy or .safetensors file of embeddings") from e
    if found.dim() != 2 or not found.is_floating_point():
        raise ConfigError("prompt", got=f"{found.dtype} of shape {list(found.shape)}", expected="[tokens, width] of floats")
    return found.float()
