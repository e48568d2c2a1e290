"""Prompts and tokenizers: the text of each family, bins at their edges, counts over the limit, and one leading bos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import CheckpointError, ConfigError, PromptTooLongError
from stretto.processors.prompts import PromptFormat, state_bins
from stretto.processors.tokenizers import find_tokenizer, load_tokenizer

STATE = np.array([-1.0, 0.0, 0.999])


def test_pi05_writes_the_state_as_bins_into_a_cleaned_prompt() -> None:
    text = PromptFormat("task_state", 200).pieces(" pick_up\nthe cup ", STATE)
    assert text == ("Task: pick up the cup, State: 0 128 255;\nAction: ",)


def test_older_lerobot_pads_the_state_before_binning() -> None:
    (text,) = PromptFormat("task_state", 200, pad_state_to=5).pieces("go", STATE)
    assert text == "Task: go, State: 0 128 255 128 128;\nAction: "


def test_openpi_pi0_encodes_its_newline_apart() -> None:
    assert PromptFormat("newline_token", 48).pieces("pick_up ", STATE) == ("pick up", "\n")


def test_lerobot_pi0_only_makes_sure_of_a_final_newline() -> None:
    form = PromptFormat("newline_text", 48)
    assert form.pieces(" pick_up", STATE) == (" pick_up\n",)
    assert form.pieces("go\n", STATE) == ("go\n",)


@pytest.mark.parametrize(
    ("value", "bin_index"),
    [(-1.5, -1), (-1.0, 0), (np.nextafter(-1, -2), -1), (0.0, 128), (1.0 - 2 / 256, 255), (1.0, 255), (7.0, 255)],
)
def test_bins_are_half_open_and_the_outside_has_its_own_value(value: float, bin_index: int) -> None:
    assert state_bins(np.array([value])) == [bin_index]


@given(st.floats(-3, 3))
def test_a_bin_is_the_number_of_edges_at_or_below_the_value_less_one(value: float) -> None:
    edges = [-1 + 2 * i / 256 for i in range(256)]
    assert state_bins(np.array([value])) == [sum(e <= value for e in edges) - 1]


def test_a_prompt_over_the_limit_is_refused_with_the_counts(sentencepiece_model: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_model)
    need = len(tokenizer.encode(PromptFormat("task_state", 200).pieces("pick up the red block", STATE)))
    fixed = len(tokenizer.encode(PromptFormat("task_state", 200).pieces("", STATE)))
    form = PromptFormat("task_state", need - 3)
    with pytest.raises(PromptTooLongError) as e:
        form.encode("prompt", tokenizer, "pick up the red block", STATE)
    text = str(e.value)
    assert text.startswith(f"prompt: got {need} tokens ({fixed} of them for the state and the markers)")
    assert f"expected at most {need - 3}" in text
    assert "by 3 tokens; nothing was cut" in text
    assert len(PromptFormat("task_state", need).encode("prompt", tokenizer, "pick up the red block", STATE)) == need


def test_both_tokenizer_files_give_the_same_ids(sentencepiece_model: Path, tokenizer_json: Path) -> None:
    a, b = load_tokenizer(sentencepiece_model), load_tokenizer(tokenizer_json)
    for pieces in (("Task: open the drawer, State: 12 255 -1 0;\nAction: ",), ("pick up the bowl", "\n"), ("",)):
        ids = a.encode(pieces)
        assert ids == b.encode(pieces)
        assert ids[0] == 2
        assert ids.count(2) == 1
    assert len(a.encode(("Task: open the drawer, State: 12 255 -1 0;\nAction: ",))) > 8


def test_a_bos_that_the_file_adds_by_itself_is_not_doubled(tokenizer_json: Path, tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import processors

    tok = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tok.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tok.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(("go",)) == load_tokenizer(tokenizer_json).encode(("go",))


def test_the_newline_is_one_token(sentencepiece_model: Path) -> None:
    assert len(load_tokenizer(sentencepiece_model).encode(("\n",))) == 2


def test_a_missing_tokenizer_lists_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: got none in .*paligemma_tokenizer\.model"):
        find_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="got no file"):
        load_tokenizer(tmp_path / "x.model")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)
