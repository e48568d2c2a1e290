"""Time of every Wan stage at its true shape, with random weights: embed, block, head, VAE decode, light decode.

    python benchmarks/wan_block.py --stock --out benchmarks/results/wan_block_h200.json

One block stands for all: its weights and ring are larger than the caches of the GPU, so a loop over it reads memory as a
pass over all blocks does. Rows of a batch are the denoise steps of one stream, in neighbouring state slots, with full
rings. Values are local, as between the visits of one segment. A case that fails is reported and the others go on; no
case begins after `--budget-seconds`.

The GPU's power limit slows it down under steady load. So a block is timed twice, as captured graphs: rested, with a pause
ahead of every sample, and sustained, with launches in a row for more than a second; clock and power stand beside both. With
`--stock` the same block as plain torch writes it, compiled, is timed in turn with ours, sample by sample. Kernels of one run
are listed with their times on a rested chip.

Beside every time stand its floor, max(FLOP at 790 TFLOP/s, bytes at 4.3 TB/s), which is what dense bf16 products and
copies reach on an H200, and for blocks what is realistic: products at 680 and attention at 550 TFLOP/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from wan_clock import PAUSE_S, Run, Sensors, per_visit, rested, sustained
from wan_rows import VISITS, WINDOW, LocalRows, bind, block_gflop, captured, floor_ms, floors, kernels
from wan_stock import CHUNK, sized, stock_of

from stretto.deploy.provenance import provenance
from stretto.layers.kernels import chunk_attention as chosen
from stretto.layers.kernels.chunk_attention import Shape
from stretto.models import wan_vae
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig
from stretto.models.wan_light import LightDecoder

TARGET_MS = {("wan2.1-1.3b", 1): 1.2, ("wan2.2-5b", 1): 1.0, ("wan2.1-14b", 1): 3.3}
VAES = {16: wan_vae.WAN21_VAE, 48: wan_vae.WAN22_VAE}
TINY = "wan-tiny"
WAYS = ["contiguous", "fused", "fused, channels_last", "fused, benchmark", "channels_last"]


@dataclass(frozen=True)
class Timing:
    """Where and how long a case is timed."""

    device: torch.device
    sensors: Sensors
    samples: int
    sustained_s: float
    beside: bool = False
    """Also with cuDNN's attention, where ours is chosen."""

    def graph(self, run: Run) -> Run:
        """Return a replay of a run; on a device without graphs the run itself."""
        if self.device.type != "cuda":
            return run
        replay, graph = captured(run)
        return lambda: (replay(), graph)


def relative(got: Tensor, want: Tensor) -> float:
    return round(float((got.float() - want.float()).norm() / want.float().norm()), 5)


def block_row(model: WanModel, rows_count: int, timing: Timing, stock: bool) -> dict[str, Any]:
    """Return the row of a block: ours, and in turn with it the stock one."""
    config = model.config
    rows = LocalRows(model, rows_count, CHUNK)
    gflop = sum(block_gflop(config)) * rows_count
    row: dict[str, Any] = {"gflop": round(gflop, 1), **floors(model, "block.0", rows_count), "visits": VISITS}
    row["target_ms"] = TARGET_MS.get((config.name, config.frames_per_chunk)) if rows_count == 1 else None
    runs = {"ours": timing.graph(bind(model, "block.0", rows, VISITS))}
    rule, shape = chosen.choose, Shape(rows_count, rows.get("h").shape[1], WINDOW * config.tokens_per_frame, config.heads, 128)
    if timing.beside and rule(shape, rows.get("h")).method == "hopper":
        chosen.choose = lambda shape, q: chosen.by_rule(shape, chosen.H200_PROCESSORS)
        try:
            runs["cudnn attention"] = timing.graph(bind(model, "block.0", rows, VISITS))
        finally:
            chosen.choose = rule
    if stock and rows_count == 1:
        try:
            run, once = stock_of(model, rows, compiled=True)
            bind(model, "block.0", rows, 1)()  # first, since it makes the prompt's keys
            want = once()
            row["stock_relative_difference"] = relative(rows.last[0], want)
            runs["stock"] = timing.graph(run)
        except Exception as error:  # the yardstick must not cost ours its figure
            row["stock_error"] = f"{type(error).__name__}: {error}"[:400]
    for name, found in rested(runs, timing.device, timing.sensors, timing.samples).items():
        row.setdefault(name, {})["rested"] = per_visit(found, VISITS)
    for name, run in runs.items():
        row[name]["sustained"] = per_visit(sustained(run, timing.device, timing.sensors, timing.sustained_s), VISITS)
    ours = row["ours"]
    row |= {"rested_ms": ours["rested"]["ms"]["p50"], "p50_ms": ours["sustained"]["ms"]["p50"]}
    row["tflop_per_s_rested"] = round(gflop / row["rested_ms"], 1)
    return row


