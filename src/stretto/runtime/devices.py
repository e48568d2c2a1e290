"""The devices of an engine: executors in this process, or processes of their own, started, watched and closed as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from stretto.core.errors import PlanError
from stretto.core.model import Model
from stretto.core.plan import Plan
from stretto.parallel.local import LocalLink
from stretto.runtime.executor import Executor
from stretto.runtime.fleet import Died, Failed, Fleet, Heard, Workers
from stretto.runtime.flow import Flow
from stretto.runtime.layout import Streams
from stretto.runtime.passage import Arrivals, Courier, Finisher
from stretto.runtime.seat import Seat
from stretto.runtime.ways import Ways
from stretto.sched.dispatch import policy

_TUNED = ("kind", "batch_caps", "in_flight", "credits", "pace_s", "admission", "dispatch", "ahead")


class Devices:
    """One seat for each device of a plan. What they have to say of chunks and of themselves goes to three listeners."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        ways: Ways,
        finisher: Finisher,
        *,
        slots: int,
        streams: Streams,
        workers: Workers | None,
        callers_launch: bool | None,
        passed: Heard,
        failed: Failed,
        died: Died,
    ) -> None:
        """Make the devices; arguments as those of `Engine`. In this process, `finisher` is handed what leaves a device."""
        self._plan, self._failed = plan, failed
        self._most = {d.name: plan.batch_cap(d.name) for d in plan.devices}
        self._links: dict[str, LocalLink] = {}
        self._near: dict[str, Executor] = {}
        self._fleet: Fleet | None = None
        self.seats: Mapping[str, Seat]
        if workers is not None:
            self._fleet = Fleet(
                model, plan, ways, workers, slots=slots, streams=streams, passed=passed, failed=failed, died=died
            )
            self.seats = self._fleet.seats
            return
        courier = Courier({name: route.outputs for name, route in ways.routes.items()}, self._links, finisher)
        for device in plan.devices:
            self._near[device.name] = executor = Executor(
                model, plan, device.name, slots=slots, streams=streams, ways=ways,
                depart=courier.depart, fail=self._fail, died=died, callers_launch=callers_launch,
            )  # fmt: skip
            self._links[device.name] = LocalLink(device.name, Arrivals(executor.offer_all).receive)
        self.seats = self._near

    def _fail(self, flow: Flow, error: Exception) -> None:
        self._failed(flow.key, error)

    @property
    def far(self) -> bool:
        """Whether they are processes of their own."""
        return self._fleet is not None

    def warm(self) -> None:
        """Capture all graphs, or wait for all workers, then start. Blocks until ready.

        Raises:
            WorkerDiedError: if a worker cannot start.
            LinkError: if two workers cannot be linked.
        """
        if self._fleet is not None:
            self._fleet.await_ready()
        for seat in self.seats.values():
            seat.warm()
        for seat in self.seats.values():
            seat.start()

    def down(self, stream_class: str) -> str | None:
        """Return which device of a class is gone, and why."""
        for p in self._plan.placements(stream_class):
            if dead := self.seats[p.device].dead:
                return f"device {p.device} is down: {dead}"
        return None

    @property
    def slowed(self) -> dict[tuple[str, ...], float]:
        return {stages: factor for e in self._near.values() for stages, factor in e.slowed.items()}

    @property
    def carriage(self) -> str:
        return self._fleet.carriage if self._fleet else "local"

    @property
    def workers(self) -> Mapping[str, int]:
        return self._fleet.pids if self._fleet else {}

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        return self._fleet.resident_bytes if self._fleet else {}

    def retune(self, plan: Plan) -> None:
        """Go on by another plan that puts everything where this one does.

        Raises:
            PlanError: if the plan differs in more than may change, or has larger batches than the devices were made for.
            ConfigError: if it names an unknown order.
        """
        if replace(plan, **{name: getattr(self._plan, name) for name in _TUNED}) != self._plan or self.far:
            raise PlanError(
                "plan", got=f"a plan of kind {plan.kind!r}", expected=f"one that differs in {_TUNED} alone, in one process"
            )
        for name, most in self._most.items():
            if plan.batch_cap(name) > most:
                raise PlanError(
                    f"batch_caps[{name}]", got=plan.batch_cap(name), expected=f"at most {most}, as the engine was made for"
                )
        policy(plan.dispatch)
        self._plan = plan
        for executor in self._near.values():
            executor.retune(plan)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start nothing while inside. Devices of this process only."""
        with ExitStack() as stack:
            for executor in self._near.values():
                stack.enter_context(executor.held())
            yield

    def close(self) -> None:
        for seat in self.seats.values():
            seat.close()
        for link in self._links.values():
            link.close()
        if self._fleet is not None:
            self._fleet.close()
