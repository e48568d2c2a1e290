"""Measured profiles that come with the package: they load, fit their models, and are used where they match and only there."""

import json
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.core.plan import Device
from stretto.deploy.profile import facts_of
from stretto.deploy.world_models import KINDS, measured_profile, place, profile_of
from stretto.deploy.worlds import RandomWorld, config_of
from stretto.models.wan import WanModel
from stretto.sched.measured import describe, find, for_shape, shapes_of, shipped
from stretto.sched.plans import by_block, by_stage, by_step
from stretto.sched.profile import Profile

H200 = "NVIDIA H200"
SHIPPED = {f"{p.model}, {p.facts['frames_per_chunk']} frames, decoder {p.facts['decoder']}": p for p in shipped()}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def model_of(profile: Profile) -> WanModel:
    facts = profile.facts
    config = config_of(
        profile.model,
        frames_per_chunk=facts["frames_per_chunk"],
        window_frames=facts["window_frames"],
        pixel_height=facts["pixels"][0],
        pixel_width=facts["pixels"][1],
        decoder=facts["decoder"],
        dtype=facts["dtype"],
    )
    return RandomWorld(config)(device="meta", only=()).first


def test_the_three_wan_models_were_measured_on_an_h200() -> None:
    assert {(p.model, p.facts["frames_per_chunk"]) for p in SHIPPED.values()} == {
        ("wan2.1-1.3b", 1), ("wan2.1-1.3b", 3), ("wan2.1-14b", 1), ("wan2.1-14b", 3), ("wan2.2-5b", 1),
    }  # fmt: skip
    for profile in SHIPPED.values():
        made = profile.provenance
        assert (profile.device, made.source) == (H200, "measured")
        assert made.commit
        assert made.date
        assert "graph, under load" in made.note


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_measured_profile_is_of_its_models_route_bytes_and_shape(name: str) -> None:
    profile = SHIPPED[name]
    model = model_of(profile)
    profile.check_route(model.route)
    assert facts_of(model.config) == dict(profile.facts)
    assert profile.chunk_bytes == sum(spec.nbytes for spec in model.values.values())
    for stage in ("block.0", "block.7"):
        assert profile.stage(stage).state_bytes == sum(model.state[s].nbytes for s in model.stages[stage].spec.state)
        assert profile.stage(stage).weight_bytes > 1e7
    assert measured_profile(model, H200) == profile
    assert measured_profile(model, "NVIDIA B200") is None


@pytest.mark.parametrize("name", SHIPPED)
def test_a_measured_profile_can_be_planned_with(name: str) -> None:
    profile = SHIPPED[name]
    devices = [Device(f"gpu:{i}") for i in range(3)]
    for make in (by_block, by_step, by_stage):
        plan = make(profile, devices)
        assert {p.device for p in plan.classes["default"]} == {d.name for d in devices}


def measured_in(file: str, model: str, frames: int) -> Profile:
    profiles = (Profile.from_json(json.dumps(raw)) for raw in json.loads((RESULTS / file).read_text())["profiles"])
    usual = {"frames_per_chunk": frames, "window_frames": 21}
    return next(p for p in profiles if p.model == model and usual.items() <= p.facts.items() and "precision" not in p.facts)


@pytest.mark.parametrize(
    ("model", "frames", "decoder", "file"),
    [
        ("wan2.1-1.3b", 1, "none", "world_2x_h200.json"),
        ("wan2.1-1.3b", 1, "vae", "world_1x_vae_h200.json"),
        ("wan2.1-14b", 1, "none", "world_2x_h200.json"),
        ("wan2.2-5b", 1, "none", "world_1x_h200.json"),
        ("wan2.2-5b", 1, "vae", "world_1x_vae_h200.json"),
        ("wan2.1-1.3b", 3, "none", "world_2x_h200.json"),
        ("wan2.1-14b", 3, "none", "world_2x_h200.json"),
    ],
)
def test_the_shipped_figures_are_those_of_the_results(model: str, frames: int, decoder: str, file: str) -> None:
    wanted = measured_in(file, model, frames)
    found = find(model, H200, {"frames_per_chunk": frames, "decoder": decoder})
    assert found is not None
    assert (found.stages, found.launch_s) == (wanted.stages, wanted.launch_s)
    assert found.provenance.commit == wanted.provenance.commit
    assert file in found.provenance.note


