"""What every model keeps to. A new model is found by its file: a module with `build` and `tiny`, and no edit here.

`tiny()` returns one small model, or several, with random weights on the CPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from rows import DictRows, inputs_for, outputs, run_route
from torch import Tensor

import stretto.models
from stretto.core.model import Model, Stage
from stretto.core.weights import Weighted
from stretto.runtime.weights import load_weights, save_weights


def tiny_models() -> list[Model]:
    found: list[Model] = []
    for info in pkgutil.iter_modules(stretto.models.__path__, "stretto.models."):
        module = importlib.import_module(info.name)
        if hasattr(module, "tiny") and hasattr(module, "build"):
            made = module.tiny()
            found.extend(made if isinstance(made, Iterable) else [made])
    return found


MODELS = tiny_models()
every_model = pytest.mark.parametrize("model", MODELS, ids=[m.name for m in MODELS])


class Recorder:
    """Rows that note which values and state a stage touches."""

    def __init__(self, rows: DictRows) -> None:
        self.rows = rows
        self.taken: set[str] = set()
        self.stored: set[str] = set()
        self.arenas: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.rows, name)

    def get(self, name: str) -> Tensor:
        self.taken.add(name)
        return self.rows.get(name)

    def put(self, name: str, value: Tensor) -> None:
        self.stored.add(name)
        self.rows.put(name, value)

    def arena(self, name: str) -> Tensor:
        self.arenas.add(name)
        return self.rows.arena(name)


def test_models_are_found() -> None:
    assert {"pi05", "pi0"} <= {m.name for m in MODELS}


@every_model
def test_the_route_is_made_of_the_models_own_stages_and_declared_tensors(model: Model) -> None:
    assert {v.stage for v in model.route.visits} == set(model.stages)
    assert set(model.route.inputs) | set(model.route.outputs) <= set(model.values)
    for name, stage in model.stages.items():
        assert isinstance(stage, Stage)
        assert stage.spec == model.route.stages[name]
        assert stage.spec.name == name
        assert set(stage.spec.reads) | set(stage.spec.writes) <= set(model.values)
        assert set(stage.spec.state) <= set(model.state)
    for bucket in model.buckets:
        assert list(bucket.lengths) == sorted(bucket.lengths)
        assert set(bucket.stages) <= set(model.stages)
        for name, axis in bucket.values.items():
            assert model.values[name].shape[axis] == bucket.lengths[-1]


@every_model
def test_a_stage_touches_only_what_it_declares(model: Model) -> None:
    rows = Recorder(DictRows(model, inputs_for(model, 2)))
    for visit in model.route.visits:
        spec = model.stages[visit.stage].spec
        rows.taken, rows.stored, rows.arenas = set(), set(), set()
        rows.rows.enter(visit)
        model.stages[visit.stage].run(rows)  # type: ignore[arg-type]
        assert rows.taken <= set(spec.reads), visit
        assert rows.stored <= set(spec.writes), visit
        assert rows.arenas <= {*spec.reads, *spec.writes, *spec.state}, visit
        assert set(spec.writes) <= rows.stored | rows.arenas, visit


@every_model
def test_outputs_are_finite_and_depend_on_the_inputs(model: Model) -> None:
    first, other = outputs(model, inputs_for(model, 2, seed=1)), outputs(model, inputs_for(model, 2, seed=2))
    assert torch.isfinite(first).all()
    assert (first - other).abs().max() > 1e-3


@every_model
def test_a_row_in_a_batch_equals_the_row_alone(model: Model) -> None:
    inputs = inputs_for(model, 3)
    together = outputs(model, inputs)
    for i in range(3):
        alone = outputs(model, {name: value[i : i + 1] for name, value in inputs.items()}, streams=[i])
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


@every_model
def test_padded_rows_write_to_slot_zero_only(model: Model) -> None:
    inputs = inputs_for(model, 2)
    plain, padded = run_route(model, inputs), run_route(model, inputs, padding=2)
    for name in model.values:
        torch.testing.assert_close(padded.arena(name)[1:], plain.arena(name)[1:], atol=1e-5, rtol=1e-5)


@every_model
def test_a_run_is_repeated_bit_for_bit(model: Model) -> None:
    inputs = inputs_for(model, 2)
    before = outputs(model, inputs)
    outputs(model, inputs_for(model, 2, seed=9))
    assert torch.equal(outputs(model, inputs), before)


@every_model
def test_every_weight_has_exactly_one_name(model: Model) -> None:
    if not isinstance(model, Weighted):
        pytest.skip("has no weights to load")
    named = sum(v.numel() for v in model.weight_map().views.values())
    assert named == sum(p.numel() for p in model.module.parameters())


@every_model
def test_weights_survive_saving_and_loading(model: Model, tmp_path: Path) -> None:
    if not isinstance(model, Weighted):
        pytest.skip("has no weights to load")
    inputs = inputs_for(model, 1)
    before = outputs(model, inputs)
    save_weights(model, tmp_path)
    kept = {name: view.clone() for name, view in model.weight_map().views.items()}
    for view in model.weight_map().views.values():
        view.zero_()
    model.refresh()
    assert not torch.equal(outputs(model, inputs), before)
    load_weights(model, tmp_path)
    assert all(torch.equal(view, kept[name]) for name, view in model.weight_map().views.items())
    assert torch.equal(outputs(model, inputs), before)
