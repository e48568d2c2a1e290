"""Lanes of a simulated device: each runs one batch at a time, and slows the others by what was measured.

While several run, a batch gets on at one over its slowdown: 1 plus what each neighbour adds. Where nothing was measured two
lanes share the device evenly, which gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.sched.profile import Profile

if TYPE_CHECKING:
    from stretto.sched.sim_state import Flow, SimDevice

EVENLY = 2.0
"""Slowdown of a task by another that nothing is known of."""


@dataclass(eq=False, slots=True)
class Running:
    """A batch in a lane."""

    batch: list[Flow]
    kind: int
    left_s: float
    """Work still to do, in seconds with the device for itself."""
    since_s: float
    slowdown: float = 1.0
    ends_s: float = 0.0


@dataclass(eq=False, slots=True)
class Chip:
    """What the lanes of one device share."""

    name: str
    free: int
    """Chunk slots that nobody holds."""
    dead: bool = False
    arrived: int = 0
    busy_s: float = 0.0
    """Time in which at least one lane was busy."""
    lanes: list[SimDevice] = field(default_factory=list)
    slowdowns: dict[tuple[SimDevice, int, SimDevice, int], float] = field(default_factory=dict)
    """(lane, kind, another lane, its kind) -> how many times longer the first takes."""
    _since_s: float = 0.0

    @property
    def shared(self) -> bool:
        return len(self.lanes) > 1

    def start(self, now: float, lane: SimDevice, batch: list[Flow], kind: int, seconds: float, at: Callable[..., None]) -> None:
        """Begin a batch; `at(time, lane, batch)` is called with every new time at which a batch of the device ends."""
        self._advance(now)
        lane.running = Running(batch, kind, seconds, now)
        self._repace(now, at)

    def ends(self, now: float, lane: SimDevice, batch: list[Flow], at: Callable[..., None]) -> bool:
        """End a batch if this is its time; False if its end has moved since it was set down."""
        running = lane.running
        if running is None or running.batch is not batch or running.ends_s != now:
            return False
        self._advance(now)
        lane.running = None
        self._repace(now, at)
        return True

    def _advance(self, now: float) -> None:
        running = [lane.running for lane in self.lanes if lane.running is not None]
        for r in running:
            r.left_s -= (now - r.since_s) / r.slowdown
            r.since_s = now
        if running:
            self.busy_s += now - self._since_s
        self._since_s = now

    def _repace(self, now: float, at: Callable[..., None]) -> None:
        running = [(lane, lane.running) for lane in self.lanes if lane.running is not None]
        for lane, r in running:
            r.slowdown = 1.0 + sum(
                self.slowdowns.get((lane, r.kind, other, o.kind), EVENLY) - 1.0 for other, o in running if o is not r
            )
            ends_s = now + max(0.0, r.left_s) * r.slowdown
            if ends_s != r.ends_s:
                r.ends_s = ends_s
                at(ends_s, lane, r.batch)


def slowdown(profile: Profile, task: Sequence[str], other: Sequence[str]) -> float:
    """Return how many times longer a task of these stages takes while another lane runs those, weighed by their times."""

    def weighed(stages: Sequence[str], value: Callable[[str], float]) -> float:
        total = sum(profile.stage(s).cost(1) for s in stages)
        if total <= 0.0:
            return max(value(s) for s in stages)
        return sum(value(s) * profile.stage(s).cost(1) for s in stages) / total

    return weighed(task, lambda s: weighed(other, lambda o: profile.beside.get(s, {}).get(o, EVENLY)))
