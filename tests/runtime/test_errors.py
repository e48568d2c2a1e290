"""Errors cross between processes: a pool that cannot read one would wait for ever."""

from __future__ import annotations

import pickle

import pytest

from stretto.core.errors import CapacityError, ConfigError, ObservationError, RefusedError, StrettoError, WorkerDiedError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("dtype", got=object(), expected=("a", "b"), hint="ask"),
        ObservationError("state", got=3, expected="8 numbers"),
        RefusedError("deadline", "too late"),
        CapacityError("slots", "all are in use"),
        WorkerDiedError("device cuda:0 is down"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_says_the_same_in_another_process(error: StrettoError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), there.code) == (type(error), str(error), error.code)
