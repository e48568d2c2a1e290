"""Does a pipeline make the very bits that one chunk after another makes? Runs both and compares.

The serial side knows no engine: it walks a chunk through its route, visit by visit, before the next chunk begins. The
pipelined side runs the same script of streams in worker processes: two interleaved, one of them cancelled on its way, and
one that comes late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stretto.core.chunk import Chunk
from stretto.core.errors import ConfigError, StreamClosedError
from stretto.core.model import Row
from stretto.core.plan import Plan
from stretto.core.plan import whole as whole_plan
from stretto.deploy.world_models import KINDS, WanShare, place
from stretto.models.wan import WanModel
from stretto.models.wan_config import WanConfig, tiny_config
from stretto.models.wan_stages import CONTEXT
from stretto.runtime.engine import Engine, Stream
from stretto.runtime.fleet import Workers
from stretto.runtime.layout import arenas_for
from stretto.runtime.pools import StatePools
from stretto.runtime.rows import BatchRows
from stretto.runtime.worker import Transport

SEED, CHUNKS, CANCELLED_AT, LATE = 5, 12, 6, 5
STREAMS = 3


def small(**changes: Any) -> WanConfig:
    """Return the configuration that is verified by default: four blocks, four steps, and windows of three frames."""
    return replace(tiny_config(), blocks=4, window_frames=3, **changes)


def prompt_of(model: WanModel, stream: int, chunk: int) -> Tensor:
    """Return the prompt of a chunk; it changes in the middle of a stream."""
    generator = torch.Generator().manual_seed(100 + 2 * stream + (chunk >= CHUNKS // 2))
    return model.context(torch.randn(5, model.config.text_width, generator=generator))


def actions_of(model: WanModel, stream: int, chunk: int) -> dict[str, Tensor]:
    config = model.config
    generator = torch.Generator().manual_seed(1000 * stream + chunk)
    counts = {t: t.samples(chunk, config.frames_per_chunk, config.time_stride) for t in config.actions}
    return {t.name: torch.randn(n, t.dim, generator=generator) for t, n in counts.items()}


def inputs_of(model: WanModel, stream: int, chunk: int) -> dict[str, Tensor]:
    return model.inputs(SEED, stream, chunk, actions=actions_of(model, stream, chunk))


class Serial:
    """One stream, a chunk at a time, a visit at a time, on one device."""

    def __init__(self, model: WanModel, stream: int) -> None:
        self.model, self.stream = model, stream
        plan = whole_plan(model.route, "cpu")
        self.arenas = arenas_for(model, plan, "cpu", torch.device("cpu"), slots=1, streams=1)
        keys = StatePools(model, plan.classes, "cpu").keys("default")
        self.slots = {key: self.arenas.state_slots[key.pool].take() for key in keys}
        self.version = 0
        self.context: Tensor | None = None

    @torch.inference_mode()
    def chunk(self, chunk: int, inputs: Mapping[str, Tensor], context: Tensor) -> dict[str, Tensor]:
        """Return the outputs of the next chunk."""
        if self.context is None or not torch.equal(context, self.context):
            self.context, self.version = context, self.version + 1
        for name, value in inputs.items():
            self.arenas[name][1] = value
        for visit in self.model.route.visits:
            key = self.model.state_key(visit)
            slot = 0 if key is None else self.slots[key]
            rows = BatchRows(
                self.arenas,
                torch.tensor([1]),
                torch.tensor([[visit.step]]),
                torch.tensor([[slot]]),
                host=[Row(self.stream, chunk, 0, 1)],
                steps=[[visit.step]],
                state_slots=[[slot]],
                conditions=[{CONTEXT: (self.version, self.context)}],
            )
            self.model.stages[visit.stage].run(rows)
            rows.flush(tuple(self.model.values))
        return {name: self.arenas[name][1].clone() for name in self.model.route.outputs}


Outputs = list[dict[str, Tensor]]


def serial_run(model: WanModel) -> list[Outputs]:
    """Return the outputs of each stream's chunks, one after the other."""
    made = []
    for stream, count in enumerate((CHUNKS, CHUNKS, LATE)):
        serial = Serial(model, stream)
        made.append([serial.chunk(c, inputs_of(model, stream, c), prompt_of(model, stream, c)) for c in range(count)])
    return made


