"""Time of every Wan stage at its true shape, with random weights: embed, block, head, VAE decode, light decode.

    python benchmarks/wan_block.py --out benchmarks/results/wan_block_h200.json

One block stands for all: its weights and ring are larger than the caches of the GPU, so a loop over it reads memory as a
pass over all blocks does. Rows of a batch are the denoise steps of one stream, in neighbouring state slots, with full
rings. Values are local, as between the visits of one segment. A case that fails is reported and the others go on; no
case begins after `--budget-seconds`.

The GPU's power limit slows it down under steady load, so beside the median of many runs stands `first_ms`, that of the first
few after a rest. `host_ms` is what the host needs to issue one run; eager runs cannot be faster. The kernels of one run
are listed with their times.

Beside every time stand its floor, max(FLOP at 790 TFLOP/s, bytes at 4.3 TB/s), which is what dense bf16 products and
copies reach on an H200, and for blocks what is realistic: products at 680 and attention at 550 TFLOP/s.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stretto.core.model import Row
from stretto.core.route import DTYPE_BYTES
from stretto.deploy.provenance import provenance
from stretto.models import wan_vae
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig, tiny_config
from stretto.models.wan_light import LightDecoder

TARGET_MS = {("wan2.1-1.3b", 1): 1.2, ("wan2.2-5b", 1): 1.0, ("wan2.1-14b", 1): 3.3}
WINDOW = 21
PEAK_GFLOP_S, MEMORY_BYTES_S = 790e3, 4.3e12
VISITS = 5  # of the block in one run: what the blocks of a denoise step share is made once, as in a segment
VAES = {16: wan_vae.WAN21_VAE, 48: wan_vae.WAN22_VAE}


class LocalRows:
    """A batch with all its values at hand; state lives in arenas of their own."""

    def __init__(self, model: WanModel, rows: int, chunk: int) -> None:
        device, config = model.device, model.config
        self.host = [Row(0, chunk, step % config.denoise_steps, 1, step + 1) for step in range(rows)]
        self.slots_B = torch.ones(rows, dtype=torch.int64, device=device)
        self.steps_B = torch.tensor([row.step for row in self.host], device=device)
        self.state_slots_B = torch.tensor([row.state_slot for row in self.host], device=device)
        generator = torch.Generator(device=device).manual_seed(rows)
        self.values: dict[str, Tensor] = {}
        for name, spec in model.values.items():
            shape, dtype = (rows, *spec.shape), getattr(torch, spec.dtype)
            random = torch.randn(shape, generator=generator, device=device) if dtype.is_floating_point else None
            self.values[name] = torch.zeros(shape, dtype=dtype, device=device) if random is None else random.to(dtype)
        self.values["place"][:] = torch.tensor([chunk, 12345, 0], device=device)
        self.arenas: dict[str, Tensor] = {}
        for name, spec in model.state.items():
            dtype = getattr(torch, spec.dtype)
            arena = torch.empty(rows + 1, *spec.shape, dtype=dtype, device=device)
            self.arenas[name] = arena.normal_(generator=generator)
        shape = (config.text_tokens, config.text_width)
        self.context = torch.randn(shape, generator=generator, device=device).to(getattr(torch, config.dtype))

    @property
    def size(self) -> int:
        return len(self.host)

    def get(self, name: str) -> Tensor:
        return self.values[name]

    def put(self, name: str, value: Tensor) -> None:
        self.last = value

    def arena(self, name: str) -> Tensor:
        return self.arenas[name]

    def length(self, axis: str) -> int:
        raise KeyError(axis)

    def condition(self, row: int, name: str) -> tuple[int, Tensor]:
        return 0, self.context


REST_S, FIRST = 0.3, 5


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Return percentiles of one run in ms; on CUDA the device's own time."""
    for _ in range(5):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(REST_S)
    if device.type != "cuda":
        spans = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            spans.append((time.perf_counter() - begin) * 1e3)
    else:
        stamps = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin_event, end_event in stamps:
            begin_event.record()
            run()
            end_event.record()
        torch.cuda.synchronize(device)
        spans = [a.elapsed_time(b) for a, b in stamps]
    first = sorted(spans[1 : FIRST + 1] or spans)
    spans.sort()
    p50, p99 = spans[len(spans) // 2], spans[int(len(spans) * 0.99)]
    return {"p50_ms": round(p50, 4), "p99_ms": round(p99, 4), "first_ms": round(first[len(first) // 2], 4)}


def host_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return how long the host takes to issue one run."""
    spans = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    torch.cuda.synchronize(device)
    return round(sorted(spans)[3] * 1e3, 4)


def host_functions(run: Callable[[], object], device: torch.device, runs: int = 20) -> list[dict[str, Any]]:
    """Return the functions that the host spends most of its time in as it issues a run; tracing them costs time too."""
    torch.cuda.synchronize(device)
    profile = cProfile.Profile()
    for _ in range(runs):
        profile.runcall(run)
        torch.cuda.synchronize(device)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sorted(((own, calls, where) for where, (_, calls, own, _, _) in stats.items()), reverse=True)
    return [
        {"function": f"{Path(file).name}:{line} {name}"[:80], "calls": calls / runs, "us": round(own / runs * 1e6, 1)}
        for own, calls, (file, line, name) in own[:14]
    ]


def kernels(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the kernels of one run, those that take longest first, with how often each ran and its time in all."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [(e.key[:80], e.count, round(e.self_device_time_total, 2)) for e in profile.key_averages()]
    listed = [{"kernel": name, "calls": calls, "us": us} for name, calls, us in found if us > 0.0]
    return sorted(listed, key=lambda k: -float(k["us"]))


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], torch.cuda.CUDAGraph]:
    """Capture a run; the graph must outlive its replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay, graph


def block_gflop(config: WanConfig) -> tuple[float, float]:
    """Return the work of one block on one row with a full window, in GFLOP: matrix products, and attention."""
    tokens, d = config.frames_per_chunk * config.tokens_per_frame, config.width
    keys = config.window_frames * config.tokens_per_frame
    products = 12 * tokens * d * d + 4 * tokens * d * config.ffn_width
    return products / 1e9, 4 * tokens * d * (keys + config.text_tokens) / 1e9


def floor_ms(gflop: float, nbytes: float) -> float:
    return round(max(gflop / PEAK_GFLOP_S, nbytes / MEMORY_BYTES_S) * 1e3, 4)


def floors(model: WanModel, stage: str, rows: int) -> dict[str, float]:
    """Return the floor of a stage on some rows, and for a block what is realistic."""
    config = model.config
    tokens = rows * config.frames_per_chunk * config.tokens_per_frame
    hidden = tokens * config.width * DTYPE_BYTES[config.dtype]
    weights = sum(p.nbytes for module in model.stages[stage].modules for p in module.parameters())  # type: ignore[attr-defined]
    if not stage.startswith("block"):
        patch = config.channels * config.patch**2
        return {"floor_ms": floor_ms(2 * tokens * patch * config.width / 1e9, weights + hidden + tokens * patch * 4)}
    products, attention = (rows * g for g in block_gflop(config))
    state = rows * sum(model.state[name].nbytes for name in model.stages[stage].spec.state)
    return {
        "floor_ms": floor_ms(products + attention, weights + state + 2 * hidden),
        "realistic_ms": round((products / 680e3 + attention / 550e3) * 1e3, 4),
    }


def fits(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a + b n, in ms, through the times of each stage by rows: what plans are made from."""
    keys = ("model", "chunk_frames", "window_frames", "stage", "mode")
    groups: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for record in records:
        if "p50_ms" in record and "window_frames" in record:
            groups.setdefault(tuple(record[k] for k in keys), []).append((record["rows"], record["p50_ms"]))
    out = []
    for key, points in groups.items():
        n = [float(rows) for rows, _ in points]
        mean_n, mean_t = sum(n) / len(n), sum(t for _, t in points) / len(points)
        spread = sum((x - mean_n) ** 2 for x in n)
        slope = sum((x - mean_n) * (t - mean_t) for x, (_, t) in zip(n, points, strict=True)) / spread if spread else mean_t
        line = {"fixed_ms": round(mean_t - slope * mean_n, 4), "per_row_ms": round(slope, 4)}
        table = {str(rows): t for rows, t in points}
        out.append({**dict(zip(keys, key, strict=True)), **line, "table_ms": table})
    return out


def measure(name: str, run: Callable[[], object], case: dict[str, Any], device: torch.device, repeats: int) -> Iterator[Any]:
    """Yield one record for eager and one for a captured graph."""
    for mode in ("eager", "graph") if device.type == "cuda" else ("eager",):
        record = {**case, "stage": name, "mode": mode}
        try:
            replay, graph = (run, None) if mode == "eager" else captured(run)
            record |= timed(replay, device, repeats)
            if device.type == "cuda" and mode == "eager":
                record["host_ms"] = host_ms(run, device)
            del graph
        except Exception as error:  # one case must not cost the others their figures
            record["error"] = f"{type(error).__name__}: {error}"
        yield record


def stages_of(
    config: WanConfig, device: torch.device, row_counts: Sequence[int], repeats: int, profiled: bool
) -> Iterator[dict[str, Any]]:
    model = build(replace(config, blocks=1), device=device)
    model.randomize(seed=0)
    chunk = 3 * WINDOW
    for rows_count in row_counts:
        rows = LocalRows(model, rows_count, chunk)
        case = {"model": config.name, "chunk_frames": config.frames_per_chunk, "window_frames": WINDOW, "rows": rows_count}
        case |= {"tokens": config.frames_per_chunk * config.tokens_per_frame}
        gflop = sum(block_gflop(config)) * rows_count
        for stage in ("embed", "block.0", "head"):
            visits = VISITS if stage == "block.0" else 1
            run = bind(model, stage, rows, visits)
            for record in measure(stage.split(".")[0], run, {**case, "visits": visits}, device, repeats):
                record |= floors(model, stage, rows_count)
                for part in {"p50_ms", "p99_ms", "first_ms", "host_ms"} & set(record):
                    record[part] = round(record[part] / visits, 4)
                if stage == "block.0" and "p50_ms" in record:
                    record |= {"gflop": round(gflop, 1), "tflop_per_s": round(gflop / record["p50_ms"], 1)}
                    record["target_ms"] = TARGET_MS.get((config.name, config.frames_per_chunk)) if rows_count == 1 else None
                yield record
            if profiled and device.type == "cuda":
                listed = kernels(bind(model, stage, rows, 1))
                total = {"launches": sum(k["calls"] for k in listed), "kernel_us": round(sum(k["us"] for k in listed), 1)}
                yield {**case, "stage": f"{stage.split('.')[0]}, kernels", **total, "kernels": listed}
            if profiled and device.type == "cuda" and rows_count == 1 and stage == "block.0":
                yield {**case, "stage": "block, host", "functions": host_functions(bind(model, stage, rows, 1), device)}
        del rows


def bind(model: WanModel, stage: str, rows: LocalRows, visits: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(visits):
            model.stages[stage].run(rows)  # type: ignore[arg-type]

    return run


def decoders_of(config: WanConfig, device: torch.device, repeats: int, small: bool) -> Iterator[dict[str, Any]]:
    dtype = getattr(torch, config.dtype)
    changes = {"base_dim": 8, "dim_mult": (1, 1, 1, 1), "num_res_blocks": 1, "decoder_base_dim": 8} if small else {}
    vae = wan_vae.build_vae(VAES[config.channels], **changes).to(device=device, dtype=dtype)
    widths = (256, 128, 64) if config.space_stride == 8 else (256, 128, 64, 64)
    light = LightDecoder(config.channels, config.space_stride, widths, dtype=dtype, device=device)
    for name, decoder in (("decode", wan_vae.VaeDecoder(vae)), ("decode_light", light)):
        for frames in (1, 3):
            latents = torch.randn(frames, *config.latent_shape[1:], device=device)
            caches = wan_vae.new_caches(decoder.caches(*config.latent_shape[2:]), device)
            case = {"model": config.name, "chunk_frames": frames, "rows": 1}
            case |= {"cache_bytes": sum(c.nbytes for c in caches)}
            case |= {"weight_bytes": sum(p.nbytes for p in decoder.module.parameters())}
            with FlopCounterMode(display=False) as counter:
                decoder.decode(latents, caches, first=False)
            gflop = counter.get_total_flops() / 1e9
            case |= {"gflop": round(gflop, 1), "floor_ms": floor_ms(gflop, case["weight_bytes"])}

            def run(decoder: Any = decoder, latents: Tensor = latents, caches: list[Tensor] = caches) -> object:
                return decoder.decode(latents, caches, first=False)

            yield from measure(name, run, case, device, max(3, repeats // 5))
            del caches


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SPECS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--frames", nargs="*", type=int, default=[1, 3])
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--budget-seconds", type=float, default=300.0)
    parser.add_argument("--no-decode", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script itself on any device")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = [tiny_config()] if args.small else [SPECS[name] for name in args.models]
    records: list[dict[str, Any]] = []
    until = time.monotonic() + args.budget_seconds

    def keep(made: Iterator[dict[str, Any]], what: str) -> None:
        try:
            while time.monotonic() < until and (record := next(made, None)) is not None:
                records.append(record)
                print(json.dumps(record), flush=True)
                save()
            if time.monotonic() >= until:
                records.append({"case": what, "not_run": "out of time, at least in part"})
        except Exception as error:  # as in `measure`: a model that does not fit leaves the rest to run
            records.append({"case": what, "error": f"{type(error).__name__}: {error}"})
            print(json.dumps(records[-1]), flush=True)

    def save() -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**about, "rows": records, "fits": fits(records), "memory": memory}, indent=1))

    about, memory = {**provenance(device), "window_frames": WINDOW}, [memory_of(config) for config in configs]
    with torch.inference_mode():
        for frames, config in itertools.product(args.frames, configs):
            sized = replace(config, frames_per_chunk=frames, window_frames=WINDOW)
            keep(stages_of(sized, device, args.rows, args.repeats, not args.no_profile), f"{config.name}, chunk {frames}")
        for config in configs if not args.no_decode else []:
            keep(decoders_of(config, device, args.repeats, args.small), f"{config.name}, decoders")
    save()


if __name__ == "__main__":
    main()
