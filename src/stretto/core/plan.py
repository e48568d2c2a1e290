"""A plan: which device runs which visits, for each class of streams. Plain data; JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from stretto.core.errors import PlanError
from stretto.core.route import Route, Segment

Mode = Literal["graph", "eager"]


@dataclass(frozen=True, slots=True)
class Device:
    """One executor's device: `cuda:0`, `cpu:0`, ... on a node of the pool."""

    name: str
    node: str = "local"
    memory_bytes: int = 0
    """Memory the plan may use; 0 means not limited by the plan."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One segment of the route on one device."""

    segment: Segment
    device: str
    lane: int = 0
    """Which of the device's queues of work runs it; lanes of a device run side by side, a higher one ahead of a lower."""


@dataclass(frozen=True)
class Plan:
    """Everything an executor or the simulator needs to know about who runs what."""

    kind: str
    """How it was made: `whole`, `stages`, `by_step`, `by_block`, `by_stage`, `circular`, `portfolio`, ..."""
    devices: tuple[Device, ...]
    classes: Mapping[str, tuple[Placement, ...]]
    """Stream class -> placements, in route order, covering the route exactly."""
    batch_caps: Mapping[str, int] = field(default_factory=dict)
    """Device -> most tasks in one batch; a device without an entry runs one task at a time."""
    in_flight: int = 1
    """Most chunks of one stream between admission and completion."""
    credits: Mapping[str, int] = field(default_factory=dict)
    """Stream class -> its own `in_flight`."""
    pace_s: Mapping[str, float] = field(default_factory=dict)
    """Stream class -> seconds that virtual deadlines of its chunks are spread over, where that is not the chunk's deadline."""
    admission: tuple[int, ...] = ()
    """Cadence of admission, in slots of one visit: chunk c enters at slot `admission[c % n] + (c // n) * period`, where the
    period is the last entry and n entries come before it. Empty: a chunk enters as soon as there is a credit."""
    dispatch: str = "earliest_deadline_first"
    mode: Mode = "eager"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes to prepare, by axis: `batch`, or a bucketed axis of the model. An axis without an entry gets all its sizes."""
    ahead: int = 1
    """Batches that the host of a GPU launches behind the one that runs. 0: each batch is chosen when the device is free, by
    what is there then, and the device waits for its launch."""

    lane_sms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Device -> for each of its lanes, the multiprocessors that it has while another lane is at work; 0: it may use all. Alone
    each has all. What runs on a part may differ in the last bits from what runs on all. CUDA devices only."""

    def placements(self, stream_class: str) -> tuple[Placement, ...]:
        """Return the placements of a class.

        Raises:
            PlanError: if the plan has no such class.
        """
        if stream_class not in self.classes:
            raise PlanError("class", got=repr(stream_class), expected=f"one of {sorted(self.classes)}")
        return self.classes[stream_class]

    def credit(self, stream_class: str) -> int:
        """Return the most chunks of one stream of a class between admission and completion."""
        return self.credits.get(stream_class, self.in_flight)

    def batch_cap(self, device: str) -> int:
        return self.batch_caps.get(device, 1)

    def lanes(self, device: str) -> int:
        """Return how many lanes the plan uses on a device."""
        return 1 + max((p.lane for placements in self.classes.values() for p in placements if p.device == device), default=0)

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> Plan:
        return replace(self, shapes=shapes)

    def with_dispatch(self, name: str) -> Plan:
        return replace(self, dispatch=name)

    def validate(self, route: Route) -> None:
        """Check the plan against a route.

        Raises:
            PlanError: naming the class and placement that does not fit.
        """
        names = [d.name for d in self.devices]
        if not names:
            raise PlanError("devices", got="none", expected="at least one device")
        if len(set(names)) != len(names):
            raise PlanError("devices", got=names, expected="distinct names")
        if self.in_flight < 1:
            raise PlanError("in_flight", got=self.in_flight, expected="1 or more")
        if self.ahead < 0:
            raise PlanError("ahead", got=self.ahead, expected="0 or more")
        for name, credit in self.credits.items():
            if name not in self.classes or credit < 1:
                raise PlanError(f"credits[{name}]", got=credit, expected=f"1 or more, for one of {sorted(self.classes)}")
        for name, pace in self.pace_s.items():
            if name not in self.classes or not pace > 0:
                raise PlanError(f"pace_s[{name}]", got=pace, expected=f"more than 0, for one of {sorted(self.classes)}")
        if self.admission and (len(self.admission) < 2 or list(self.admission) != sorted(set(self.admission))):
            raise PlanError("admission", got=self.admission, expected="rising slots, the last of them the period")
        for device, cap in self.batch_caps.items():
            if device not in names or cap < 1:
                raise PlanError(f"batch_caps[{device}]", got=cap, expected=f"1 or more, on one of {names}")
        for device, sms in self.lane_sms.items():
            if device not in names or len(sms) != self.lanes(device) or min(sms) < 0:
                raise PlanError(f"lane_sms[{device}]", got=sms, expected=f"a number for each lane of one of {names}, 0 or more")
        for axis, sizes in self.shapes.items():
            if not sizes or min(sizes) < 1:
                raise PlanError(f"shapes[{axis}]", got=sizes, expected="sizes of 1 or more")
        for name, placements in self.classes.items():
            at = 0
            for i, p in enumerate(placements):
                where = f"classes[{name}][{i}]"
                if p.device not in names:
                    raise PlanError(f"{where}.device", got=repr(p.device), expected=f"one of {names}")
                if p.lane < 0:
                    raise PlanError(f"{where}.lane", got=p.lane, expected="0 or more")
                if p.segment.start != at or p.segment.stop <= p.segment.start:
                    raise PlanError(f"{where}.segment", got=p.segment, expected=f"a segment that starts at visit {at}")
                at = p.segment.stop
            if at != len(route):
                raise PlanError(f"classes[{name}]", got=f"{at} visits placed", expected=f"all {len(route)} of the route")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote, or that was edited by hand.

        Raises:
            PlanError: if a key is missing, unknown or of the wrong type.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as e:
            raise PlanError("plan", got=f"text that is not JSON ({e})", expected="a JSON object") from e
        known = set(Plan.__dataclass_fields__)
        if not isinstance(raw, dict) or set(raw) - known or not {"kind", "devices", "classes"} <= set(raw):
            got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise PlanError("plan", got=got, expected=f"an object with keys among {sorted(known)}")
        for name, value in raw.items():
            _check(name, value, _FORM[name])
        try:
            devices = tuple(Device(**d) for d in raw.pop("devices"))
            classes = {
                name: tuple(Placement(**{**p, "segment": Segment(**p["segment"])}) for p in ps)
                for name, ps in raw.pop("classes").items()
            }
            shapes = {axis: tuple(sizes) for axis, sizes in raw.pop("shapes", {}).items()}
            raw["lane_sms"] = {device: tuple(sms) for device, sms in raw.get("lane_sms", {}).items()}
            raw["admission"] = tuple(raw.get("admission", ()))
            return Plan(devices=devices, classes=classes, shapes=shapes, **raw)
        except (TypeError, KeyError, AttributeError) as e:
            raise PlanError(
                "plan", got=f"a malformed entry ({e})", expected="devices and placements as `to_json` writes them"
            ) from e


