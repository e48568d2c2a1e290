"""What happens to chunks that leave a device: values go on to the next one, outputs to the host, times to whoever asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.parallel.link import Link, Values
from stretto.parallel.order import Mark
from stretto.runtime.flow import Flow
from stretto.runtime.timing import Stamp

_GRACE_S = 3e-4
"""Who has launched a chunk is about to wait for it, more often than not, and two who wait get in each other's way."""


@dataclass(frozen=True)
class Passage:
    """What a device says of a chunk that has left it."""

    spans: tuple[tuple[str, float, int, str], ...]
    """Stages that ran together, their device time in ms, the batch they ran in, and the device."""
    started_s: float
    """When the chunk was first launched anywhere."""
    run_ms: float = 0.0
    ran_eagerly: bool = False
    outputs: Mapping[str, np.ndarray] | None = None
    """Where the route is done: every output, owned by the receiver."""


Passed = Callable[[Flow, Passage], None]


class Finisher:
    """Waits for the device, so that the executor need not, and hands over what has left it, in order.

    It has a thread. Waking that, and then the thread that waits for a chunk, takes longer than all else that is left to
    do, so a thread that is about to wait anyway may do the waiting here (`help`).
    """

    def __init__(
        self,
        passed: Passed,
        clock: Callable[[], float] = time.monotonic,
        *,
        together: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Make one. `together`: entered while chunks of one batch are handed over, so that what follows can share one too."""
        self._passed, self._clock, self._together = passed, clock, together
        self._items: deque[tuple[Sequence[Flow], Mapping[str, np.ndarray] | None, Stamp]] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._turn = threading.Condition(threading.Lock())
        self._busy = False
        """Whether a thread waits for the device, or hands over what it waited for. Guarded by `_turn`."""
        self._helpers = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="finisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, flows: Sequence[Flow], outputs: Mapping[str, np.ndarray] | None, stamp: Stamp) -> None:
        """Take chunks that have left a device; outputs are on the host once it has reached the stamp."""
        with self._wake:
            self._items.append((flows, outputs, stamp))
            self._call_thread()

    def _call_thread(self) -> None:
        if self._items and not self._helpers:
            self._wake.notify()

    def _helped(self) -> bool:
        return self._helpers > 0

    def help(self, done: Callable[[], bool]) -> None:
        """Finish what has left devices, on the calling thread, until `done` or nothing is left to finish. Waits for devices."""
        with self._wake:
            self._helpers += 1
        try:
            while self._finish_next(done):
                pass
        finally:
            with self._wake:
                self._helpers -= 1
                self._call_thread()

    def close(self) -> None:
        """Finish what is queued."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._helpers or not self._items:
                    if self._closing and not self._items:
                        return
                    self._wake.wait()
                if not self._items[0][2].reached():
                    self._wake.wait(_GRACE_S)
                    if self._helped():
                        continue
            self._finish_next(lambda: False)

    def _finish_next(self, done: Callable[[], bool]) -> bool:
        """Finish the oldest batch; False if there is none, or if `done` by the time that it is this thread's turn."""
        with self._turn:
            # Not a lock: another thread may finish what this one waits for and go on to the next, for as long as that takes.
            while self._busy and not done():
                self._turn.wait()
            if done():
                return False
            try:
                flows, outputs, stamp = self._items.popleft()
            except IndexError:
                return False
            self._busy = True
        try:
            stamp.wait()
            with self._together() if len(flows) > 1 else nullcontext():
                for i, flow in enumerate(flows):
                    mine = None if outputs is None else {name: rows[i, ...].copy() for name, rows in outputs.items()}
                    self._passed(flow, self._passage(flow, mine, stamp))
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
        return True

    def _passage(self, flow: Flow, outputs: Mapping[str, np.ndarray] | None, stamp: Stamp) -> Passage:
        here = flow.placements[flow.at - len(flow.spans) : flow.at]
        spans = tuple(
            [
                (name, end.ms_since(begin), batch, place.device)
                for (name, begin, end, batch), place in zip(flow.spans, here, strict=True)
            ]
        )
        alone = len(flow.placements) == 1 or len({p.device for p in flow.placements}) == 1
        run_ms = stamp.ms_since(flow.spans[0][1]) if alone else (self._clock() - flow.started_s) * 1e3
        return Passage(spans, flow.started_s, run_ms, flow.ran_eagerly, outputs)


class Courier:
    """Takes chunks from an executor to where they go next."""

    def __init__(
        self,
        outputs: Mapping[str, Sequence[str]],
        links: Mapping[str, Link],
        finisher: Finisher,
        *,
        names: Callable[[Flow], object] = lambda flow: flow,
        every_device: bool = False,
    ) -> None:
        """Make one.

        Args:
            outputs: route -> its outputs. `links`: device -> the link to it.
            names: what goes over a link as the header of a chunk.
            every_device: tell of every chunk that leaves, not only of those whose route is done.
        """
        self._outputs, self._links, self._finisher = outputs, links, finisher
        self._names, self._every_device = names, every_device

    def depart(self, flows: Sequence[Flow], values: Mapping[str, Tensor]) -> None:
        """Send on chunks that stand at the same place of one route. Called on the executor's thread; does not block."""
        device, first = next(iter(values.values())).device, flows[0]
        if first.at == len(first.placements):
            outputs = {name: _to_host(values[name]) for name in self._outputs[first.route]}
            # Behind the copies: whoever has waited for it reads what they brought.
            self._finisher.put(flows, {name: rows.numpy() for name, rows in outputs.items()}, Stamp(device))
            return
        stamp = Stamp(device)
        link = self._links[first.placement.device]
        for i, flow in enumerate(flows):
            link.send(self._names(flow), {name: rows[i] for name, rows in values.items()})
        if self._every_device:
            self._finisher.put(flows, None, stamp)


class Arrivals:
    """Takes chunks off links, and hands over those that left a device in one batch together.

    One by one, an idle device would start with the first alone.
    """

    def __init__(self, offer: Callable[[Sequence[Flow]], None]) -> None:
        self._offer = offer
        self._come: dict[str, list[Flow]] = {}

    def receive(self, flow: Flow, values: Values, there: Mark) -> None:
        """Take a chunk with the values that came with it. Chunks of one device come in order, from one thread."""
        flow.values, flow.there = values, there
        source = flow.placements[flow.at - 1].device
        self._come.setdefault(source, []).append(flow)
        if not flow.behind:
            self._offer(self._come.pop(source))


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return host.copy_(rows, non_blocking=True)
