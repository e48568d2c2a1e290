"""A policy in FP8: its calibration, what is refused, and the run beside it that says how far it is off."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observations import observation

from stretto.cli import main
from stretto.core.errors import ConfigError
from stretto.core.policy import RequestOptions
from stretto.deploy import shadow
from stretto.deploy.bench import BenchOptions, bench_policy
from stretto.deploy.calibration import Observer, Observing, calibrate_at_random, read_observations
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.deploy.precision import FILE, Calibration, check_accuracy, fingerprint
from stretto.models import pi0
from stretto.serve.metadata import build_metadata

OPTIONS = PolicyOptions(device="cpu", max_batch=1, degenerate="hold", threads=1)
EMULATED = replace(OPTIONS, precision="fp8-emulated")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration on three observations."""
    folder = tmp_path_factory.mktemp("calibrated") / "pi05"
    shutil.copytree(tiny_checkpoint, folder)
    observer = Observer(folder, OPTIONS)
    observer.warm()
    observer.answer([observation(i) for i in range(3)], "recorded").write(folder / FILE)
    observer.close()
    return folder


def warmed(folder: Path, options: PolicyOptions) -> Policy:
    policy = load_policy(folder, options)
    policy.warm()
    return policy


@pytest.fixture(scope="module")
def coded(checkpoint: Path) -> Iterator[Policy]:
    policy = warmed(checkpoint, EMULATED)
    yield policy
    policy.close()


def test_actions_in_fp8_are_near_those_without_and_not_equal(checkpoint: Path, coded: Policy) -> None:
    plain = warmed(checkpoint, OPTIONS)
    for i in range(4):
        a, b = (p.infer(observation(i), RequestOptions(seed=i))["actions"] for p in (plain, coded))
        assert (a != b).any()
        np.testing.assert_allclose(a, b, atol=0.1 * np.abs(a).max())
    plain.close()


def test_the_handshake_says_which_precision_runs_and_what_it_was_calibrated_on(coded: Policy) -> None:
    said = build_metadata(coded.metadata, max_message_bytes=None, ping_interval_s=20.0)["stretto"]["precision"]
    assert (said["name"], said["calibration"]["observed"], said["calibration"]["observations"]) == (
        "fp8-emulated",
        "recorded",
        3,
    )
    assert said["coded_bytes"] > 0
    assert "warning" not in said["calibration"]


