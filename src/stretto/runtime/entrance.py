"""Which chunks of a stream may start: so many at a time, and in their slots where the plan gives them some."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from stretto.runtime.flow import Flow
from stretto.runtime.slots import Slots
from stretto.runtime.stream import Stream


class Entrance:
    """Lets chunks in. `lock` guards what it knows of streams; `offer` hands those that enter to their device, without it."""

    def __init__(
        self,
        lock: AbstractContextManager[object],
        most: Callable[[Stream], float],
        offer: Callable[[Flow], None],
        clock: Callable[[], float],
    ) -> None:
        """Make one; `most` says how many chunks of a stream may be under way."""
        self._lock, self._most, self._offer, self._clock = lock, most, offer, clock

    def come(self, stream: Stream, flow: Flow) -> list[Flow]:
        """Take a new chunk; returns those of the stream that enter now. Under the lock."""
        if stream.slots is None and not stream.held and stream.in_flight < self._most(stream):
            stream.in_flight += 1
            return [flow]
        stream.held.append(flow)
        return self.enter(stream)

    def left(self, stream: Stream, flow: Flow) -> list[Flow]:
        """Take a chunk off the stream; returns those that enter in its place. Under the lock."""
        if flow in stream.held:
            stream.held.remove(flow)
            return []
        stream.in_flight -= 1
        if stream.slots is not None:
            stream.slots.done(flow.serial, self._clock())
        return self.enter(stream)

    def enter(self, stream: Stream) -> list[Flow]:
        """Take in the chunks of a stream that may start now; see to it that the next one does in its slot. Under the lock."""
        entered: list[Flow] = []
        # Where chunks hand state on, more of them in flight than the plan says would only fill queues.
        while stream.held and stream.in_flight < self._most(stream):
            if stream.slots is not None and not self._in_slot(stream, stream.slots):
                break
            stream.in_flight += 1
            entered.append(stream.held.popleft())
        return entered

    def _in_slot(self, stream: Stream, slots: Slots) -> bool:
        """Tell whether the next chunk is in its slot now; else see to it that somebody looks again when it comes."""
        now_s = self._clock()
        wait_s = slots.wait_s(now_s, stream.in_flight)
        if wait_s <= 0.0:
            slots.start(stream.held[0].serial, now_s, stream.in_flight)
            return True
        if wait_s < math.inf and not slots.timed:
            slots.timed = True
            timer = threading.Timer(wait_s, self._slot_came, (stream, slots))
            timer.daemon = True
            timer.start()
        return False

    def _slot_came(self, stream: Stream, slots: Slots) -> None:
        with self._lock:
            slots.timed = False
            following = self.enter(stream)
        for flow in following:
            self._offer(flow)
