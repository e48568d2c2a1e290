"""Admission: streams come and go; each is taken with all its promises, or refused with the reason and what would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.core.errors import CapacityError
from stretto.core.plan import Device
from stretto.sched.bounds import pool_bound
from stretto.sched.cluster import Cluster, Placed, StreamSpec
from stretto.sched.equal import equal_share
from stretto.sched.lds import BEST_FIT, Search
from stretto.sched.placement import STRATEGIES, Planner, Strategy
from stretto.sched.profile import Profile

Resource = Literal["interval", "response", "time", "memory", "neighbours"]
"""What a refused stream lacks. `interval`, `response`: no place on an empty pool keeps the promise. `neighbours`: it
would fit, but a stream that runs (or this one, between them) would be late."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a stream was not taken."""

    spec: StreamSpec
    resource: Resource
    missing: str
    """How much of it, in words with a unit."""
    fits: tuple[str, ...]
    """Changes with which the stream would be taken now."""

    @property
    def text(self) -> str:
        *most, last = self.fits or ("",)
        hint = f"; it would fit with {' or '.join(part for part in (', '.join(most), last) if part)}" if self.fits else ""
        return f"{self.spec.name} ({self.spec.model}): not enough {self.resource}: {self.missing}{hint}"


@dataclass(frozen=True, slots=True)
class Variant:
    """The same model at another chunk shape; a stream of it is promised the same frames per second."""

    label: str
    model: str
    interval_factor: float