class Script:
    """The same streams through an engine."""

    def __init__(self, engine: Engine, model: WanModel) -> None:
        self.engine, self.model = engine, model
        self.futures: list[list[Future[Chunk]]] = [[] for _ in range(STREAMS)]

    def submit(self, index: int, stream: Stream, chunk: int) -> None:
        if chunk in (0, CHUNKS // 2):
            stream.set_condition(CONTEXT, prompt_of(self.model, index, chunk))
        inputs = {name: value.numpy() for name, value in inputs_of(self.model, index, chunk).items()}
        self.futures[index].append(stream.submit(inputs, seed=SEED))

    def run(self) -> list[Outputs]:
        """Return what each stream got; the cancelled one got a part."""
        kept, doomed = self.engine.open(), self.engine.open()
        for chunk in range(CHUNKS):
            self.submit(0, kept, chunk)
            self.submit(1, doomed, chunk)
        self.futures[1][CANCELLED_AT - 1].result(120)
        doomed.close()
        late = self.engine.open()
        for chunk in range(LATE):
            self.submit(2, late, chunk)
        return [self._outputs(futures) for futures in self.futures]

    def _outputs(self, futures: Sequence[Future[Chunk]]) -> Outputs:
        made: Outputs = []
        for future in futures:
            error = future.exception(120)
            if isinstance(error, StreamClosedError):
                break
            made.append({name: torch.from_numpy(value) for name, value in future.result().outputs.items()})
        return made


@dataclass(frozen=True)
class Verdict:
    """What one plan gave."""

    plan: str
    workers: int
    equal: bool
    chunks: int
    """Chunks that were compared."""
    worst: float
    """Largest difference of a latent from the serial one."""


def compare(plan: Plan, got: Sequence[Outputs], want: Sequence[Outputs]) -> Verdict:
    """Compare bit for bit; the cancelled stream up to where it ended, which must be after some chunks."""
    counts = [len(outputs) for outputs in got]
    complete = counts[0] == CHUNKS and counts[2] == LATE and counts[1] >= CANCELLED_AT
    pairs = [(g, w) for gs, ws in zip(got, want, strict=True) for g, w in zip(gs, ws, strict=False)]
    same = all(g.keys() == w.keys() and all(torch.equal(g[n], w[n]) for n in w) for g, w in pairs)
    worst = max((float((g["x"].double() - w["x"].double()).abs().max()) for g, w in pairs), default=float("inf"))
    return Verdict(plan.kind, len(plan.devices), complete and same, len(pairs), worst)


def run_plan(share: WanShare, plan: Plan, transport: Transport = "peer") -> list[Outputs]:
    """Run the script under a plan with a process for each device."""
    model = share(device="cpu", only=())
    workers = Workers(share, transport=transport, threads=torch.get_num_threads())
    engine = Engine(model, plan, streams=STREAMS, workers=workers)
    try:
        engine.warm()
        return Script(engine, model).run()
    finally:
        engine.close()


def verify(
    workers: int,
    kinds: Sequence[str] = KINDS,
    config: WanConfig | None = None,
    *,
    transport: Transport = "peer",
    batch_cap: int = 1,
) -> list[Verdict]:
    """Compare every kind of plan on this many worker processes (`whole`: on one) with the serial run.

    Raises:
        ConfigError: if `workers` is not 1 or more.
        PlanError: if a kind has fewer parts than workers.
    """
    if workers < 1:
        raise ConfigError("workers", got=workers, expected="1 or more")
    share = WanShare(config or small())
    model = share(device="cpu", only=None)
    want = serial_run(model)
    verdicts = []
    for kind in kinds:
        devices = [f"cpu:{i}" for i in range(1 if kind == "whole" else workers)]
        plan = place(model, kind, devices, batch_cap=batch_cap)
        verdicts.append(compare(plan, run_plan(share, plan, transport), want))
    return verdicts
