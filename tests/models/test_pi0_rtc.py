"""Real-time chunking inside the denoise steps: against NumPy in both directions of time, LeRobot, and plain sampling."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import outputs
from safetensors.torch import load_file
from torch import Tensor

from stretto.control.rtc import guided_velocity, hold_prefix, lerobot_weights, paper_weights
from stretto.core.errors import ConfigError
from stretto.core.plan import per_visit, whole
from stretto.models import pi0
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_denoise import RTC_MODES
from stretto.models.pi0_net import Condition, PrefixKV, euler_schedule
from stretto.runtime.engine import Engine
from stretto.runtime.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
SETTINGS: list[dict[str, Any]] = json.loads((GOLDEN / "rtc.json").read_text())["model"]
FAMILIES = ("pi05", "pi0")
OFFERS = (("identity",), ("hard",), ("vjp",), RTC_MODES)


@cache
def tiny(family: str, rtc: tuple[str, ...]) -> pi0.Pi0Model:
    return {m.name: m for m in pi0.tiny(rtc)}[family]


def plain_inputs(family: str, batch: int, seed: int = 0) -> dict[str, Tensor]:
    return tiny(family, ()).example_inputs(batch, seed)


def chunking(model: pi0.Pi0Model, batch: int, seed: int = 3) -> dict[str, Tensor]:
    """The target of every row and the row of plain sampling; the target is large, so that a leak would show."""
    specs = {name: spec for name, spec in model.values.items() if name.startswith("rtc_")}
    made = {name: torch.zeros(batch, *spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    made["rtc_target"] = 3 * torch.randn(made["rtc_target"].shape, generator=torch.Generator().manual_seed(seed))
    if "rtc_cap" in made:
        made["rtc_cap"] += 5.0
    return made


def mixed(family: str, seed: int = 0) -> tuple[pi0.Pi0Model, dict[str, Tensor]]:
    """Six rows of every mode and of different delays."""
    model = tiny(family, RTC_MODES)
    rows = plain_inputs(family, 6, seed) | chunking(model, 6)
    horizon = model.config.action_horizon
    for row, delay in ((1, 1), (2, 2), (3, 0), (4, 2)):
        rows["rtc_weights"][row] = torch.from_numpy(paper_weights("exp", delay=delay, executed=1, horizon=horizon)).float()
    rows["rtc_cap"][2] = 1.5
    rows["rtc_vjp"][3:5] = True
    rows["rtc_delay"][5] = 3
    return model, rows


@pytest.mark.parametrize("rtc", OFFERS, ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_weights_and_delay_is_plain_sampling_bit_for_bit(family: str, rtc: tuple[str, ...]) -> None:
    inputs = plain_inputs(family, 3)
    # Signed zeros too.
    inputs["x"][0, 0, :2] = torch.tensor([0.0, -0.0])
    model = tiny(family, rtc)
    plain = outputs(tiny(family, ()), inputs)
    guided = outputs(model, inputs | chunking(model, 3))
    assert plain.numpy().tobytes() == guided.numpy().tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_mixed_modes_and_delays_equals_row_by_row(family: str) -> None:
    model, inputs = mixed(family)
    together = outputs(model, inputs)
    plain = outputs(tiny(family, ()), {name: inputs[name] for name in plain_inputs(family, 1)})
    moved = (together - plain).abs().amax((1, 2))
    assert moved[0] < 1e-6
    assert (moved[1:] > 0.1).all(), "every other row must be steered for this test to mean anything"
    for i in range(6):
        alone = outputs(model, {name: value[i : i + 1] for name, value in inputs.items()})
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_offering_more_modes_changes_no_row(family: str) -> None:
    inputs = plain_inputs(family, 2)
    few, many = tiny(family, ("identity",)), tiny(family, RTC_MODES)
    guidance = chunking(many, 2)
    guidance["rtc_weights"][:, :3] = torch.tensor([1.0, 0.7, 0.2])
    a = outputs(few, inputs | {name: guidance[name] for name in chunking(few, 2)})
    assert torch.equal(a, outputs(many, inputs | guidance))


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("mode", RTC_MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_the_numpy_reference_in_both_directions_of_time(family: str, mode: str, direction: Any) -> None:
    model = tiny(family, (mode,))
    config = model.config
    inputs = plain_inputs(family, 2, seed=4) | chunking(model, 2)
    weights = paper_weights("exp", delay=2, executed=1, horizon=config.action_horizon)
    if mode == "hard":
        inputs["rtc_delay"] += torch.tensor([2, 3], dtype=torch.int32)
    else:
        inputs["rtc_weights"][:] = torch.from_numpy(weights)
    if mode == "vjp":
        inputs["rtc_vjp"][:] = True
    target = inputs["rtc_target"].numpy()
    expert = Expert(family, inputs)
    x = inputs["x"].numpy()
    sign = -1.0 if direction == "up" else 1.0  # the network's velocity points to the noise
    for t, dt in euler_schedule(config.denoise_steps):
        tau = 1.0 - t if direction == "up" else t
        t_BH = np.full(x.shape[:2], tau, np.float32)
        if mode == "hard":
            x, t_BH = hold_prefix(x, target, inputs["rtc_delay"].numpy(), tau, direction)
            v = sign * expert.velocity(x, 1.0 - t_BH if direction == "up" else t_BH)
        else:
            v = sign * expert.velocity(x, np.full(2, t, np.float32))
            v = guided_velocity(
                x,
                v,
                tau,
                target_BHA=target,
                weights_BH=np.tile(weights, (2, 1)),
                cap=5.0,
                direction=direction,
                vjp=None if mode == "identity" else lambda e, x=x, t=t: expert.pull_back(x, t, e),
            )
        x = x + np.float32(sign * dt) * v
    if mode == "hard":
        x, _ = hold_prefix(x, target, inputs["rtc_delay"].numpy(), 0.0)
    np.testing.assert_allclose(outputs(model, inputs), x, rtol=0, atol=1e-4)


class Expert:
    """Velocities of a tiny policy by its training forward, which shares no stage with the runtime."""

    def __init__(self, family: str, inputs: dict[str, Tensor]) -> None:
        self.net = tiny(family, ()).module
        layout = self.net.prefix_layout(inputs["image_mask"], inputs["token_count"], inputs["tokens"].shape[1])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        with torch.no_grad():
            self.net.prefix(
                self.net.vision(inputs["images"]),
                inputs["tokens"],
                layout,
                lambda layer, k, v: (keys.append(k), values.append(v)),
            )
        slots = torch.arange(len(layout.mask_BP))
        self.prefix = PrefixKV(torch.stack(keys, 1), torch.stack(values, 1), slots, *layout[:3])
        self.state = inputs.get("state")

    def _velocity(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net.velocity(x, Condition(self.net.time(t).table), self.prefix, self.state)

    @torch.no_grad()
    def velocity(self, x_BHA: np.ndarray, t: np.ndarray) -> np.ndarray:
        return self._velocity(torch.from_numpy(x_BHA), torch.from_numpy(np.asarray(t, np.float32))).numpy()

    def pull_back(self, x_BHA: np.ndarray, t: float, error_BHA: np.ndarray) -> np.ndarray:
        """(d x1 / d x)^T e, one row of the Jacobian at a time."""
        one = torch.full((len(x_BHA),), t)
        jacobian = torch.autograd.functional.jacobian(
            lambda x: x - t * self._velocity(x, one), torch.from_numpy(x_BHA.astype(np.float32))
        )
        return torch.einsum("bhaBHA,bha->BHA", jacobian, torch.from_numpy(error_BHA.astype(np.float32))).numpy()


@cache
def golden_model(family: str, rtc: tuple[str, ...]) -> pi0.Pi0Model:
    folder = GOLDEN / f"{family}_tiny"
    raw = json.loads((folder / "config.json").read_text())
    raw["stretto"] = json.loads((folder / "sizes.json").read_text())
    made = pi0.build(Pi0Config.from_lerobot(raw), dtype="float32", pixels="float32", rtc=rtc)
    load_weights(made, folder)
    return made


@cache
def golden_inputs(family: str) -> dict[str, Tensor]:
    """Case `batch_of_two` as inputs of the route."""
    tensors = load_file(GOLDEN / f"{family}_tiny" / "cases.safetensors")
    case = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith("batch_of_two/")}
    images = tensors["image_pool"].permute(0, 2, 3, 1).float()[case["image_index"].clamp(min=0)] / 255 * 2 - 1
    images[~case["image_mask"]] = -1
    limit = golden_model(family, ()).config.tokenizer_max_length
    inputs = {
        "images": images,
        "image_mask": case["image_mask"],
        "tokens": torch.nn.functional.pad(case["tokens"], (0, limit - case["tokens"].shape[1])),
        "token_count": case["token_mask"].sum(1, dtype=torch.int32),
        "x": case["noise"],
    }
    return inputs | ({"state": case["state"]} if family == "pi0" else {})


def run(model: pi0.Pi0Model, inputs: dict[str, Tensor], *, one_visit_at_a_time: bool) -> np.ndarray:
    plan = (per_visit if one_visit_at_a_time else whole)(model.route, "cpu:0", batch_cap=len(inputs["x"]))
    engine = Engine(model, plan)
    engine.warm()
    try:
        rows = [{name: value[i].numpy() for name, value in inputs.items()} for i in range(len(inputs["x"]))]
        streams = [engine.open() for _ in rows]
        # In one batch whatever the machine is doing: other batch sizes round differently.
        with engine.together():
            futures = [s.submit(row, lengths={"prompt": int(row["token_count"])}) for s, row in zip(streams, rows, strict=True)]
        return np.stack([future.result(30).outputs["x"] for future in futures])
    finally:
        engine.close()


@pytest.mark.parametrize("rtc", [("identity",), RTC_MODES], ids="+".join)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s["key"].removeprefix("model/"))
def test_the_engine_s_guided_actions_equal_lerobots(setting: dict[str, Any], rtc: tuple[str, ...]) -> None:
    family, tensors = setting["family"], load_file(GOLDEN / "rtc.safetensors")
    model = golden_model(family, rtc)
    tail = tensors[f"model/{family}/left_over"]
    horizon = model.config.action_horizon
    inputs = golden_inputs(family) | chunking(model, 2)
    inputs["rtc_target"] = torch.nn.functional.pad(tail, (0, 0, 0, horizon - tail.shape[1]))
    weights = lerobot_weights(
        setting["schedule"].lower(),
        delay=setting["delay"],
        execution_horizon=setting["execution_horizon"],
        horizon=horizon,
        tail=tail.shape[1],
    )
    inputs["rtc_weights"][:] = torch.from_numpy(weights)
    inputs["rtc_cap"][:] = setting["max_guidance_weight"]
    actions = run(model, inputs, one_visit_at_a_time=len(rtc) == 1)
    np.testing.assert_allclose(actions, tensors[setting["key"]].numpy(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_the_route_is_cut_changes_no_mode(family: str) -> None:
    model, inputs = mixed(family)
    np.testing.assert_array_equal(run(model, inputs, one_visit_at_a_time=True), run(model, inputs, one_visit_at_a_time=False))


@pytest.mark.parametrize("rtc", [("soft",), ("identity", "identity")])
def test_an_unknown_mode_is_refused_when_the_policy_is_built(rtc: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="rtc"):
        pi0.build(tiny("pi05", ()).config, rtc=rtc)


@pytest.mark.gpu
@pytest.mark.parametrize("rtc", [("identity", "hard"), RTC_MODES], ids="+".join)
def test_captured_graphs_give_what_eager_stages_give_in_every_mode(rtc: tuple[str, ...]) -> None:
    config = tiny("pi05", ()).config
    model = pi0.build(config, device="cuda", dtype="float32", rtc=rtc)
    model.randomize(seed=0)
    inputs = mixed("pi05")[1]
    inputs = {name: inputs[name] for name in model.route.inputs}
    for plan in (per_visit, whole):
        results = []
        for mode in ("graph", "eager"):
            engine = Engine(model, plan(model.route, "cuda:0", batch_cap=6, mode=mode))  # type: ignore[arg-type]
            engine.warm()
            streams = [engine.open() for _ in range(6)]
            for _ in range(2):
                rows = [{name: value[i].numpy() for name, value in inputs.items()} for i in range(6)]
                done = [s.submit(row, lengths={"prompt": 20}) for s, row in zip(streams, rows, strict=True)]
                results.append(np.stack([d.result(60).outputs["x"] for d in done]))
            engine.close()
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], rtol=0, atol=1e-5)
