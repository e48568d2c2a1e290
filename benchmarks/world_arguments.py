"""The options that the benchmarks of world models share, and the devices that they come to."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from stretto.core.plan import Mode
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_bench_options import resolve
from stretto.deploy.world_rig import hand_over
from stretto.models.wan_config import WanConfig
from stretto.sched.profile import Profile


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=0, help="use so many; all by default")
    parser.add_argument("--workers", default="threads", choices=["threads", "processes"])
    parser.add_argument("--mode", default="auto", choices=["auto", "graph", "eager"])
    parser.add_argument("--sustained", type=float, default=1.0, help="seconds for which denoise steps are timed in a row")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU; `--gpus` devices")
    parser.add_argument("--table", type=Path, help="a table of kernels, if it is there (STRETTO_KERNEL_TABLE)")
    parser.add_argument("--out", type=Path)


def profiled(config: WanConfig, case: WorldCase) -> WorldBench:
    """Profile a model on all devices at the same time; one after the other where that fails."""
    try:
        return WorldBench(config, case)
    except Exception as error:  # a run on borrowed devices is worth more than a profile of devices side by side
        print(f"# devices were not profiled at the same time: {type(error).__name__}: {error}", flush=True)
        return WorldBench(config, replace(case, at_once=False))


def with_hand_overs(bench: WorldBench, rows: int = 1) -> Profile:
    """Return the bench's profile with what hand-overs cost on this host added to its launches; as it is where that fails.

    `rows`: time those of a batch too.
    """
    before = bench.case
    try:
        found = hand_over(bench, rows)
    except Exception as error:  # the figures that follow are worth more than this one
        print(f"# hand-overs were not timed: {type(error).__name__}: {error}", flush=True)
        return bench.profile
    finally:
        bench.case = before
    profile, (host, row) = bench.profile, (found.host_s * 1e3, found.row_s * 1e3)
    more = f", {row:.3f} more for each further chunk" if rows > 1 else ""
    print(f"# a hand-over takes {host:.3f} ms{more}, a launch {profile.host_s * 1e3:.3f} ms of the host", flush=True)
    return replace(profile, host_s=round(profile.host_s + found.host_s, 6), host_row_s=round(found.row_s, 6))


def place_of(args: argparse.Namespace, on_cpu: int) -> tuple[tuple[str, ...], Mode, str]:
    """Return devices, mode and dtype: the GPUs at hand, or `on_cpu` CPU devices, unless `--gpus` says how many."""
    if args.table is not None and args.table.is_file():
        os.environ["STRETTO_KERNEL_TABLE"] = str(args.table)
    cuda = torch.cuda.is_available() and not args.small
    count = args.gpus or (torch.cuda.device_count() if cuda else on_cpu)
    return resolve([f"cuda:{i}" for i in range(count)] if cuda else ["cpu"] * count, args.mode, "auto")