def until(metrics: Callable[[], Any], name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while metrics()[name] < value:
        assert time.monotonic() < deadline, metrics()
        time.sleep(0.01)


def test_one_request_in_two_runs_beside_fp8_and_its_distance_is_a_metric(checkpoint: Path) -> None:
    policy = warmed(checkpoint, replace(EMULATED, fp8_shadow=2))
    for i in range(4):
        policy.infer(observation(i), RequestOptions(seed=i))
        until(policy.metrics, "fp8_shadow_compared_total", i // 2 + 1)
    metrics = policy.metrics()
    policy.close()
    assert (metrics["fp8_shadow_compared_total"], metrics["fp8_shadow_beyond_gate_total"]) == (2, 0)
    assert 0.99 < metrics["fp8_shadow_cosine_worst"] <= metrics["fp8_shadow_cosine_mean"] < 1.0
    assert metrics["fp8_shadow_max_abs"] > 0.0


def test_the_time_of_second_runs_is_known_once_they_are_warm() -> None:
    often, seldom = (shadow.Shadow(pi0_model(), "cpu", "eager", every) for every in (1, 100))
    assert often.seconds_per_request == 0.0
    for runs in (often, seldom):
        runs.warm()
        runs.close()
    assert 0.0 < 10 * seldom.seconds_per_request < often.seconds_per_request


def pi0_model() -> pi0.Pi0Model:
    model = pi0.build(pi0.tiny()[0].config, device="cpu", dtype="float32", rtc=("vjp",))
    model.randomize(seed=0)
    return model


def test_a_model_that_offers_gradients_is_calibrated_without_them_or_refused() -> None:
    model = pi0_model()
    assert min(calibrate_at_random(model, "cpu", 1).input_max.values()) > 0.0
    with pytest.raises(ConfigError, match=r"rtc: got .*vjp"):
        Observing(model)


def test_a_calibration_that_cuts_inputs_is_noticed_by_the_run_beside_it(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibration = Calibration.read(checkpoint / FILE)
    shrunk = {name: value / 100 for name, value in calibration.input_max.items()}
    replace(calibration, input_max=shrunk).write(tmp_path / "small.json")
    policy = warmed(checkpoint, replace(EMULATED, fp8_shadow=1, fp8_scales=tmp_path / "small.json"))
    with caplog.at_level(logging.WARNING, shadow.__name__):
        policy.infer(observation(0), RequestOptions(seed=0))
        until(policy.metrics, "fp8_shadow_beyond_gate_total", 1)
        policy.close()
    assert "FP8 is off: cosine" in caplog.text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weights": "00000000"}, "fp8_scales.weights: got 00000000"),
        ({"model": "pi0"}, "fp8_scales.model: got pi0, expected pi05"),
        ({"headroom": float("nan")}, "fp8_scales.headroom: got nan"),
        ({"observed": "dreamed"}, "fp8_scales.observed: got 'dreamed'"),
        ({"input_max": {"vision.0.qkv": 1.0}}, "fp8 scale of expert.0.down: got none"),
        ({"input_max": {"vision.0.qkv": float("inf")}}, r"fp8_scales.input_max\[vision.0.qkv\]: got inf"),
        ({"format": "other"}, "fp8_scales.format"),
        ({"more": 1}, "fp8_scales.more: got unknown"),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused_by_its_field(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(json.loads((checkpoint / FILE).read_text()) | change))
    with pytest.raises(ConfigError, match=expected):
        load_policy(checkpoint, replace(EMULATED, fp8_scales=path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "fp8"}, "precision: got fp8 on cpu, expected a GPU of compute capability 8.9"),
        ({"precision": "fp4"}, "precision: got 'fp4'"),
        ({"fp8_shadow": 10}, "fp8_shadow: got 10, expected precision fp8 with it"),
        ({"precision": "fp8-emulated", "fp8_shadow": -1}, "fp8_shadow: got -1"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(checkpoint: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_policy(checkpoint, replace(OPTIONS, **options))


def test_fp8_on_pi0_is_refused_without_the_run_beside_it_that_says_how_near_it_is() -> None:
    with pytest.raises(ConfigError, match="fp8_shadow: got 0, expected a number with FP8 on pi0"):
        check_accuracy("pi0", 0)
    check_accuracy("pi0", 100)
    check_accuracy("pi05", 0)


def test_without_a_calibration_the_error_says_how_to_make_one(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="stretto calibrate CHECKPOINT"):
        load_policy(tiny_checkpoint, EMULATED)


def test_the_command_calibrates_on_a_file_of_observations(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [observation(i) for i in range(3)]
    arrays = {name: np.stack([np.asarray(o[name]) for o in seen]) for name in seen[0]}
    np.savez(tmp_path / "seen.npz", **arrays)
    again = [*read_observations(tmp_path / "seen.npz")]
    assert again[1]["task"] == seen[1]["task"]
    flags = ["--device", "cpu", "--degenerate", "hold", "--out", str(tmp_path / "out.json")]
    assert main(["calibrate", str(checkpoint), "--observations", str(tmp_path / "seen.npz"), *flags]) == 0
    assert "3 recorded observations" in capsys.readouterr().out
    assert Calibration.read(tmp_path / "out.json").input_max == pytest.approx(Calibration.read(checkpoint / FILE).input_max)
    assert main(["calibrate", str(checkpoint), "--synthetic", "2", *flags]) == 0
    assert Calibration.read(tmp_path / "out.json").describe()["warning"] == "random inputs, not a robot's"
    assert main(["calibrate", str(checkpoint), *flags]) == 2
    assert "one of --observations FILE" in capsys.readouterr().err


def test_a_fingerprint_is_of_the_weights_and_not_of_the_dtype_that_holds_them() -> None:
    model = pi0.tiny()[0]
    held = pi0.build(model.config, dtype=torch.bfloat16)
    for mine, its in zip(held.module.parameters(), model.module.parameters(), strict=True):
        mine.data.copy_(its)
    assert fingerprint(held) == fingerprint(model)
    model.randomize(seed=1)
    assert fingerprint(held) != fingerprint(model)


def test_bench_times_fp8_and_says_on_which_scales(checkpoint: Path) -> None:
    options = BenchOptions(checkpoint=checkpoint, device="cpu", precision="fp8-emulated", warmup=1, n=2)
    result = bench_policy(options)
    assert result["calibration"]["observed"] == "recorded"
    assert result["rows"][0]["precision"] == "fp8-emulated"
