"""One Wan block and the rows that it runs on, at true shapes with random weights and full rings: what its benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.core.model import Row
from stretto.core.route import DTYPE_BYTES
from stretto.models.wan import WanModel
from stretto.models.wan_config import WanConfig
from stretto.runtime.graphs import Graphs

WINDOW = 21
VISITS = 5  # of the block in one run: what the blocks of a denoise step share is made once, as in a segment
PEAK_GFLOP_S, MEMORY_BYTES_S = 790e3, 4.3e12


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


def bind(model: WanModel, stage: str, rows: LocalRows, visits: int) -> Callable[[], object]:
    """Return what runs a stage so many times."""

    def run() -> None:
        for _ in range(visits):
            model.stages[stage].run(rows)  # type: ignore[arg-type]

    return run


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], torch.cuda.CUDAGraph]:
    """Capture a run; the graph must outlive its replays."""
    graph = Graphs().capture_at_rest(run)
    return graph.replay, graph


def kernels(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the kernels of one run, those that take longest first, with how often each ran and its time in all."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [(e.key[:80], e.count, round(e.self_device_time_total, 2)) for e in profile.key_averages()]
    listed = [{"kernel": name, "calls": calls, "us": us} for name, calls, us in found if us > 0.0]
    return sorted(listed, key=lambda k: -float(k["us"]))


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
