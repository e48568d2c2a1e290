"""How a batch is given to a device: values into slots, the program, and away with what leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from stretto.parallel.order import hold_for_current_stream
from stretto.runtime.arena import Arenas
from stretto.runtime.desk import Batch, Desk
from stretto.runtime.flow import Flow
from stretto.runtime.lane import Lane
from stretto.runtime.repertoire import Repertoire
from stretto.runtime.staging import Staging
from stretto.runtime.timing import Stamp

Depart = Callable[[Sequence[Flow], Mapping[str, Tensor]], None]
"""Takes chunks that leave from one place of one route, and their values as [B, ...] on the device; on the launching thread."""


_LINGERS_S = 3e-3
"""A robot that has its chunk asks again: who was at work until just now is taken to be back before a task is done."""


class Launcher:
    """Launches batches on the current lane; does not wait for the device.

    Args:
        turn: guards the desk.
    """

    def __init__(
        self,
        arenas: Arenas,
        staging: Staging,
        can: Repertoire,
        desk: Desk,
        lanes: Sequence[Lane],
        turn: AbstractContextManager[object],
        depart: Depart,
        clock: Callable[[], float],
    ) -> None:
        self._arenas, self._staging, self._can, self._desk = arenas, staging, can, desk
        self._lanes, self._turn, self._depart, self._clock = lanes, turn, depart, clock
        self._company_until_s = -math.inf
        self.launches = 0

    def launch(self, lane: Lane, batch: Batch) -> None:
        """Run a batch that the desk has chosen, and move its chunks on."""
        flows, device = batch.flows, self._arenas.device
        ends = self._desk.touched.ends(lane, flows)
        beside = lane.parted and self._has_company(lane, ends)
        lane.turn(beside)
        stream = lane.stream
        for end in ends:
            end.hold()
        self._bring(flows)
        lengths = flows[0].lengths
        if len(flows) > 1:
            lengths = {axis: max(f.lengths[axis] for f in flows) for axis in lengths}
        begin = Stamp(device, stream)
        ran = batch.entry.program.launch(batch.members, lengths, beside=beside)
        end = Stamp(device, stream)
        lane.gave(end, batch.seconds)
        name = "+".join(dict.fromkeys(batch.entry.stages))
        for flow in flows:
            flow.spans.append((name, begin, end, len(flows)))
            flow.ran_eagerly |= ran.mode == "eager"
            if flow.packed is not None:
                self._staging.give(flow.packed, begin)
                flow.packed = None
        with self._turn:
            self.launches += 1
            leaving = self._desk.launched(lane, batch, end)
        for group in leaving:
            self._leave(lane, group)
        lane.running = ()

    def _has_company(self, lane: Lane, ends: Sequence[Stamp]) -> bool:
        """Tell whether other lanes are, or were just now, at work on something that this one does not wait for."""
        now_s = self._clock()
        if any(other.at_work_beyond(ends) for other in self._lanes if other is not lane):
            self._company_until_s = now_s + _LINGERS_S
        return now_s < self._company_until_s

    def _bring(self, flows: Sequence[Flow]) -> None:
        """Put the values of chunks that are new here into their slots."""
        for flow in flows:
            if flow.packed is not None:
                self._arenas.load(flow.slot, flow.packed)
            if flow.values is None:
                continue
            if flow.there is not None:
                flow.there.wait()
            for name, value in flow.values.items():
                self._arenas[name][flow.slot].copy_(value, non_blocking=True)
            if flow.there is not None:
                hold_for_current_stream(flow.values.values())
            flow.values = flow.there = None

    def _leave(self, lane: Lane, flows: Sequence[Flow]) -> None:
        """Let chunks go that leave from one place of one route."""
        cut = flows[0].placements[flows[0].at - 1].segment.stop
        slots = [f.slot for f in flows]
        rows = self._arenas.rows(self._can.route(flows[0].route).crossing(cut), slots, view=self._to_host(flows))
        if self._to_host(flows):
            # The copy to the host is ahead of whatever comes into these slots next.
            self._depart(flows, rows)
        with self._turn:
            self._desk.touched.note(lane, slots, Stamp(self._arenas.device, lane.stream))
            self._desk.left(flows)
        if not self._to_host(flows):
            self._depart(flows, rows)  # the next device owns the chunks from here on

    def _to_host(self, flows: Sequence[Flow]) -> bool:
        return self._arenas.device.type == "cuda" and flows[0].at == len(flows[0].placements)
