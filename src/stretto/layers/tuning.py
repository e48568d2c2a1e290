"""Which kernel, and how tiled, runs an op at one shape on one device: measured choices in tables on disk.

A table is one JSON file for one kind of device, written by `stretto bench --tune`. Tables are read in this order, the first
one that knows a shape decides: the file that STRETTO_KERNEL_TABLE names, or else those in `~/.config/stretto/kernels`; then
those that come with the package. Where no table knows a shape the op decides by its own rule. Both are reported.

A part of a device (`layers.part`) has tables of its own, named as `part_name` says; what they do not know is as on the whole.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto.core import env
from stretto.core.errors import ConfigError
from stretto.layers.part import part

Config = Mapping[str, int | str]
Key = tuple[int, ...]
FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Tunable:
    """An op whose kernel is chosen by measurement. A module of `layers.kernels` lists its own in `TUNABLES`."""

    name: str
    fields: Mapping[str, tuple[int | str, ...]]
    """What a choice may say: each field with the values that it may take."""
    candidates: Callable[[Key], list[Config]]
    """The choices worth timing at a shape; the one that the op's rule makes is among them."""
    inputs: Callable[[Key, torch.dtype, torch.device], tuple[Any, ...]]
    """Random arguments of `run` at a shape."""
    run: Callable[..., Any]
    """`run(choice, *inputs)` runs the op once; no choice (None) means the op's rule."""


@dataclass(frozen=True)
class Entry:
    """One measured choice."""

    op: str
    key: Key
    dtype: str
    config: Config
    us: float
    """Time of one call."""
    rule_us: float
    """Time of what the op's own rule chooses."""
    commit: str

    @property
    def place(self) -> tuple[str, Key, str]:
        return self.op, self.key, self.dtype


@dataclass(frozen=True)
class Table:
    """The measured choices of one kind of device."""

    device: str
    torch: str
    triton: str
    entries: tuple[Entry, ...]
    path: Path | None = None

    @property
    def commits(self) -> list[str]:
        return sorted({e.commit for e in self.entries})

    def merged(self, other: Table) -> Table:
        """Return this table with the entries of `other`, which replace those of the same shapes."""
        entries = {e.place: e for e in (*self.entries, *other.entries)}
        return Table(other.device, other.torch, other.triton, tuple(entries[p] for p in sorted(entries)), self.path)

    def save(self, path: Path) -> None:
        head = {"format": FORMAT, "device": self.device, "torch": self.torch, "triton": self.triton}
        lines = [
            json.dumps({"op": e.op, "key": e.key, "dtype": e.dtype, "config": dict(e.config)}
                       | {"us": e.us, "rule_us": e.rule_us, "commit": e.commit})
            for e in self.entries
        ]  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        body = ",\n  ".join(lines)
        path.write_text(json.dumps(head)[:-1] + f', "entries": [\n  {body}\n]}}\n')


@functools.cache
def tunables() -> Mapping[str, Tunable]:
    """Return every op that can be tuned, by name."""
    package = importlib.import_module("stretto.layers.kernels")
    found: dict[str, Tunable] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        ours: tuple[Tunable, ...] = getattr(module, "TUNABLES", ())
        found |= {t.name: t for t in ours}
    return found


def load_table(path: Path) -> Table:
    """Read and check one table.

    Raises:
        ConfigError: naming the file and the field that is absent, of the wrong type, or unknown to its op.
    """
    try:
        raw = json.loads(path.read_text())
    except ValueError as e:
        raise ConfigError(str(path), got=f"no JSON ({e})", expected="a table that `stretto bench --tune` wrote") from e
    head = _Fields(str(path), raw)
    if head.get("format", int) != FORMAT:
        hint = "Measure again with `stretto bench --tune`."
        raise ConfigError(f"{path}: format", got=raw["format"], expected=FORMAT, hint=hint)
    entries = tuple(_entry(f"{path}: entries[{i}]", e) for i, e in enumerate(head.get("entries", list)))
    return Table(head.get("device", str), head.get("torch", str), head.get("triton", str), entries, path)


