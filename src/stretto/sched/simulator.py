"""A discrete-event simulator: plans, the dispatch functions of the executor, and a profile's costs in place of devices.

It follows the executor step by step: a chunk may run at a placement once its predecessor has passed, holds a slot from
its first launch on a device until it leaves, runs in batches of one kind that the dispatch policy chooses whenever the
device is free, and arrives at the next device after the link's time. Two runs of the same input are equal.

The host of a GPU launches and goes on: what a chunk does next on the same device waits there from its launch, not from its
end. With `Plan.ahead` it takes the next batch while others are still queued, and chooses by what is there at that time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping, Sequence

from stretto.sched.dispatch import Waiting
from stretto.sched.outcome import Launch, Outcome
from stretto.sched.sim_state import Flow, Load, Run, SimDevice, StreamRun, Weather, build_devices, build_run

_DONE, _ARRIVE, _SUBMIT, _STOP, _FAIL = range(5)
_RETURN_S = 1e-6


class Simulation:
    """Runs streams under plans.

    Raises:
        ConfigError: on construction, if a stream names an unknown model.
        PlanError: if a plan has no such class, or splits state over devices.
    """

    def __init__(
        self,
        loads: Mapping[str, Load],
        streams: Sequence[StreamRun],
        *,
        weather: Weather | None = None,
        slots: int = 0,
        trace: bool = False,
        together: bool = True,
    ) -> None:
        """Prepare a run.

        Args:
            slots: the executor's chunk slots a device; 0 means enough.
            together: chunks that leave in one batch arrive as one; else an idle device starts with the first of them.
        """
        self._weather = weather or Weather()
        self._random = random.Random(self._weather.seed)
        self._limited, self._together = slots > 0, together
        self._heap: list[tuple[float, int, int, object, object]] = []
        self._count = 0
        self._trace: list[Launch] | None = [] if trace else None
        self.tasks = 0
        self._devices = build_devices(loads, self._weather, slots, streams)
        self._runs = [build_run(i, spec, loads, self._devices) for i, spec in enumerate(streams)]

    def run(self, until_s: float) -> Outcome:
        """Simulate up to this time; call once."""
        for run in self._runs:
            self._push(run.spec.start_s, _SUBMIT, (run,), None)
            if run.spec.stop_s < until_s:
                self._push(run.spec.stop_s, _STOP, run, None)
        for name, at in self._weather.fails.items():
            self._push(at, _FAIL, self._devices[name, 0], None)
        heap, pop = self._heap, heapq.heappop
        now = 0.0
        while heap:
            at, _, code, a, b = pop(heap)
            if at > until_s:
                break
            now = at
            if code == _DONE:
                self._done(now, a, b)  # type: ignore[arg-type]
            elif code == _ARRIVE:
                self._arrive(now, a, b)  # type: ignore[arg-type]
            elif code == _SUBMIT:
                self._submit(now, a)  # type: ignore[arg-type]
            elif code == _STOP:
                self._stop(a, "closed")  # type: ignore[arg-type]
            else:
                self._fail(a)  # type: ignore[arg-type]
        busy = {d.name: d.chip.busy_s for d in self._devices.values()}
        return Outcome(
            [r.outcome for r in self._runs], busy, min(until_s, now) if not heap else until_s, self.tasks, self._trace
        )

    def _push(self, at: float, code: int, a: object, b: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, code, a, b))

    def _submit(self, now: float, runs: Sequence[Run]) -> None:
        """Admit what may come now; chunks that follow those of one batch come together, as these left."""
        if len(runs) == 1:
            for flow in self._admit(now, runs[0]):
                self._arrive(now, runs[0].device[0], (flow,))
            return
        coming: dict[SimDevice, list[Flow]] = {}
        for run in runs:
            coming.setdefault(run.device[0], []).extend(self._admit(now, run))
        for device, flows in coming.items():
            self._arrive(now, device, flows)

    def _admit(self, now: float, run: Run) -> Iterator[Flow]:
        """Yield the chunks whose time has come, as far as there are credits."""
        spec = run.spec
        while not run.gone and run.flying < run.credit and (not spec.chunks or run.chunk < spec.chunks):
            due = run.due_s(run.chunk, now)
            if due > now + 1e-12:
                if run.scheduled_s != due:
                    run.scheduled_s = due
                    self._push(due, _SUBMIT, (run,), None)
                return
            if not spec.interval_s:
                due = now  # a slot that was missed is not waited for: a chunk is asked for when it can come in
            flow = Flow(run, run.chunk, due, now)
            run.chunk += 1
            run.flying += 1
            run.outcome.submitted.append(due)
            yield flow

    def _arrive(self, now: float, device: SimDevice, flows: Sequence[Flow]) -> None:
        for flow in flows:
            if flow.run.gone:
                continue
            flow.key = device.chip.arrived
            device.chip.arrived += 1
            self._enqueue(now, device, flow)
            if not self._together and not device.busy:
                self._dispatch(now, device)
        if not device.busy:
            self._dispatch(now, device)

    def _enqueue(self, now: float, device: SimDevice, flow: Flow) -> None:
        run, at = flow.run, flow.at
        flow.ready = now
        before = run.waits[at]
        if before is None or run.passed[before] >= flow.chunk - 1:
            self._make_ready(device, flow)
        else:
            run.blocked.setdefault((before, flow.chunk - 1), []).append(flow)

    def _make_ready(self, device: SimDevice, flow: Flow) -> None:
        run, at = flow.run, flow.at
        device.flows[flow.key] = flow
        deadline = flow.due + run.pace_s
        task = Waiting(
            flow.key,
            run.kind[at],
            flow.ready,
            flow.due,
            deadline,
            run.id,
            flow.chunk,
            run.progress[at],
            run.remaining[at],
            at > 0,
            run.served,
            run.ahead[at],
        )
        device.ready.append(task)
        if device.patience is not None and at == 0:
            device.hear_deadline(task)

    def _choice(self, device: SimDevice) -> list[Waiting]:
        """Chunks that hold a slot, and as many others as slots are free, in order of arrival."""
        ready, flows = device.ready, device.flows
        new = [w.key for w in ready if not flows[w.key].held]
        free = device.chip.free
        if len(new) <= free:
            return ready
        late = set(sorted(new)[free:])
        return [w for w in ready if w.key not in late]

    def _dispatch(self, now: float, device: SimDevice) -> None:
        while device.ready and not (device.chip.dead or device.busy):
            ready = self._choice(device) if self._limited else device.ready
            if not ready:
                return
            decision = device.policy(max(now, device.free_s), ready, device.limits)
            for refusal in decision.refuse:
                self._refuse(now, device, refusal.key, refusal.reason)
            if decision.run:
                self._launch(now, device, decision.run)
            elif not decision.refuse:
                return

    def _launch(self, now: float, device: SimDevice, keys: tuple[int, ...]) -> None:
        n = len(keys)
        batch = [device.flows.pop(k) for k in keys]
        ready = device.ready
        if n == len(ready):
            ready.clear()
        elif n == 1:
            key = keys[0]
            for i, w in enumerate(ready):
                if w.key == key:
                    del ready[i]
                    break
        else:
            chosen = set(keys)
            device.ready = [w for w in ready if w.key not in chosen]
        first = batch[0]
        kind = first.run.kind[first.at]
        seconds = device.costs[kind][n] * device.slow
        if self._weather.noise:
            seconds *= max(0.2, 1.0 + self._random.gauss(0.0, self._weather.noise))
        if self._limited:
            for flow in batch:
                if not flow.held:
                    flow.held = True
                    device.chip.free -= 1
        begin = max(now + device.host[kind], device.free_s)
        device.free_s = begin + seconds
        device.queued += 1
        device.busy = device.queued > device.ahead
        self.tasks += n
        for flow in batch:
            flow.run.served += seconds / n
        if self._trace is not None:
            streams = tuple((f.run.spec.name, f.chunk) for f in batch)
            self._trace.append(Launch(device.name, begin, device.free_s, kind, first.at, streams))
        if device.prompt:
            self._pass(now, device, batch)
        if device.chip.shared:
            device.chip.start(now, device, batch, kind, seconds, self._ends_at)
        else:
            device.chip.busy_s += seconds
            self._ends_at(device.free_s, device, batch)

    def _ends_at(self, at: float, device: SimDevice, batch: list[Flow]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, _DONE, device, batch))

    def _pass(self, now: float, device: SimDevice, batch: Sequence[Flow]) -> None:
        """Let the chunks of a batch go on as far as this device is concerned."""
        for flow in batch:
            run, at = flow.run, flow.at
            run.passed[at] = flow.chunk
            if run.blocked:
                for other in run.blocked.pop((at, flow.chunk), ()):
                    self._make_ready(device, other)
            if run.gone:
                self._release(device, flow)
                continue
            flow.at = at + 1
            if at < run.last and run.device[at + 1].chip is device.chip:
                self._enqueue(now, run.device[at + 1], flow)
            else:
                self._release(device, flow)
                flow.leaves, flow.leaves_with = at, batch

    def _done(self, now: float, device: SimDevice, batch: list[Flow]) -> None:
        if device.chip.dead or (device.chip.shared and not device.chip.ends(now, device, batch, self._ends_at)):
            return
        if not device.prompt:
            self._pass(now, device, batch)
        leaving: dict[tuple[str, float], tuple[SimDevice, list[Flow]]] = {}
        finished: list[Run] = []
        for flow in batch:
            run, at = flow.run, flow.leaves
            if flow.leaves_with is not batch or run.gone:
                continue
            flow.leaves_with = None
            if at == run.last:
                run.outcome.done.append((flow.chunk, flow.due, now))
                run.flying -= 1
                finished.append(run)
            else:
                there, delay = run.device[at + 1], run.delay[at]
                leaving.setdefault((there.name, delay), (there, []))[1].append(flow)
        if finished:
            # The device goes on with what it has; credits come back through the host.
            self._push(now + _RETURN_S, _SUBMIT, finished, None)
        device.queued -= 1
        device.free_s = now if device.chip.shared else device.free_s
        device.busy = device.queued > device.ahead
        for (_, delay), (there, flows) in leaving.items():
            if delay:
                more_s = (len(flows) - 1) * flows[0].run.row_s
                self._push(now + delay + more_s, _ARRIVE, there, flows)
            else:
                self._arrive(now, there, flows)
        for lane in device.chip.lanes:
            if not lane.busy:
                self._dispatch(now, lane)

    def _release(self, device: SimDevice, flow: Flow) -> None:
        if flow.held:
            flow.held = False
            device.chip.free += 1

    def _refuse(self, now: float, device: SimDevice, key: int, reason: str) -> None:
        flow = device.flows.pop(key)
        device.ready = [w for w in device.ready if w.key != key]
        self._release(device, flow)
        flow.run.outcome.refused.append((flow.chunk, now, reason))
        flow.run.flying -= 1
        self._push(now + _RETURN_S, _SUBMIT, (flow.run,), None)

    def _stop(self, run: Run, why: str) -> None:
        run.gone = run.outcome.ended = why
        run.blocked.clear()
        for device in dict.fromkeys(run.device):
            mine = [k for k, f in device.flows.items() if f.run is run]
            for key in mine:
                self._release(device, device.flows.pop(key))
            device.ready = [w for w in device.ready if w.stream != run.id]

    def _fail(self, device: SimDevice) -> None:
        device.chip.dead = True
        for run in self._runs:
            if any(d.chip is device.chip for d in run.device) and not run.gone:
                self._stop(run, "worker_died")
