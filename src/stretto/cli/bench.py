"""`stretto bench MODEL`: a policy's request, whole and per stage, or a world model's output interval under plans.

With --tune it times kernels instead, and writes the table of choices that later runs use.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from rich.table import Table

Comma = arg(metavar="N,N,...")


@dataclass(frozen=True)
class Args:
    model: Positional[str] = "pi0.5"
    """A preset (`pi0.5`, `pi0`, `wan2.1-1.3b`, ...): true shapes, seeded random weights."""
    checkpoint: Path | None = None
    """Policies: this checkpoint, at its own shapes, instead of random weights."""
    batch: Annotated[str, Comma] = "1"
    """Policies: batch sizes, one row of the result each."""
    prompt: int | None = None
    """Policies: real prompt tokens; the longest by default."""
    chunk_frames: Annotated[str, Comma] = "1,3"
    """World models: latent frames of a chunk."""
    window_frames: Annotated[str, Comma] = "21"
    """World models: latent frames that a query sees."""
    steps: int | None = None
    """World models: denoise steps, of the model's own list."""
    size: Annotated[str | None, arg(metavar="HxW")] = None
    """World models: pixels, such as 480x832; the model's own by default."""
    plan: Annotated[str, arg(metavar="PLAN,PLAN,...")] = "auto"
    """World models: serial, whole, batched, by_step, by_block, by_block_batched, by_stage, circular; auto: all that fit."""
    decoder: Literal["none", "light", "vae"] = "none"
    """World models: what decodes, as a stage of its own."""
    streams: int = 1
    """World models: streams at once."""
    workers: Literal["threads", "processes"] = "threads"
    """World models: where the devices of a plan run."""
    seconds: float = 4.0
    """World models: length of the measured span of each row."""
    device: str = "auto"
    """A device, or for a world model several: cuda:0,cuda:1."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    mode: Literal["auto", "graph", "eager"] = "auto"
    precision: Literal["dtype", "fp8", "fp8-emulated"] = "dtype"
    """Policies: as `stretto serve`; without a calibration beside the checkpoint, on scales of random inputs.
    World models: of the products of their blocks, with a scale a row."""
    warmup: int = 20
    n: int = 100
    """Policies: timed runs."""
    json: bool = False
    """Print one JSON object on standard output."""
    out: Path | None = None
    """Also write that JSON to a file; with --tune, the table (~/.config/stretto/kernels/DEVICE.json by default)."""
    tune: bool = False
    """Time every kernel choice at the shapes that the model runs, and write the fastest to a table."""
    tune_seconds: float = 120.0
    """Start no new measurement after this long."""


def run(args: Args) -> int:
    from stretto.cli.files import writable
    from stretto.deploy.worlds import NAMES

    writable("out", args.out)
    if args.tune:
        return _tune(args)
    world = args.model in NAMES
    result = _world(args) if world else _policy(args)
    text = json.dumps(result, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        _show(result, _world_table(result["rows"]) if world else _policy_table(result["rows"]))
    return 0


def _policy(args: Args) -> dict[str, Any]:
    from stretto.deploy.bench import BenchOptions, bench_policy

    options = BenchOptions(
        model=args.model,
        checkpoint=args.checkpoint,
        batches=numbers("batch", args.batch),
        prompt=args.prompt,
        device=args.device,
        dtype=args.dtype,
        mode=args.mode,
        precision=args.precision,
        warmup=args.warmup,
        n=args.n,
    )
    return bench_policy(options)


def _world(args: Args) -> dict[str, Any]:
    from stretto.deploy.world_bench_options import WorldBenchOptions, bench_world

    height, width = pixels(args.size)
    options = WorldBenchOptions(
        model=args.model,
        chunk_frames=numbers("chunk_frames", args.chunk_frames),
        window_frames=numbers("window_frames", args.window_frames),
        steps=args.steps,
        pixel_height=height,
        pixel_width=width,
        plans=() if args.plan == "auto" else tuple(args.plan.split(",")),
        decoder=args.decoder,
        streams=args.streams,
        workers=args.workers,
        seconds=args.seconds,
        devices=tuple(args.device.split(",")),
        dtype=args.dtype,
        mode=args.mode,
        precision=args.precision,
    )
    return bench_world(options)


def _tune(args: Args) -> int:
    from stretto.core.errors import ConfigError
    from stretto.deploy.device import resolve_device
    from stretto.deploy.tune import TuneOptions, tune_model

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise ConfigError("device", got=str(device), expected="a GPU: elsewhere plain torch runs, and there is no choice")
    height, width = pixels(args.size)
    chunks = itertools.product(numbers("chunk_frames", args.chunk_frames), numbers("window_frames", args.window_frames))
    options = TuneOptions(
        model=args.model,
        checkpoint=args.checkpoint,
        batches=numbers("batch", args.batch),
        prompt=args.prompt,
        seconds=args.tune_seconds,
        worlds=tuple(
            {"frames_per_chunk": frames, "window_frames": window, "pixel_height": height, "pixel_width": width}
            for frames, window in chunks
        ),
        device=args.device,
        dtype=args.dtype,
        precision=args.precision,
        out=args.out,
    )
    result = tune_model(options, lambda row: None if args.json else _show_choice(row))
    print(json.dumps(result, indent=1) if args.json else f"{len(result['rows'])} shapes; table: {result['table']}")
    return 0


def _show_choice(row: dict[str, Any]) -> None:
    shape = f"{row['op']} {'x'.join(map(str, row['key']))} {row['dtype']}"
    print(
        f"{shape}: {row['left']}" if "left" in row else f"{shape}: {row['us']} us {row['best']}; rule {row['rule_us']} us",
        flush=True,
    )


def numbers(field: str, text: str) -> tuple[int, ...]:
    """Read `1,4,32`.

    Raises:
        ConfigError: if one is no whole number of 1 or more.
    """
    from stretto.core.errors import ConfigError

    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(field, got=repr(text), expected="whole numbers of 1 or more, such as 1,4,32")
    return found


def pixels(text: str | None) -> tuple[int | None, int | None]:
    """Read `480x832` as height and width.

    Raises:
        ConfigError: if it is not two whole numbers.
    """
    from stretto.core.errors import ConfigError

    if text is None:
        return None, None
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ConfigError("size", got=repr(text), expected="height x width in pixels, such as 480x832")
    return int(parts[0]), int(parts[1])


def _policy_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    stages = list(dict.fromkeys(s for row in rows for s in row["stages"]))
    title = ", ".join(str(rows[0][k]) for k in ("model", "dtype", "precision", "mode"))
    names = ("batch", "tokens", "gpu p50", "gpu p99", "wall p50", "wall p99", *stages, "GiB")
    table = Table(*names, title=title, title_justify="left", box=None)
    for row in rows:
        times = [f"{row[k]:.2f}" for k in ("gpu_ms_p50", "gpu_ms_p99", "wall_ms_p50", "wall_ms_p99")]
        per_stage = [f"{row['stages'].get(s, 0.0):.2f}" for s in stages]
        table.add_row(str(row["batch"]), str(row["prefix_tokens"]), *times, *per_stage, f"{row['memory_bytes'] / 2**30:.2f}")
    return table


def _world_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("chunk", "window", "plan", "devices", "mode", "block", "interval", "latency", "frames/s", "idle", "remark")
    for row in rows:
        head = [str(row[k]) for k in ("chunk_frames", "window_frames", "plan", "devices")]
        if "output_interval_ms" not in row:
            table.add_row(*head, *[""] * 6, row.get("skipped") or row.get("error", ""))
            continue
        times = [row["stage_ms"]["block.*"], row["output_interval_ms"], row["response_latency_ms"], row["frames_per_s"]]
        idle = ", ".join(f"{share:.0%}" for share in row["idle_share"].values())
        table.add_row(*head, row["mode"], *[f"{t:.2f}" for t in times], idle, "")
    return table


def _show(result: dict[str, Any], table: Table) -> None:
    from rich.console import Console

    console = Console()
    console.print(table)
    console.print(f"{result['device']}, torch {result['torch']}, commit {result['commit']}; milliseconds")
    console.print(f"kernels: {_kernels(result['kernels'])}")


def _kernels(report: dict[str, Any]) -> str:
    """Say in a line what chose the kernels: a table, the rule of an op, or plain torch as the reference."""
    by: dict[str, list[str]] = {}
    for op, kinds in report["ops"].items():
        by.setdefault(" and ".join(kinds), []).append(op)
    tables = ", ".join(f"{t['path']} ({t['device']}, commit {' '.join(t['commits'])})" for t in report["tables"])
    said = "; ".join(f"by {kinds}: {', '.join(ops)}" for kinds, ops in sorted(by.items()))
    return f"{said or 'none in this process'}; tables: {tables or 'none'}"
