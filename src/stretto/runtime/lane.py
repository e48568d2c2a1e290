"""One queue of a device's work: launches under way in the order in which they were given, on a stream of their own.

A device has one lane, or several that run side by side. What a lane leaves in a chunk's slot is waited for, on the device,
by whichever lane touches that slot next; the host does not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from stretto.runtime.costs import Backlog
from stretto.runtime.flow import Flow
from stretto.runtime.timing import Stamp

_WAITED_S = 50e-6  # waiting for longer than this, the host met the end of a batch


class Lane:
    """What waits for one lane, what it is given, and how far it has come."""

    def __init__(
        self,
        number: int,
        device: torch.device,
        *,
        clock: Callable[[], float],
        stream: torch.cuda.Stream | None = None,
        part: torch.cuda.Stream | None = None,
        ahead: int = 1,
    ) -> None:
        """Make one; without a stream of its own it uses the device's default stream.

        `part`: the stream on which it goes on while another lane is at work, where it has a part of the device for that.
        """
        self.number, self.device = number, device
        on_gpu = device.type == "cuda"
        self.stream = stream if stream is not None or not on_gpu else torch.cuda.default_stream(device)
        """Where the lane's work goes now."""
        self._whole, self._part = self.stream, part
        self._most = 1 + ahead
        """Launches queued on the device before the host waits for the oldest."""
        self._clock = clock
        self.driver = threading.Lock()
        """Held by the one thread that gives work to this lane."""
        self.driving = Current(self)
        """For whoever holds `driver`."""
        self.waiting: list[Flow] = []
        self.running: Sequence[Flow] = ()
        """The batch that is being handed to the device now."""
        self._backlog = Backlog()
        self._outstanding: deque[Stamp] = deque()

    def current(self) -> Current:
        """Return a context in which a thread gives work to this lane."""
        return Current(self)

    def launch_ahead(self, batches: int) -> None:
        """Queue so many launches behind the one that runs."""
        self._most = 1 + batches

    @property
    def parted(self) -> bool:
        return self._part is not None

    def turn(self, beside: bool) -> None:
        """Go on on the lane's part of the device, or on all of it; the lane is current."""
        if self._part is None:
            return
        wanted = self._part if beside else self._whole
        assert wanted is not None
        if self.stream is not None and wanted is not self.stream:
            wanted.wait_stream(self.stream)
            self.stream = wanted
        torch.cuda.set_stream(wanted)  # who gave this lane work before may have turned it on another thread

    def at_work_beyond(self, ends: Collection[Stamp]) -> bool:
        """Tell whether the lane has work, or will have some, once the device has reached these points. Any thread."""
        if self.waiting:
            return True
        try:
            last = self._outstanding[-1]
        except IndexError:  # the lane's own thread takes them off
            return False
        return last not in ends and not last.reached()

    @property
    def full(self) -> bool:
        """Whether as many batches are queued as may be, so far as the host knows."""
        while self._outstanding and self._outstanding[0].reached():
            self._reach(waited=False)
        return len(self._outstanding) >= self._most

    def make_room(self) -> None:
        """Wait until one more batch may be queued."""
        if len(self._outstanding) >= self._most:
            begin_s = self._clock()
            self._outstanding[0].wait()
            self._reach(waited=self._clock() - begin_s > _WAITED_S)

    def _reach(self, *, waited: bool) -> None:
        self._outstanding.popleft()
        if self.device.type == "cuda":
            self._backlog.reach(waited, self._clock())

    def gave(self, end: Stamp, seconds: float) -> None:
        """Note a launch: where it ends, and what it is expected to take."""
        self._outstanding.append(end)
        if self.device.type == "cuda":
            self._backlog.give(seconds, self._clock())

    def free_s(self) -> float:
        """Return when the lane will be through with what it has been given, as far as costs are known."""
        return self._backlog.free_s(self._clock())


class Current:
    """The state in which a thread gives work to a lane: its device and stream, and no gradients. One thread at a time."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._before: torch.cuda.Stream | None = None
        self._mode = torch.inference_mode()
        self._device = torch.cuda.device(lane.device if lane.device.type == "cuda" else -1)

    def __enter__(self) -> None:
        self._mode.__enter__()
        self._device.__enter__()  # type: ignore[no-untyped-call]
        stream = self._lane.stream
        if stream is not None:
            before = torch.cuda.current_stream()
            self._before = before if self._lane.parted or before != stream else None
            if self._before is not None:
                torch.cuda.set_stream(stream)

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)
        self._device.__exit__(*error)
        self._mode.__exit__(*error)


class Touched:
    """Which lane touched each chunk slot last, and where in its work that was."""

    def __init__(self, lanes: int) -> None:
        self._several = lanes > 1
        self._last: dict[int, tuple[Lane, Stamp]] = {}

    def note(self, lane: Lane, slots: Sequence[int], end: Stamp) -> None:
        if self._several:
            self._last.update(dict.fromkeys(slots, (lane, end)))

    def settled(self, lane: Lane, slot: int) -> bool:
        """Tell whether a lane need not wait for what another one leaves in a slot."""
        last = self._last.get(slot)
        return last is None or last[0] is lane or last[1].reached()

    def ends(self, lane: Lane, flows: Sequence[Flow]) -> Sequence[Stamp]:
        """Return the points in the work of others that a lane must wait for before it touches the slots of these chunks."""
        if not self._several:
            return ()
        lasts = [last for f in flows if (last := self._last.get(f.slot)) is not None]
        return list({id(end): end for other, end in lasts if other is not lane}.values())
