"""`stretto inspect CHECKPOINT`: what it is, what a request must hold, and what it needs in memory. Loads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Args:
    checkpoint: Positional[str]
    """A LeRobot folder, an openpi PyTorch export, or the name of an embedded checkpoint."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype that the memory figures are for."""
    preset: str | None = None
    tokenizer: Path | None = None
    degenerate: Literal["refuse", "hold"] = "refuse"
    json: bool = False


def run(args: Args) -> int:
    from stretto.deploy.describe import describe

    facts = describe(
        args.checkpoint, dtype=args.dtype, preset=args.preset, tokenizer=args.tokenizer, degenerate=args.degenerate
    )
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title in ("checkpoint", "network", "processing", "fp8"):
        table = Table(title, "", box=None)
        for key, value in facts[title].items():
            table.add_row(key, str(value))
        console.print(table)
    stats = Table("statistics", "mode", "dimension", "", "", box=None)
    for feature, entry in facts["statistics"].items():
        names = [name for name in entry if name not in ("mode", "width")]
        for i, values in enumerate(zip(*(entry[name] for name in names), strict=True)):
            numbers = [f"{name} {value:g}" for name, value in zip(names, values, strict=True)]
            stats.add_row(*((feature, entry["mode"]) if i == 0 else ("", "")), str(i), *numbers)
        if not names:
            stats.add_row(feature, entry["mode"], f"all {entry['width']}")
    console.print(stats)
    request = Table("a request holds", "kind", "shape", "dtype", "required", box=None)
    for key, entry in facts["observation"].items():
        request.add_row(key, entry["kind"], str(entry["shape"]), entry["dtype"], "yes" if entry["required"] else "no")
    console.print(request)
    memory = Table("batch", "weights", "slots and inputs", "together (activations and graphs aside)", box=None)
    for row in facts["memory"]:
        sizes = [f"{row[k] / 2**20:,.0f} MiB" for k in ("weight_bytes", "arena_bytes", "total_bytes")]
        memory.add_row(str(row["batch"]), *sizes)
    console.print(memory)
    return 0