def stages_of(
    config: WanConfig, row_counts: Sequence[int], timing: Timing, *, stock: bool, profiled: bool
) -> Iterator[dict[str, Any]]:
    model = build(config, device=timing.device)
    model.randomize(seed=0)
    tokens = config.frames_per_chunk * config.tokens_per_frame
    case = {"model": config.name, "chunk_frames": config.frames_per_chunk, "window_frames": WINDOW, "tokens": tokens}
    mode = "graph" if timing.device.type == "cuda" else "eager"
    for rows_count in row_counts:
        here = {**case, "rows": rows_count, "mode": mode}
        try:
            yield {**here, "stage": "block", **block_row(model, rows_count, timing, stock)}
        except Exception as error:  # one case must not cost the others their figures
            yield {**here, "stage": "block", "error": f"{type(error).__name__}: {error}"[:400]}
    rows = LocalRows(model, 1, CHUNK)
    for stage in ("embed", "head"):
        run = timing.graph(bind(model, stage, rows, VISITS))
        found = per_visit(sustained(run, timing.device, timing.sensors, 0.1), VISITS)
        yield {**case, "rows": 1, "mode": mode, "stage": stage, "p50_ms": found["ms"]["p50"], **floors(model, stage, 1)}
    if profiled and timing.device.type == "cuda":
        time.sleep(PAUSE_S)
        listed = kernels(bind(model, "block.0", rows, 1))
        total = {"launches": sum(k["calls"] for k in listed), "kernel_us": round(sum(k["us"] for k in listed), 1)}
        yield {**case, "rows": 1, "stage": "block, kernels", **total, "kernels": listed}


