"""Normalisation: each family's formula, exact round trips, and statistics that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stretto.core.errors import CheckpointError
from stretto.processors.stats import LEROBOT, NEEDED, OPENPI, Mode, Rule, build_normalizer

MODES: list[Mode] = ["mean_std", "min_max", "quantiles", "quantile10"]
STATS: dict[str, Any] = {
    "mean": [1.0, -2.0],
    "std": [0.5, 4.0],
    "min": [-3.0, 0.0],
    "max": [5.0, 1.0],
    "q01": [-1.0, 0.25],
    "q99": [1.5, 0.75],
    "q10": [-0.5, 0.3],
    "q90": [1.0, 0.7],
}


def test_openpi_adds_its_epsilon_to_every_span() -> None:
    x = np.array([0.3, 2.0])
    quantiles = build_normalizer("state", "quantiles", STATS, width=2, rule=OPENPI).normalize(x)
    assert quantiles.tolist() == [(0.3 + 1.0) / (2.5 + 1e-6) * 2 - 1, (2.0 - 0.25) / (0.5 + 1e-6) * 2 - 1]
    mean_std = build_normalizer("state", "mean_std", STATS, width=2, rule=OPENPI).normalize(x)
    assert mean_std.tolist() == [(0.3 - 1.0) / (0.5 + 1e-6), (2.0 + 2.0) / (4.0 + 1e-6)]


def test_lerobot_uses_plain_spans_in_float32() -> None:
    x = np.array([0.3, 2.0], np.float32)
    f = np.float32
    for mode, low, high in (("quantiles", "q01", "q99"), ("min_max", "min", "max"), ("quantile10", "q10", "q90")):
        got = build_normalizer("s", mode, STATS, width=2, rule=LEROBOT).normalize(x)  # type: ignore[arg-type]
        want = [f(2) * (f(v) - f(a)) / (f(b) - f(a)) - f(1) for v, a, b in zip(x, STATS[low], STATS[high], strict=True)]
        assert got.dtype == np.float32
        assert got.tolist() == want


def test_lerobot_leaves_the_epsilon_out_of_the_way_back_from_mean_std() -> None:
    rule = Rule("lerobot", 0.5, False, np.float32)
    n = build_normalizer("s", "mean_std", STATS, width=2, rule=rule)
    assert n.normalize(np.array([2.0, 2.5], np.float32)).tolist() == [1.0, 1.0]
    assert n.unnormalize(np.array([1.0, 1.0], np.float32)).tolist() == [1.5, 2.0]


def test_identity_changes_nothing_and_needs_no_statistics() -> None:
    n = build_normalizer("s", "identity", None, width=3, rule=LEROBOT)
    x = np.array([1.0, 2.0, 3.0], np.float32)
    assert n.normalize(x) is x
    assert n.unnormalize(x) is x


def test_actions_beyond_the_data_are_not_clipped() -> None:
    n = build_normalizer("a", "quantiles", STATS, width=2, rule=OPENPI)
    out = n.unnormalize(np.array([1.3, -1.3]))
    assert out[0] > 1.5
    assert out[1] < 0.25


@given(
    arrays(np.float64, 2, elements=st.floats(-100, 100)),
    st.sampled_from(MODES),
)
def test_the_way_back_undoes_the_way_in(x: np.ndarray, mode: Mode) -> None:
    n = build_normalizer("s", mode, STATS, width=2, rule=OPENPI)
    np.testing.assert_allclose(n.unnormalize(n.normalize(x)), x, rtol=1e-12, atol=1e-12)
    f = build_normalizer("s", mode, STATS, width=2, rule=LEROBOT)
    np.testing.assert_allclose(f.unnormalize(f.normalize(x.astype(np.float32))), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_statistic_is_named(mode: Mode) -> None:
    needed = NEEDED[mode]
    assert needed is not None
    for name in needed:
        stats = {k: v for k, v in STATS.items() if k != name}
        with pytest.raises(CheckpointError, match=rf"action\.{name}: missing; found"):
            build_normalizer("action", mode, stats, width=2, rule=LEROBOT)


def test_statistics_of_another_width_are_refused_with_both_widths() -> None:
    with pytest.raises(CheckpointError, match=r"state\.q01: got shape \(2,\), expected \(3,\)"):
        build_normalizer("state", "quantiles", STATS, width=3, rule=OPENPI)


def test_padding_beyond_the_robots_width_is_not_looked_at() -> None:
    padded = {k: np.pad(v, (0, 30)) for k, v in STATS.items()}
    n = build_normalizer("state", "quantiles", padded, width=2, padded_width=32, rule=OPENPI)
    x = np.array([0.3, 2.0])
    assert n.normalize(x).tolist() == build_normalizer("s", "quantiles", STATS, width=2, rule=OPENPI).normalize(x).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_or_infinity_in_statistics_is_refused_with_the_dimension(bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"state\.q99: got NaN or infinity in dimensions \[1\]"):
        build_normalizer("state", "quantiles", {**STATS, "q99": [1.0, bad]}, width=2, rule=OPENPI)


def test_equal_quantiles_are_refused_with_the_dimensions() -> None:
    with pytest.raises(CheckpointError, match=r"state\.q01/q99: got q01 = q99 in dimensions \[0\]"):
        build_normalizer("state", "quantiles", {**STATS, "q99": [-1.0, 0.75]}, width=2, rule=LEROBOT)


def test_a_std_of_zero_is_refused_with_the_dimensions() -> None:
    with pytest.raises(CheckpointError, match=r"state\.std: got std = 0 in dimensions \[1\]"):
        build_normalizer("state", "mean_std", {**STATS, "std": [1.0, 0.0]}, width=2, rule=LEROBOT)


def test_swapped_quantiles_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"negative spread in dimensions \[0\]"):
        build_normalizer("state", "quantiles", {**STATS, "q99": [-2.0, 0.75]}, width=2, rule=LEROBOT)


def test_statistics_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state\.q01: got list .*expected 2 numbers"):
        build_normalizer("state", "quantiles", {**STATS, "q01": ["a", "b"]}, width=2, rule=LEROBOT)


def test_no_statistics_at_all_is_refused_because_the_step_would_do_nothing() -> None:
    with pytest.raises(CheckpointError, match="would silently do nothing"):
        build_normalizer("state", "quantiles", None, width=2, rule=LEROBOT)


@pytest.mark.parametrize("rule", [LEROBOT, OPENPI], ids=lambda r: r.name)
@pytest.mark.parametrize("mode", ["quantiles", "mean_std"])
def test_a_held_dimension_stays_at_the_constant_of_the_data(rule: Rule, mode: Mode) -> None:
    stats = {**STATS, "q99": [-1.0, 0.75], "std": [0.0, 4.0]}
    n = build_normalizer("state", mode, stats, width=2, rule=rule, degenerate="hold")
    z = n.normalize(np.array([12345.0, 0.5], rule.dtype))
    assert z[0] == (-1.0 if mode == "quantiles" else 0.0)
    constant = -1.0 if mode == "quantiles" else 1.0
    assert abs(n.unnormalize(np.array([0.9, 0.0], rule.dtype))[0] - constant) < 1e-5
    assert n.held.tolist() == [True, False]
