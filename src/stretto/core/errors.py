"""Every error that a user of Stretto can meet, in one tree.

An error says which field is wrong, what was given, what was expected and, where it is not obvious, what to do.
"""

from __future__ import annotations

from functools import partial


class StrettoError(Exception):
    """Base of all errors raised on purpose."""

    code = "error"


class FieldError(StrettoError):
    """A named field has a value that cannot be used."""

    code = "bad_field"

    def __init__(self, field: str, *, got: object, expected: object, hint: str = "") -> None:
        self.field, self.got, self.expected, self.hint = field, got, expected, hint
        text = f"{field}: got {got}, expected {expected}"
        super().__init__(f"{text}. {hint}" if hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross between processes: a pool that cannot read one waits for ever.
        return partial(type(self), got=str(self.got), expected=str(self.expected), hint=self.hint), (self.field,)


class ConfigError(FieldError):
    """A configuration, flag or environment variable is wrong."""

    code = "bad_config"


class ObservationError(FieldError):
    """One request holds an observation that the model cannot take; the session goes on."""

    code = "bad_observation"


class PromptTooLongError(ObservationError):
    """The prompt needs more tokens than the model was trained with; nothing is cut."""

    code = "prompt_too_long"


class CheckpointError(StrettoError):
    """A checkpoint is damaged, incomplete or of another model; nothing is started."""

    code = "bad_checkpoint"


class PlanError(FieldError):
    """A plan does not fit its route, its devices or its memory."""

    code = "bad_plan"


class RouteError(FieldError):
    """Stages do not fit together: one reads what none before it writes."""

    code = "bad_route"


class NonFiniteActionsError(StrettoError):
    """The model produced NaN or infinity; the actions were withheld."""

    code = "non_finite_actions"


class RefusedError(StrettoError):
    """The system chose not to run a request; `reason` is a short, stable word."""

    code = "refused"

    def __init__(self, reason: str, text: str) -> None:
        self.reason, self._text = reason, text
        super().__init__(f"refused ({reason}): {text}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reason, self._text)


class DeadlineError(RefusedError):
    """The request could not have been on time."""

    code = "deadline"


class CapacityError(RefusedError):
    """No slot, memory or device time is left for a new stream."""

    code = "capacity"


class SupersededError(RefusedError):
    """A newer observation of the same robot took the place of this request."""

    code = "superseded"


class StreamClosedError(StrettoError):
    """The stream was closed or cancelled, so its work was dropped."""

    code = "closed"


class WorkerDiedError(StrettoError):
    """The device's worker ended; streams with state on it are lost, the others go on."""

    code = "worker_died"
