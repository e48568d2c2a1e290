"""The client, the broker and the trace against a running server, and the trace on the roofline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.control.roofline import locate_files
from stretto.core.errors import DeadlineError, ObservationError
from stretto.core.policy import PolicyReply, RequestOptions, Session
from stretto.serve import ServerThread
from stretto_client import FieldError, PolicyClient, RealtimeBroker, ServerError, TracedPolicy

H, D, INFER_S = 12, 3, 0.03


class Reacher:
    """Moves towards the goal it is told, a fixed stride a step; keeps to the promised steps of a prefix."""

    def __init__(self) -> None:
        self.metadata: Mapping[str, object] = {
            "model": "reacher",
            "action_horizon": H,
            "action_dim": D,
            "observation": {"state": {"kind": "state", "shape": (D,), "dtype": "float64", "required": True}},
            "rt": {"rtc_modes": ["hard"], "max_delay": 6, "control_hz": 50.0},
        }
        self.ready, self.dead = False, None
        self.seen: list[RequestOptions] = []
        self.refuse_next = False
        self._turn = threading.Lock()

    def warm(self) -> None:
        self.ready = True

    def open_session(self, session_id: str, peer: str = "") -> Session:
        return Session(session_id, peer)

    def close_session(self, session: Session) -> None: ...

    def submit(self, observation: Mapping[str, Any], options: RequestOptions, session: Session) -> Future[PolicyReply]:
        future: Future[PolicyReply] = Future()
        threading.Thread(target=self._run, args=(observation, options, future), daemon=True).start()
        return future

    def _run(self, observation: Mapping[str, Any], options: RequestOptions, future: Future[PolicyReply]) -> None:
        with self._turn:
            self.seen.append(options)
            if "state" not in observation:
                future.set_exception(ObservationError("state", got="nothing", expected="[3]"))
                return
            if self.refuse_next:
                self.refuse_next = False
                future.set_exception(DeadlineError("deadline", "too late"))
                return
            time.sleep(INFER_S)
            actions = np.asarray(observation["state"]) + 0.01 * np.arange(1, H + 1)[:, None]
            if options.prefix_KD is not None:
                d = options.delay_steps or 0
                actions = options.prefix_KD[max(0, d - 1)] + 0.01 * np.arange(1 - d, H + 1 - d)[:, None]
                actions[:d] = options.prefix_KD[:d]
            future.set_result(PolicyReply(actions, INFER_S * 1e3, stage_ms={"denoise": INFER_S * 1e3}))

    def close(self) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[Reacher, int]]:
    policy = Reacher()
    with ServerThread(policy) as running:
        yield policy, running.port


def test_a_robot_runs_in_real_time_and_its_trace_stands_on_the_roofline(server: tuple[Reacher, int], tmp_path: Path) -> None:
    policy, port = server
    trace = tmp_path / "reacher.trace.jsonl"
    with (
        PolicyClient("127.0.0.1", port) as client,
        TracedPolicy(client, trace, control_hz=50, executed_steps=H // 2, extra={"mode": "rtc", "horizon": H}) as traced,
    ):
        broker = RealtimeBroker(traced, 50, guidance="hard", execution_horizon=5)
        state, commands = np.zeros(D), []
        for _ in range(40):
            command = broker.infer({"state": state})
            commands.append(command)
            state = command["actions"]
            time.sleep(0.02)
        broker.close()
        done = broker.stats.chunks
    steps = [c["broker"]["step"] for c in commands if not c["broker"]["starved"]]
    assert steps == list(range(len(steps)))
    assert done >= 3
    asked = [o for o in policy.seen if o.prefix_KD is not None]
    assert asked
    assert all(o.mode == "hard" and o.delay_steps is not None and o.deadline_ms is not None for o in asked)
    (point,) = locate_files([trace])
    assert point.name == "reacher.trace"
    assert point.requests >= done
    assert point.parts_ms_p50["inference"] >= INFER_S * 1e3 * 0.99
    assert 0 < point.parts_ms_p50["transfer"] < 1000
    assert point.stages_ms_p50["denoise"] == pytest.approx(INFER_S * 1e3)
    assert point.rtc is not None


def test_errors_and_refusals_come_back_by_their_words(server: tuple[Reacher, int], tmp_path: Path) -> None:
    policy, port = server
    trace = tmp_path / "t.jsonl"
    with PolicyClient("127.0.0.1", port) as client, TracedPolicy(client, trace, control_hz=50, executed_steps=5) as traced:
        with pytest.raises(ServerError, match="state") as bad:
            traced.infer({"wrong": np.zeros(D)})
        assert (bad.value.code, bad.value.reason) == ("bad_observation", None)
        policy.refuse_next = True
        with pytest.raises(ServerError) as late:
            traced.infer({"state": np.zeros(D)})
        assert (late.value.code, late.value.reason) == ("deadline", "deadline")
        assert traced.infer({"state": np.zeros(D)})["actions"].shape == (H, D)
        with pytest.raises(FieldError, match="obs"):
            client.infer({"state": np.zeros(1 << 25)})
    (point,) = locate_files([trace])
    assert point.miss_rate == pytest.approx(2 / 3)


def test_a_guidance_that_the_server_does_not_offer_is_refused_before_the_robot_moves(server: tuple[Reacher, int]) -> None:
    with PolicyClient("127.0.0.1", server[1]) as client, pytest.raises(FieldError, match="guidance"):
        RealtimeBroker(client, 50, guidance="vjp")
