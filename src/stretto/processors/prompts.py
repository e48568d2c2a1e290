"""The text that a policy reads: the instruction, and for some checkpoints the state as numbers.

| checkpoint                    | text                                                  | cleaned | bins              |
|-------------------------------|-------------------------------------------------------|---------|-------------------|
| pi0.5, LeRobot 0.6            | `Task: {instruction}, State: {bins};\\nAction: `      | yes     | the state's width |
| pi0.5, LeRobot before 0.5     | the same                                              | yes     | zero-padded to 32 |
| pi0.5, openpi, discrete state | the same                                              | yes     | the state's width |
| pi0.5, openpi, no state; pi0  | `{instruction}`, then `\\n` as a token of its own     | yes     | none              |
| pi0, LeRobot                  | `{instruction}`, ended by a newline if it has none    | no      | none              |

Cleaning strips the ends and turns underscores and newlines into spaces. A bin is the index of 256 equal steps over
[-1, 1) in which the normalised value falls: -1 below the range, 255 above it, as both families do.
Source: openpi PaliGemma tokenizer; LeRobot 0.6.1 pi0.5 and pi0 processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stretto.core.errors import PromptTooLongError
from stretto.processors.stats import Array, widened
from stretto.processors.tokenizers import Tokenizer

BINS = np.linspace(-1.0, 1.0, 257)[:-1]
Style = Literal["task_state", "newline_token", "newline_text"]


def state_bins(state_S: Array) -> list[int]:
    """Return the bin of each normalised value."""
    bins: list[int] = (BINS.searchsorted(state_S, side="right") - 1).tolist()
    return bins


@dataclass(frozen=True)
class PromptFormat:
    """How one checkpoint writes its prompt, and how many tokens it was trained with."""

    style: Style
    token_limit: int
    pad_state_to: int = 0
    """Zero-pad the normalised state to this width before binning; 0 leaves it as it is."""

    @property
    def has_state(self) -> bool:
        return self.style == "task_state"

    def pieces(self, instruction: str, state_S: Array) -> tuple[str, ...]:
        """Return the pieces of text that are tokenized apart. `state_S` is normalised."""
        if self.style == "newline_text":
            return (instruction if instruction.endswith("\n") else f"{instruction}\n",)
        cleaned = instruction.strip().replace("_", " ").replace("\n", " ")
        if self.style == "newline_token":
            return (cleaned, "\n")
        bins = state_bins(widened(state_S, self.pad_state_to))
        return (f"Task: {cleaned}, State: {' '.join(map(str, bins))};\nAction: ",)

    def encode(self, field: str, tokenizer: Tokenizer, instruction: str, state_S: Array) -> list[int]:
        """Return the token ids, beginning of sequence first, without padding.

        Raises:
            PromptTooLongError: with the counts. Nothing is cut, the state least of all.
        """
        ids = tokenizer.encode(self.pieces(instruction, state_S))
        if len(ids) > self.token_limit:
            fixed = len(tokenizer.encode(self.pieces("", state_S)))
            raise PromptTooLongError(
                field,
                got=f"{len(ids)} tokens ({fixed} of them for {'the state and ' if self.has_state else ''}the markers)",
                expected=f"at most {self.token_limit}",
                hint=f"Shorten the instruction by {len(ids) - self.token_limit} tokens; nothing was cut.",
            )
        return ids
