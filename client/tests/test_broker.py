"""The broker on a simulated clock: every tick one command, whatever the delay does. Then once on real threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from stretto_client.broker import RealtimeBroker
from stretto_client.errors import ClockError, FieldError, ReplyError, ServerError, StarvedError
from stretto_client.options import Options

H, D, HZ, SPEED = 16, 2, 10.0, 0.05
T = 1 / HZ


class Sim(Executor):
    """A clock and an executor in one: work is done when it is handed in, and its result arrives `delay_s` later."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self.now_s, self.delay_s = 100.0, delay_s
        self.pending: list[tuple[float, Future[Any], Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        sim = self

        class Awaited(Future[Any]):
            def exception(self, timeout: float | None = None) -> BaseException | None:
                if not self.done():
                    sim.advance(max(0.0, next(due for due, f, _ in sim.pending if f is self) - sim.now_s))
                return super().exception(timeout)

        future: Future[Any] = Awaited()
        try:
            result = fn(*args, **kwargs)
            deliver: Callable[[], None] = lambda: future.set_result(result)  # noqa: E731
        except Exception as e:
            error = e
            deliver = lambda: future.set_exception(error)  # noqa: E731
        self.pending.append((self.now_s + self.delay_s(), future, deliver))
        self.pending.sort(key=lambda p: p[0])
        return future

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.pending and self.pending[0][0] <= end_s + 1e-12:
            due_s, _, deliver = self.pending.pop(0)
            self.now_s = max(self.now_s, due_s)
            deliver()
        self.now_s = max(self.now_s, end_s)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.pending.clear()


class Wanderer:
    """Each chunk goes a random way from where the robot is; given a prefix, it first keeps to the promised part of it."""

    accepts_options = True

    def __init__(self, honours_prefix: bool = True) -> None:
        self.rng, self.honours_prefix = np.random.default_rng(0), honours_prefix
        self.asked: list[Options | None] = []
        self.resets, self.inner = 0, 0.0

    def reset(self) -> None:
        self.resets += 1

    def infer(self, obs: dict[str, Any], options: Options | None = None) -> dict[str, Any]:
        self.asked.append(options)
        way = self.rng.uniform(-SPEED, SPEED, D)
        actions = obs["position"] + way * np.arange(1, H + 1)[:, None]
        if options is not None and options.prefix is not None and self.honours_prefix:
            d = options.delay_steps or 0
            actions[:d] = options.prefix[:d]
            actions[d:] = (actions[d - 1] if d else obs["position"]) + way * np.arange(1, H - d + 1)[:, None]
        self.inner = max(self.inner, float(np.abs(np.diff(actions, axis=0)).max()))
        return {"actions": actions, "row": obs["step"] + np.arange(H), "policy_timing": {"infer_ms": 1.0}, "name": "w"}


def drive(broker: RealtimeBroker, sim: Sim, ticks: int) -> list[dict[str, Any]]:
    """Run the control loop; the robot reaches each commanded position at once."""
    position, step, commands = np.zeros(D), 0, []
    for _ in range(ticks):
        command = broker.infer({"position": position, "step": step})
        commands.append(command)
        position = command["actions"]
        step += not command["broker"]["starved"]
        sim.advance(T)
    return commands


def largest_step(commands: list[dict[str, Any]]) -> float:
    return float(np.abs(np.diff([np.zeros(D)] + [c["actions"] for c in commands], axis=0)).max())


def make(policy: Any, sim: Sim, **kwargs: Any) -> RealtimeBroker:
    return RealtimeBroker(policy, HZ, clock=sim, executor=sim, **kwargs)


def jittered(seed: int, low: float, high: float, spikes: float = 0.0) -> Callable[[], float]:
    rng = np.random.default_rng(seed)
    return lambda: float(rng.uniform(low, high) * (8 if rng.random() < spikes else 1)) * T


@pytest.mark.parametrize("seed", range(5))
def test_every_control_step_gets_its_own_command_and_no_step_is_larger_than_inside_a_chunk(seed: int) -> None:
    sim, policy = Sim(jittered(seed, 0.3, 4.8)), Wanderer()
    broker = make(policy, sim, min_delay_steps=5)
    commands = drive(broker, sim, 400)
    assert [c["broker"]["step"] for c in commands] == list(range(400))
    # The row of the chunk is the one that its policy meant for this very step.
    assert [int(c["row"]) for c in commands] == list(range(400))
    assert broker.stats.starved == broker.stats.late == 0
    assert broker.stats.chunks > 30
    assert largest_step(commands) <= policy.inner + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_with_spikes_of_the_delay_the_robot_waits_but_never_skips_repeats_or_jumps(seed: int) -> None:
    sim, policy = Sim(jittered(seed, 0.3, 3.0, spikes=0.15)), Wanderer()
    broker = make(policy, sim, max_failures=50)
    commands = drive(broker, sim, 400)
    executed = [c for c in commands if not c["broker"]["starved"]]
    assert [c["broker"]["step"] for c in executed] == list(range(len(executed)))
    assert [int(c["row"]) for c in executed] == list(range(len(executed)))
    assert [c["broker"]["tick"] for c in commands] == list(range(400))
    assert broker.stats.late > 0
    assert len(executed) > 200
    assert largest_step(commands) <= policy.inner + 1e-12


def test_naive_switching_jumps_where_real_time_chunking_does_not() -> None:
    sim, policy = Sim(lambda: 3.5 * T), Wanderer()
    commands = drive(make(policy, sim, mode="naive"), sim, 200)
    assert [int(c["row"]) for c in commands] == list(range(200))
    assert largest_step(commands) > 1.5 * policy.inner


def test_the_policy_is_told_the_rest_of_the_plan_by_absolute_step() -> None:
    sim, policy = Sim(lambda: 2.5 * T), Wanderer()
    broker = make(policy, sim, execution_horizon=6, min_delay_steps=3)
    commands = drive(broker, sim, 40)
    assert policy.asked[0] is None
    at = 0
    for options in policy.asked[1:5]:
        assert options is not None
        assert options.executed_steps == 6
        assert options.delay_steps == 3
        assert options.mode == "identity"
        assert options.prefix is not None
        assert len(options.prefix) == H - 6
        at += 6
        np.testing.assert_array_equal(options.prefix[:3], [c["actions"] for c in commands[at : at + 3]])


def test_synchronous_mode_waits_and_executes_each_chunk_in_turn() -> None:
    sim, policy = Sim(lambda: 5 * T), Wanderer()
    commands = drive(make(policy, sim, mode="sync", execution_horizon=4), sim, 12)
    assert [int(c["row"]) for c in commands] == list(range(12))
    assert len(policy.asked) == 3


def test_temporal_ensembling_weighs_the_oldest_chunk_most() -> None:
    class Counter:
        n = -1.0

        def reset(self) -> None: ...

        def infer(self, obs: Any) -> dict[str, Any]:
            self.n += 1
            return {"actions": np.full((4, 1), self.n)}

    sim = Sim(lambda: 0.5 * T)
    broker = make(Counter(), sim, mode="ensemble", ensemble_m=0.5)
    got = []
    for _ in range(4):
        got.append(float(broker.infer({})["actions"][0]))
        sim.advance(T)
    w = np.exp(-0.5 * np.arange(3))
    # The observation of a tick reaches its own step only from the next tick on.
    np.testing.assert_allclose(got, [0, 0, w[1] / (w[0] + w[1]), (w[1] + 2 * w[2]) / w.sum()], atol=1e-6)


@pytest.mark.parametrize(
    ("relative", "policy", "expected"),
    [
        (False, "hold", [3, 3, 3]),
        (False, "decelerate", [3.5, 3.75, 3.875]),
        (True, "hold", [0, 0, 0]),
        (True, "decelerate", [1.5, 0.75, 0.375]),
    ],
)
def test_a_robot_without_actions_is_held_or_slowed_and_its_gripper_kept(relative: bool, policy: Any, expected: Any) -> None:
    class Once:
        def reset(self) -> None: ...

        def infer(self, obs: Any) -> dict[str, Any]:
            return {"actions": np.array([[1.0, 9.0], [2.0, 9.0], [3.0, 7.0]])}

    delays = iter([0.0, 1000.0])
    sim = Sim(lambda: next(delays))
    broker = make(Once(), sim, mode="naive", starvation=policy, relative_actions=relative, held_dims=[1])
    got = []
    for _ in range(6):
        got.append(broker.infer({})["actions"])
        sim.advance(T)
    np.testing.assert_allclose([g[0] for g in got], [1, 2, 3, *expected])
    np.testing.assert_allclose([g[1] for g in got], [9, 9, 7, 7, 7, 7])
    assert broker.stats.starved == 3


def test_after_standing_still_no_action_is_skipped() -> None:
    delays = iter([0.0, 40 * T, T])
    sim, policy = Sim(lambda: next(delays, T)), Wanderer()
    commands = drive(make(policy, sim, execution_horizon=H, mode="naive"), sim, 60)
    executed = [c for c in commands if not c["broker"]["starved"]]
    assert len(executed) < 40
    assert [int(c["row"]) for c in executed] == list(range(len(executed)))


@pytest.mark.parametrize("relative", [True, False])
def test_a_late_chunk_is_taken_over_by_a_robot_that_stands_still_if_its_actions_are_relative(relative: bool) -> None:
    delays = iter([*[2.0] * 12, 9.0, *[2.0] * 200])
    sim, policy = Sim(lambda: next(delays) * T), Wanderer()
    broker = make(policy, sim, execution_horizon=8, relative_actions=relative)
    commands = drive(broker, sim, 200)
    rows = [int(c["row"]) for c in commands if not c["broker"]["starved"]]
    assert rows == list(range(len(rows)))
    assert broker.stats.late == (0 if relative else 1)
    assert broker.stats.starved > 0


def test_requests_say_that_a_late_answer_is_better_than_none() -> None:
    sim, policy = Sim(lambda: 1.5 * T), Wanderer()
    drive(make(policy, sim), sim, 40)
    told = [options for options in policy.asked if options is not None and options.deadline_ms]
    assert len(told) > 3
    assert all(options.late for options in told)


def test_cameras_may_be_slower_than_control() -> None:
    sim, policy = Sim(lambda: 1.5 * T), Wanderer()
    broker, step, rows = make(policy, sim, execution_horizon=4), 0, []
    for tick in range(40):
        command = broker.infer({"position": np.zeros(D), "step": step} if tick % 3 == 0 else None)
        rows.append(command["row"])
        step += not command["broker"]["starved"]
        sim.advance(T)
    # A row belongs to the control step of its own picture, however late the picture was used.
    assert rows == list(range(40))
    assert broker.stats.starved == 0


def test_an_episode_cannot_begin_without_an_observation() -> None:
    with pytest.raises(StarvedError, match="no action"):
        make(Wanderer(), Sim(lambda: T)).infer(None)


def test_starvation_can_be_an_error() -> None:
    delays = iter([0.0, 1000.0])
    sim = Sim(lambda: next(delays))
    broker = make(Wanderer(), sim, starvation="raise")
    with pytest.raises(StarvedError, match="control step 16"):
        drive(broker, sim, H + 1)


def test_a_reset_discards_the_chunk_that_is_under_way() -> None:
    sim, policy = Sim(lambda: 3 * T), Wanderer()
    broker = make(policy, sim)
    drive(broker, sim, 9)
    broker.reset()
    commands = drive(broker, sim, 4)
    assert broker.stats.abandoned == 1
    assert policy.resets == 1
    assert [int(c["row"]) for c in commands] == [0, 1, 2, 3]
    assert [c["broker"]["step"] for c in commands] == [0, 1, 2, 3]


class Faulty(Wanderer):
    def __init__(self, *faults: Exception | None) -> None:
        super().__init__()
        self.faults = list(faults)

    def infer(self, obs: dict[str, Any], options: Options | None = None) -> dict[str, Any]:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return super().infer(obs, options)


def test_a_refused_request_is_asked_again_while_the_robot_goes_on() -> None:
    sim = Sim(lambda: T)
    broker = make(Faulty(None, ServerError("refused (deadline): too late")), sim)
    commands = drive(broker, sim, 30)
    assert broker.stats.failures == 1
    assert broker.stats.starved == 0
    assert [int(c["row"]) for c in commands] == list(range(30))


def test_a_bad_observation_reaches_the_caller() -> None:
    sim = Sim(lambda: T)
    with pytest.raises(ServerError, match="missing image"):
        drive(make(Faulty(None, ServerError("missing image")), sim), sim, 20)
    with pytest.raises(KeyError):
        drive(make(Faulty(KeyError("state")), sim), sim, 1)


@pytest.mark.parametrize(
    "actions", [None, [[0.0]], np.zeros(3), np.full((H, D), np.nan), np.zeros((0, 2)), np.zeros((H, D), "U1")]
)
def test_a_chunk_that_cannot_be_executed_is_refused(actions: Any) -> None:
    class Bad(Wanderer):
        def infer(self, obs: Any, options: Options | None = None) -> dict[str, Any]:
            return {"actions": actions}

    sim = Sim(lambda: T)
    with pytest.raises(ReplyError, match="actions"):
        make(Bad(), sim).infer({})


@pytest.mark.parametrize("now_s", [99.0, float("nan")])
def test_a_clock_that_goes_backwards_is_an_error(now_s: float) -> None:
    sim = Sim(lambda: T)
    broker = make(Wanderer(), sim)
    drive(broker, sim, 2)
    sim.now_s = now_s
    with pytest.raises(ClockError, match="monotonic"):
        broker.infer({"position": np.zeros(D), "step": 2})


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("control_hz", {"control_hz": 0}),
        ("control_hz", {"control_hz": -1.0}),
        ("control_hz", {"control_hz": float("nan")}),
        ("control_hz", {"control_hz": True}),
        ("execution_horizon", {"execution_horizon": 0}),
        ("execution_horizon", {"execution_horizon": -2}),
        ("execution_horizon", {"execution_horizon": float("nan")}),
        ("min_delay_steps", {"min_delay_steps": 0}),
        ("mode", {"mode": "magic"}),
        ("guidance", {"guidance": "none"}),
        ("starvation", {"starvation": "panic"}),
        ("held_dims", {"held_dims": [-1]}),
        ("max_failures", {"max_failures": 0}),
        ("ensemble_m", {"ensemble_m": float("nan")}),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as e:
        RealtimeBroker(Wanderer(), **{"control_hz": HZ, **kwargs})
    assert e.value.field == field


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [
        ("execution_horizon", {"execution_horizon": H + 1}),
        ("min_delay_steps", {"min_delay_steps": H}),
        ("held_dims", {"held_dims": [D]}),
    ],
)
def test_a_setting_beyond_the_chunk_is_refused_when_the_chunk_is_known(field: str, kwargs: dict[str, Any]) -> None:
    sim = Sim(lambda: T)
    with pytest.raises(FieldError) as e:
        drive(make(Wanderer(), sim, **kwargs), sim, 1)
    assert e.value.field == field


def test_a_policy_without_options_cannot_do_real_time_chunking() -> None:
    class Plain(Wanderer):
        accepts_options = False

    with pytest.raises(FieldError, match="takes no prefix"):
        RealtimeBroker(Plain(), HZ)


def test_on_real_threads_the_robot_never_waits_after_the_first_chunk() -> None:
    class Slow(Wanderer):
        def infer(self, obs: dict[str, Any], options: Options | None = None) -> dict[str, Any]:
            time.sleep(0.1)
            return super().infer(obs, options)

    broker = RealtimeBroker(Slow(), 50.0)
    waits, position = [], np.zeros(D)
    for k in range(40):
        began = time.monotonic()
        position = broker.infer({"position": position, "step": k})["actions"]
        waits.append(time.monotonic() - began)
        time.sleep(0.02)
    broker.close()
    assert waits[0] >= 0.1
    assert max(waits[1:]) < 0.1
    assert broker.stats.chunks >= 3
