"""Small frozen steps between the robot's units and the model's, in a group that undoes them in the reverse order.

Each step sees the state on the way in and the actions on the way out. The group remembers the state as it entered each
step, so an action is always decoded against the state that produced it, whatever has arrived since.

Shape legend: H actions of a chunk, A width of an action, S width of the state.
Source: joint signs and gripper ranges of `AlohaJoints` as in openpi's ALOHA policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from stretto.processors.stats import Array, Normalizer, widened


class Transform(Protocol):
    """One invertible step. `state_S` is the state as it entered this step."""

    def state(self, state_S: Array) -> Array: ...
    def to_model(self, actions_HA: Array, state_S: Array) -> Array: ...
    def to_robot(self, actions_HA: Array, state_S: Array) -> Array: ...


@dataclass(frozen=True)
class ActionContext:
    """What is needed to decode the actions of one observation: the state before each step, and after the last."""

    states: tuple[Array, ...]


@dataclass(frozen=True)
class Group:
    """Steps in the order in which an observation meets them; actions leave through them backwards."""

    steps: tuple[Transform, ...]
    dtype: DTypeLike

    def forward(self, state_S: Array) -> ActionContext:
        states = [state_S.astype(self.dtype)]
        for step in self.steps:
            states.append(step.state(states[-1]))
        return ActionContext(tuple(states))

    def to_robot(self, actions_HA: Array, context: ActionContext) -> Array:
        actions_HA = actions_HA.astype(self.dtype)
        for step, state_S in zip(reversed(self.steps), reversed(context.states[:-1]), strict=True):
            actions_HA = step.to_robot(actions_HA, state_S)
        return actions_HA

    def to_model(self, actions_HA: Array, context: ActionContext) -> Array:
        actions_HA = actions_HA.astype(self.dtype)
        for step, state_S in zip(self.steps, context.states[:-1], strict=True):
            actions_HA = step.to_model(actions_HA, state_S)
        return actions_HA


@dataclass(frozen=True)
class Relative:
    """Actions are offsets from the state where the mask is set; dimensions past the mask are absolute."""

    mask: tuple[bool, ...]

    def state(self, state_S: Array) -> Array:
        return state_S

    def to_model(self, actions_HA: Array, state_S: Array) -> Array:
        return actions_HA - self._offset(actions_HA, state_S)

    def to_robot(self, actions_HA: Array, state_S: Array) -> Array:
        return actions_HA + self._offset(actions_HA, state_S)

    def _offset(self, actions_HA: Array, state_S: Array) -> Array:
        n = len(self.mask)
        offset = np.zeros(actions_HA.shape[-1], actions_HA.dtype)
        offset[:n] = np.where(self.mask, state_S[:n], 0)
        return offset


@dataclass(frozen=True)
class Normalize:
    """State and actions by the checkpoint's statistics."""

    state_stats: Normalizer
    action_stats: Normalizer

    def state(self, state_S: Array) -> Array:
        return self.state_stats.normalize(state_S)

    def to_model(self, actions_HA: Array, state_S: Array) -> Array:
        return self.action_stats.normalize(actions_HA)

    def to_robot(self, actions_HA: Array, state_S: Array) -> Array:
        return self.action_stats.unnormalize(actions_HA)


@dataclass(frozen=True)
class Pad:
    """Widen to the model's fixed widths with zeros on the way in; cut to the robot's width on the way out."""

    state_dim: int
    action_dim: int
    robot_action_dim: int

    def state(self, state_S: Array) -> Array:
        return widened(state_S, self.state_dim)

    def to_model(self, actions_HA: Array, state_S: Array) -> Array:
        return widened(actions_HA, self.action_dim)

    def to_robot(self, actions_HA: Array, state_S: Array) -> Array:
        return actions_HA[..., : self.robot_action_dim]


_FLIPPED = (1, 2, 8, 9)
_GRIPPERS = [6, 13]
_CLOSED_M, _OPEN_M = 0.01844, 0.05800
_ARM_M, _HORN_M = 0.036, 0.022
_LOW_RAD, _HIGH_RAD = 0.5476, 1.6296
_PUPPET_OPEN_RAD, _PUPPET_CLOSE_RAD = -0.6213, 1.4910


@dataclass(frozen=True)
class AlohaJoints:
    """The joint signs and gripper units of ALOHA on one side, of the pi base models on the other.

    Layout: 6 joints, gripper, 6 joints, gripper. The gripper state arrives as a fraction of the linear opening and the
    model wants an angle; actions leave the model as angles and the robot wants a fraction of the puppet's angle. The two
    are different quantities, so the state's conversion is not the inverse of the actions'.
    """

    def state(self, state_S: Array) -> Array:
        out = _signs(state_S)
        linear = out[_GRIPPERS] * (_OPEN_M - _CLOSED_M) + _CLOSED_M
        sine = (_HORN_M**2 + linear**2 - _ARM_M**2) / (2 * _HORN_M * linear)
        out[_GRIPPERS] = (np.arcsin(np.clip(sine, -1.0, 1.0)) - _LOW_RAD) / (_HIGH_RAD - _LOW_RAD)
        return out

    def to_model(self, actions_HA: Array, state_S: Array) -> Array:
        out = _signs(actions_HA)
        span = _PUPPET_CLOSE_RAD - _PUPPET_OPEN_RAD
        out[..., _GRIPPERS] = out[..., _GRIPPERS] * span + _PUPPET_OPEN_RAD - _LOW_RAD
        return out

    def to_robot(self, actions_HA: Array, state_S: Array) -> Array:
        out = _signs(actions_HA)
        span = _PUPPET_CLOSE_RAD - _PUPPET_OPEN_RAD
        out[..., _GRIPPERS] = (out[..., _GRIPPERS] + _LOW_RAD - _PUPPET_OPEN_RAD) / span
        return out


def _signs(x: Array) -> Array:
    out = x.copy()
    out[..., _FLIPPED] *= -1
    return out
