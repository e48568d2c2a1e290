"""Checkpoints: what loads, and what is refused with every fault named and no weight changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.core.errors import CheckpointError
from stretto.models import pi0
from stretto.models.pi0 import Pi0Model
from stretto.runtime.weights import INDEX, load_weights, save_weights, tensor_shapes, update_weights

SOURCE = pi0.tiny()[0]
ROOT = "paligemma_with_expert."
EMBED = f"{ROOT}paligemma.model.language_model.embed_tokens.weight"
HEAD = f"{ROOT}paligemma.lm_head.weight"
DENSE = f"{ROOT}gemma_expert.model.layers.0.input_layernorm.dense.weight"
QUERY = f"{ROOT}gemma_expert.model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {name: view.clone() for name, view in SOURCE.weight_map().views.items()}


@pytest.fixture
def model() -> Pi0Model:
    """A model of the same sizes, with other weights."""
    made = pi0.build(SOURCE.config, dtype="float32")
    made.randomize(seed=7)
    return made


def weights(model: Pi0Model) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in model.weight_map().views.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def renamed(tensors: dict[str, Tensor], change: Callable[[str], str]) -> dict[str, Tensor]:
    return {change(name): value for name, value in tensors.items()}


def shard(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write two shards and their index."""
    names = sorted(tensors)
    placed = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    for file in set(placed.values()):
        save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def refused(model: Pi0Model, path: Path) -> str:
    """Load what must not load; check that no weight changed and return the error's text."""
    before = weights(model)
    with pytest.raises(CheckpointError) as error:
        load_weights(model, path)
    assert same(weights(model), before)
    return str(error.value)


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_a_checkpoint_loads_with_or_without_a_writers_prefix(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path, prefix: str
) -> None:
    save_file(renamed(tensors, lambda n: prefix + n), tmp_path / "model.safetensors")
    report = load_weights(model, tmp_path)
    assert same(weights(model), tensors)
    assert torch.equal(model.module.table, SOURCE.module.table)
    assert (report.tensors, report.casts, report.unused) == (len(tensors), {}, ())
    assert report.bytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("paligemma.model.language_model.", "paligemma.language_model.model."),
        ("paligemma.model.vision_tower.", "paligemma.vision_tower."),
        ("paligemma.model.multi_modal_projector.", "paligemma.multi_modal_projector."),
        ("vision_tower.vision_model.", "vision_tower."),
    ],
)
def test_names_of_other_library_versions_are_understood(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path, old: str, new: str
) -> None:
    moved = renamed(tensors, lambda n: n.replace(old, new))
    assert moved.keys() != tensors.keys()
    save_file(moved, tmp_path / "model.safetensors")
    load_weights(model, tmp_path / "model.safetensors")
    assert same(weights(model), tensors)


