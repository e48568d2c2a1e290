"""Checkpoints in and out of a model's live storage, one tensor at a time.

Everything is checked before the first byte is copied: a checkpoint that is damaged, incomplete or of another model leaves
the model as it was, and the error lists every tensor and file that is wrong.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stretto.core.errors import CheckpointError
from stretto.core.weights import Weighted, WeightMap

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
LISTED = 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load or an update did."""

    files: tuple[str, ...]
    tensors: int
    bytes: int
    """Bytes read, in the checkpoint's own dtypes."""
    casts: Mapping[str, int]
    """`float32->bfloat16` and the like -> number of tensors."""
    unused: tuple[str, ...]
    """Tensors that the checkpoint holds and the network has no use for."""

    def __str__(self) -> str:
        casts = ", ".join(f"{n} {name}" for name, n in self.casts.items()) or "none"
        return (
            f"{self.tensors} tensors, {self.bytes / 1e9:.2f} GB from {len(self.files)} file(s); "
            f"casts: {casts}; {len(self.unused)} not needed"
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint as its file's header declares it."""

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str


class Problems:
    """Collects all that is wrong, so that one error tells the whole story."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: list[str] = []
        self.unread = False
        """A file could not be read, so that nobody knows which tensors are missing."""

    def add(self, line: str) -> None:
        self.lines.append(line)

    def cannot_read(self, line: str, wanted: Iterable[str]) -> None:
        names = sorted(wanted)
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        self.add(line + (f"; {INDEX} puts {', '.join(names[:3])}{more} there" if names else ""))
        self.unread = True

    def raise_if_any(self) -> None:
        if not self.lines:
            return
        shown = "\n  ".join(self.lines[:LISTED])
        more = f"\n  ... and {len(self.lines) - LISTED} more" if len(self.lines) > LISTED else ""
        raise CheckpointError(f"{self.source}: {len(self.lines)} problem(s), nothing was loaded\n  {shown}{more}")


def load_weights(model: Weighted, path: str | Path) -> LoadReport:
    """Fill a model's storage from a `.safetensors` file or a folder that holds one or an index with shards.

    Tensors are cast to the dtype of their storage. Derived data is refreshed at the end.

    Raises:
        CheckpointError: listing every missing, unexpected, mis-shaped or non-float tensor and every absent or damaged
            file; the model's weights are then as they were.
    """
    path = Path(path)
    weight_map = model.weight_map()
    problems = Problems(str(path))
    with ExitStack() as stack:
        files, stored = _read_headers(path, problems, stack)
        chosen, unused = _match(weight_map, stored, problems, complete=not problems.unread)
        problems.raise_if_any()
        report = _copy(weight_map, ((name, s, files[s.where].get_tensor(s.name)) for name, s in chosen.items()))
    model.refresh()
    return LoadReport(tuple(files), report.tensors, report.bytes, report.casts, unused)


def check_weights(model: Weighted, path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that a checkpoint declares, if `load_weights` would take it. Reads only headers.

    Raises:
        CheckpointError: as `load_weights`, which alone finds what is wrong with the values.
    """
    problems = Problems(str(path))
    with ExitStack() as stack:
        _, stored = _read_headers(Path(path), problems, stack)
    _match(model.weight_map(), stored, problems, complete=not problems.unread)
    problems.raise_if_any()
    return {s.name: s.shape for s in stored}


def update_weights(model: Weighted, tensors: Iterable[tuple[str, Tensor]], *, complete: bool = False) -> LoadReport:
    """Replace weights in place, under captured graphs, then refresh what is derived from them.

    All names and shapes are checked before the first weight changes. The caller keeps the model idle meanwhile.

    Args:
        complete: require every weight of the model; otherwise those not given stay as they are.

    Raises:
        CheckpointError: as `load_weights`; the weights are then as they were.
    """
    source = "update"
    given = dict(tensors)
    problems = Problems(source)
    names = {dtype: short for short, dtype in FLOATS.items()}
    stored = [
        Stored(name, source, tuple(t.shape), names.get(str(t.dtype).removeprefix("torch."), str(t.dtype)))
        for name, t in given.items()
    ]
    weight_map = model.weight_map()
    chosen, unused = _match(weight_map, stored, problems, complete=complete)
    problems.raise_if_any()
    report = _copy(weight_map, ((name, s, given[s.name]) for name, s in chosen.items()))
    model.refresh()
    return LoadReport((), report.tensors, report.bytes, report.casts, unused)


def save_weights(model: Weighted, path: str | Path, *, base: str | Path | None = None) -> Path:
    """Write a model's weights under their canonical names, in the dtype they are held in.

    Args:
        path: a folder, which gets `model.safetensors`, or a file name. It is replaced as a whole, or left as it was.
        base: checkpoint whose tensors that the network does not use are copied along, for readers that ask for them.

    Returns:
        The file written.

    Raises:
        CheckpointError: if `base` cannot be read.
    """
    path = Path(path)
    target = path if path.suffix == ".safetensors" else path / SINGLE
    target.parent.mkdir(parents=True, exist_ok=True)
    weight_map = model.weight_map()
    out = {name: view.detach().to("cpu", copy=True).contiguous() for name, view in weight_map.views.items()}
    if base is not None:
        out |= _unused_of(Path(base), weight_map)
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    os.close(handle)
    try:
        save_file(out, partial, metadata={"format": "pt"})
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that a checkpoint declares, reading only headers.

    Raises:
        CheckpointError: if a file is absent or damaged.
    """
    problems = Problems(str(path))
    with ExitStack() as stack:
        _, stored = _read_headers(Path(path), problems, stack)
    problems.raise_if_any()
    return {s.name: s.shape for s in stored}


def _read_headers(path: Path, problems: Problems, stack: ExitStack) -> tuple[dict[str, Any], list[Stored]]:
    files: dict[str, Any] = {}
    stored: list[Stored] = []
    for file, wanted in _files(path, problems).items():
        try:
            handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except FileNotFoundError:
            problems.cannot_read(f"{file.name}: the file is not there", wanted or ())
            continue
        except (SafetensorError, OSError) as e:
            problems.cannot_read(f"{file.name}: damaged or cut short ({e})", wanted or ())
            continue
        files[str(file)] = handle
        present = set(handle.keys())
        for name in sorted(present if wanted is None else wanted & present):
            view = handle.get_slice(name)
            stored.append(Stored(name, str(file), tuple(view.get_shape()), view.get_dtype()))
        for name in sorted((wanted or set()) - present):
            problems.add(f"{name}: {INDEX} puts it in {file.name}, which does not hold it")
    return files, stored


def _files(path: Path, problems: Problems) -> dict[Path, set[str] | None]:
    """Return file -> the names wanted from it (None: all that it holds)."""
    if not path.is_dir():
        return {path: None}
    index = path / INDEX
    if not index.exists():
        return {path / SINGLE: None}
    try:
        placed = json.loads(index.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file in placed.items():
            if Path(file).name != file:
                problems.add(f"{INDEX}: {name} is put in {file!r}, expected the plain name of a file beside it")
                continue
            names = files.setdefault(path / file, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        problems.cannot_read(f"{INDEX}: not an index with a `weight_map` of names to files ({e})", ())
        return {}
    return files


def _match(
    weight_map: WeightMap, stored: Iterable[Stored], problems: Problems, *, complete: bool
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Decide which stored tensor fills which view."""
    chosen: dict[str, Stored] = {}
    others: list[tuple[str, Stored]] = []
    for s in stored:
        name = weight_map.canonical(s.name)
        if name not in weight_map.views:
            others.append((name, s))
        elif name in chosen:
            problems.add(f"{s.name} in {s.where}: the same tensor as {chosen[name].name} in {chosen[name].where}")
        else:
            chosen[name] = s
    unused = []
    for name, s in others:
        target = weight_map.tied.get(name)
        if target is not None and target not in chosen:
            chosen[target] = s
        elif target is not None or weight_map.may_ignore(name):
            unused.append(s.name)
        else:
            problems.add(f"{s.name} in {s.where}: unexpected, the model has no such weight")
    for name, view in weight_map.views.items():
        if name in chosen:
            _check(chosen[name], view, problems)
        elif complete:
            problems.add(f"{name}: missing")
    return chosen, tuple(unused)


def _check(s: Stored, view: Tensor, problems: Problems) -> None:
    if s.shape != tuple(view.shape):
        problems.add(f"{s.name} in {s.where}: shape {list(s.shape)}, expected {list(view.shape)}")
    if s.dtype not in FLOATS:
        problems.add(f"{s.name} in {s.where}: dtype {s.dtype}, expected one of {sorted(FLOATS)}")


@torch.no_grad()
def _copy(weight_map: WeightMap, tensors: Iterator[tuple[str, Stored, Tensor]]) -> LoadReport:
    casts: Counter[str] = Counter()
    count = nbytes = 0
    for name, s, tensor in tensors:
        view = weight_map.views[name]
        if tensor.dtype != view.dtype:
            casts[f"{FLOATS[s.dtype]}->{str(view.dtype).removeprefix('torch.')}"] += 1
        view.copy_(tensor)
        count += 1
        nbytes += tensor.nbytes
    return LoadReport((), count, nbytes, dict(casts), ())


def _unused_of(path: Path, weight_map: WeightMap) -> dict[str, Tensor]:
    problems = Problems(str(path))
    with ExitStack() as stack:
        files, stored = _read_headers(path, problems, stack)
        problems.raise_if_any()
        named = [(weight_map.canonical(s.name), s) for s in stored]
        return {
            name: files[s.where].get_tensor(s.name).clone()
            for name, s in named
            if name not in weight_map.views and name not in weight_map.tied and weight_map.may_ignore(name)
        }