def decoders_of(name: str, timing: Timing, counts: Sequence[int], ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each decoder and chunk length; `ways` are memory formats of the convolutions."""
    config, small = sized(name, 1), name == TINY
    dtype, device = getattr(torch, config.dtype), timing.device
    changes = {"base_dim": 8, "dim_mult": (1, 1, 1, 1), "num_res_blocks": 1, "decoder_base_dim": 8} if small else {}
    widths = (256, 128, 64) if config.space_stride == 8 else (256, 128, 64, 64)
    light = LightDecoder(config.channels, config.space_stride, widths, dtype=dtype, device=device)
    first: dict[int, Tensor] = {}
    for way in ways:
        torch.backends.cudnn.benchmark = "benchmark" in way
        torch.manual_seed(0)
        with torch.device(device):
            vae = wan_vae.build_vae(VAES[config.channels], **changes).to(dtype=dtype)
        full = wan_vae.VaeDecoder(vae, channels_last="channels_last" in way, fused="fused" in way)
        for kind, decoder in (("decode", full), ("decode_light", light)) if way == ways[0] else (("decode", full),):
            for count in counts:
                case = {"model": config.name, "chunk_frames": count, "rows": 1, "stage": kind, "way": way}
                try:
                    row, frames = decoder_row(config, decoder, count, timing)
                    if kind == "decode":
                        apart = (frames.int() - first.setdefault(count, frames).int()).abs().float()
                        row["bytes_off"] = {"mean": round(float(apart.mean()), 4), "most": int(apart.max())}
                    yield case | row
                except Exception as error:  # as above
                    yield case | {"error": f"{type(error).__name__}: {error}"[:400]}


def decoder_row(config: WanConfig, decoder: wan_vae.Decoder, frames: int, timing: Timing) -> tuple[dict[str, Any], Tensor]:
    """Return the row of one decoder, and what it decodes of the same latents behind the same ones."""
    generator = torch.Generator(device=timing.device).manual_seed(frames)
    latents = torch.randn(frames, *config.latent_shape[1:], generator=generator, device=timing.device)
    caches = wan_vae.new_caches(decoder.caches(*config.latent_shape[2:]), timing.device)
    weight_bytes = sum(p.nbytes for p in decoder.module.parameters())
    with FlopCounterMode(display=False) as counter:
        made = decoder.decode(latents, caches, first=False)
    gflop = counter.get_total_flops() / 1e9
    run = timing.graph(lambda: decoder.decode(latents, caches, first=False))
    found = sustained(run, timing.device, timing.sensors, min(timing.sustained_s, 0.6))
    row = {
        "mode": "graph" if timing.device.type == "cuda" else "eager",
        "cache_bytes": sum(c.nbytes for c in caches),
        "weight_bytes": weight_bytes,
        "gflop": round(gflop, 1),
        "floor_ms": floor_ms(gflop, weight_bytes),
        "p50_ms": found["ms"]["p50"],
        "p99_ms": found["ms"]["p99"],
        "sustained": found,
    }
    if timing.device.type == "cuda":
        time.sleep(PAUSE_S)
        row["kernels"] = kernels(lambda: decoder.decode(latents, caches, first=False))[:12]
    return row, made


def memory_of(config: WanConfig) -> dict[str, Any]:
    """Return the bytes of a model by part, for its whole and for each (stream, ring)."""
    model = build(replace(config, window_frames=WINDOW), device="meta")
    rings = sum(spec.nbytes for name, spec in model.state.items() if name.endswith((".k", ".v")))
    prompts = sum(spec.nbytes for name, spec in model.state.items() if name.endswith(("cross_k", "cross_v")))
    weights = sum(p.nbytes for p in model.net.parameters())
    return {
        "model": config.name,
        "weight_bytes": weights,
        "block_weight_bytes": sum(p.nbytes for p in model.net.blocks[0].parameters()),
        "ring_bytes_per_state_slot": rings,
        "prompt_bytes_per_state_slot": prompts,
        "hidden_bytes": model.values["h"].nbytes,
        "latent_bytes": model.values["x"].nbytes,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SPECS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--frames", nargs="*", type=int, default=[1, 3], help="the first with the stock block and kernels")
    parser.add_argument("--stock", action="store_true", help="beside ours the block of plain torch, compiled")
    parser.add_argument("--ahead", action="store_true", help="compile the stock blocks side by side before anything else")
    parser.add_argument("--beside", action="store_true", help="beside ours the block with cuDNN's attention")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--samples", type=int, default=5, help="rested ones; a third of it for all but the first chunk length")
    parser.add_argument("--sustained", type=float, default=1.2, help="seconds of launches in a row")
    parser.add_argument("--budget-seconds", type=float, default=300.0)
    parser.add_argument("--decoders", nargs="*", default=[], help="models whose decoders are timed too")
    parser.add_argument(
        "--ways", nargs="*", default=WAYS, choices=WAYS, help="to run a decoder; the light one beside the first"
    )
    parser.add_argument("--table", type=Path, help="a table of kernels, if it is there (STRETTO_KERNEL_TABLE)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself on any device")
    args = parser.parse_args()
    use_table(args.table)
    return args


def use_table(path: Path | None) -> None:
    if path is not None and path.is_file():
        os.environ["STRETTO_KERNEL_TABLE"] = str(path)


def compile_ahead(names: Sequence[str], frames: int) -> None:
    """Compile the stock blocks side by side, in processes of their own: what they leave on disk is found by this one."""
    script = Path(__file__).with_name("wan_stock.py")
    made = [subprocess.Popen([sys.executable, str(script), name, str(frames)]) for name in names]
    for process in made:
        process.wait()


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [TINY] if args.small else args.models
    records: list[dict[str, Any]] = []
    began = time.monotonic()
    until = began + args.budget_seconds
    about = {**provenance(device), "window_frames": WINDOW, "pause_s": PAUSE_S, "sustained_s": args.sustained}
    memory = [memory_of(sized(name, 1) if name == TINY else SPECS[name]) for name in names]

    def save() -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**about, "rows": records, "memory": memory}, indent=1))

    def keep(begin: Callable[[], Iterator[dict[str, Any]]], what: str) -> None:
        if time.monotonic() >= until:
            records.append({"case": what, "not_run": "out of time"})
            return
        try:
            for record in begin():
                records.append({**record, "at_s": round(time.monotonic() - began, 1)})
                print(json.dumps(records[-1]), flush=True)
                save()
                if time.monotonic() >= until:
                    records.append({"case": what, "not_run": "out of time, at least in part"})
                    return
        except Exception as error:  # as in `stages_of`: a model that does not fit leaves the rest to run
            records.append({"case": what, "error": f"{type(error).__name__}: {error}"[:400]})
            print(json.dumps(records[-1]), flush=True)

    if args.ahead and args.stock:
        compile_ahead(names, args.frames[0])
    sensors = Sensors(device)
    with torch.inference_mode():
        for frames, name in itertools.product(args.frames, names):
            main_case = frames == args.frames[0]
            samples = args.samples if main_case else -(-args.samples // 3)
            timing = Timing(device, sensors, samples, args.sustained, args.beside)
            counts = args.rows if main_case else args.rows[:1]
            config, profiled = sized(name, frames), main_case and not args.no_profile
            keep(
                lambda c=config, n=counts, t=timing, m=main_case, p=profiled: stages_of(  # type: ignore[misc]
                    c, n, t, stock=args.stock and m, profiled=p
                ),
                f"{name}, chunk {frames}",
            )
        timing = Timing(device, sensors, args.samples, args.sustained)
        for name in args.decoders:
            keep(lambda n=name: decoders_of(n, timing, args.frames, args.ways), f"{name}, decoders")  # type: ignore[misc]
    save()


if __name__ == "__main__":
    main()