_PLACEMENT = {"segment": {"start": int, "stop": int}, "device": str, "lane": int}
_FORM: Mapping[str, Any] = {
    "kind": str,
    "devices": [{"name": str, "node": str, "memory_bytes": int}],
    "classes": {"*": [_PLACEMENT]},
    "batch_caps": {"*": int},
    "in_flight": int,
    "credits": {"*": int},
    "pace_s": {"*": float},
    "admission": [int],
    "dispatch": str,
    "mode": get_args(Mode),
    "shapes": {"*": [int]},
    "ahead": int,
    "lane_sms": {"*": [int]},
}
"""What a plan's JSON is made of: `[form]` is a list, `{"*": form}` an object with any keys, a tuple the values it can have."""


def _check(where: str, value: Any, form: Any) -> None:
    """Check a value read from JSON against its form.

    Raises:
        PlanError: naming the entry.
    """
    if isinstance(form, list | dict):
        if not isinstance(value, type(form)):
            raise PlanError(where, got=repr(value), expected="a list" if isinstance(form, list) else "an object")
        for key, some in enumerate(value) if isinstance(value, list) else value.items():
            inner = form[0] if isinstance(form, list) else form.get(key, form.get("*"))
            if inner is None:
                raise PlanError(where, got=f"key {key!r}", expected=f"keys among {sorted(form)}")
            _check(f"{where}[{key}]", some, inner)
    elif isinstance(form, tuple):
        if value not in form:
            raise PlanError(where, got=repr(value), expected=f"one of {form}")
    elif isinstance(value, bool) or not isinstance(value, int | float if form is float else form):
        expected = {int: "a whole number", float: "a number", str: "text"}[form]
        raise PlanError(where, got=repr(value), expected=expected)


def whole(route: Route, device: str, *, batch_cap: int = 1, mode: Mode = "eager", stream_class: str = "default") -> Plan:
    """Plan the whole route as one segment on one device: the lowest latency of a single stream."""
    placements = (Placement(route.whole, device),)
    return Plan("whole", (Device(device),), {stream_class: placements}, {device: batch_cap}, mode=mode)


def per_visit(route: Route, device: str, *, batch_cap: int = 1, mode: Mode = "eager", dispatch: str = "fill_first") -> Plan:
    """Plan every visit as a segment of its own on one device: chunks of many streams join and leave batches between visits."""
    placements = tuple(Placement(s, device) for s in route.cut(range(1, len(route))))
    return Plan("per_visit", (Device(device),), {"default": placements}, {device: batch_cap}, dispatch=dispatch, mode=mode)


def overlapped(
    route: Route, device: str, *, batch_cap: int = 1, mode: Mode = "eager", between_visits: bool = False, dispatch: str = ""
) -> Plan:
    """Plan two lanes on one device: the loop over a stage runs beside what comes before it, for other chunks.

    The second lane begins at the first visit of a stage that the route visits more than once. With `between_visits` every
    visit is a segment, and chunks join and leave batches between two of them; else each lane runs one segment.

    Raises:
        PlanError: if the route has no such stage, or begins with it.
    """
    stages = [v.stage for v in route.visits]
    loop = next((i for i, stage in enumerate(stages) if stages.count(stage) > 1), 0)
    if not loop:
        raise PlanError("route", got=stages, expected="a stage that is visited more than once, after others")
    cuts = range(1, len(route)) if between_visits else (loop,)
    placements = tuple(Placement(s, device, int(s.start >= loop)) for s in route.cut(cuts))
    plan = Plan("overlapped", (Device(device),), {"default": placements}, {device: batch_cap}, mode=mode)
    return plan.with_dispatch(dispatch) if dispatch else plan
