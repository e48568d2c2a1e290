"""The whole table that was asked of pi0.5 and Wan on an H200, with stock torch and other engines beside ours, by one command.

    python benchmarks/roofline_table.py --out benchmarks/results/roofline_table_h200.json --peers FOLDER
    python benchmarks/roofline_table.py --small --out /tmp/table.json        # tiny models on the CPU, to try the script

Every part is a script of this folder in a process of its own, on the GPU that is free (`--gpus 0 1` for two of them). Its rows
are taken over as they come and the table is written after each, so a call that is cut leaves what it had. `--peers` is a folder
with a folder of packages for each of the engines in `peers.py`; what is not there is reported as not run. At the end the
table is printed; `roofline_rows.py` prints it from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from roofline_rows import WAN, markdown, table_of

from stretto.deploy.provenance import provenance

HERE = Path(__file__).parent
AHEAD_S = 75.0
STARTS_S = 25.0
"""What a part may take beyond its budget: a process that starts, a model, a row that was begun."""


@dataclass(frozen=True)
class Part:
    """One script and how it is asked."""

    name: str
    script: str
    flags: tuple[str, ...]
    seconds: float
    """Its budget."""
    budget: Callable[[float], tuple[str, ...]] = lambda seconds: ("--budget", f"{seconds:.0f}")
    small: tuple[str, ...] = ("--small",)
    ahead: tuple[tuple[str, ...], ...] = ()
    """Scripts that compile what the part needs; those of all parts run side by side before the first."""


INTERVALS = ("wan2.2-5b/1/batched/fp8", "wan2.2-5b/1/batched")
PEER = ("--seconds", "1.5", "--cases", "1:200", "4:200", "32:200", "8:200")
PARTS = (
    Part("pi05", "pi05_table.py", ("--parts", "rows", "wall", "overlap", "profiles"), 190.0),
    Part(
        "wan", "wan_block.py", ("--stock", "--frames", "1", "--rows", "1", "--samples", "3", "--sustained", "0.8"), 50.0,
        lambda seconds: ("--budget-seconds", f"{seconds:.0f}"),
        ahead=tuple(("wan_stock.py", model, "1") for model, _, _ in WAN.values()),
    ),
    Part("lerobot", "peers.py", ("lerobot", *PEER), 55.0),
    Part("stock", "pi05_stock.py", (), 60.0, ahead=(("pi05_stock.py", "--ahead", "--compile-only"),)),
    Part(
        "world", "world.py", ("--gpus", "1", "--seconds", "1.0", "--sustained", "0.4", "--cases", *INTERVALS),
        45.0, lambda seconds: ("--minutes", f"{seconds / 60:.2f}"),
    ),
    Part("phyai", "peers.py", ("phyai", *PEER, "1:16"), 60.0),
)  # fmt: skip
PEERS = ("lerobot", "phyai")


class Table:
    """What has come of each part, on disk after every row. Any thread."""

    def __init__(self, out: Path | None, head: dict[str, Any]) -> None:
        self._out, self._lock = out, threading.Lock()
        self.result: dict[str, Any] = {**head, "table": [], "commands": {}, "seconds": {}, "errors": {}, "parts": {}}

    def note(self, field: str, part: str, value: Any) -> None:
        with self._lock:
            self.result[field][part] = value
            self._write()

    def take(self, part: str, file: Path) -> None:
        """Take over what a part has written so far."""
        try:
            found = json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # nothing yet, or it is writing
            return
        self.note("parts", part, found)

    def _write(self) -> None:
        self.result["table"] = table_of(self.result["parts"])
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self.result, indent=1) + "\n")


class Run:
    """Parts one after another on each GPU, within one budget of time."""

    def __init__(self, args: argparse.Namespace, table: Table, work: Path) -> None:
        self._args, self._table, self._work = args, table, work
        self._begun, self._lock = time.monotonic(), threading.Lock()
        self._compiled = threading.Event()
        self._left = [part for name in args.parts for part in PARTS if part.name == name]

    def ahead(self, gpu: str | None) -> None:
        """Compile what parts need, side by side on one GPU: what that leaves on disk is found by them."""
        if self._args.small:
            return
        with self._lock:
            commands = [[sys.executable, str(HERE / script), *flags] for part in self._left for script, *flags in part.ahead]
        env = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
        made = [subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, env=env) for command in commands]
        end_s = time.monotonic() + AHEAD_S
        for process in made:
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._table.note("seconds", "compiling ahead", round(time.monotonic() - self._begun, 1))

    def on(self, gpu: str | None, *, ahead: bool) -> None:
        """Run parts on one GPU until none is left; `ahead`: compile there first, for which parts elsewhere wait."""
        if ahead:
            try:
                self.ahead(gpu)
            finally:
                self._compiled.set()
        while True:
            with self._lock:
                if not self._left:
                    return
                part = self._left.pop(0)
            if part.ahead:
                self._compiled.wait()
            seconds = min(part.seconds, self._args.budget - (time.monotonic() - self._begun) - STARTS_S)
            if seconds < min(part.seconds, STARTS_S):
                self._table.note("errors", part.name, "not run: no time left")
                continue
            begin = time.monotonic()
            self._one(part, gpu, seconds)
            self._table.note("seconds", part.name, round(time.monotonic() - begin, 1))

    def _one(self, part: Part, gpu: str | None, seconds: float) -> None:
        out = self._work / f"{part.name}.json"
        flags = [*part.flags, *part.budget(seconds), *(part.small if self._args.small else ())]
        self._table.note("commands", part.name, " ".join(["python", f"benchmarks/{part.script}", *flags]))
        command = [sys.executable, str(HERE / part.script), *flags, "--out", str(out)]
        with (self._work / f"{part.name}.log").open("w+") as log:
            code = self._heard(part, command, self._surroundings(part, gpu), log, seconds + STARTS_S)
            self._table.take(part.name, out)
            if code:
                log.seek(0)
                said = log.read()[-600:]
                self._table.note("errors", part.name, said if code > 0 else f"stopped after {seconds + STARTS_S:.0f} s")
                print(f"{part.name} ended with {code}: {said}", flush=True)

    def _heard(self, part: Part, command: Sequence[str], env: dict[str, str], log: TextIO, limit_s: float) -> int:
        """Run a command and take over what it writes after each line that it prints; what lasts too long is killed."""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True
        ) as process:
            limit = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
            limit.start()
            try:
                for line in process.stdout or ():
                    if "{" in line:  # a row
                        print(f"{time.monotonic() - self._begun:6.1f} s  {part.name}  {line.strip()[:300]}", flush=True)
                    self._table.take(part.name, self._work / f"{part.name}.json")
                return process.wait()
            finally:
                limit.cancel()

    def _surroundings(self, part: Part, gpu: str | None) -> dict[str, str]:
        more = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        packages = self._args.peers / part.name if self._args.peers is not None and part.name in PEERS else None
        if packages is not None and packages.is_dir():
            more["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONUNBUFFERED": "1", **more}


def gpus_of(args: argparse.Namespace) -> Sequence[str | None]:
    return args.gpus if args.gpus and torch.cuda.is_available() else (None,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", default=names, choices=names, help="in this order")
    parser.add_argument("--budget", type=float, default=360.0, help="seconds of all parts together on one GPU")
    parser.add_argument("--gpus", nargs="+", help="as CUDA_VISIBLE_DEVICES has them, for parts side by side; one by default")
    parser.add_argument("--peers", type=Path, help="a folder with packages of other engines, a folder for each")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table(args.out, {**provenance(device), "small": args.small})
    with tempfile.TemporaryDirectory() as work:
        run = Run(args, table, Path(work))
        gpus = gpus_of(args)
        threads = [threading.Thread(target=run.on, args=(gpu,), kwargs={"ahead": gpu == gpus[-1]}) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(markdown(table.result["table"]))


if __name__ == "__main__":
    main()