@pytest.mark.parametrize(("model", "frames"), [("wan2.1-14b", 1)])
def test_a_decode_that_was_measured_by_itself_is_the_fastest_way_to_decode(model: str, frames: int) -> None:
    decode = min(
        row["p50_ms"]
        for row in json.loads((RESULTS / "wan_decode_h200.json").read_text())["rows"]
        if (row.get("stage"), row.get("model"), row.get("chunk_frames")) == ("decode", "wan2.1-1.3b", frames)
    )
    plain, whole = (find(model, H200, {"frames_per_chunk": frames, "decoder": name}) for name in ("none", "vae"))
    assert plain is not None
    assert whole is not None
    assert whole.work_s - plain.work_s == pytest.approx(decode / 1e3)


def test_a_model_of_another_form_or_device_is_cut_evenly() -> None:
    model = model_of(SHIPPED["wan2.2-5b, 1 frames, decoder none"])
    assert measured_profile(model, H200) is not None
    assert profile_of(model, ["cpu:0", "cpu:1"]).device == "any"
    for kind in KINDS[1:]:
        assert len(place(model, kind, ["cpu:0", "cpu:1"]).devices) == 2
    for changes in ({"window_frames": 9}, {"kv_policy": "clean"}, {"frames_per_chunk": 3}, {"dtype": "float16"}):
        other = RandomWorld(config_of("wan2.2-5b", **{"frames_per_chunk": 1, **changes}))(device="meta", only=()).first
        assert measured_profile(other, H200) is None


def test_a_scenario_gets_the_measured_costs_of_its_chunk_shape_only() -> None:
    usual = for_shape("wan2.1-1.3b", H200, {})
    assert usual is not None
    assert (usual.facts["frames_per_chunk"], usual.facts["decoder"]) == (3, "none")
    fewer = for_shape("wan2.1-14b", H200, {"frames_per_chunk": 1, "steps": 2})
    assert fewer is not None
    assert (fewer.steps, fewer.facts["frames_per_chunk"]) == (2, 1)
    assert for_shape("wan2.2-5b", H200, {}) is None  # five frames by default, of which nobody measured a chunk
    assert for_shape("wan2.1-1.3b", H200, {"window_frames": 9}) is None
    assert for_shape("wan2.1-1.3b", "NVIDIA H100 80GB HBM3", {}) is None
    assert for_shape("minimax-h3-33b", H200, {}) is None
    assert len(shapes_of("wan2.1-14b", H200)) == 3


def test_every_row_of_a_plan_says_which_profile_it_used(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus", "2", "--models", "wan2.1-14b,ltx-2.5-22b", "--interval-ms", "3000"]
    assert main(["plan", *flags, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["profile"] == "NVIDIA H200, wan2.1-14b measured, ltx-2.5-22b computed"
    measured, computed = (row["profile"] for row in out["rows"])
    assert measured.startswith("measured 2026-11-30 at 58f411bb73fb, 3 of 21 latent frames, 4680 tokens a chunk, 480x832")
    assert computed.startswith("computed, 7 of 28 latent frames")
    assert main(["plan", *flags, "--costs", "measured", "--json"]) == 2
    assert "none of this model" in capsys.readouterr().err
    assert main(["plan", *flags, "--costs", "computed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == "NVIDIA H200, computed"


def test_a_description_says_where_the_costs_come_from() -> None:
    text = describe(SHIPPED["wan2.1-14b, 1 frames, decoder vae"])
    assert "decoder vae" in text
    assert "wan_decode_h200.json" in text
