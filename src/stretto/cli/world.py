"""`stretto world`: make a film, serve worlds to clients, or check that pipelines change nothing."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg, subcommand

if TYPE_CHECKING:
    from stretto.deploy.world import World
    from stretto.deploy.world_session import WorldChunk, WorldSession


@dataclass(frozen=True)
class WorldFlags:
    """The model and where it runs."""

    model: str = "wan-tiny"
    """`wan-tiny`, wan2.1-1.3b, wan2.1-14b or wan2.2-5b. Weights are random without a checkpoint."""
    checkpoint: Path | None = None
    """A .safetensors file or folder (original or diffusers names), or a Self-Forcing or CausVid .pt."""
    plan: Literal["whole", "by_step", "by_block", "by_stage", "circular", "replicas"] = "whole"
    devices: tuple[str, ...] = ("auto",)
    """One for each part of the plan, such as cuda:0 cuda:1, or cpu:0 cpu:1."""
    workers: Literal["threads", "processes"] = "threads"
    """Several GPUs take a process each."""
    transport: Literal["peer", "dist"] = "peer"
    """Between processes: memory shared on this host, or torch.distributed."""
    mode: Literal["auto", "graph", "eager"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    streams: int = 4
    """Most sessions at a time."""
    read_ahead: int = 0
    """Chunks made before they are read; 0: what the plan keeps in flight."""
    text_encoder: str | None = None
    """A folder with `text_encoder` and `tokenizer`. The tiny model hashes words."""
    size: tuple[int, int] | None = None
    """Height and width in pixels."""
    frames_per_chunk: int | None = None
    """Latent frames made together."""
    window_frames: int | None = None
    sink_frames: int | None = None
    kv_policy: Literal["same_step", "last_step", "clean"] | None = None
    decoder: Literal["none", "light", "vae"] | None = None
    vae: Path | None = None
    """A folder in diffusers' layout: `vae` of a Wan pipeline. The decoder is then that."""
    precision: Literal["dtype", "fp8", "fp8-emulated"] | None = None
    """Of the products of blocks: fp8 is faster and 3 % off in a chunk (docs/world-models.md)."""

    def build(self) -> World:
        from stretto.deploy.world import World, WorldOptions

        changes = {
            "frames_per_chunk": self.frames_per_chunk,
            "window_frames": self.window_frames,
            "sink_frames": self.sink_frames,
            "kv_policy": self.kv_policy,
            "decoder": self.decoder,
            "precision": self.precision,
        }
        if self.size is not None:
            changes |= {"pixel_height": self.size[0], "pixel_width": self.size[1]}
        return World(
            WorldOptions(
                model=self.model,
                checkpoint=self.checkpoint,
                plan=self.plan,
                devices=self.devices,
                workers=self.workers,
                transport=self.transport,
                mode=self.mode,
                dtype=self.dtype,
                streams=self.streams,
                read_ahead=self.read_ahead,
                vae=self.vae,
                text_encoder=self.text_encoder or ("hash" if self.model == "wan-tiny" else None),
                changes={name: value for name, value in changes.items() if value is not None},
            )
        )


Flags = Annotated[WorldFlags, OmitArgPrefixes]


@dataclass(frozen=True)
class Run:
    """Make a film."""

    prompt: str = "a road through a forest"
    embedding: Path | None = None
    """The prompt as a .npy or .safetensors of [tokens, width], instead of text."""
    seconds: float = 4.0
    seed: int = 0
    seeding: Literal["none", "first_chunk"] = "none"
    """`first_chunk`: make the first chunk alone and let all later ones see it clean."""
    out: Path = Path("world.mp4")
    """An .mp4 where PyAV is installed, or a .gif."""
    world: Flags = field(default_factory=WorldFlags)

    def run(self) -> int:
        from stretto.cli.files import writable
        from stretto.core.errors import ConfigError
        from stretto.deploy.world_text import read_embedding
        from stretto.evals.video import write_video

        if not 0.0 < self.seconds < math.inf:
            raise ConfigError("seconds", got=self.seconds, expected="a finite time above 0")
        writable("out", self.out)
        prompt = self.prompt if self.embedding is None else read_embedding(self.embedding)
        world = self.world.build()
        try:
            if world.model.decoder is None:
                raise ConfigError("decoder", got="none", expected="light or vae, for a film")
            world.warm()
            session = world.open(prompt, seed=self.seed, seeding=self.seeding)
            hz = world.model.config.frame_hz
            wanted = max(1, round(self.seconds * hz))
            chunks = _make(world, session, wanted)
        finally:
            world.close()
        path = self._playable(self.out)
        frames = [frame for chunk in chunks if chunk.frames is not None for frame in chunk.frames]
        write_video(path, frames[:wanted], hz)
        print(path)
        return 0

    @staticmethod
    def _playable(path: Path) -> Path:
        from importlib.util import find_spec

        return path.with_suffix(".gif") if path.suffix == ".mp4" and find_spec("av") is None else path


def _make(world: World, session: WorldSession, frames: int) -> list[WorldChunk]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    chunks: list[WorldChunk] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("frames", total=frames, rate="")
        began_s = time.monotonic()
        while not chunks or chunks[-1].pixel_frames[1] < frames:
            chunks.append(session.read())
            done = chunks[-1].pixel_frames[1]
            progress.update(task, completed=min(done, frames), rate=f"{done / (time.monotonic() - began_s):.1f} frames/s")
    return chunks


@dataclass(frozen=True)
class Serve:
    """Serve worlds on a WebSocket at /world."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the port to the network (set --api-key then)."""
    port: int = 8000
    api_key: str | None = None
    """Clients must send `Authorization: Api-Key <key>`."""
    world: Flags = field(default_factory=WorldFlags)

    def run(self) -> int:
        from stretto.serve.options import ServerOptions
        from stretto.serve.run import run_server
        from stretto.serve.world import world_route

        world = self.world.build()
        options = ServerOptions(host=self.host, port=self.port, api_key=self.api_key)
        run_server(world, options, routes=[world_route(world)])
        return 0


@dataclass(frozen=True)
class Verify:
    """Compare every kind of plan, in processes on this CPU, with one chunk after another, bit for bit."""

    workers: int = 2
    """Processes, one for each part of a plan."""
    transport: Literal["peer", "dist"] = "peer"
    json: bool = False
    """Print one JSON object on standard output."""

    def run(self) -> int:
        from stretto.deploy.world_verify import verify

        verdicts = verify(self.workers, transport=self.transport)
        rows = [asdict(v) for v in verdicts]
        if self.json:
            print(json.dumps({"rows": rows}, indent=1))
        else:
            for v in verdicts:
                said = "equal" if v.equal else f"DIFFERENT by up to {v.worst:g}"
                print(f"{v.plan:<10}{v.workers} workers  {v.chunks} chunks  {said}")
        unequal = [v.plan for v in verdicts if not v.equal]
        if unequal:
            print(f"not equal: {', '.join(unequal)}", file=sys.stderr)
        return 1 if unequal else 0


@dataclass(frozen=True)
class Args:
    command: Annotated[
        Annotated[Run, subcommand("run")] | Annotated[Serve, subcommand("serve")] | Annotated[Verify, subcommand("verify")],
        arg(name=""),
    ]


def run(args: Args) -> int:
    return args.command.run()
