"""The roofline of one robot: what was injected is what the traces show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from roofline_robots import VARIANTS, main, stage_costs, trace_path

from stretto.control.roofline import locate, read_trace
from stretto.models import pi0


def test_a_slow_model_and_a_slow_network_are_blamed_for_what_they_do(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "tiny"
    arguments = [
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--requests",
        "9",
        "--execute",
        "5",
        "--control-hz",
        "400",
    ]
    result = main([*arguments, "--no-figures"])
    assert not out.with_suffix(".png").exists()
    plain, slow, far = (locate(name, read_trace(trace_path(out, name))) for name in VARIANTS)
    assert slow.limited_by == "model"
    assert "slower is limited by the model" in slow.sentence
    assert far.limited_by == "network"
    assert "50_ms is limited by the network" in far.sentence
    assert slow.parts_ms_p50["inference"] > 2 * plain.parts_ms_p50["inference"]
    assert far.parts_ms_p50["transfer"] == pytest.approx(50, abs=20)
    assert [p["name"] for p in result["points"]] == list(VARIANTS)
    assert [s["name"] for s in result["stages"]] == ["vision", "prefix", "denoise"]
    main(["--figures-from", str(out.with_suffix(".json"))])
    for name in ("tiny.png", "tiny_stages.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    json.loads(out.with_suffix(".json").read_text())


def test_counted_work_is_that_of_the_published_shape() -> None:
    model = pi0.build(pi0.SPECS["pi05"], device="meta")
    costs = {c.name: c for c in stage_costs(model, {"vision": 1.0, "prefix": 1.0, "denoise": 1.0}, 200)}
    # Two FLOPs a weight and token: 414 M weights on 768 tokens, 1.87 G on 968, 311 M on 50 tokens ten times.
    assert costs["vision"].flops == pytest.approx(2 * 768 * 414e6, rel=0.1)
    assert costs["prefix"].flops == pytest.approx(2 * 968 * 1.87e9, rel=0.1)
    assert costs["denoise"].flops == pytest.approx(10 * 2 * 50 * 311e6, rel=0.35)
    assert costs["denoise"].nbytes == pytest.approx(10 * 2 * 311e6, rel=0.35)
