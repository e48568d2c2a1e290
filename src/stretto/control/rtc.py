"""Real-time chunking in NumPy: prefix weights, guidance weight and the guided velocity, for one row or for many.

While a chunk is computed, the robot executes d more actions of the previous one. The new chunk is steered so that its
first d actions equal those, and so that it leaves them gradually. This is the readable form of what the captured denoise
graph computes, and it prepares that graph's per-row inputs. All of it happens in the model's normalised action space.

Two conventions are in use. The paper counts `executed` steps s: the ramp ends at H - s, and its cap is 5. LeRobot's
`execution_horizon` is itself the step where the ramp ends, at most the length of the tail, and its cap is 10.

Two directions of flow time are in use. Going `up`, tau runs from 0 (noise) to 1 (data) and velocity points to the data;
going `down`, t = 1 - tau runs from 1 (noise) to 0 (data), velocity points to the noise, and all corrections change sign.

Shape legend: B rows, H actions of a chunk, A width of one action, K actions of the previous chunk that are left.
Source: Real-Time Execution of Action Chunking Flow Policies (arXiv 2506.07339), section 4 and algorithm 1; training-time
variant: arXiv 2512.05964; LeRobot 0.6.1, `policies/rtc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stretto.core.errors import FieldError

Array = npt.NDArray[np.floating]
Schedule = Literal["exp", "linear", "ones", "zeros"]
Direction = Literal["up", "down"]
SCHEDULES: tuple[Schedule, ...] = ("exp", "linear", "ones", "zeros")


def ramp(schedule: Schedule, start: int, end: int, horizon: int) -> Array:
    """Return [H] weights: 1 before `start`, falling until `end`, exactly 0 from there on.

    An end beyond the chunk is the chunk's; a start after the end is the end.

    Raises:
        FieldError: if a step is negative, or the schedule is unknown.
    """
    for name, steps, low in (("start", start, 0), ("end", end, 0), ("horizon", horizon, 1)):
        _check_steps(name, steps, low, None)
    end = min(end, horizon)
    start = min(start, end)
    i = np.arange(horizon)
    c = np.clip((end - i) / (end - start + 1), 0.0, 1.0)
    if schedule == "exp":
        falling = c * np.expm1(c) / math.expm1(1)
    elif schedule == "linear":
        falling = c
    elif schedule in ("ones", "zeros"):
        falling = np.full(horizon, 1.0 if schedule == "ones" else 0.0)
    else:
        raise FieldError("schedule", got=repr(schedule), expected=f"one of {SCHEDULES}")
    return np.where(i < start, 1.0, np.where(i < end, falling, 0.0))


def paper_weights(schedule: Schedule, *, delay: int, executed: int, horizon: int, tail: int | None = None) -> Array:
    """Return [H] weights in the paper's convention.

    Args:
        delay: d, actions that will be executed while the chunk is computed.
        executed: s, actions of the previous chunk executed before the observation, so that H - s are left.
        tail: K, if fewer actions are left than that.

    Raises:
        FieldError: if a number of steps is out of range; `delay` may reach no further than what is left.
    """
    _check_steps("horizon", horizon, 1, None)
    _check_steps("executed", executed, 0, horizon)
    left = horizon - executed
    if tail is not None:
        left = min(left, _check_steps("tail", tail, 1, horizon))
    return ramp(schedule, _check_steps("delay", delay, 0, left), left, horizon)


def lerobot_weights(schedule: Schedule, *, delay: int, execution_horizon: int, horizon: int, tail: int | None = None) -> Array:
    """Return [H] weights in LeRobot's convention: `execution_horizon` is where the ramp ends, at most the tail's length.

    Raises:
        FieldError: if a number of steps is out of range.
    """
    _check_steps("horizon", horizon, 1, None)
    _check_steps("execution_horizon", execution_horizon, 1, None)
    end = execution_horizon if tail is None else min(execution_horizon, _check_steps("tail", tail, 1, horizon))
    return ramp(schedule, _check_steps("delay", delay, 0, horizon), end, horizon)


def guidance_weight(t: float, cap: float, direction: Direction = "down") -> float:
    """Return how strongly a correction counts at flow time `t`: min(cap, ((1-tau)^2 + tau^2) / (tau (1-tau))).

    Raises:
        FieldError: if `t` is not in [0, 1] or `cap` is not a finite number of at least 0.
    """
    if not 0.0 <= t <= 1.0:
        raise FieldError("t", got=t, expected="a flow time in [0, 1]")
    if not 0.0 <= cap < math.inf:
        raise FieldError("cap", got=cap, expected="a finite number, 0 or more")
    tau = t if _check_direction(direction) == "up" else 1.0 - t
    below = tau * (1.0 - tau)
    return cap if below <= 0.0 else min(cap, (tau**2 + (1.0 - tau) ** 2) / below)


def guided_velocity(
    x_BHA: Array,
    velocity_BHA: Array,
    t: float,
    *,
    target_BHA: Array,
    weights_BH: Array,
    cap: float,
    direction: Direction = "down",
    vjp: Callable[[Array], Array] | None = None,
) -> Array:
    """Return the velocity steered towards the target.

    The predicted chunk is x1 = x + (1-tau) v. Its weighted error e = (target - x1) W is carried back to x by the transposed
    Jacobian of x1 and added with `guidance_weight`. Where the weights are zero the velocity is returned untouched, bit
    for bit: per action with the identity, per row with `vjp`.

    Args:
        vjp: maps e [B, H, A] to (dx1/dx)^T e. None takes the identity for the Jacobian (LeRobot's choice).

    Raises:
        FieldError: if shapes differ, or `t`, `cap` or a weight is out of range.
    """
    shape = x_BHA.shape
    for name, value in (("velocity", velocity_BHA), ("target", target_BHA)):
        if value.shape != shape:
            raise FieldError(name, got=value.shape, expected=f"the shape of x, {shape}")
    if len(shape) < 2 or weights_BH.shape != shape[:-1]:
        raise FieldError("weights", got=weights_BH.shape, expected=shape[:-1])
    # Written so that NaN fails too.
    if not ((weights_BH >= 0.0) & (weights_BH <= 1.0)).all():
        raise FieldError("weights", got="a value outside [0, 1]", expected="weights in [0, 1]")
    strength = guidance_weight(t, cap, direction)
    sign, to_go = (1.0, 1.0 - t) if direction == "up" else (-1.0, t)
    weights = weights_BH[..., None]
    error = (target_BHA - (x_BHA + sign * to_go * velocity_BHA)) * weights
    touched = weights > 0.0 if vjp is None else (weights > 0.0).any(axis=-2, keepdims=True)
    correction = error if vjp is None else vjp(error)
    return np.where(touched, velocity_BHA + sign * strength * correction, velocity_BHA).astype(velocity_BHA.dtype)


def hold_prefix(
    x_BHA: Array, target_BHA: Array, delay_B: npt.NDArray[np.integer], t: float, direction: Direction = "down"
) -> tuple[Array, Array]:
    """Clamp each row's first `delay` actions to the target, as a policy trained with prefixes expects (mode `hard`).

    Returns:
        x_BHA with the prefix in place, and t_BH: the flow time of each action, which is that of clean data in the prefix.

    Raises:
        FieldError: if shapes differ, or a delay lies outside the chunk.
    """
    if target_BHA.shape != x_BHA.shape or delay_B.shape != x_BHA.shape[:1]:
        raise FieldError("target", got=(target_BHA.shape, delay_B.shape), expected=(x_BHA.shape, x_BHA.shape[:1]))
    horizon = x_BHA.shape[1]
    if ((delay_B < 0) | (delay_B > horizon)).any():
        raise FieldError("delay", got=delay_B.tolist(), expected=f"0 to the chunk's {horizon}")
    inside_BH = np.arange(horizon) < delay_B[:, None]
    data_t = 1.0 if _check_direction(direction) == "up" else 0.0
    return np.where(inside_BH[..., None], target_BHA, x_BHA), np.where(inside_BH, data_t, t).astype(x_BHA.dtype)


def pad_prefix(prefix_KA: Array, horizon: int) -> Array:
    """Extend the tail of the previous chunk to [H, A] by holding its last action.

    Zeros would be the data set's mean pose, and pull the arm there at the seam.

    Raises:
        FieldError: if the tail is empty, longer than the chunk, or not finite.
    """
    if prefix_KA.ndim != 2 or not 1 <= prefix_KA.shape[0] <= horizon:
        raise FieldError("prefix", got=prefix_KA.shape, expected=f"[K, A] with K from 1 to the chunk's {horizon}")
    if not np.isfinite(prefix_KA).all():
        raise FieldError("prefix", got="NaN or infinity", expected="finite actions")
    return np.pad(prefix_KA, ((0, horizon - len(prefix_KA)), (0, 0)), mode="edge")


@dataclass(frozen=True)
class Guidance:
    """What one row of a batch brings into the denoise graph. Plain sampling is a row whose weights and delay are zero."""

    target_HA: Array
    weights_H: Array
    delay: int
    cap: float


def plan_row(
    prefix_KA: Array | None,
    *,
    delay: int,
    executed: int,
    horizon: int,
    width: int,
    schedule: Schedule = "exp",
    cap: float = 5.0,
) -> Guidance:
    """Make one row's guidance, in the paper's convention. No prefix gives the row of plain sampling.

    Raises:
        FieldError: if the prefix has another width or does not fit the chunk, or the delay is longer than the prefix.
    """
    guidance_weight(0.5, cap)
    if prefix_KA is None:
        _check_steps("delay", delay, 0, 0)
        return Guidance(np.zeros((horizon, width), np.float32), np.zeros(horizon, np.float32), 0, cap)
    target = pad_prefix(prefix_KA, horizon)
    if target.shape[1] != width:
        raise FieldError("prefix", got=f"width {target.shape[1]}", expected=f"width {width}")
    weights = paper_weights(schedule, delay=delay, executed=executed, horizon=horizon, tail=len(prefix_KA))
    return Guidance(target.astype(np.float32), weights.astype(np.float32), delay, cap)


def _check_steps(name: str, value: int, low: int, high: int | None) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or value < low
        or (high is not None and value > high)
    ):
        expected = f"an integer from {low}" + ("" if high is None else f" to {high}")
        raise FieldError(name, got=repr(value), expected=expected)
    return int(value)


def _check_direction(direction: Direction) -> Direction:
    if direction not in ("up", "down"):
        raise FieldError("direction", got=repr(direction), expected="'up' (0 noise to 1 data) or 'down' (1 noise to 0 data)")
    return direction
