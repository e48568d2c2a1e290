"""Real-time chunking through a whole policy: what a session remembers, what may be asked, and what comes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observations import observation

from stretto.core.errors import ConfigError, DeadlineError, ObservationError, SupersededError
from stretto.core.policy import PolicyReply, RequestOptions, Session
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.deploy.realtime import Realtime

OPTIONS = PolicyOptions(
    device="cpu",
    max_batch=4,
    degenerate="hold",
    threads=1,
    denoise_steps=4,
    rtc=("identity", "vjp", "hard"),
    control_hz=10.0,
    max_delay=6,
)


@pytest.fixture(scope="module")
def policy(tiny_checkpoint: Path) -> Iterator[Policy]:
    policy = load_policy(tiny_checkpoint, OPTIONS)
    policy.warm()
    yield policy
    policy.close()


@pytest.fixture
def session(policy: Policy) -> Iterator[Session]:
    session = policy.open_session("robot")
    yield session
    policy.close_session(session)


def ask(policy: Policy, session: Session, seed: int, **said: Any) -> PolicyReply:
    options = RequestOptions(seed=7, deadline_ms=60_000, **said)
    return policy.submit(observation(seed), options, session).result(30)


def test_the_handshake_says_what_is_offered(policy: Policy) -> None:
    assert policy.metadata["rt"] == {"rtc_modes": ["identity", "vjp", "hard"], "max_delay": 6, "control_hz": 10.0}


@pytest.mark.parametrize("mode", ["identity", "vjp", "hard"])
def test_what_the_session_remembers_equals_a_prefix_that_is_sent_bit_for_bit(
    policy: Policy, session: Session, mode: str
) -> None:
    first = ask(policy, session, 0).actions
    other = policy.open_session("other")
    remembered = ask(policy, session, 1, executed_steps=3, delay_steps=2, mode=mode)
    sent = ask(policy, other, 1, prefix_KD=first[3:], executed_steps=3, delay_steps=2, mode=mode)
    plain = ask(policy, other, 1)
    policy.close_session(other)
    np.testing.assert_array_equal(remembered.actions, sent.actions)
    assert np.abs(remembered.actions - plain.actions).max() > 1e-3
    assert (remembered.prefix_steps_honoured, plain.prefix_steps_honoured) == (2, 0)


@pytest.mark.parametrize("mode", ["identity", "vjp"])
def test_a_steered_chunk_begins_closer_to_the_one_before_it(policy: Policy, session: Session, mode: str) -> None:
    first = ask(policy, session, 0).actions
    plain, steered = ask(policy, session, 1, prefix_KD=first[3:], executed_steps=3, delay_steps=3, mode="none"), None
    steered = ask(policy, session, 1, prefix_KD=first[3:], executed_steps=3, delay_steps=3, mode=mode)
    gap = [np.abs(r.actions[:3] - first[3:6]).max() for r in (plain, steered)]
    assert gap[1] < 0.7 * gap[0]


def test_given_actions_come_back_as_they_were(policy: Policy, session: Session) -> None:
    first = ask(policy, session, 0).actions
    reply = ask(policy, session, 1, executed_steps=4, delay_steps=3, mode="hard")
    np.testing.assert_allclose(reply.actions[:3], first[4:7], rtol=0, atol=1e-5)
    assert np.abs(reply.actions[3:6] - first[7:]).max() > 1e-3


def test_many_chunks_in_a_row_are_indexed_by_what_was_executed(policy: Policy, session: Session) -> None:
    chunk = ask(policy, session, 0).actions
    for i in range(1, 5):
        new = ask(policy, session, i, executed_steps=i, delay_steps=2, mode="hard").actions
        np.testing.assert_allclose(new[:2], chunk[i : i + 2], rtol=0, atol=1e-5)
        chunk = new


def test_the_first_mode_that_is_offered_is_taken_where_none_is_named(policy: Policy, session: Session) -> None:
    first = ask(policy, session, 0).actions
    unnamed = ask(policy, session, 1, prefix_KD=first[2:], delay_steps=2)
    named = ask(policy, session, 1, prefix_KD=first[2:], delay_steps=2, mode="identity")
    np.testing.assert_array_equal(unnamed.actions, named.actions)


def test_robots_of_different_modes_and_delays_share_a_batch(policy: Policy) -> None:
    sessions = [policy.open_session(f"r{i}") for i in range(4)]
    modes = ("none", "identity", "vjp", "hard")
    first = ask(policy, sessions[0], 0).actions
    wishes: list[dict[str, Any]] = [
        {"prefix_KD": first[i:], "delay_steps": i, "mode": mode} if i else {} for i, mode in enumerate(modes)
    ]
    alone = [ask(policy, s, 1, **wish) for s, wish in zip(sessions, wishes, strict=True)]
    options = [RequestOptions(seed=7, **wish) for wish in wishes]
    asked = [policy.submit(observation(1), o, s) for o, s in zip(options, sessions, strict=True)]
    together = [future.result(30) for future in asked]
    for one, all_ in zip(alone, together, strict=True):
        np.testing.assert_allclose(all_.actions, one.actions, rtol=0, atol=1e-4)
    assert max(r.batch_size for r in together) > 1
    for s in sessions:
        policy.close_session(s)


def test_a_new_episode_forgets_the_last_chunk(policy: Policy, session: Session) -> None:
    ask(policy, session, 0)
    with pytest.raises(ObservationError, match=r"rt\.executed_steps: got 1, expected a chunk in this session"):
        ask(policy, session, 1, executed_steps=1, delay_steps=1, reset=True)
    reply = ask(policy, session, 1)
    assert ask(policy, session, 2, executed_steps=1, delay_steps=1).prefix_steps_honoured == 1
    assert ask(policy, session, 2, prefix_KD=reply.actions, delay_steps=1, reset=True).prefix_steps_honoured == 1


def test_a_robot_that_reconnects_in_mid_chunk_sends_its_prefix(policy: Policy, session: Session) -> None:
    chunk = ask(policy, session, 0).actions
    policy.close_session(session)
    again = policy.open_session("robot")
    with pytest.raises(ObservationError, match="Send the prefix"):
        ask(policy, again, 1, executed_steps=2, delay_steps=1)
    assert ask(policy, again, 1, prefix_KD=chunk[2:], executed_steps=2, delay_steps=1).prefix_steps_honoured == 1
    policy.close_session(again)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"executed_steps": 0, "delay_steps": 7}, "rt.delay_steps"),
        ({"executed_steps": 8, "delay_steps": 3}, "rt.delay_steps"),
        ({"executed_steps": 10, "delay_steps": 0}, "rt.executed_steps"),
        ({"executed_steps": 11, "delay_steps": 0}, "rt.executed_steps"),
        ({"executed_steps": 2}, "rt.delay_steps"),
        ({"delay_steps": 2}, "rt.prefix"),
        ({"prefix_KD": np.zeros((11, 7)), "delay_steps": 1}, "rt.prefix"),
        ({"prefix_KD": np.zeros((0, 7)), "delay_steps": 0}, "rt.prefix"),
        ({"prefix_KD": np.zeros((4, 8)), "delay_steps": 1}, "rt.prefix"),
        ({"prefix_KD": np.full((4, 7), np.nan), "delay_steps": 1}, "rt.prefix"),
        ({"prefix_KD": np.zeros((2, 7)), "delay_steps": 3}, "rt.delay_steps"),
        ({"mode": "soft", "executed_steps": 0, "delay_steps": 1}, "rt.mode"),
        ({"mode": "hard"}, "rt.delay_steps"),
    ],
)
def test_steps_that_cannot_be_are_refused_by_field_and_others_are_untouched(
    policy: Policy, session: Session, said: dict[str, Any], field: str
) -> None:
    before = ask(policy, session, 0).actions
    with pytest.raises(ObservationError) as caught:
        ask(policy, session, 1, **said)
    assert caught.value.field == field
    np.testing.assert_array_equal(ask(policy, session, 0).actions, before)


def test_a_mode_that_is_not_offered_is_refused(tiny_checkpoint: Path) -> None:
    policy = load_policy(tiny_checkpoint, replace(OPTIONS, rtc=("identity",)))
    session = policy.open_session("a")
    for mode in ("vjp", "hard"):
        with pytest.raises(ObservationError, match=r"rt\.mode.*identity"):
            policy.submit(observation(0), RequestOptions(mode=mode, executed_steps=0, delay_steps=1), session)
    policy.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"control_hz": 0.0}, "control_hz"), ({"control_hz": float("nan")}, "control_hz"), ({"max_delay": 11}, "max_delay")],
)
def test_rates_and_delays_out_of_range_are_refused_at_load(tiny_checkpoint: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(tiny_checkpoint, replace(OPTIONS, **change))
    assert caught.value.field == field


def test_a_checkpoint_that_was_trained_with_given_actions_offers_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rtc_training_max_delay": 4}))
    policy = load_policy(folder, PolicyOptions(device="cpu", degenerate="hold"))
    assert policy.metadata["rt"] == {"rtc_modes": ["hard", "identity"], "max_delay": 4}
    policy.close()
    (folder / "config.json").write_text(json.dumps(config | {"rtc_training_max_delay": 10}))
    with pytest.raises(ConfigError, match="rtc_training_max_delay"):
        load_policy(folder, PolicyOptions(device="cpu", degenerate="hold"))


def test_relative_actions_are_moved_to_the_state_of_the_new_observation() -> None:
    realtime = Realtime(("identity",), horizon=4, width=2, robot_width=2)
    chunk = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    wish = realtime.read(RequestOptions(executed_steps=1, delay_steps=2), chunk)
    state = np.array([1.5, 0.0])
    names = dict.fromkeys(("rtc_target", "rtc_weights"))
    target = realtime.inputs(wish, lambda prefix: prefix - state, names)["rtc_target"]
    np.testing.assert_allclose(target[:3, 0] + state[0], chunk[1:, 0])
    # What lies beyond the chunk repeats its last action rather than the mean pose.
    assert target[3, 0] == target[2, 0]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({"deadline_ms": 250.0, "executed_steps": 1, "delay_steps": 1}, 0.25),
        ({"executed_steps": 4}, 0.6),
        ({"executed_steps": 4, "delay_steps": 2}, 0.2),
        ({"prefix_KD": np.zeros((3, 7)), "delay_steps": 5}, 0.3),
        ({}, float("inf")),
    ],
)
def test_a_deadline_follows_from_the_steps_that_are_left(said: dict[str, Any], seconds: float) -> None:
    realtime = Realtime(("identity",), horizon=10, width=7, robot_width=7, control_hz=10.0)
    assert realtime.allowance_s(RequestOptions(**said)) == pytest.approx(seconds)
    assert Realtime((), 10, 7, 7).allowance_s(RequestOptions(executed_steps=4)) == float("inf")


def test_a_newer_observation_takes_the_place_of_one_that_waits(policy: Policy, session: Session) -> None:
    futures = [policy.submit(observation(i), RequestOptions(seed=i), session) for i in range(6)]
    last = futures[-1].result(30)
    errors = [error for future in futures[:-1] if (error := future.exception(30)) is not None]
    assert errors
    assert all(isinstance(error, SupersededError) and error.reason == "superseded" for error in errors)
    np.testing.assert_array_equal(last.actions, policy.infer(observation(5), RequestOptions(seed=5))["actions"])


def test_a_request_that_cannot_be_on_time_is_refused_with_the_reason_or_served_late(policy: Policy, session: Session) -> None:
    with pytest.raises(DeadlineError, match="deadline") as caught:
        policy.submit(observation(0), RequestOptions(deadline_ms=0.01), session).result(30)
    assert caught.value.reason == "deadline"
    late = policy.submit(observation(0), RequestOptions(deadline_ms=0.01, late=True, seed=7), session).result(30)
    assert late.late
    np.testing.assert_array_equal(late.actions, ask(policy, session, 0).actions)
    assert not ask(policy, session, 0).late


def test_costs_are_measured_before_the_first_request(policy: Policy) -> None:
    assert set(policy.engine.costs) >= {("vision",), ("prefix",), ("denoise",)}
    assert all(len(seconds) == OPTIONS.max_batch and min(seconds) > 0 for seconds in policy.engine.costs.values())
