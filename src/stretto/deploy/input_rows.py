"""What the model is given for one request of a policy: its processed observation, its noise, and what guides it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.core.errors import ObservationError
from stretto.deploy.realtime import Realtime
from stretto.deploy.tickets import Ticket
from stretto.models.pi0 import Pi0Model
from stretto.processors.policy import ModelInputs, PolicyProcessor
from stretto.runtime.engine import Stream
from stretto.runtime.noise import noise

Array = np.ndarray[Any, Any]


class InputRows:
    """Makes route inputs, one row each."""

    def __init__(self, model: Pi0Model, processor: PolicyProcessor, realtime: Realtime) -> None:
        self._shape = model.config.action_horizon, model.config.action_dim
        self._wanted = frozenset(model.route.inputs)
        self._processor, self._realtime = processor, realtime

    def of(self, inputs: ModelInputs, ticket: Ticket) -> dict[str, Array]:
        """Return every input of the route for a request that is about to be handed in; the robot's turn is held.

        Raises:
            ObservationError: if the request brings noise of another shape.
        """
        rows = inputs.arrays()
        rows["token_count"] = rows["token_count"].astype(np.int32)
        guidance = self._realtime.inputs(
            ticket.wish, lambda prefix_KD: self._processor.encode_actions(prefix_KD, inputs.context), self._wanted
        )
        return {
            **{name: value for name, value in rows.items() if name in self._wanted},
            **guidance,
            "x": self._noise_of(ticket),
        }

    def look_ahead(self, ticket: Ticket) -> None:
        """Draw what the robot's next chunk starts from, while the device is busy with this one."""
        if ticket.options.seed is None and ticket.options.noise_HD is None:
            stream = ticket.robot.stream
            ticket.robot.noise = stream.submitted, self._next(stream)

    def _noise_of(self, ticket: Ticket) -> Array:
        options, robot = ticket.options, ticket.robot
        if options.noise_HD is not None:
            if options.noise_HD.shape != self._shape:
                raise ObservationError("rt.noise", got=f"shape {options.noise_HD.shape}", expected=f"shape {self._shape}")
            return np.ascontiguousarray(options.noise_HD, np.float32)
        if options.seed is not None:
            return noise(self._shape, seed=options.seed).numpy()
        number, drawn = robot.noise
        return drawn if number == robot.stream.submitted else self._next(robot.stream)

    def _next(self, stream: Stream) -> Array:
        return noise(self._shape, seed=stream.seed, stream=stream.id, chunk=stream.submitted).numpy()
