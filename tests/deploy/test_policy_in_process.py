"""A whole policy in process: what a robot gets must not depend on who else is served, or on what ran before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from observations import observation
from safetensors.torch import load_file, save_file

from stretto.core.errors import CheckpointError, ConfigError, ObservationError, StreamClosedError
from stretto.core.policy import RequestOptions
from stretto.deploy.policy import PlanKind, Policy, PolicyOptions, load_policy, plan_for
from stretto.models.pi0 import tiny


@pytest.fixture(scope="module")
def options() -> PolicyOptions:
    return PolicyOptions(device="cpu", max_batch=4, degenerate="hold", threads=2)


@pytest.fixture(scope="module")
def policy(tiny_checkpoint: Path, options: PolicyOptions) -> Iterator[Policy]:
    policy = load_policy(tiny_checkpoint, options)
    policy.warm()
    yield policy
    policy.close()


def test_the_reply_is_a_chunk_in_robot_units_and_says_how_it_ran(policy: Policy) -> None:
    session = policy.open_session("a")
    reply = policy.submit(observation(0), RequestOptions(seed=1, request_id="r1"), session).result(20)
    assert reply.actions.shape == (policy.metadata["action_horizon"], policy.metadata["action_dim"])
    assert np.isfinite(reply.actions).all()
    assert (reply.mode, reply.request_id) == ("eager", "r1")
    assert {"preprocess", "vision", "prefix", "denoise", "postprocess"} == set(reply.stage_ms)
    policy.close_session(session)


def test_the_same_request_after_fifty_others_gives_the_same_bits(policy: Policy) -> None:
    first = policy.infer(observation(0), RequestOptions(seed=3))["actions"]
    for i in range(1, 51):
        policy.infer(observation(i, "put the cup on the plate" if i % 2 else "go"), RequestOptions(seed=i))
    np.testing.assert_array_equal(policy.infer(observation(0), RequestOptions(seed=3))["actions"], first)


def test_a_row_in_the_middle_of_a_batch_equals_the_row_alone(policy: Policy) -> None:
    alone = [policy.infer(observation(i), RequestOptions(seed=5))["actions"] for i in range(9)]
    together = policy.infer_batch([observation(i) for i in range(9)], RequestOptions(seed=5))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(b["actions"], a, rtol=0, atol=1e-5)


@pytest.mark.parametrize("plan", ["whole", "overlapped"])
def test_every_plan_gives_the_same_bits(tiny_checkpoint: Path, policy: Policy, plan: PlanKind) -> None:
    other = load_policy(tiny_checkpoint, PolicyOptions(device="cpu", max_batch=1, plan=plan, degenerate="hold", threads=1))
    other.warm()
    try:
        for i in range(3):
            a = other.infer(observation(i), RequestOptions(seed=i))["actions"]
            np.testing.assert_array_equal(policy.infer(observation(i), RequestOptions(seed=i))["actions"], a)
    finally:
        other.close()


@pytest.mark.parametrize("plan", ["overlapped", "auto", "whole"])
@pytest.mark.parametrize("sms", [(88,), (88, 0), (88, 44)])
def test_parts_for_lanes_that_the_device_cannot_have_are_refused(
    tiny_checkpoint: Path, plan: PlanKind, sms: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"lane_sms: got \(88.*on cpu, .*two lanes of a GPU"):
        load_policy(tiny_checkpoint, PolicyOptions(device="cpu", plan=plan, lane_sms=sms, degenerate="hold"))


@pytest.mark.parametrize(("max_batch", "launches"), [(1, 2), (2, 2 + tiny()[0].config.denoise_steps)])
def test_lanes_with_parts_are_launched_once_each_unless_robots_may_join_between_visits(max_batch: int, launches: int) -> None:
    options = PolicyOptions(plan="overlapped", max_batch=max_batch, lane_sms=(80, 52), mode="graph")
    plan = plan_for(tiny()[0].route, options, torch.device("cuda:0"))
    assert len(plan.classes["default"]) == launches
    assert plan.lane_sms == {"cuda:0": (80, 52)}


def test_a_seed_decides_the_noise_and_no_seed_moves_on(policy: Policy) -> None:
    a = policy.infer(observation(0), RequestOptions(seed=1))["actions"]
    assert not np.array_equal(policy.infer(observation(0), RequestOptions(seed=2))["actions"], a)
    b, c = policy.infer(observation(0))["actions"], policy.infer(observation(0))["actions"]
    assert not np.array_equal(b, c)


def test_a_bad_observation_fails_alone(policy: Policy) -> None:
    sessions = [policy.open_session(name) for name in "bcd"]
    bad = observation(1)
    del bad["observation.state"]
    asked = zip((observation(0), bad, observation(2)), sessions, strict=True)
    futures = [policy.submit(o, RequestOptions(seed=0), session) for o, session in asked]
    assert futures[0].result(20).actions.shape == futures[2].result(20).actions.shape
    with pytest.raises(ObservationError, match=r"observation\.state"):
        futures[1].result(20)
    for session in sessions:
        policy.close_session(session)


def test_a_priority_is_refused_rather_than_ignored(policy: Policy) -> None:
    with pytest.raises(ObservationError, match=r"rt\.priority: got 5, expected 0"):
        policy.infer(observation(0), RequestOptions(priority=5))


def test_a_session_that_left_gets_nothing_more(policy: Policy) -> None:
    session = policy.open_session("c")
    policy.close_session(session)
    policy.close_session(session)
    with pytest.raises(ObservationError, match="open session"):
        policy.submit(observation(0), RequestOptions(), session)


def test_work_queued_by_a_session_that_leaves_is_dropped(tiny_checkpoint: Path, options: PolicyOptions) -> None:
    policy = load_policy(tiny_checkpoint, replace(options, dispatch="fill_first"))
    session = policy.open_session("leaver")
    futures = [policy.submit(observation(i), RequestOptions(), session) for i in range(3)]
    while not all(policy.engine.queue_depth >= 3 or f.done() for f in futures):
        pass
    policy.close_session(session)
    policy.warm()
    for future in futures:
        with pytest.raises(StreamClosedError):
            future.result(20)
    policy.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_new_weights_give_what_a_policy_gives_that_was_loaded_with_them(
    tiny_checkpoint: Path, tmp_path: Path, options: PolicyOptions, device: str
) -> None:
    options = replace(options, device=device)
    folder = tmp_path / "trained"
    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    trained = {n: t + 0.01 for n, t in tensors.items() if "gemma_expert" in n and t.is_floating_point()}
    save_file(tensors | trained, folder / "model.safetensors")
    updated, loaded = load_policy(tiny_checkpoint, options), load_policy(folder, options)
    for policy in (updated, loaded):
        policy.warm()
    before = updated.infer(observation(0), RequestOptions(seed=1))
    with pytest.raises(CheckpointError, match="no such weight"):
        updated.update_weights([("a.stranger", torch.zeros(1))])
    updated.update_weights(trained.items())
    after, want = (p.infer(observation(0), RequestOptions(seed=1)) for p in (updated, loaded))
    assert (before["weight_version"], after["weight_version"]) == (0, 1)
    assert not np.array_equal(before["actions"], want["actions"])
    np.testing.assert_array_equal(after["actions"], want["actions"])
    for policy in (updated, loaded):
        policy.close()


def test_weights_do_not_change_under_a_request(tiny_checkpoint: Path, options: PolicyOptions) -> None:
    policy = load_policy(tiny_checkpoint, options)
    session = policy.open_session("asks")
    waiting = policy.submit(observation(0), RequestOptions(), session)
    while not policy.engine.in_flight:
        assert not waiting.done()
    with pytest.raises(ConfigError, match="update_weights: got 1 requests in flight"):
        policy.update_weights([])
    policy.warm()
    waiting.result(20)
    policy.close()


def test_denoise_steps_are_an_option(tiny_checkpoint: Path) -> None:
    policy = load_policy(tiny_checkpoint, PolicyOptions(device="cpu", denoise_steps=3, degenerate="hold"))
    assert sum(v.stage == "denoise" for v in policy.loaded.model.route.visits) == 3
    policy.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (PolicyOptions(device="cpu", mode="graph", degenerate="hold"), "mode"),
        (PolicyOptions(device="cpu", max_batch=0, degenerate="hold"), "max_batch"),
        (PolicyOptions(device="nonsense"), "device"),
        (PolicyOptions(device="cpu", dispatch="nobody", degenerate="hold"), "dispatch"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    tiny_checkpoint: Path, options: PolicyOptions, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(tiny_checkpoint, options)
    assert caught.value.field == field


def test_a_folder_of_another_layout_is_refused_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        load_policy(tmp_path, PolicyOptions(device="cpu"))
    with pytest.raises(CheckpointError, match="no such folder"):
        load_policy(tmp_path / "absent", PolicyOptions(device="cpu"))


def test_a_network_and_a_processor_for_different_cameras_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["chunk_size"] = 12
    config["stretto"]["vocab_size"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError), match=r"vocab|tokenizer"):
        load_policy(folder, PolicyOptions(device="cpu", degenerate="hold"))
