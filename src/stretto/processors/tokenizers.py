"""PaliGemma's tokenizer from a local file: `tokenizer.json`, or the sentencepiece `.model` that openpi uses.

The beginning-of-sequence token is put in front here, once, so both backends give the same ids whatever a file's own
post-processing says. Nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from stretto.core.errors import CheckpointError, ConfigError

NAMES = ("tokenizer.json", "paligemma_tokenizer.model", "tokenizer.model")
FOLDERS = (".", "tokenizer", "assets")
CACHED_TEXTS = 256


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids. The cache is keyed by the whole piece of text, so it is exact."""

    bos: int
    vocabulary: int
    source: Path
    encode_text: Callable[[str], tuple[int, ...]] = field(repr=False)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of pieces that are encoded apart and joined, after one beginning-of-sequence token."""
        ids = [self.bos]
        for piece in pieces:
            ids.extend(self.encode_text(piece))
        return ids


def find_tokenizer(folder: Path) -> Path:
    """Return the tokenizer file beside a checkpoint.

    Raises:
        ConfigError: if there is none; it lists where one was looked for.
    """
    for name in NAMES:
        for sub in FOLDERS:
            path = folder / sub / name
            if path.is_file():
                return path
    places = [str(Path(sub) / name) for name in NAMES for sub in FOLDERS]
    raise ConfigError(
        "tokenizer",
        got=f"none in {folder}",
        expected=f"one of {places}",
        hint="Copy the PaliGemma tokenizer beside the checkpoint, or give its path.",
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from a local file, or from the folder that holds it.

    Raises:
        ConfigError: if there is no such file.
        CheckpointError: if it cannot be read, or has no beginning-of-sequence token.
    """
    if path.is_dir():
        path = find_tokenizer(path)
    if not path.is_file():
        raise ConfigError("tokenizer", got=f"no file {path}", expected="a tokenizer.json or a sentencepiece .model")
    return _load_json(path) if path.suffix == ".json" else _load_sentencepiece(path)


def _load_json(path: Path) -> Tokenizer:
    import tokenizers

    # The library raises a bare Exception for any malformed file.
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text())
    except Exception as e:
        raise CheckpointError(f"{path}: not a tokenizer.json ({e})") from e
    backend.no_padding()
    backend.no_truncation()
    bos = backend.token_to_id("<bos>")
    if bos is None:
        raise CheckpointError(f"{path}: no <bos> token, so this is not a PaliGemma tokenizer")

    @lru_cache(maxsize=CACHED_TEXTS)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    return Tokenizer(bos, backend.get_vocab_size(), path, encode)


def _load_sentencepiece(path: Path) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError as e:
        raise ConfigError(
            "tokenizer", got=f"{path} without the sentencepiece package", expected="`pip install 'stretto[openpi]'`"
        ) from e
    try:
        backend = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError as e:
        raise CheckpointError(f"{path}: not a sentencepiece model ({e})") from e
    if backend.bos_id() < 0:
        raise CheckpointError(f"{path}: no beginning-of-sequence token, so this is not a PaliGemma tokenizer")

    @lru_cache(maxsize=CACHED_TEXTS)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(backend.encode(text))

    return Tokenizer(backend.bos_id(), backend.vocab_size(), path, encode)
