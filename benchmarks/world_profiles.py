"""Turns the profiles that `world.py` measured, and the decoder times of `wan_block.py`, into those that ship with the package.

    cd benchmarks/results && python ../world_profiles.py world_1x_h200.json world_2x_h200.json world_1x_vae_h200.json \\
        --decoders wan_decode_h200.json --hosts world_fidelity_2x_h200.json

One file for each model and chunk shape, and one more with the full VAE as a stage where its decode time was measured: with
the other stages, or by itself. The VAE of Wan2.1 is the same network at the same latent shape for 1.3B and 14B, so one
measurement serves both. Later results take the place of earlier ones. What a host takes is timed on an engine, by another
script; a model of which it was not timed takes the longest of the others, since it launches the same kernels.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.deploy.profile import passes_of
from stretto.deploy.worlds import RandomWorld, config_of
from stretto.models.wan import DECODE
from stretto.sched.costs import BatchCost
from stretto.sched.profile import Profile, StageProfile

USUAL_WINDOW = 21
OUT = Path(__file__).resolve().parents[1] / "src" / "stretto" / "sched" / "profiles"


def decodes(path: Path) -> dict[tuple[int, int, str], dict[str, Any]]:
    """Return the measured decodes, the fastest way of each: (latent channels, latent frames, mode) -> row."""
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row.get("stage") == DECODE and "p50_ms" in row:
            key = config_of(row["model"]).channels, row["chunk_frames"], row["mode"]
            if key not in found or row["p50_ms"] < found[key]["p50_ms"]:
                found[key] = row
    return found


def hosts(path: Path) -> dict[str, tuple[float, float]]:
    """Return what the host takes to start an idle device: model -> seconds, and more for each stage of the launch."""
    profiles = json.loads(path.read_text())["profiles"]
    return {p["model"]: (p["host_s"], p["host_stage_s"]) for p in profiles if p.get("host_s")}


def with_host(profile: Profile, times: dict[str, tuple[float, float]], source: str) -> Profile:
    whole, stage = times.get(profile.model) or max(times.values())
    note = f"{profile.provenance.note}; host of {source}"
    return replace(profile, host_s=whole, host_stage_s=stage, provenance=replace(profile.provenance, note=note))


def with_decoder(profile: Profile, rows: dict[tuple[int, int, str], dict[str, Any]], source: str) -> Profile | None:
    """Return the profile with the full VAE as its last stage; None where its decode was not measured."""
    facts = dict(profile.facts)
    frames, (height, width) = facts["frames_per_chunk"], facts["pixels"]
    config = config_of(
        profile.model,
        frames_per_chunk=frames,
        window_frames=facts["window_frames"],
        pixel_height=height,
        pixel_width=width,
        decoder="vae",
    )
    mode = "graph" if "graph" in profile.provenance.note else "eager"
    row = rows.get((config.channels, frames, mode))
    if row is None:
        return None
    model = RandomWorld(config)(device="meta", only=())
    stage = StageProfile(
        BatchCost(((1, row["p50_ms"] / 1e3),)), row["weight_bytes"], row["cache_bytes"], "stream", crossing_bytes=0
    )
    note = f"; decode of {source}, measured on {row['model']}, one row only, mode {mode}, its working memory not counted"
    return replace(
        profile,
        passes=passes_of(model.route.visits),
        stages={**profile.stages, DECODE: stage},
        provenance=replace(profile.provenance, note=profile.provenance.note + note),
        chunk_bytes=sum(spec.nbytes for spec in model.values.values()),
        facts=facts | {"decoder": "vae"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--decoders", type=Path, required=True)
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows, times = decodes(args.decoders), hosts(args.hosts)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.results:
        for raw in json.loads(path.read_text())["profiles"]:
            profile = Profile.from_json(json.dumps(raw))
            made = replace(profile.provenance, note=f"{profile.provenance.note}; blocks of {path.name}")
            profile = with_host(replace(profile, provenance=made), times, args.hosts.name)
            facts = profile.facts
            if "precision" in facts:  # `find` tells the others apart by fewer facts
                continue
            name = f"{profile.device.split()[-1].lower()}-{profile.model}-chunk{facts['frames_per_chunk']}"
            if facts["window_frames"] != USUAL_WINDOW:
                name += f"-window{facts['window_frames']}"
            if facts["decoder"] != "none":
                write(args.out / f"{name}-{facts['decoder']}.json", profile)
                continue
            write(args.out / f"{name}.json", profile)
            decoded = with_decoder(profile, rows, args.decoders.name)
            if decoded is not None:
                write(args.out / f"{name}-vae.json", decoded)


def write(path: Path, profile: Profile) -> None:
    path.write_text(profile.to_json() + "\n")
    print(path, f"{profile.work_s * 1e3:.1f} ms of work a chunk")


if __name__ == "__main__":
    main()
