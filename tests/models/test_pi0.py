"""pi0 and pi0.5: what padding, masks, pruning, tables and training must and must not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rows import DictRows, outputs, run_route
from torch import Tensor
from torch.nn.functional import gelu, linear, softmax

from stretto.core.errors import ConfigError
from stretto.models import pi0
from stretto.models.pi0 import Pi0Model
from stretto.models.pi0_config import GEMMA, Pi0Config, family_of
from stretto.models.pi0_net import PrefixKV, euler_schedule
from stretto.runtime.weights import update_weights

MODELS = {m.name: m for m in pi0.tiny()}
both = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def with_config(model: Pi0Model, **changes: Any) -> Pi0Model:
    """Return a model of the same weights and another shape of its inputs."""
    other = pi0.build(replace(model.config, **changes), dtype="float32", pixels=model.pixels)
    update_weights(other, model.weight_map().views.items(), complete=True)
    return other


def training_inputs(model: Pi0Model, batch: int) -> dict[str, Tensor]:
    given = model.example_inputs(batch)
    names = {"images": "images_BCRR3", "image_mask": "image_mask_BC", "tokens": "tokens_BL", "token_count": "token_count_B"}
    inputs = {names[n]: given[n] for n in names} | {"x_BHA": given["x"]}
    return inputs | ({"state_BW": given["state"]} if model.name == "pi0" else {})


@both
def test_a_larger_prompt_bucket_changes_nothing(model: Pi0Model) -> None:
    inputs = model.example_inputs(2)
    inputs["token_count"] = torch.tensor([9, 16], dtype=torch.int32)
    small, large = (run_route(model, inputs, lengths={"prompt": n}) for n in model.buckets[0].lengths)
    close(small.arena("x")[1:], large.arena("x")[1:])
    for name in ("prefix_mask", "prefix_length", "suffix_start"):
        assert torch.equal(small.arena(name)[1:], large.arena(name)[1:])
    used = model.config.image_tokens + 16
    assert not small.arena("prefix_k")[:, :, used:].any()


@both
def test_what_stands_in_padding_and_in_masked_cameras_is_never_seen(model: Pi0Model) -> None:
    inputs = model.example_inputs(2)
    inputs["token_count"].fill_(7)
    inputs["image_mask"][:, 1] = False
    before = outputs(model, inputs)
    inputs["tokens"][:, 7:] = 1
    inputs["images"][:, 1] = 255
    assert torch.equal(outputs(model, inputs), before)


@both
@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_camera_equals_a_policy_without_it(model: Pi0Model, absent: int) -> None:
    inputs = model.example_inputs(2)
    inputs["image_mask"][:, absent] = False
    present = 1 - absent
    alone = {**inputs, "images": inputs["images"][:, [present]], "image_mask": inputs["image_mask"][:, [present]]}
    close(outputs(model, inputs), outputs(with_config(model, cameras=1), alone))


@both
def test_a_row_without_anything_valid_stays_finite(model: Pi0Model) -> None:
    inputs = model.example_inputs(1)
    inputs["image_mask"].fill_(False)
    inputs["token_count"].zero_()
    rows = run_route(model, inputs)
    assert torch.isfinite(rows.arena("x")).all()
    assert rows.arena("suffix_start")[1] == 0


@both
def test_float_pixels_equal_uint8_pixels(model: Pi0Model) -> None:
    inputs = model.example_inputs(1)
    other = pi0.build(model.config, dtype="float32", pixels="float32")
    update_weights(other, model.weight_map().views.items())
    close(outputs(model, inputs), outputs(other, inputs | {"images": inputs["images"] / 255 * 2 - 1}))


@both
def test_rows_at_different_denoise_steps_share_a_batch(model: Pi0Model) -> None:
    inputs = model.example_inputs(2)
    rows = DictRows(model, inputs)
    for name in ("vision", "prefix"):
        model.stages[name].run(rows)
    steps = model.config.denoise_steps
    rows.slots_B = torch.tensor([1])  # the first row is one step ahead
    rows.steps_B = torch.tensor([0])
    model.stages["denoise"].run(rows)
    rows.slots_B = torch.tensor([2, 1])
    for step in range(steps - 1):
        rows.steps_B = torch.tensor([step, step + 1])
        model.stages["denoise"].run(rows)
    rows.slots_B, rows.steps_B = torch.tensor([2]), torch.tensor([steps - 1])
    model.stages["denoise"].run(rows)
    close(rows.arena("x")[1:], outputs(model, inputs))


def full_gemma(model: Pi0Model, image_tokens: Tensor, tokens: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Run every part of every layer, the last one's too, in plain torch with full attention masks; return keys and values."""
    dims, views = model.config.language, model.weight_map().views
    root = "paligemma_with_expert.paligemma.model.language_model."
    generator = torch.Generator().manual_seed(5)

    def weight(layer: int, name: str) -> Tensor:
        shapes = {"q_proj": (dims.heads * dims.head_dim, dims.width), "o_proj": (dims.width, dims.heads * dims.head_dim)}
        shapes |= {"gate_proj": (dims.mlp, dims.width), "up_proj": (dims.mlp, dims.width), "down_proj": (dims.width, dims.mlp)}
        full = f"{root}layers.{layer}.{name}.weight"
        if full in views:
            return views[full]
        assert layer == dims.depth - 1, full
        return torch.randn(shapes.get(name.split(".")[-1], (dims.width,)), generator=generator)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w)

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        frequency = 1e4 ** -(torch.arange(0, dims.head_dim, 2) / dims.head_dim)
        angle = (positions[..., None] * frequency)[:, :, None]
        a, b = x[..., : dims.head_dim // 2], x[..., dims.head_dim // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = torch.cat((image_tokens, views[f"{root}embed_tokens.weight"][tokens] * dims.width**0.5), 1)
    positions, kept = mask.cumsum(1) - 1, []
    for i in range(dims.depth):
        h = norm(x, weight(i, "input_layernorm"))
        q, k, v = (linear(h, weight(i, f"self_attn.{n}_proj")).unflatten(-1, (-1, dims.head_dim)) for n in "qkv")
        q, k = turned(q, positions), turned(k, positions)
        kept.append((k, v))
        scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / dims.head_dim**0.5
        scores = scores.masked_fill(~(mask[:, None, :, None] & mask[:, None, None]), -1e30)
        mixed = torch.einsum("bhqk,bkd->bqhd", softmax(scores, -1), v[:, :, 0]).flatten(2)
        x = x + linear(mixed, weight(i, "self_attn.o_proj"))
        h = norm(x, weight(i, "post_attention_layernorm"))
        gated = gelu(linear(h, weight(i, "mlp.gate_proj")), approximate="tanh") * linear(h, weight(i, "mlp.up_proj"))
        x = x + linear(gated, weight(i, "mlp.down_proj"))
    return kept


@both
def test_dropping_the_dead_end_of_the_last_prefix_layer_changes_no_key_or_value(model: Pi0Model) -> None:
    inputs = model.example_inputs(2)
    inputs["image_mask"][0, 0] = False
    rows = run_route(model, inputs)
    mask = rows.arena("prefix_mask")[1:]
    for i, (k, v) in enumerate(full_gemma(model, rows.arena("image_tokens")[1:], inputs["tokens"], mask)):
        torch.testing.assert_close(rows.arena("prefix_k")[1:, i][mask], k[mask], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(rows.arena("prefix_v")[1:, i][mask], v[mask], atol=2e-5, rtol=1e-4)


@both
def test_no_memory_is_held_for_weights_that_nothing_reads(model: Pi0Model) -> None:
    last = f"layers.{model.config.language.depth - 1}."
    names = [n for n in model.weight_map().views if "language_model" in n and last in n]
    assert sorted(n.split(last)[1] for n in names) == [
        "input_layernorm.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ]


def prefix_of(model: Pi0Model, rows: DictRows) -> PrefixKV:
    k, v = rows.arena("prefix_k"), rows.arena("prefix_v")
    return PrefixKV(k, v, rows.slots_B, *(rows.get(n) for n in ("prefix_mask", "prefix_length", "suffix_start")))


def test_the_state_token_sees_no_action_and_every_action_sees_the_state() -> None:
    model = MODELS["pi0"]
    net, inputs = model.module, model.example_inputs(1)
    prefix = prefix_of(model, run_route(model, inputs))
    seen: list[Tensor] = []
    hook = net.expert.register_forward_hook(lambda module, args, out: seen.append(out))
    condition = net.tabled(torch.tensor([0]))
    net.velocity(inputs["x"], condition, prefix, inputs["state"])
    net.velocity(inputs["x"] + 1, condition, prefix, inputs["state"])
    net.velocity(inputs["x"], condition, prefix, inputs["state"] + 1)
    hook.remove()
    base, other_actions, other_state = seen
    assert torch.equal(base[:, 0], other_actions[:, 0])
    assert (base[:, 1:] - other_actions[:, 1:]).abs().amax(-1).min() > 1e-4
    assert (base - other_state).abs().amax(-1).min() > 1e-5


@both
def test_training_computes_the_velocity_that_serving_computes(model: Pi0Model) -> None:
    inputs = model.example_inputs(2)
    prefix = prefix_of(model, run_route(model, inputs))
    times = torch.tensor([t for t, _ in euler_schedule(model.config.denoise_steps)])
    steps = torch.tensor([0, 2])
    served = model.module.velocity(inputs["x"], model.module.tabled(steps), prefix, inputs.get("state"))
    close(model.module.train_forward(**training_inputs(model, 2), t=times[steps]), served)


@both
def test_a_time_for_each_token_equals_one_for_the_row_where_all_are_the_same(model: Pi0Model) -> None:
    inputs, t = training_inputs(model, 2), torch.tensor([0.3, 0.9])
    each = t[:, None].expand(-1, model.config.action_horizon)
    row = model.module.train_forward(**inputs, t=t)
    close(model.module.train_forward(**inputs, t=each), row)
    known = each.clone()
    known[:, :2] = 0.0
    assert (model.module.train_forward(**inputs, t=known) - row).abs().max() > 1e-4


@both
def test_the_last_line_of_the_time_table_is_for_actions_already_known(model: Pi0Model) -> None:
    inputs = model.example_inputs(1)
    prefix = prefix_of(model, run_route(model, inputs))
    steps, horizon = model.config.denoise_steps, model.config.action_horizon
    rows = torch.full((1, horizon), 1)
    rows[:, :2] = steps
    t = torch.full((1, horizon), euler_schedule(steps)[1][0])
    t[:, :2] = 0.0
    tabled = model.module.velocity(inputs["x"], model.module.tabled(rows), prefix, inputs.get("state"))
    close(tabled, model.module.velocity(inputs["x"], model.module.time(t), prefix, inputs.get("state")))


@both
def test_a_gradient_reaches_every_weight(model: Pi0Model) -> None:
    net = model.module
    net.train_forward(**training_inputs(model, 2), t=torch.tensor([0.2, 0.7])).square().sum().backward()
    without = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    net.zero_grad(set_to_none=True)
    assert without == []


@both
def test_updated_weights_refresh_the_time_table_in_place(model: Pi0Model) -> None:
    other = with_config(model)
    table, address = other.module.table.clone(), other.module.table.data_ptr()
    name = "time_mlp_in.weight" if model.name == "pi05" else "action_time_mlp_in.weight"
    update_weights(other, [(f"model.{name}", model.weight_map().views[name] + 0.1)])
    assert other.module.table.data_ptr() == address
    assert (other.module.table - table).abs().max() > 1e-3
    expected = other.module.time(torch.tensor([1.0])).table[0]
    close(other.module.table[0], expected.detach())


@both
def test_random_weights_depend_on_the_seed_and_on_nothing_else(model: Pi0Model) -> None:
    a, b, c = (pi0.build(model.config, dtype="float32") for _ in range(3))
    a.randomize(3), b.randomize(3), c.randomize(4)
    name = "action_in_proj.weight"
    assert all(torch.equal(v, b.weight_map().views[n]) for n, v in a.weight_map().views.items())
    assert not torch.equal(a.weight_map().views[name], c.weight_map().views[name])


@both
def test_bf16_stays_close_to_fp32_on_the_same_rounded_weights(model: Pi0Model) -> None:
    low = pi0.build(model.config, dtype="bfloat16")
    update_weights(low, model.weight_map().views.items())
    high = pi0.build(model.config, dtype="float32")
    update_weights(high, low.weight_map().views.items())
    inputs = model.example_inputs(2)
    a, b = outputs(low, inputs), outputs(high, inputs)
    assert a.dtype == torch.float32
    assert torch.cosine_similarity(a.flatten(1), b.flatten(1)).min() > 0.9995


@both
def test_random_weights_let_every_input_move_the_actions(model: Pi0Model) -> None:
    inputs, other = model.example_inputs(2, seed=1), model.example_inputs(2, seed=2)
    inputs["token_count"].fill_(9)
    before = outputs(model, inputs)
    for name in {"images", "tokens", "x", "state"} & inputs.keys():
        moved = (outputs(model, inputs | {name: other[name]}) - before).abs().amax((1, 2))
        assert moved.min() > 1e-3, name


def test_euler_runs_from_noise_to_actions() -> None:
    schedule = euler_schedule(10)
    assert schedule[0] == (1.0, -0.1)
    assert schedule[-1][0] + schedule[-1][1] == pytest.approx(0.0)


LEROBOT: dict[str, Any] = {
    "type": "pi05",
    "input_features": {"observation.images.top": {"type": "VISUAL"}, "observation.state": {"type": "STATE"}},
    "chunk_size": 16,
}


def test_a_lerobot_config_gives_every_dimension() -> None:
    config = Pi0Config.from_lerobot(LEROBOT | {"empty_cameras": 2, "rtc_config": None, "optimizer_lr": 1e-5})
    assert (config.family, config.cameras, config.action_horizon) == ("pi05", 3, 16)
    assert (config.language, config.expert) == (GEMMA["gemma_2b"], GEMMA["gemma_300m"])
    assert config.prefix_tokens == 968
    assert config.prompt_buckets == (16, 48, 112, 200)
    pi0_config = Pi0Config.from_lerobot(LEROBOT | {"type": "pi0"})
    assert (pi0_config.tokenizer_max_length, pi0_config.prompt_buckets) == (48, (16, 48))


def test_empty_cameras_that_are_listed_are_not_counted_twice() -> None:
    features = {**LEROBOT["input_features"], "observation.images.empty_camera_0": {"type": "VISUAL"}}
    assert Pi0Config.from_lerobot(LEROBOT | {"input_features": features, "empty_cameras": 1}).cameras == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "act"}, "type"),
        ({"chunk_size": "50"}, "chunk_size"),
        ({"chunk_size": True}, "chunk_size"),
        ({"chunk_size": 0}, "action_horizon"),
        ({"max_period": 1e-4}, "min_period"),
        ({"image_resolution": [224, 256]}, "image_resolution"),
        ({"image_resolution": [225, 225]}, "image_size"),
        ({"paligemma_variant": "gemma_9b"}, "paligemma_variant"),
        ({"input_features": {}}, "input_features"),
        ({"n_obs_steps": 6}, "n_obs_steps"),
        ({"use_proprioceptive_memory": True}, "use_proprioceptive_memory"),
        ({"stretto": {"visoin": {}}}, "stretto"),
        ({"stretto": {"expert": {"layers": 3}}}, "stretto.expert.layers"),
        ({"stretto": {"expert": {"depth": 3}}}, "expert.depth"),
    ],
)
def test_a_config_that_cannot_be_used_names_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Pi0Config.from_lerobot(LEROBOT | change)
    assert error.value.field == field


@both
def test_an_openpi_export_tells_its_family_and_sizes_by_its_tensors(model: Pi0Model) -> None:
    shapes = {name: tuple(view.shape) for name, view in model.weight_map().views.items()}
    assert family_of(shapes) == model.config.family
    full = pi0.SPECS[model.name]
    with torch.device("meta"):
        net = pi0.Pi0Net(full, torch.bfloat16)
    shapes = {n: tuple(v.shape) for n, v in Pi0Model(full, net, "uint8").weight_map().views.items()}
    assert Pi0Config.from_openpi(shapes) == full
    assert Pi0Config.from_openpi(shapes, action_horizon=16, cameras=2) == replace(full, action_horizon=16, cameras=2)
    with pytest.raises(ConfigError, match="expected time_mlp_in"):
        family_of({"lm_head.weight": (1, 1)})


def test_an_unknown_dtype_or_pixel_format_is_refused() -> None:
    config = MODELS["pi0"].config
    with pytest.raises(ConfigError, match="dtype"):
        pi0.build(config, dtype="float16")
    with pytest.raises(ConfigError, match="pixels"):
        pi0.build(config, pixels="jpeg")  # type: ignore[arg-type]
