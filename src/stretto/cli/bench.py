"""`stretto bench MODEL`: device and wall time of one request, whole and per stage, at true shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Args:
    model: Positional[str] = "pi0.5"
    """A preset (`pi0.5`, `pi0`, `wan2.1-1.3b`, ...): true shapes, seeded random weights."""
    checkpoint: Path | None = None
    """Time this checkpoint instead of random weights."""
    batch: Annotated[str, arg(metavar="N,N,...")] = "1"
    """Batch sizes, one row of the result each."""
    prompt: int | None = None
    """Real prompt tokens; the longest by default."""
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    mode: Literal["auto", "graph", "eager"] = "auto"
    warmup: int = 20
    n: int = 100
    """Timed runs."""
    json: bool = False
    """Print one JSON object on standard output."""
    out: Path | None = None
    """Also write that JSON to a file."""


def run(args: Args) -> int:
    from stretto.deploy.bench import BenchOptions, bench_policy

    options = BenchOptions(
        model=args.model,
        checkpoint=args.checkpoint,
        batches=_batches(args.batch),
        prompt=args.prompt,
        device=args.device,
        dtype=args.dtype,
        mode=args.mode,
        warmup=args.warmup,
        n=args.n,
    )
    result = bench_policy(options)
    text = json.dumps(result, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        _table(result)
    return 0


def _batches(text: str) -> tuple[int, ...]:
    from stretto.core.errors import ConfigError

    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        batches = ()
    if not batches or min(batches) < 1:
        raise ConfigError("batch", got=repr(text), expected="whole numbers of 1 or more, such as 1,4,32")
    return batches


def _table(result: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = result["rows"]
    assert isinstance(rows, list)
    stages = list(dict.fromkeys(s for row in rows for s in row["stages"]))
    table = Table("model", "batch", "dtype", "prefix", "mode", "gpu p50", "gpu p99", "wall p50", "wall p99", *stages, "memory")
    for row in rows:
        numbers = [f"{row[k]:.2f}" for k in ("gpu_ms_p50", "gpu_ms_p99", "wall_ms_p50", "wall_ms_p99")]
        per_stage = [f"{row['stages'].get(s, 0.0):.2f}" for s in stages]
        fixed = [row["model"], str(row["batch"]), row["dtype"], str(row["prefix_tokens"]), row["mode"]]
        table.add_row(*fixed, *numbers, *per_stage, f"{row['memory_bytes'] / 2**30:.2f} GiB")
    console = Console()
    console.print(table)
    console.print(f"{result['device']}, torch {result['torch']}, commit {result['commit']}; milliseconds")
