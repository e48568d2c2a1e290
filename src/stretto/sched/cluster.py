"""The pool as the planner sees it: what is on every device, what a rank would add, and commits that are all or nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.core.errors import ConfigError, PlanError
from stretto.core.plan import Device
from stretto.sched.columns import Columns, Rank
from stretto.sched.profile import Profile

SHARED_CAP = 0.95
"""Most load of a device that several streams share; the rest absorbs noise."""
EXCLUSIVE_CAP = 0.995
"""Most load of a device with one stream only."""


def stretch(others: float) -> float:
    """Return how much longer work takes on a device where others have this load: the wait of an M/D/1 queue.

    Streams arrive more evenly than at random, so this is on the safe side; a simulation of the plan says how far.
    """
    others = min(others, 0.97)
    return 1.0 + others / (2.0 * (1.0 - others))


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream that asks for a place, and what it is promised.

    Raises:
        ConfigError: on construction, if a promise is not above zero.
    """

    name: str
    model: str
    interval_s: float
    """Output interval, at most."""
    response_s: float = math.inf
    """Response latency, at most."""

    def __post_init__(self) -> None:
        for what, value in (("interval_s", self.interval_s), ("response_s", self.response_s)):
            if math.isnan(value) or value <= 0:
                raise ConfigError(what, got=value, expected="more than 0")


class ModelView:
    """Sums over ranges of a model's columns."""

    def __init__(self, profile: Profile, batch: int = 1) -> None:
        """Charge a chunk's work as in batches of `batch`."""
        self.profile = profile
        self.columns = Columns.of(profile)
        self.work = self.columns.work_at(batch)
        self.work_sum = (0.0, *itertools.accumulate(self.work))
        self.state_sum = (0, *itertools.accumulate(self.columns.state))
        self.weight_sum = (0, *itertools.accumulate(self.columns.weights))

    def __len__(self) -> int:
        return len(self.columns)

    def hop_s(self, a: Device, b: Device) -> float:
        link = self.profile.links["peer" if a.node == b.node else "node"]
        return link.seconds(self.columns.hop_bytes)

    def hops(self, ranks: Sequence[Rank]) -> int:
        """Return how often a chunk changes device: between ranks in every step, and back for the next step."""
        turns = max(self.columns.passes)
        return turns * len(ranks) - 1 if len(ranks) > 1 else 0


@dataclass(eq=False, slots=True)
class DeviceState:
    """One device: its load (busy seconds a second), memory, and the ranks on it."""

    device: Device
    load: float = 0.0
    used_bytes: int = 0
    tenants: dict[str, float] = field(default_factory=dict)
    """Stream -> its load here."""
    resident: dict[str, list[int]] = field(default_factory=dict)
    """Model -> for each column, how many streams use its weights here."""

    @property
    def open(self) -> bool:
        return bool(self.tenants)

    @property
    def room(self) -> float:
        """Load that one more stream may add."""
        return (SHARED_CAP if self.tenants else EXCLUSIVE_CAP) - self.load

    def added_bytes(self, model: str, view: ModelView, start: int, stop: int) -> int:
        """Return the memory that a rank would add: state, and the weights that are not here yet."""
        state = view.state_sum[stop] - view.state_sum[start]
        here = self.resident.get(model)
        if here is None:
            return state + view.weight_sum[stop] - view.weight_sum[start] + view.profile.reserved_bytes
        return state + sum(w for w, n in zip(view.columns.weights[start:stop], here[start:stop], strict=True) if not n)

    def fits(self, model: str, view: ModelView, start: int, stop: int, interval_s: float) -> bool:
        load = (view.work_sum[stop] - view.work_sum[start]) / interval_s
        if load > self.room + 1e-12:
            return False
        limit = self.device.memory_bytes
        return not limit or self.used_bytes + self.added_bytes(model, view, start, stop) <= limit

    def longest(self, model: str, view: ModelView, start: int, interval_s: float) -> int:
        """Return the furthest column at which a rank that begins at `start` can end here; `start` if none fits."""
        low, high = start, len(view)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(model, view, start, middle, interval_s):
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class Placed:
    """A stream that has its place."""

    spec: StreamSpec
    ranks: tuple[Rank, ...]
    how: str


