"""Rows of host memory that are used again must not show what they held before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import FieldError
from stretto.core.route import TensorSpec
from stretto.runtime.arena import InputLayout
from stretto.runtime.staging import Staging
from stretto.runtime.timing import Stamp

CPU = torch.device("cpu")
LAYOUT = InputLayout.of({"items": TensorSpec((3, 4), "float32"), "count": TensorSpec((), "int32")})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-5, 5)), min_size=1, max_size=6))
def test_a_row_that_was_used_before_equals_a_fresh_one(requests: list[tuple[int, int, int]]) -> None:
    staging = Staging(LAYOUT, pin=False, keep=1)
    for rows, columns, value in requests:
        inputs = {"items": np.full((rows, columns), value, np.float32), "count": np.asarray(value, np.int32)}
        fresh = LAYOUT.row(pin=False)
        LAYOUT.fill(fresh, inputs)
        row = staging.pack(inputs)
        for name, spec in LAYOUT.specs.items():
            part = slice(LAYOUT.offsets[name], LAYOUT.offsets[name] + spec.nbytes)
            assert torch.equal(row.data[part], fresh.data[part])
        staging.give(row, Stamp(CPU))


def test_rows_go_round_and_one_that_is_out_is_never_handed_out_again() -> None:
    staging = Staging(LAYOUT, pin=False, keep=2)
    staging.warm(CPU)
    inputs = {"items": np.zeros((3, 4), np.float32), "count": np.asarray(0, np.int32)}
    out = [staging.pack(inputs) for _ in range(4)]
    assert len({row.data.data_ptr() for row in out}) == 4
    staging.give(out[1], Stamp(CPU))
    assert staging.pack(inputs) is out[1]


@pytest.mark.parametrize("dtype", ["float64", ">f4"])
def test_an_input_of_another_dtype_or_byte_order_is_refused(dtype: str) -> None:
    staging = Staging(LAYOUT, pin=False, keep=2)
    with pytest.raises(FieldError, match="items"):
        staging.pack({"items": np.zeros((3, 4), dtype), "count": np.asarray(0, np.int32)})