@dataclass(frozen=True)
class _Fields:
    """Takes fields out of a JSON object, by name and type."""

    where: str
    raw: Any

    def get(self, name: str, kind: type[Any]) -> Any:
        if not isinstance(self.raw, dict):
            raise ConfigError(self.where, got=type(self.raw).__name__, expected="an object")
        value = self.raw.get(name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            got = "nothing" if value is None else repr(value)
            raise ConfigError(self._at(name), got=got, expected=f"a value of type {kind.__name__}")
        return value

    def _at(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where.endswith("]") else f"{self.where}: {name}"


def _entry(where: str, raw: Any) -> Entry:
    fields = _Fields(where, raw)
    op, key, dtype = fields.get("op", str), fields.get("key", list), fields.get("dtype", str)
    tunable = tunables().get(op)
    if tunable is None:
        raise ConfigError(f"{where}.op", got=repr(op), expected=f"one of {sorted(tunables())}")
    if any(type(n) is not int for n in key):
        raise ConfigError(f"{where}.key", got=key, expected="whole numbers")
    config = fields.get("config", dict)
    for name, value in config.items():
        allowed = tunable.fields.get(name)
        if allowed is None:
            raise ConfigError(f"{where}.config.{name}", got="an unknown field", expected=f"one of {sorted(tunable.fields)}")
        if value not in allowed:
            raise ConfigError(f"{where}.config.{name}", got=repr(value), expected=f"one of {list(allowed)}")
    us, rule_us = float(fields.get("us", float)), float(fields.get("rule_us", float))
    return Entry(op, tuple(key), dtype, config, us, rule_us, fields.get("commit", str))


def user_tables() -> Path:
    """Return the folder whose tables are found without being named."""
    return Path.home() / ".config" / "stretto" / "kernels"


def table_paths() -> list[Path]:
    """Return the tables that are read, those that decide first first.

    Raises:
        ConfigError: if STRETTO_KERNEL_TABLE names no file.
    """
    named = env.kernel_table()
    mine = [named] if named is not None else sorted(user_tables().glob("*.json"))
    return [*mine, *sorted(SHIPPED.glob("*.json"))]


def device_name(device: torch.device) -> str:
    """Return the name by which tables know a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass
class Choices:
    """The tables of one device, and what has been asked of them so far in this process."""

    tables: Sequence[Table]
    """Those for this kind of device, in the order in which they decide."""
    known: Mapping[tuple[str, Key, str], Config]
    asked: dict[tuple[str, Key, str], Config | None] = field(default_factory=dict)
    ran: dict[str, set[str]] = field(default_factory=dict)
    """Fused op -> `triton` or `reference`, as it was run."""

    def find(self, op: str, key: Key, dtype: str) -> Config | None:
        place = op, key, dtype
        if place not in self.asked:
            self.asked[place] = self.known.get(place)
        return self.asked[place]

    def report(self) -> dict[str, Any]:
        """Say where each kernel came from: `table`, `rule` (the op's own), or `reference` (plain torch); or what it ran as."""
        ops = {op: {"rule" if kind == "triton" else kind for kind in kinds} for op, kinds in self.ran.items()}
        asked: dict[str, set[str]] = {}
        for (op, _, _), config in self.asked.items():
            asked.setdefault(op, set()).add("rule" if config is None else "table")
        for op, kinds in asked.items():
            ops[op] = kinds | (ops.get(op, set()) - {"rule"})
        return {
            "tables": [
                {"path": str(t.path), "device": t.device, "commits": t.commits, "torch": t.torch, "triton": t.triton}
                for t in self.tables
            ],
            "ops": {op: sorted(ops[op]) for op in sorted(ops)},
            "choices": [
                {"op": op, "key": key, "dtype": dtype, "config": None if config is None else dict(config)}
                for (op, key, dtype), config in sorted(self.asked.items(), key=lambda item: item[0])
            ],
        }


def part_name(device: str, multiprocessors: int) -> str:
    """Return the name by which tables know a part of a device."""
    return f"{device}, {multiprocessors} multiprocessors" if multiprocessors else device


@functools.cache
def choices(device: torch.device, multiprocessors: int = 0) -> Choices:
    """Return the choices for a device, or for a part of it; tables are read once, until `choices.cache_clear()`.

    Raises:
        ConfigError: if a table cannot be used, whatever device it is for.
    """
    plain = device if device.type == "cuda" else torch.device(device.type)
    if plain != device:
        return choices(plain, multiprocessors)
    name = part_name(device_name(device), multiprocessors)
    tables = [t for t in (load_table(p) for p in table_paths()) if t.device == name]
    known: dict[tuple[str, Key, str], Config] = {}
    for entry in _deciding_last(tables):
        known[entry.place] = entry.config
    return Choices(tables, known)


def _deciding_last(tables: Sequence[Table]) -> Iterator[Entry]:
    for table in reversed(tables):
        yield from table.entries


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tuned(op: str, key: Key, dtype: torch.dtype, device: torch.device) -> Config | None:
    """Return the measured choice for an op at a shape on a device, or None: then the op's own rule decides.

    Raises:
        ConfigError: if a table cannot be used.
    """
    multiprocessors = part()
    if multiprocessors:
        found = choices(device, multiprocessors).find(op, key, dtype_name(dtype))
        if found is not None:
            return found
    return choices(device).find(op, key, dtype_name(dtype))