class Cluster:
    """Devices and the streams on them. Streams that run are never moved."""

    def __init__(self, devices: Sequence[Device], profiles: Mapping[str, Profile], *, batch: int = 1) -> None:
        """Start with an empty pool. `batch` is the batch size that loads are charged at.

        Raises:
            PlanError: if the pool is empty or two devices share a name.
        """
        if not devices:
            raise PlanError("devices", got="none", expected="at least one device")
        self.devices = {d.name: DeviceState(d) for d in devices}
        if len(self.devices) != len(devices):
            raise PlanError("devices", got=[d.name for d in devices], expected="distinct names")
        self.views = {name: ModelView(p, min(batch, p.max_batch)) for name, p in profiles.items()}
        self.streams: dict[str, Placed] = {}

    def view(self, model: str) -> ModelView:
        """Return a model of the catalogue.

        Raises:
            ConfigError: if it is not in it.
        """
        if model not in self.views:
            raise ConfigError("model", got=repr(model), expected=f"one of {sorted(self.views)}")
        return self.views[model]

    @property
    def open_devices(self) -> int:
        return sum(d.open for d in self.devices.values())

    def commit(self, placed: Placed) -> None:
        """Put a stream in its place, or change nothing.

        Raises:
            PlanError: if it no longer fits, naming the device.
        """
        spec, view = placed.spec, self.view(placed.spec.model)
        if spec.name in self.streams:
            raise PlanError("stream", got=repr(spec.name), expected="a name that is not in use")
        for rank in placed.ranks:
            if not self.devices[rank.device].fits(spec.model, view, rank.start, rank.stop, spec.interval_s):
                raise PlanError(f"devices[{rank.device}]", got=f"{rank} of {spec.name}", expected="room in time and memory")
        for rank in placed.ranks:
            self._change(placed.spec, rank, 1)
        self.streams[spec.name] = placed

    def leave(self, name: str) -> Placed:
        """Take a stream away.

        Raises:
            ConfigError: if there is no such stream.
        """
        if name not in self.streams:
            raise ConfigError("stream", got=repr(name), expected="a stream that was admitted")
        placed = self.streams.pop(name)
        for rank in placed.ranks:
            self._change(placed.spec, rank, -1)
        return placed

    def _change(self, spec: StreamSpec, rank: Rank, sign: int) -> None:
        state, view = self.devices[rank.device], self.view(spec.model)
        if sign > 0:
            state.used_bytes += state.added_bytes(spec.model, view, rank.start, rank.stop)
        here = state.resident.setdefault(spec.model, [0] * len(view))
        for column in range(rank.start, rank.stop):
            here[column] += sign
        if sign > 0:
            state.tenants[spec.name] = (view.work_sum[rank.stop] - view.work_sum[rank.start]) / spec.interval_s
        else:
            del state.tenants[spec.name]
            if not any(here):
                del state.resident[spec.model]
            state.used_bytes -= state.added_bytes(spec.model, view, rank.start, rank.stop)
        state.load = sum(state.tenants.values())

    def response_s(self, spec: StreamSpec, ranks: Iterable[Rank], newcomer: Mapping[str, float] | None = None) -> float:
        """Predict the response latency: the chunk's own time, longer where others share the device, and its hand-overs.

        On a device where others have load r the chunk takes `stretch(r)` times as long.
        """
        ranks, view = tuple(ranks), self.view(spec.model)
        total = 0.0
        for rank in ranks:
            state = self.devices[rank.device]
            others = state.load - state.tenants.get(spec.name, 0.0) + (newcomer or {}).get(rank.device, 0.0)
            total += (view.work_sum[rank.stop] - view.work_sum[rank.start]) * stretch(others)
        if len(ranks) > 1:
            devices = [self.devices[r.device].device for r in ranks]
            slowest = max(view.hop_s(a, b) for a, b in itertools.pairwise(devices))
            total += view.hops(ranks) * slowest
        return total

    def late_neighbour(self, spec: StreamSpec, ranks: Sequence[Rank]) -> str | None:
        """Return a stream whose predicted response would no longer hold if this one came; None if all would."""
        view = self.view(spec.model)
        more = {r.device: (view.work_sum[r.stop] - view.work_sum[r.start]) / spec.interval_s for r in ranks}
        for name in {t for device in more for t in self.devices[device].tenants}:
            placed = self.streams[name]
            if math.isfinite(placed.spec.response_s):
                extra = {d: load for d, load in more.items() if any(r.device == d for r in placed.ranks)}
                if self.response_s(placed.spec, placed.ranks, extra) > placed.spec.response_s:
                    return name
        return None
