"""Real-time chunking against a reference written separately in upward time, and against LeRobot's own outputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from stretto.control.delay import published_delay, slack_s
from stretto.control.rtc import (
    SCHEDULES,
    guidance_weight,
    guided_velocity,
    hold_prefix,
    lerobot_weights,
    pad_prefix,
    paper_weights,
    plan_row,
    ramp,
)
from stretto.core.errors import FieldError

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
H, A = 10, 4


def reference_weight(schedule: str, i: int, d: int, s: int, horizon: int) -> float:
    """One weight, straight from the paper's case distinction."""
    if i < d:
        return 1.0
    if i >= horizon - s:
        return 0.0
    c = (horizon - s - i) / (horizon - s - d + 1)
    return {"exp": c * (math.e**c - 1) / (math.e - 1), "linear": c, "ones": 1.0, "zeros": 0.0}[schedule]


def reference_sample(x: Any, field: Any, jacobian: Any, target: Any, weights: Any, cap: float, steps: int) -> Any:
    """Guided Euler from noise to data in upward time, one action entry after the other; `field(x, tau)` points to the data."""
    for k in range(steps):
        tau = k / steps
        v = field(x, tau)
        x1 = x + (1 - tau) * v
        e = np.array([[(target[i, j] - x1[i, j]) * weights[i] for j in range(x.shape[1])] for i in range(len(x))])
        g = e if jacobian is None else jacobian(tau, e)
        if tau == 0:
            w = cap
        else:
            r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
            w = min(cap, (1 - tau) / (tau * r2))
        x = x + (v + w * g) / steps
    return x


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_equal_the_paper_s_case_distinction(schedule: Any) -> None:
    for d in range(H + 1):
        for s in range(H - d + 1):
            want = [reference_weight(schedule, i, d, s, H) for i in range(H)]
            np.testing.assert_allclose(paper_weights(schedule, delay=d, executed=s, horizon=H), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("mode", ["identity", "vjp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("d", "s"), [(0, 4), (2, 3), (5, 5), (3, 0)])
def test_guided_sampling_downwards_equals_the_reference_upwards(mode: str, schedule: Any, d: int, s: int) -> None:
    rng = np.random.default_rng(d + 10 * s)
    matrix, bias = 0.4 * rng.normal(size=(A, A)), rng.normal(size=A)
    x0, target = rng.normal(size=(H, A)), rng.normal(size=(H, A))
    weights = paper_weights(schedule, delay=d, executed=s, horizon=H)
    up = lambda x, tau: np.tanh(x @ matrix) + tau * bias  # noqa: E731

    def transposed(tau: float, e: Any, x: Any) -> Any:
        """(d(x + (1 - tau) v) / dx)^T e, worked out by hand for the tanh field."""
        return e + (1 - tau) * ((e * (1 - np.tanh(x @ matrix) ** 2)) @ matrix.T)

    state = {"x": x0}

    def watched(x: Any, tau: float) -> Any:
        state["x"] = x
        return up(x, tau)

    jacobian = None if mode == "identity" else lambda tau, e: transposed(tau, e, state["x"])
    want = reference_sample(x0, watched, jacobian, target, weights, 5.0, 8)
    for direction in ("down", "up"):
        x = x0[None]
        for k in range(8):
            tau = k / 8
            t, sign = (tau, 1.0) if direction == "up" else (1.0 - tau, -1.0)
            vjp = None if mode == "identity" else lambda e, tau=tau, x=x: transposed(tau, e, x)
            v = guided_velocity(
                x,
                sign * up(x, tau),
                t,
                target_BHA=target[None],
                weights_BH=weights[None],
                cap=5.0,
                direction=direction,
                vjp=vjp,
            )
            x = x + sign * v / 8
        np.testing.assert_allclose(x[0], want, rtol=1e-10, atol=1e-12)


def test_a_batch_of_mixed_rows_equals_row_by_row() -> None:
    rng = np.random.default_rng(0)
    x, v, y = (rng.normal(size=(4, H, A)).astype(np.float32) for _ in range(3))
    w = np.stack([paper_weights("exp", delay=d, executed=s, horizon=H) for d, s in ((0, 10), (1, 2), (4, 4), (2, 8))]).astype(
        np.float32
    )
    whole = guided_velocity(x, v, 0.7, target_BHA=y, weights_BH=w, cap=5.0)
    for b in range(4):
        row = guided_velocity(x[b : b + 1], v[b : b + 1], 0.7, target_BHA=y[b : b + 1], weights_BH=w[b : b + 1], cap=5.0)
        np.testing.assert_array_equal(whole[b], row[0])


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("vjp", [None, lambda e: e + 7.0])
def test_zero_weights_leave_the_velocity_untouched_bit_for_bit(direction: Any, vjp: Any) -> None:
    v = np.array([[[-0.0, 1e-40], [-7.0, 3.0]]], np.float32)
    x = np.full_like(v, 1e30)
    got = guided_velocity(
        x, v, 0.3, target_BHA=x, weights_BH=np.zeros((1, 2), np.float32), cap=5.0, direction=direction, vjp=vjp
    )
    assert got.tobytes() == v.tobytes()
    assert plan_row(None, delay=0, executed=0, horizon=H, width=A).weights_H.max() == 0.0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.data())
def test_weights_fall_from_one_to_exactly_zero(schedule: Any, horizon: int, data: st.DataObject) -> None:
    d = data.draw(st.integers(0, horizon))
    s = data.draw(st.integers(0, horizon - d))
    w = paper_weights(schedule, delay=d, executed=s, horizon=horizon)
    assert (w[:d] == 1.0).all()
    assert (w[horizon - s :] == 0.0).all()
    assert (np.diff(w) <= 0).all()


def test_the_guidance_weight_is_the_same_in_both_directions_and_capped_at_the_ends() -> None:
    for t in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert guidance_weight(t, 5.0, "up") == pytest.approx(guidance_weight(1 - t, 5.0, "down"))
    assert guidance_weight(0.0, 5.0, "up") == guidance_weight(1.0, 5.0, "up") == 5.0
    assert guidance_weight(0.5, 5.0) == 2.0


def test_weights_equal_those_of_lerobot() -> None:
    tensors = load_file(GOLDEN / "rtc.safetensors")
    entries = json.loads((GOLDEN / "rtc.json").read_text())["weights"]
    assert len(entries) == 36
    for e in entries:
        got = ramp(e["schedule"].lower(), e["start"], e["end"], e["total"])
        np.testing.assert_allclose(got, tensors[e["key"]], atol=2e-6, err_msg=str(e))


def test_guided_velocities_and_samples_equal_those_of_lerobot() -> None:
    tensors = load_file(GOLDEN / "rtc.safetensors")
    about = json.loads((GOLDEN / "rtc.json").read_text())
    matrix, bias, x = (tensors[f"linear/{n}"] for n in ("matrix", "bias", "x"))
    assert len(about["linear"]) == 15
    for e in about["linear"]:
        tail = tensors[f"linear/left_over/{e['left_over']}"]
        tail = tail if tail.ndim == 3 else tail[None].repeat(len(x), 0)
        # LeRobot pads with zeros in both directions, and guides the padded entries of an action too.
        target = np.zeros_like(x)
        target[:, : tail.shape[1], : tail.shape[2]] = tail
        w = lerobot_weights(
            e["schedule"].lower(),
            delay=e["delay"],
            execution_horizon=e["execution_horizon"],
            horizon=x.shape[1],
            tail=tail.shape[1],
        )
        args: dict[str, Any] = {"target_BHA": target, "weights_BH": np.tile(w, (len(x), 1)), "cap": e["max_guidance_weight"]}
        for i, t in enumerate(about["linear_times"]):
            got = guided_velocity(x, x @ matrix + np.float32(t) * bias, t, **args)
            np.testing.assert_allclose(got, tensors[f"{e['key']}/velocity"][i], atol=2e-5, err_msg=f"{e} at {t}")
        y, n = x, about["linear_euler_steps"]
        for k in range(n):
            t = 1.0 - k / n
            y = y - guided_velocity(y, y @ matrix + np.float32(t) * bias, t, **args) / n
        np.testing.assert_allclose(y, tensors[f"{e['key']}/sampled"], atol=5e-5, err_msg=str(e))


def test_a_hard_prefix_is_the_target_at_the_time_of_clean_data() -> None:
    x, y = np.zeros((3, 4, 2), np.float32), np.ones((3, 4, 2), np.float32)
    for direction, clean in (("down", 0.0), ("up", 1.0)):
        got, t_BH = hold_prefix(x, y, np.array([0, 2, 4]), 0.6, direction)  # type: ignore[arg-type]
        assert got[..., 0].sum(axis=1).tolist() == [0, 2, 4]
        assert [(row == np.float32(clean)).sum() for row in t_BH] == [0, 2, 4]


def test_the_padded_prefix_holds_the_last_real_action() -> None:
    row = plan_row(np.array([[1.0, 2.0], [3.0, 4.0]]), delay=1, executed=1, horizon=5, width=2)
    np.testing.assert_array_equal(row.target_HA, [[1, 2], [3, 4], [3, 4], [3, 4], [3, 4]])
    assert row.weights_H[0] == 1.0
    assert (row.weights_H[2:] == 0).all()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("delay", lambda: paper_weights("exp", delay=6, executed=5, horizon=10)),
        ("delay", lambda: paper_weights("exp", delay=-1, executed=5, horizon=10)),
        ("delay", lambda: paper_weights("exp", delay=float("nan"), executed=5, horizon=10)),  # type: ignore[arg-type]
        ("executed", lambda: paper_weights("exp", delay=0, executed=11, horizon=10)),
        ("horizon", lambda: paper_weights("exp", delay=0, executed=0, horizon=0)),
        ("schedule", lambda: ramp("cosine", 0, 1, 2)),  # type: ignore[arg-type]
        ("execution_horizon", lambda: lerobot_weights("exp", delay=0, execution_horizon=0, horizon=10)),
        ("delay", lambda: lerobot_weights("exp", delay=11, execution_horizon=5, horizon=10)),
        ("t", lambda: guidance_weight(float("nan"), 5.0)),
        ("cap", lambda: guidance_weight(0.5, float("inf"))),
        ("direction", lambda: guidance_weight(0.5, 5.0, "left")),  # type: ignore[arg-type]
        ("prefix", lambda: pad_prefix(np.zeros((0, 2)), 4)),
        ("prefix", lambda: pad_prefix(np.zeros((5, 2)), 4)),
        ("prefix", lambda: pad_prefix(np.full((2, 2), np.nan), 4)),
        ("prefix", lambda: plan_row(np.zeros((2, 3)), delay=1, executed=0, horizon=4, width=2)),
        ("delay", lambda: plan_row(np.zeros((2, 2)), delay=3, executed=0, horizon=4, width=2)),
        ("delay", lambda: plan_row(None, delay=1, executed=0, horizon=4, width=2)),
        ("delay", lambda: hold_prefix(np.zeros((1, 4, 2)), np.zeros((1, 4, 2)), np.array([5]), 0.5)),
        ("delay_steps", lambda: published_delay([2.0], 10.0, 16)),
        ("latencies_s", lambda: published_delay([], 10.0, 16)),
        ("control_hz", lambda: slack_s(unexecuted_steps=1, delay_steps=0, control_hz=0.0, service_s=0.1)),
        ("delay_steps", lambda: slack_s(unexecuted_steps=1, delay_steps=-1, control_hz=10.0, service_s=0.1)),
    ],
)
def test_steps_and_times_out_of_range_are_refused_by_name(field: str, call: Any) -> None:
    with pytest.raises(FieldError) as e:
        call()
    assert e.value.field == field


def test_slack_and_published_delay_follow_their_definitions() -> None:
    assert slack_s(unexecuted_steps=8, delay_steps=3, control_hz=10.0, service_s=0.1) == pytest.approx(0.4)
    assert published_delay([0.11] * 999 + [0.19], 10.0, 16) == 2
