"""Which ways of sharing device memory work between two processes of this host. Tried in processes that may die of it.

Whether a driver, a container or a virtual machine lets one process open the memory and the events of another cannot be
asked, only tried, and where it cannot, the process that tries may not live to say so.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing  # teaches pipes to carry tensors and events by handle

from stretto.parallel.order import Mark

Way = Literal["events", "memory"]
"""`events`: memory and events opened by handle; `memory`: memory alone, and the host waits in the place of events."""
WAYS: tuple[Way, ...] = ("events", "memory")
_ROUNDS, _PAGE = 6, 1 << 20
_TROUBLE = (EOFError, OSError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Tried:
    """How one way went between two devices."""

    way: Way
    source: str
    target: str
    works: bool
    said: str
    """The last step that was reached, or the error, or the signal that ended a process."""
    seconds: float


def try_ways(source: str, target: str, ways: Sequence[Way] = WAYS, *, timeout_s: float = 60.0) -> list[Tried]:
    """Try each way from one device to another, in a fresh pair of processes each. Never raises for what fails there."""
    return [_try(way, source, target, timeout_s) for way in ways]


@functools.cache
def shared_by(source: str, target: str) -> Tried:
    """Return the best way of sharing memory from one device to another, as it was found when it was first asked for.

    Where none works, the last that was tried says why. Devices that are not CUDA share without trying.
    """
    if not (source.startswith("cuda") and target.startswith("cuda")):
        return Tried("events", source, target, True, "", 0.0)
    for way in WAYS:
        tried = _try(way, source, target, 60.0)
        if tried.works:
            break
    return tried


def _try(way: Way, source: str, target: str, timeout_s: float) -> Tried:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    began_s, steps = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        reports: dict[str, Connection] = {}
        processes = {}
        for role, device, pipe in (("consumer", target, theirs), ("producer", source, ours)):
            reports[role], end = context.Pipe(duplex=False)
            log = str(Path(folder) / role)
            processes[role] = context.Process(target=_main, args=(role, way, device, pipe, end, log), daemon=True)
            processes[role].start()
            end.close()
        ours.close()
        theirs.close()
        for role, process in processes.items():
            process.join(max(0.1, timeout_s - (time.monotonic() - began_s)))
            if process.is_alive():
                process.kill()
                process.join()
            steps[role] = _last(reports[role])
        ends = {role: p.exitcode for role, p in processes.items()}
        traces = {role: Path(folder, role).read_text() if Path(folder, role).exists() else "" for role in processes}
    works = all(code == 0 for code in ends.values())
    return Tried(way, source, target, works, "" if works else _words(steps, ends, traces), round(time.monotonic() - began_s, 2))


def _last(pipe: Connection) -> str:
    said = "nothing"
    try:
        while pipe.poll():
            said = pipe.recv()
    except EOFError:
        pass
    return said


def _words(steps: Mapping[str, str], ends: Mapping[str, int | None], traces: Mapping[str, str]) -> str:
    words = []
    for role, code in ends.items():
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit {code}"
        words.append(f"{role}: {how} after '{steps[role]}'" + (f"\n{traces[role]}" if traces[role] else ""))
    return "; ".join(words)


def _main(role: str, way: Way, device: str, pipe: Connection, report: Connection, log: str) -> None:
    with open(log, "w") as file:
        faulthandler.enable(file)
        try:
            place = torch.device(device)
            if place.type == "cuda":
                torch.cuda.set_device(place)
            end = _Consumer(way, place, pipe, report) if role == "consumer" else _Producer(way, place, pipe, report)
            end.run()
        except _TROUBLE as e:
            report.send(f"{type(e).__name__}: {e}")
            raise SystemExit(1) from e


class _End:
    def __init__(self, way: Way, device: torch.device, pipe: Connection, report: Connection) -> None:
        self.way, self.device, self.pipe, self.report = way, device, pipe, report

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _events(self, count: int) -> list[Mark]:
        return [Mark.new(self.device, shared=True) if self.way == "events" else Mark() for _ in range(count)]


class _Consumer(_End):
    def run(self) -> None:
        pages = torch.zeros(2, _PAGE, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            pages.share_memory_()  # type: ignore[no-untyped-call]
        self.pipe.send(pages)
        self.report.send("memory offered")
        read, written = self._events(2), [Mark(), Mark()]
        if self.way != "memory":
            self.pipe.send([mark.handle() for mark in read])
            self.report.send("events offered")
            written = [Mark(event) for event in self.pipe.recv()]
            self.report.send("events opened")
        for i in range(_ROUNDS):
            assert self.pipe.recv() == i
            written[i % 2].wait()
            self.report.send(f"waited for page {i}")
            got = pages[i % 2].clone()
            read[i % 2].record()
            self._wait()
            right = bool((got == 7 * i + 1).all())
            self.report.send(f"page {i} is {'right' if right else 'wrong'}")
            assert right, f"page {i} holds {got[:4].tolist()}"
            self.pipe.send(i)
        self.pipe.recv()


class _Producer(_End):
    def run(self) -> None:
        pages: Any = self.pipe.recv()
        self.report.send("memory opened")
        written, read = self._events(2), [Mark(), Mark()]
        if self.way != "memory":
            read = [Mark(event) for event in self.pipe.recv()]
            self.report.send("events opened")
            self.pipe.send([mark.handle() for mark in written])
            self.report.send("events offered")
        for i in range(_ROUNDS):
            read[i % 2].wait()
            self.report.send(f"waited for page {i} to be free")
            pages[i % 2].copy_(torch.full((_PAGE,), 7 * i + 1, dtype=torch.uint8, device=self.device), non_blocking=True)
            self.report.send(f"page {i} written")
            written[i % 2].record()
            if self.way == "memory":
                self._wait()
            self.report.send(f"page {i} marked")
            self.pipe.send(i)
            assert self.pipe.recv() == i
        self.pipe.send(None)