def test_tied_embeddings_load_from_either_name(model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tied = dict(tensors)
    tied[HEAD] = tied.pop(EMBED)
    save_file(tied, tmp_path / "head.safetensors")
    load_weights(model, tmp_path / "head.safetensors")
    assert same(weights(model), tensors)
    save_file(tensors | {HEAD: torch.zeros_like(tensors[EMBED])}, tmp_path / "both.safetensors")
    report = load_weights(model, tmp_path / "both.safetensors")
    assert same(weights(model), tensors)
    assert report.unused == (HEAD,)


def test_tensors_that_the_network_never_reads_may_be_there(model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    language = f"{ROOT}paligemma.model.language_model."
    last = SOURCE.config.language.depth - 1
    dead = [
        f"{ROOT}gemma_expert.lm_head.weight",
        f"{language}norm.weight",
        f"{language}layers.{last}.self_attn.o_proj.weight",
        f"{language}layers.{last}.mlp.up_proj.weight",
        f"{language}layers.{last}.post_attention_layernorm.weight",
    ]
    save_file(tensors | {n: torch.zeros(3) for n in dead}, tmp_path / "model.safetensors")
    assert set(load_weights(model, tmp_path).unused) == set(dead)


def test_shards_are_found_by_the_index_and_stray_files_are_ignored(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    shard(tmp_path, tensors)
    save_file({n: torch.full_like(t, 9.0) for n, t in tensors.items()}, tmp_path / "stray.safetensors")
    report = load_weights(model, tmp_path)
    assert same(weights(model), tensors)
    assert len(report.files) == 2


def test_dtypes_are_cast_to_the_models_and_reported(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    low = pi0.build(SOURCE.config, dtype="bfloat16")
    report = load_weights(low, tmp_path)
    assert torch.equal(low.weight_map().views[QUERY], tensors[QUERY].bfloat16())
    kept = sum(v.dtype == torch.float32 for v in low.weight_map().views.values())
    assert report.casts == {"float32->bfloat16": len(tensors) - kept}
    save_weights(low, tmp_path / "low")
    up = pi0.build(SOURCE.config, dtype="float32")
    assert load_weights(up, tmp_path / "low").casts == {"bfloat16->float32": len(tensors) - kept}


def test_missing_unexpected_and_misshapen_tensors_are_all_named_at_once(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    broken = dict(tensors)
    del broken[QUERY]
    broken["proprio_history_proj.weight"] = torch.zeros(2)
    broken[DENSE] = broken[DENSE][:-1].clone()
    broken[EMBED] = broken[EMBED].int()
    save_file(broken, tmp_path / "model.safetensors")
    text = refused(model, tmp_path)
    rows = tensors[DENSE].shape[0]
    for part in (
        "4 problem(s)",
        f"{QUERY}: missing",
        "proprio_history_proj.weight in",
        f"shape [{rows - 1}, 16], expected [{rows}, 16]",
        "dtype I32",
        str(tmp_path / "model.safetensors"),
    ):
        assert part in text


def test_a_checkpoint_of_the_other_family_is_refused(tmp_path: Path) -> None:
    save_weights(pi0.tiny()[1], tmp_path)
    model = pi0.tiny()[0]
    text = refused(model, tmp_path)
    assert "time_mlp_in.weight: missing" in text or "state_proj" in text


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_file_is_named(model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    text = refused(model, tmp_path)
    assert "model.safetensors: damaged or cut short" in text
    assert "1 problem(s)" in text, "what a file that nobody can read lacks is not known"


def test_an_absent_shard_and_a_shard_without_its_tensor_are_named(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    shard(tmp_path, tensors)
    kept = load_file(tmp_path / "part-0.safetensors")
    gone = sorted(kept)[0]
    del kept[gone]
    save_file(kept, tmp_path / "part-0.safetensors")
    (tmp_path / "part-1.safetensors").unlink()
    text = refused(model, tmp_path)
    assert f"{gone}: {INDEX} puts it in part-0.safetensors" in text
    assert "part-1.safetensors: the file is not there" in text
    assert "2 problem(s)" in text
    assert re.search(rf"{INDEX} puts (\S+, ){{3}}and \d+ more there", text)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_damaged_index_is_named(model: Pi0Model, tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refused(model, tmp_path)


def test_an_empty_folder_is_refused_with_the_file_that_was_looked_for(model: Pi0Model, tmp_path: Path) -> None:
    assert "model.safetensors: the file is not there" in refused(model, tmp_path)


def test_the_same_tensor_under_two_names_is_refused(model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(tensors | {f"model.{QUERY}": tensors[QUERY].clone()}, tmp_path / "model.safetensors")
    assert "the same tensor as" in refused(model, tmp_path)


def test_an_update_writes_through_fused_storage(model: Pi0Model) -> None:
    block = model.module.expert.blocks[0]
    fused = block.qkv.weight  # type: ignore[union-attr]
    address, before = fused.data_ptr(), fused.detach().clone()
    rows = model.weight_map().views[QUERY].shape[0]
    update_weights(model, [(QUERY, torch.full((rows, 16), 2.0))])
    assert fused.data_ptr() == address
    assert (fused[:rows] == 2.0).all()
    assert torch.equal(fused[rows:], before[rows:])


def test_an_update_is_all_or_nothing(model: Pi0Model, tensors: dict[str, Tensor]) -> None:
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"no such weight"):
        update_weights(model, [(QUERY, tensors[QUERY]), ("nonsense", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"expected \["):
        update_weights(model, [(QUERY, tensors[QUERY]), (DENSE, torch.zeros(1))])
    with pytest.raises(CheckpointError, match=f"{EMBED}: missing"):
        update_weights(model, ((n, t) for n, t in tensors.items() if n != EMBED), complete=True)
    assert same(weights(model), before)


def test_a_saved_checkpoint_can_carry_the_unused_tensors_of_its_base(
    model: Pi0Model, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    head = f"{ROOT}gemma_expert.lm_head.weight"
    save_file(renamed(tensors | {head: torch.ones(2)}, lambda n: f"model.{n}"), tmp_path / "base.safetensors")
    saved = save_weights(model, tmp_path / "out", base=tmp_path / "base.safetensors")
    assert saved == tmp_path / "out" / "model.safetensors"
    assert tensor_shapes(saved).keys() == {*tensors, head}
    assert [p.name for p in saved.parent.iterdir()] == ["model.safetensors"]
    assert same({n: t for n, t in load_file(saved).items() if n != head}, weights(model))
