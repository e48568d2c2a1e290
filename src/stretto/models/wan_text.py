"""Prompts to the embeddings that Wan reads: transformers' UMT5 encoder, with the tokens past the prompt left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stretto.core.errors import ConfigError, PromptTooLongError

Tokenize = Callable[[str], Sequence[int]]


class TextEncoder:
    """A UMT5 encoder with its tokenizer.

    Args:
        module: transformers' `UMT5EncoderModel`.
        tokenize: prompt to token ids, with the end token.
        text_tokens: the most tokens that the video network was trained with.
    """

    def __init__(self, module: nn.Module, tokenize: Tokenize, text_tokens: int = 512) -> None:
        self.module, self.tokenize, self.text_tokens = module.eval().requires_grad_(False), tokenize, text_tokens

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """Return [tokens, width] for the tokens of the prompt.

        Raises:
            PromptTooLongError: if there are more than the network was trained with; nothing is cut.
        """
        ids = list(self.tokenize(prompt))
        if len(ids) > self.text_tokens:
            raise PromptTooLongError("prompt", got=f"{len(ids)} tokens", expected=f"at most {self.text_tokens}")
        device = next(self.module.parameters()).device
        tokens = torch.tensor([ids], dtype=torch.int64, device=device)
        embedded: Tensor = self.module(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[0]
        return embedded


def load_text_encoder(path: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> TextEncoder:
    """Load encoder and tokenizer from the folder of a Wan pipeline that has `text_encoder` and `tokenizer`.

    Raises:
        ConfigError: if transformers is not installed or the folders are not there.
    """
    try:
        from transformers import AutoTokenizer, UMT5EncoderModel
    except ImportError as e:
        raise ConfigError(
            "text_encoder", got="no transformers", expected="the extra `world`", hint="pip install stretto[world]"
        ) from e
    root = Path(path)
    for part in ("text_encoder", "tokenizer"):
        if not (root / part).is_dir():
            raise ConfigError("text_encoder", got=str(root), expected=f"a folder that holds `{part}`")
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    module = UMT5EncoderModel.from_pretrained(root / "text_encoder", dtype=dtype).to(device)
    return TextEncoder(module, lambda prompt: tokenizer(prompt).input_ids)
