"""What a simulation is made of: loads, streams, and the simulated devices with everything looked up in advance."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.core.errors import ConfigError
from stretto.core.plan import Device, Placement, Plan
from stretto.sched.captures import captured_rows
from stretto.sched.dispatch import ANSWER_S, LOOKS_AHEAD, DispatchPolicy, Limits, Waiting, policy
from stretto.sched.hardware import CPU
from stretto.sched.outcome import StreamOutcome
from stretto.sched.patience import Patience
from stretto.sched.plans import waits
from stretto.sched.profile import Profile
from stretto.sched.sim_lanes import Chip, Running, slowdown


@dataclass(frozen=True, slots=True)
class Load:
    """One model on the pool: its plan and what its stages cost."""

    plan: Plan
    profile: Profile


@dataclass(frozen=True, slots=True)
class StreamRun:
    """One stream to simulate. Chunk c is due in at `start_s` + c `interval_s`."""

    name: str
    model: str
    stream_class: str = "default"
    interval_s: float = 0.0
    """0: a chunk enters whenever there is a credit (or at the plan's admission slots)."""
    response_s: float = math.inf
    """Deadline of a chunk after it was due in."""
    start_s: float = 0.0
    stop_s: float = math.inf
    chunks: int = 0
    """Most chunks; 0: as many as fit into the time."""
    in_flight: int = 0
    """0: as the plan says."""
    pace_s: float = 0.0
    """Time that virtual deadlines are spread over; 0: as the plan says, else `response_s`."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What a real pool does to a plan."""

    seed: int = 0
    noise: float = 0.0
    """Standard deviation of a batch's time, as a share of it."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Device -> factor on all its times."""
    fails: Mapping[str, float] = field(default_factory=dict)
    """Device -> when it dies, with every stream that has a placement there."""
    ahead: int | None = None
    """Batches that a device's host launches behind the one that runs; 0 for a host that computes itself. None: as the plans
    say, with CPUs as hosts that compute themselves."""


@dataclass(eq=False, slots=True)
class SimDevice:
    """One lane of a device, most often its only one: what waits there, and whether it is busy."""

    name: str
    chip: Chip
    slow: float = 1.0
    ahead: int = 0
    prompt: bool = False
    """Whether its host goes on as soon as a batch is launched: chunks then wait for their next turn here from that time."""
    host: list[float] = field(default_factory=list)
    """Kind -> what its host takes to launch it, before an idle device starts."""
    queued: int = 0
    """Batches that were launched and are not done."""
    free_s: float = 0.0
    """When the last of them is done."""
    busy: bool = False
    """Whether it takes no further batch now."""
    running: Running | None = None
    """Kept where the device has several lanes."""
    ready: list[Waiting] = field(default_factory=list)
    flows: dict[int, Flow] = field(default_factory=dict)
    kinds: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    costs: list[tuple[float, ...]] = field(default_factory=list)
    """Kind -> seconds of a batch of 0, 1, 2, ..."""
    limits: Limits = field(default_factory=Limits)
    policy: DispatchPolicy = field(default_factory=lambda: policy("earliest_deadline_first"))
    patience: Patience | None = None
    """Kept where dispatch holds costs against deadlines."""

    def hear_deadline(self, task: Waiting) -> None:
        """Bound batches by what a chunk that comes in can spare, as the executor does."""
        assert self.patience is not None
        alone_s = self.limits.seconds(task.kind, 1) + task.remaining_s
        patience_s = self.patience.note(task.stream, task.deadline_s - task.ready_s - alone_s, task.ready_s)
        if patience_s != self.limits.patience_s:
            self.limits = replace(self.limits, patience_s=patience_s)


@dataclass(eq=False, slots=True)
class Run:
    """A stream with everything about its placements worked out."""

    id: int
    spec: StreamRun
    outcome: StreamOutcome
    device: list[SimDevice]
    kind: list[int]
    waits: list[int | None]
    passed: list[int]
    progress: list[float]
    remaining: list[float]
    """Placement -> least seconds of all that follow."""
    ahead: list[tuple[int, ...]]
    """Placement -> kinds that follow on its device."""
    delay: list[float]
    """Placement -> seconds of the hand-over after it."""
    row_s: float
    """More of that for each further chunk of a batch."""
    credit: int
    pace_s: float
    admission: tuple[int, ...]
    slot_s: float
    blocked: dict[tuple[int, int], list[Flow]] = field(default_factory=dict)
    """(placement, chunk) that must pass first -> chunks that wait for it."""
    chunk: int = 0
    scheduled_s: float = -1.0
    """When the next chunk is due, once that is on the calendar."""
    flying: int = 0
    served: float = 0.0
    gone: str = ""

    @property
    def last(self) -> int:
        return len(self.device) - 1

    def due_s(self, chunk: int, now: float) -> float:
        """Return when a chunk may enter."""
        if self.spec.interval_s:
            return self.spec.start_s + chunk * self.spec.interval_s
        if self.admission:
            *entries, period = self.admission
            turn, place = divmod(chunk, len(entries))
            return self.spec.start_s + self.slot_s * (entries[place] + turn * period)
        return now


@dataclass(eq=False, slots=True)
class Flow:
    """A chunk on its way."""

    run: Run
    chunk: int
    due: float
    ready: float
    at: int = 0
    key: int = -1
    held: bool = False
    """Whether it holds a slot of the device it is on."""
    leaves: int = -1
    """The placement from which it leaves its device."""
    leaves_with: Sequence[Flow] | None = None
    """The batch with whose end it does so. Others of its batches may be queued before."""


Devices = dict[tuple[str, int], SimDevice]
"""(device, lane) -> what the simulator knows of it."""


def build_devices(loads: Mapping[str, Load], weather: Weather, slots: int, streams: Sequence[StreamRun]) -> Devices:
    """Make the devices of all plans, and number the kinds of each along the routes as the executor does."""
    devices: Devices = {}
    rows = _rows(loads, streams)
    chips: dict[str, Chip] = {}
    lanes: dict[str, int] = {}
    for load in loads.values():
        for d in load.plan.devices:
            lanes[d.name] = max(lanes.get(d.name, 1), load.plan.lanes(d.name))
    for name, count in lanes.items():
        chip = chips[name] = Chip(name, slots)
        for lane in range(count):
            # Side by side, when a batch ends is not known while it runs, so nothing is launched behind it.
            ahead, prompt = _launching(name, loads.values(), weather) if count == 1 else (0, False)
            devices[name, lane] = SimDevice(name, chip, weather.slow.get(name, 1.0), ahead, prompt)
            chip.lanes.append(devices[name, lane])
    for model, load in loads.items():
        for placements in load.plan.classes.values():
            for p in placements:
                device, signature = devices[p.device, p.lane], signature_of(load.profile, p)
                if (model, signature) not in device.kinds:
                    device.kinds[model, signature] = len(device.kinds)
                    device.costs.append(_costs(load, p.device, signature, rows[model, p.device, p.lane, signature]))
                    host_s = load.profile.host_s + load.profile.host_stage_s * len(signature)
                    device.host.append(host_s if device.prompt else 0.0)
    for chip in chips.values():
        _interfere(chip, loads)
    plans = [load.plan for load in loads.values()]
    for device in devices.values():
        caps = {k: loads[model].plan.batch_cap(device.name) for (model, _), k in device.kinds.items()}
        costs = {k: device.costs[k][1:] for k in caps}
        most = max(caps.values(), default=1)
        device.limits = Limits(most, kind_caps={} if len(plans) == 1 else caps, costs=costs, answer_s=ANSWER_S)
        device.policy = policy(plans[0].dispatch)
        device.patience = Patience() if plans[0].dispatch in LOOKS_AHEAD else None
    return devices


def _launching(device: str, loads: Iterable[Load], weather: Weather) -> tuple[int, bool]:
    """Return how many batches a device's host launches behind the one that runs, and whether it launches at all."""
    if weather.ahead is not None:
        return weather.ahead, weather.ahead > 0
    mine = [load for load in loads if any(d.name == device for d in load.plan.devices)]
    prompt = all(load.profile.device != CPU.name for load in mine)
    return (min(load.plan.ahead for load in mine) if prompt else 0), prompt


def _interfere(chip: Chip, loads: Mapping[str, Load]) -> None:
    """Note what the kinds of each lane cost those of the others; between two models nothing is known."""
    for lane, other in itertools.permutations(chip.lanes, 2):
        for (model, task), kind in lane.kinds.items():
            for (beside, stages), its in other.kinds.items():
                if model == beside:
                    chip.slowdowns[lane, kind, other, its] = slowdown(loads[model].profile, task, stages)


def signature_of(profile: Profile, placement: Placement) -> tuple[str, ...]:
    return tuple(v.stage for v in profile.visits[placement.segment.start : placement.segment.stop])


def _rows(loads: Mapping[str, Load], streams: Sequence[StreamRun]) -> Mapping[tuple[str, str, int, tuple[str, ...]], int]:
    """Return, for each kind of task, in how many rows it can come: one for each stream there at a time, and for each visit."""
    rows: Counter[tuple[str, str, int, tuple[str, ...]]] = Counter()
    for model, load in loads.items():
        for name, placements in load.plan.classes.items():
            mine = [s for s in streams if s.model == model and s.stream_class == name]
            most = max((sum(s.start_s <= at.start_s < s.stop_s for s in mine) for at in mine), default=0)
            for p in placements:
                rows[model, p.device, p.lane, signature_of(load.profile, p)] += most
    return rows


def _costs(load: Load, device: str, signature: tuple[str, ...], rows: int) -> tuple[float, ...]:
    """Return the seconds of a batch of 0, 1, 2, ... of a kind that can come in so many rows."""
    profile, most = load.profile, load.plan.batch_cap(device)
    stages = [profile.stage(s) for s in signature]

    def seconds(n: int) -> float:
        return profile.launch_s + sum(stage.cost(n) for stage in stages)

    if load.plan.mode == "eager":
        return (0.0, *map(seconds, range(1, most + 1)))
    if profile.carry == "none" or not any(stage.state_bytes for stage in stages):
        return (0.0, *(seconds(_bucket(n, load.plan, most)) for n in range(1, most + 1)))
    # Graphs are for their rows: none is padded, and without one of their own rows go one after the other.
    own = captured_rows(rows, most)
    return (0.0, *(seconds(n) if n <= own else n * seconds(1) for n in range(1, most + 1)))


def build_run(id_: int, spec: StreamRun, loads: Mapping[str, Load], devices: Devices) -> Run:
    """Look up everything that a stream's chunks will need.

    Raises:
        ConfigError: if the stream's model is unknown.
        PlanError: if the plan has no such class, or splits state over devices.
    """
    if spec.model not in loads:
        raise ConfigError("model", got=repr(spec.model), expected=f"one of {sorted(loads)}")
    plan, profile = loads[spec.model].plan, loads[spec.model].profile
    placements = plan.placements(spec.stream_class)
    there = [devices[p.device, p.lane] for p in placements]
    kind = [d.kinds[spec.model, signature_of(profile, p)] for d, p in zip(there, placements, strict=True)]
    least = [d.costs[k][1] for d, k in zip(there, kind, strict=True)]
    node = {d.name: d for d in plan.devices}
    delay = [
        link_s(profile, node[a.device], node[b.device], profile.visits[a.segment.stop - 1].stage)
        for a, b in itertools.pairwise(placements)
    ]
    return Run(
        id_,
        spec,
        StreamOutcome(spec.name, spec.model, spec.interval_s, spec.response_s),
        there,
        kind,
        list(waits(profile, placements)),
        [-1] * len(placements),
        [p.segment.stop / len(profile.visits) for p in placements],
        [sum(least[i + 1 :]) for i in range(len(least))],
        [tuple(k for d, k in zip(there[i + 1 :], kind[i + 1 :], strict=True) if d is there[i]) for i in range(len(there))],
        [*delay, 0.0],
        profile.host_row_s if there[0].prompt else 0.0,
        spec.in_flight or plan.credit(spec.stream_class),
        spec.pace_s or plan.pace_s.get(spec.stream_class, spec.response_s),
        plan.admission,
        slot_s(delay, least, there, kind) if plan.admission else 0.0,
    )


def slot_s(delays: Sequence[float], seconds: Sequence[float], devices: Sequence[SimDevice], kinds: Sequence[int]) -> float:
    """Return the longest stay of a chunk on a device between two hand-overs, with the hand-over and what the host takes."""
    longest = here = 0.0
    for i, s in enumerate(seconds):
        if i == 0 or devices[i - 1] is not devices[i]:
            here = devices[i].host[kinds[i]]
        here += s
        if i + 1 == len(devices) or devices[i + 1] is not devices[i]:
            longest = max(longest, here + (delays[i] if i < len(delays) else 0.0))
    return longest


def link_s(profile: Profile, a: Device, b: Device, stage: str) -> float:
    if a.name == b.name:
        return 0.0
    link = profile.links["peer" if a.node == b.node else "node"]
    return link.seconds(profile.stage(stage).crossing_bytes)


def _bucket(n: int, plan: Plan, cap: int) -> int:
    """Captured graphs exist for some batch sizes only; a batch is padded up to the next."""
    sizes = plan.shapes.get("batch") or (*(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s < cap), cap)
    return next((s for s in sorted(sizes) if s >= n), n)
