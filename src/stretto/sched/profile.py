"""A profile: what a model's stages cost on one device kind. Measured on a device, or computed and labelled so.

A stage is looked up by its name, or by its group: `block.7` falls back to `block.*`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from stretto.core.errors import ConfigError
from stretto.core.route import Route, Visit
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import LINKS, Link

Carry = Literal["none", "same_step", "last_pass"]
"""What a stage with state waits for: nothing, the previous chunk at the same visit, or at its last visit of the stage."""
StateOf = Literal["visit", "stream"]
"""A stage keeps one state slot for every visit (rings of a denoise step) or one for the stream (decoder caches)."""


@dataclass(frozen=True)
class StageProfile:
    """One stage on one device kind."""

    cost: BatchCost
    weight_bytes: int = 0
    """Shared by every stream on the device."""
    state_bytes: int = 0
    """Of one state slot."""
    state_of: StateOf = "visit"
    crossing_bytes: int = 0
    """Handed over when the next visit is on another device."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers come from."""

    source: Literal["measured", "computed"]
    commit: str = ""
    date: str = ""
    note: str = ""


@dataclass(frozen=True)
class Profile:
    """Costs of a model at one chunk shape on one device kind.

    `passes` is the route: each is a list of stages, visited in order for each of its steps.

    Raises:
        ConfigError: on construction, naming the stage or field that cannot be used.
    """

    model: str
    device: str
    passes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    stages: Mapping[str, StageProfile]
    provenance: Provenance
    carry: Carry = "same_step"
    memory_bytes: int = 0
    """Of one device, for plans; 0 means not limited."""
    reserved_bytes: int = 0
    """On every device that runs the model: activations, graph pools."""
    chunk_bytes: int = 0
    """Of one chunk's values while it is on a device."""
    launch_s: float = 0.0
    """Device time of a launch, whatever its stages."""
    host_s: float = 0.0
    """From when a batch can run on an idle device until it does, its host working on it; hidden where launches are queued."""
    host_stage_s: float = 0.0
    """More of that, for each stage of the batch."""
    host_row_s: float = 0.0
    """What each further chunk of a batch takes the host when the batch goes on to another device."""
    max_batch: int = 8
    links: Mapping[str, Link] = field(default_factory=lambda: dict(LINKS))
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Stage -> a stage in another lane of the device -> how many times longer the first takes while that runs, 1 or more."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Shape of the chunk and whatever else a reader should know: tokens, frames per chunk, pixel frames, window."""

    def __post_init__(self) -> None:
        if not self.passes:
            raise ConfigError("passes", got="none", expected="one pass or more")
        if self.carry not in get_args(Carry):
            raise ConfigError("carry", got=repr(self.carry), expected=f"one of {get_args(Carry)}")
        if self.max_batch < 1:
            raise ConfigError("max_batch", got=self.max_batch, expected="1 or more")
        for name in ("memory_bytes", "reserved_bytes", "chunk_bytes", "launch_s", "host_s", "host_stage_s", "host_row_s"):
            _number(name, getattr(self, name))
        for name, stage in self.stages.items():
            for part in ("weight_bytes", "state_bytes", "crossing_bytes"):
                _number(f"stages[{name}].{part}", getattr(stage, part))
        for name, others in self.beside.items():
            for other, times in others.items():
                if not isinstance(times, int | float) or not 1.0 <= times < math.inf:
                    raise ConfigError(f"beside[{name}][{other}]", got=times, expected="a finite number, 1 or more")
        for name, link in self.links.items():
            _number(f"links[{name}].alpha_s", link.alpha_s)
            if not link.bytes_s > 0:
                raise ConfigError(f"links[{name}].bytes_s", got=link.bytes_s, expected="more than 0")
        for visit in self.visits:
            self.stage(visit.stage)

    def stage(self, name: str) -> StageProfile:
        """Return what a stage costs.

        Raises:
            ConfigError: if neither the stage nor its group is in the profile.
        """
        found = self.stages.get(name) or self.stages.get(name.rpartition(".")[0] + ".*")
        if found is None:
            raise ConfigError("stage", got=repr(name), expected=f"one of the profile of {self.model}: {sorted(self.stages)}")
        return found

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        return tuple(Visit(stage, step) for stages, steps in self.passes for step in steps for stage in stages)

    @property
    def steps(self) -> int:
        """Denoise steps: the steps of the longest pass."""
        return max(len(steps) for _, steps in self.passes)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Distinct stages, by first visit."""
        return tuple(dict.fromkeys(v.stage for v in self.visits))

    @cached_property
    def work_s(self) -> float:
        """Seconds of one chunk, one row at a time, without launches."""
        return sum(self.stage(v.stage).cost(1) for v in self.visits)

    @cached_property
    def best_work_s(self) -> float:
        """Seconds of one chunk if every stage ran in its best batch."""
        return sum(self.stage(v.stage).cost.best_row_s(self.max_batch) for v in self.visits)

    def waits_for(self, visit: Visit) -> Visit | None:
        """Return the visit that the previous chunk must have passed; None if there is none."""
        if not self.stage(visit.stage).state_bytes or self.carry == "none":
            return None
        if self.carry == "same_step" or self.stage(visit.stage).state_of == "stream":
            return visit
        return self._last[visit.stage]

    @cached_property
    def _last(self) -> dict[str, Visit]:
        return {v.stage: v for v in self.visits}

    def state_slots(self, stage: str) -> int:
        """Return how many state slots of a stage one stream fills over the whole route."""
        here = self.stage(stage)
        if not here.state_bytes:
            return 0
        if here.state_of == "stream" or self.carry == "last_pass":
            return 1
        return sum(v.stage == stage for v in self.visits)

    def check_device(self, kind: str) -> None:
        """Refuse a pool of another device kind.

        Raises:
            ConfigError: if the profile is of another device.
        """
        if kind != self.device:
            raise ConfigError(
                "profile.device",
                got=repr(self.device),
                expected=f"a profile of {kind!r}, the devices of the pool",
                hint=f"measure {self.model} there; times of one device say nothing about another",
            )

    def check_route(self, route: Route) -> None:
        """Refuse a profile of another route.

        Raises:
            ConfigError: naming the first visit that differs.
        """
        for i, (mine, theirs) in enumerate(zip(self.visits, route.visits, strict=False)):
            if mine != theirs:
                raise ConfigError(f"profile.visits[{i}]", got=mine, expected=f"{theirs}, as on the route")
        if len(self.visits) != len(route):
            raise ConfigError("profile.visits", got=f"{len(self.visits)} visits", expected=f"{len(route)}, as on the route")

    def with_steps(self, steps: int) -> Profile:
        """Return the profile of the same model with another number of denoise steps."""
        longest = self.steps
        if steps < 1:
            raise ConfigError("steps", got=steps, expected="1 or more")
        passes = tuple(
            (s, tuple(range(steps)) if len(k) == longest else tuple(min(i, steps - 1) for i in k)) for s, k in self.passes
        )
        return replace(self, passes=passes)

    def to_json(self) -> str:
        raw = {k: v for k, v in asdict(self).items() if k not in ("stages", "passes", "links")}
        raw["passes"] = [{"stages": _folded(stages), "steps": list(steps)} for stages, steps in self.passes]
        raw["stages"] = {
            n: {**{k: v for k, v in asdict(s).items() if k != "cost"}, "cost": s.cost.to_json()} for n, s in self.stages.items()
        }
        links = {k: v for k, v in self.links.items() if math.isfinite(v.bytes_s)}
        raw["links"] = {k: {"alpha_s": v.alpha_s, "bytes_s": v.bytes_s} for k, v in links.items()}
        return json.dumps(raw, indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile that `to_json` wrote, or that was written by hand.

        Raises:
            ConfigError: naming the entry that is missing, unknown or cannot be used.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError("profile", got=f"text that is not JSON ({e})", expected="a JSON object") from e
        known = set(Profile.__dataclass_fields__)
        if (
            not isinstance(raw, dict)
            or set(raw) - known
            or not {"model", "device", "passes", "stages", "provenance"} <= set(raw)
        ):
            got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise ConfigError("profile", got=got, expected=f"an object with keys among {sorted(known)}")
        try:
            stages = {n: _stage(n, s) for n, s in raw.pop("stages").items()}
            passes = tuple((_unfolded(p["stages"]), tuple(p["steps"])) for p in raw.pop("passes"))
            links = dict(LINKS) | {k: Link(**v) for k, v in raw.pop("links", {}).items()}
            return Profile(stages=stages, passes=passes, links=links, provenance=Provenance(**raw.pop("provenance")), **raw)
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            raise ConfigError("profile", got=f"a malformed entry ({e})", expected="what `to_json` writes") from e


def _stage(name: str, raw: Mapping[str, Any]) -> StageProfile:
    parts = dict(raw)
    return StageProfile(BatchCost.from_json(parts.pop("cost"), f"stages[{name}]"), **parts)


def _number(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(name, got=value, expected="a finite number, 0 or more")


def _folded(stages: tuple[str, ...]) -> list[str]:
    """Write runs of numbered stages as `block.0..29`."""
    out: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in [*stages, ""]:
        group, _, index = name.rpartition(".")
        if run and group == run[0] and index.isdigit() and int(index) == run[2] + 1:
            run = (run[0], run[1], run[2] + 1)
            continue
        if run:
            out.append(f"{run[0]}.{run[1]}..{run[2]}" if run[2] > run[1] else f"{run[0]}.{run[1]}")
        run = (group, int(index), int(index)) if group and index.isdigit() else None
        if name and run is None:
            out.append(name)
    return out


def _unfolded(stages: list[str]) -> tuple[str, ...]:
    out: list[str] = []
    for name in stages:
        head, dots, last = name.partition("..")
        group, _, first = head.rpartition(".")
        out += [f"{group}.{i}" for i in range(int(first), int(last) + 1)] if dots else [name]
    return tuple(out)