class Admission:
    """The online planner of one pool."""

    def __init__(
        self,
        devices: Sequence[Device],
        profiles: Mapping[str, Profile],
        *,
        strategy: Strategy = STRATEGIES["portfolio"],
        expected: Sequence[StreamSpec] = (),
        variants: Mapping[str, Sequence[Variant]] | None = None,
        device_kind: str | None = None,
    ) -> None:
        """Start with an empty pool.

        Args:
            variants: model -> its other chunk shapes in `profiles`, tried when a refusal says what would fit.
            device_kind: what the devices are; profiles of another kind are refused.

        Raises:
            ConfigError: if a profile is of another device.
            PlanError: if the pool is empty.
        """
        for profile in profiles.values():
            if device_kind is not None:
                profile.check_device(device_kind)
        self.planner = Planner(devices, profiles, strategy, expected=expected)
        self._profiles, self._variants = profiles, variants or {}

    def arrive(self, spec: StreamSpec, *, explain: bool = True) -> Placed | Refused:
        """Place a stream or say why not. Nothing changes for the streams that run.

        Raises:
            ConfigError: if the model is unknown.
            PlanError: if the name is in use.
        """
        placed = self.planner.place(spec)
        if placed is not None:
            return placed
        if not explain:
            return Refused(spec, "time", "not worked out", ())
        resource, missing = self._lack(spec)
        return Refused(spec, resource, missing, tuple(self._alternatives(spec)))

    def admit(self, spec: StreamSpec) -> Placed:
        """Place a stream.

        Raises:
            CapacityError: if it is refused, with the reason and what would fit.
        """
        answer = self.arrive(spec)
        if isinstance(answer, Refused):
            raise CapacityError(answer.resource, answer.text)
        return answer

    def leave(self, name: str) -> None:
        """Take a stream away, admitted or not; the shadow forgets it too."""
        if name in self.planner.placed:
            self.planner.leave(name)
        else:
            self.planner.forget(name)

    def _lack(self, spec: StreamSpec) -> tuple[Resource, str]:
        cluster = self.planner.cluster
        view = cluster.view(spec.model)
        bound = pool_bound(view.profile, len(self.planner.pool))
        if spec.interval_s < bound.interval_s:
            least = f"no plan is faster than {bound.interval_s * 1e3:.1f} ms ({bound.binds} bound)"
            return "interval", f"{spec.interval_s * 1e3:.1f} ms asked, {least}"
        if spec.response_s < view.profile.work_s:
            least = f"one chunk takes {view.profile.work_s * 1e3:.1f} ms even alone"
            return "response", f"{spec.response_s * 1e3:.1f} ms asked, {least}"
        if not self.planner.shadow.share(spec):
            return self._lack_alone(spec)
        time_left = sum(max(0.0, d.room) for d in cluster.devices.values())
        need = view.profile.work_s / spec.interval_s
        if self._would_fit(spec, memory=False):
            state = view.state_sum[-1]
            free = sum(max(0, d.device.memory_bytes - d.used_bytes) for d in cluster.devices.values())
            text = f"{state / 1e9:.1f} GB of state, {free / 1e9:.1f} GB free where there is time"
            return "memory", text
        if self._would_fit(replace(spec, response_s=math.inf), memory=True):
            return "neighbours", "the promised response latency, its own or that of a stream that runs"
        text = f"needs {need:.2f} devices, {time_left:.2f} are free"
        return "time", f"{text}, {max(0.0, need - time_left):.2f} missing" if need > time_left else f"{text} but in pieces"

    def _lack_alone(self, spec: StreamSpec) -> tuple[Resource, str]:
        """Say what a stream lacks that no number of the pool's devices would give it."""
        view, pool = self.planner.cluster.view(spec.model), self.planner.pool
        largest = max(d.memory_bytes for d in pool)
        reserved = view.profile.reserved_bytes
        heaviest = max(w + s for w, s in zip(view.columns.weights, view.columns.state, strict=True)) + reserved
        if largest and heaviest > largest:
            return "memory", f"one stage needs {heaviest / 1e9:.1f} GB, the largest device has {largest / 1e9:.1f} GB"
        if equal_share(view, replace(spec, response_s=math.inf), pool):
            return "response", f"{spec.response_s * 1e3:.1f} ms asked, hand-overs between its devices take more"
        if equal_share(view, replace(spec, interval_s=math.inf, response_s=math.inf), pool):
            return "interval", f"{spec.interval_s * 1e3:.1f} ms asked, too short for {len(pool)} devices"
        need = view.state_sum[-1] + view.weight_sum[-1] + reserved
        return "memory", f"{need / 1e9:.1f} GB for one stream, over {len(pool)} devices of {largest / 1e9:.1f} GB"

    def _would_fit(self, spec: StreamSpec, *, memory: bool) -> bool:
        """Ask a copy of the pool, without its memory limits or with them."""
        copy = _copy(self.planner.cluster, self.planner.pool, self._profiles, memory=memory)
        return self._fits_on(copy, spec, self.planner.shadow.share(spec))

    def _fits_on(self, copy: Cluster, spec: StreamSpec, share: int) -> bool:
        """Tell whether a stream that has come in place of a refused one of its name would be placed."""
        most, could = self.planner.may_open_instead(spec.name, share)
        if Search(copy, spec, BEST_FIT, open_most=most).run() is not None:
            return True
        return could and share <= len(self.planner.pool) - copy.open_devices

    def _alternatives(self, spec: StreamSpec) -> Iterator[str]:
        """Yield what would be taken now: a longer interval, fewer steps, another chunk shape, a longer response."""
        for factor in (1.1, 1.25, 1.5, 2.0, 3.0, 4.0):
            longer = replace(spec, interval_s=spec.interval_s * factor)
            if self._would_fit(longer, memory=True):
                yield f"an interval of {longer.interval_s * 1e3:.0f} ms"
                break
        profile = self._profiles[spec.model]
        for steps in range(profile.steps - 1, 0, -1):
            if self._fits_as(spec, profile.with_steps(steps)):
                yield f"{steps} denoise steps"
                break
        for variant in self._variants.get(spec.model, ()):
            other = replace(spec, model=variant.model, interval_s=spec.interval_s * variant.interval_factor)
            if self._would_fit(other, memory=True):
                yield variant.label
                break
        if math.isfinite(spec.response_s):
            for factor in (1.5, 2.0, 4.0, 8.0):
                later = replace(spec, response_s=spec.response_s * factor)
                if self._would_fit(later, memory=True):
                    yield f"a response of {later.response_s * 1e3:.0f} ms"
                    break

    def _fits_as(self, spec: StreamSpec, profile: Profile) -> bool:
        """Tell whether the stream would fit if it had another profile. Its weights are counted as not there yet."""
        name = f"{spec.model} (other)"
        copy = _copy(self.planner.cluster, self.planner.pool, {**self._profiles, name: profile}, memory=True)
        return self._fits_on(copy, replace(spec, model=name), equal_share(copy.view(name), spec, self.planner.pool))


def _copy(cluster: Cluster, pool: Sequence[Device], profiles: Mapping[str, Profile], *, memory: bool) -> Cluster:
    copy = Cluster([d if memory else replace(d, memory_bytes=0) for d in pool], profiles)
    for placed in cluster.streams.values():
        copy.commit(placed)
    return copy
