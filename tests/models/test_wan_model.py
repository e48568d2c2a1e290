"""Sizes, schedules, noise, actions, prompts and checkpoints of the Wan family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel
from wan_world import Member, StreamRows, Streams

from stretto.core.errors import CheckpointError, ConfigError, ObservationError, PromptTooLongError
from stretto.models.wan import WanModel, build
from stretto.models.wan_actions import ActionTrack
from stretto.models.wan_config import CAUSVID, SELF_FORCING, SPECS, Level, tiny_config
from stretto.models.wan_noise import noise
from stretto.models.wan_text import TextEncoder
from stretto.models.wan_weights import detect, diffusers_name, read_pt
from stretto.runtime.weights import load_weights, save_weights, update_weights


@pytest.mark.parametrize(
    ("name", "blocks", "total", "tokens"),
    [("wan2.1-1.3b", 46.44e6, 1.419e9, 1560), ("wan2.1-14b", 351.39e6, 14.288e9, 1560), ("wan2.2-5b", 163.66e6, 5.0e9, 880)],
)
def test_the_presets_have_the_published_sizes(name: str, blocks: float, total: float, tokens: int) -> None:
    model = build(SPECS[name], device="meta")
    assert sum(p.numel() for p in model.net.blocks[0].parameters()) == pytest.approx(blocks, rel=1e-3)
    assert sum(p.numel() for p in model.net.parameters()) == pytest.approx(total, rel=1e-3)
    assert model.config.tokens_per_frame == tokens


def test_the_self_forcing_list_is_warped_and_looked_up_in_the_table() -> None:
    assert [level.timestep for level in SELF_FORCING] == pytest.approx([1000.0, 937.5, 833.3333, 625.0])
    assert [level.sigma for level in SELF_FORCING] == pytest.approx([1.0, 0.9375, 0.833333, 0.625])
    # CausVid's timesteps lie between table entries, so that sigma is the nearest entry and not t / 1000.
    assert [level.timestep for level in CAUSVID] == [1000.0, 757.0, 522.0]
    assert CAUSVID[1].sigma != pytest.approx(0.757, abs=1e-5)
    assert CAUSVID[1].sigma == pytest.approx(0.757, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_height": 470}, "pixel_height: got 470, expected a multiple of 16. the nearest is 464"),
        ({"pixel_width": 840}, "pixel_width: got 840, expected a multiple of 16. the nearest is 832"),
        ({"window_frames": 2}, "window_frames: got 2, expected at least one chunk of 3"),
        ({"sink_frames": 19}, "sink_frames: got 19, expected at most 18"),
        ({"sink_frames": 30}, "sink_frames: got 30"),
        ({"frames_per_chunk": 0}, "frames_per_chunk: got 0"),
        ({"levels": ()}, "levels: got none"),
        ({"levels": (Level(500.0, 0.5), Level(900.0, 0.9))}, "levels: got"),
        ({"kv_policy": "dirty"}, "kv_policy: got 'dirty'"),
        ({"heads": 7}, "heads: got 7"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        replace(SPECS["wan2.1-1.3b"], **changes)  # type: ignore[arg-type]


def test_noise_depends_on_its_name_alone_and_is_normal() -> None:
    shape = (3, 16, 20, 30)
    drawn = noise(1, 2, 3, 0, shape)
    assert torch.equal(drawn, noise(1, 2, 3, 0, shape))
    others = [noise(*key, shape) for key in ((2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1), (2, 1, 3, 0))]
    for other in others:
        assert abs(float((drawn * other).mean())) < 0.03
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.02)
    assert float((drawn.flatten()[:-1] * drawn.flatten()[1:]).mean()) == pytest.approx(0.0, abs=0.02)
    assert float((drawn**4).mean()) == pytest.approx(3.0, abs=0.2)
    assert torch.isfinite(noise(-1, 0, 2**40, 3, (7,))).all()


def test_a_track_at_pixel_rate_is_averaged_by_the_one_plus_four_rule() -> None:
    track = ActionTrack("camera", 1)
    first = torch.arange(9.0)[:, None]
    assert track.to_latent_rate(first, 0, 3).flatten().tolist() == [0.0, 2.5, 6.5]
    assert track.to_latent_rate(torch.arange(12.0)[:, None], 1, 3).flatten().tolist() == [1.5, 5.5, 9.5]
    assert ActionTrack("go", 1, "chunk").to_latent_rate(torch.ones(1, 1), 4, 3).shape == (3, 1)
    with pytest.raises(ObservationError, match=r"actions\.camera: got shape \(12, 1\), expected \(9, 1\) for chunk 0"):
        track.to_latent_rate(torch.zeros(12, 1), 0, 3)
    with pytest.raises(ObservationError, match="not finite"):
        track.to_latent_rate(first / 0.0, 0, 3)


def test_actions_steer_the_chunk_that_carries_them_and_zero_adapters_do_nothing() -> None:
    plain_config = replace(tiny_config(), frames_per_chunk=2)
    config = replace(plain_config, actions=(ActionTrack("camera", 3),))
    model, plain = WanModel(config), WanModel(plain_config)
    model.randomize(seed=1)
    update_weights(plain, ((n, v) for n, v in model.weight_map().views.items() if "actions." not in n), complete=True)
    left, right = torch.full((5, 3), -1.0), torch.full((5, 3), 1.0)
    chunks = [Streams(model).chunk(0, 0, model.inputs(1, 0, 0, actions={"camera": a})) for a in (left, right)]
    assert (chunks[0] - chunks[1]).abs().max() > 1e-2
    update_weights(model.base(), plain.weight_map().views.items(), complete=True)
    steered = Streams(model).chunk(0, 0, model.inputs(1, 0, 0, actions={"camera": left}))
    torch.testing.assert_close(steered, Streams(plain).chunk(0, 0, plain.inputs(1, 0, 0)), atol=1e-6, rtol=0)
    with pytest.raises(ObservationError, match=r"actions: got \['mouse'\], expected \['camera'\]"):
        model.inputs(1, 0, 0, actions={"mouse": left})


def test_a_first_frame_stays_as_it_was_given_and_steers_the_rest() -> None:
    model = WanModel(replace(tiny_config(), frames_per_chunk=2))
    model.randomize(seed=2)
    given = torch.randn(1, *model.config.latent_shape[1:], generator=torch.Generator().manual_seed(3))
    streams = Streams(model, 2, conditions=Streams(model).conditions * 2)
    started = streams.chunk(0, 0, model.inputs(1, 0, 0, given_KChw=given))
    free = streams.chunk(1, 0, model.inputs(1, 0, 0))
    assert torch.equal(started[:1], given)
    assert not torch.equal(free[:1], given)
    assert (started[1] - free[1]).abs().max() > 1e-3
    with pytest.raises(ObservationError, match=r"first_frame: got shape \(3, 16, 8, 12\), expected up to 2 frames"):
        model.inputs(1, 0, 0, given_KChw=given.expand(3, -1, -1, -1))


def test_a_batch_without_host_rows_is_refused_instead_of_attending_to_nothing() -> None:
    model = WanModel(tiny_config())
    model.randomize(seed=1)
    rows = StreamRows(Streams(model), "block.0", [Member(0, 0, 0)], padding=0)
    rows.host = []
    with pytest.raises(ConfigError, match="mode: got graph, captured without rows"):
        model.stages["block.0"].run(rows)


def test_prompts_longer_than_the_network_knows_are_refused_and_shorter_ones_end_in_zeros() -> None:
    model = WanModel(tiny_config())
    context = model.context(torch.ones(3, model.config.text_width))
    assert context.shape == (8, model.config.text_width)
    assert context[:3].all()
    assert not context[3:].any()
    with pytest.raises(PromptTooLongError, match="prompt: got 9 tokens, expected at most 8"):
        model.context(torch.ones(9, model.config.text_width))
    with pytest.raises(ObservationError, match="prompt: got shape"):
        model.context(torch.ones(3, 7))
    with pytest.raises(ObservationError, match="latents: got shape"):
        model.seed_chunks(torch.zeros(1, 3, 8, 12))


def test_umt5_embeds_the_prompts_tokens_and_refuses_too_many() -> None:
    torch.manual_seed(0)
    config = UMT5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    encoder = TextEncoder(UMT5EncoderModel(config), lambda prompt: [*(ord(c) % 50 for c in prompt), 1], text_tokens=8)
    embedded = encoder.encode("abc")
    assert embedded.shape == (4, 24)
    # A prompt alone is what it is in a padded batch under a mask.
    ids = torch.tensor([[97 % 50, 98 % 50, 99 % 50, 1, 0, 0]])
    padded = encoder.module(ids, attention_mask=(ids != 0).long()).last_hidden_state[0, :4]
    torch.testing.assert_close(embedded, padded, atol=1e-5, rtol=1e-5)
    with pytest.raises(PromptTooLongError, match="prompt: got 9 tokens"):
        encoder.encode("abcdefgh")


def tiny_filled(seed: int) -> WanModel:
    model = WanModel(tiny_config())
    model.randomize(seed=seed)
    return model


def one_chunk(model: WanModel) -> torch.Tensor:
    return Streams(model).chunk(0, 0, model.inputs(1, 0, 0))


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_weights_load_from_either_layout(layout: str, tmp_path: Path) -> None:
    source, target = tiny_filled(1), tiny_filled(2)
    want = one_chunk(source)
    save_weights(source, tmp_path)
    if layout == "diffusers":
        named = {diffusers_name(n): v.clone() for n, v in source.weight_map().views.items()}
        assert detect(named) == "diffusers"
        update_weights(target, named.items(), complete=True)
    else:
        assert detect(source.weight_map().views) == "original"
        load_weights(target, tmp_path)
    assert torch.equal(one_chunk(target), want)


@pytest.mark.parametrize("prefix", ["model.", "model._fsdp_wrapped_module.", ""])
def test_distilled_pt_files_give_their_averaged_generator(prefix: str, tmp_path: Path) -> None:
    averaged, plain, target = tiny_filled(1), tiny_filled(2), tiny_filled(3)

    def wrapped(model: WanModel) -> dict[str, torch.Tensor]:
        views = model.weight_map().views.items()
        return {prefix + n.replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): v.clone() for n, v in views}

    path = tmp_path / "model.pt"
    torch.save({"generator": wrapped(plain), "generator_ema": wrapped(averaged), "step": 3}, path)
    update_weights(target, read_pt(path).items(), complete=True)
    assert torch.equal(one_chunk(target), one_chunk(averaged))
    update_weights(target, read_pt(path, ema=False).items(), complete=True)
    assert torch.equal(one_chunk(target), one_chunk(plain))


def test_checkpoints_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pt(tmp_path / "absent.pt")
    torch.save({"generator": {"a": Path("x")}}, tmp_path / "objects.pt")
    with pytest.raises(CheckpointError, match="not tensors"):
        read_pt(tmp_path / "objects.pt")
    torch.save({"critic": {}, "step": 1}, tmp_path / "critic.pt")
    with pytest.raises(CheckpointError, match="no generator among"):
        read_pt(tmp_path / "critic.pt")
    with pytest.raises(CheckpointError, match="not a Wan transformer"):
        detect(["transformer_blocks.0.attn1.to_k.weight"])
    with pytest.raises(CheckpointError, match="CLIP image attention"):
        detect(["blocks.0.self_attn.q.weight", "img_emb.proj.0.weight"])
    with pytest.raises(CheckpointError, match="unexpected"):
        update_weights(tiny_filled(1), [("blocks.0.self_attn.qq.weight", torch.zeros(1))])


def test_a_part_of_the_model_holds_only_its_own_weights_and_computes_the_same(tmp_path: Path) -> None:
    whole = tiny_filled(1)
    save_weights(whole, tmp_path)
    part = WanModel(tiny_config(), only=("block.1", "head"))
    load_weights(part, tmp_path)
    assert part.net.patch_embedding.weight.is_meta
    assert part.net.blocks[0].modulation.is_meta  # type: ignore[union-attr]
    streams, rest = Streams(whole), Streams(part)
    streams.admit(0, whole.inputs(1, 0, 0))
    for stage in ("embed", "block.0"):
        streams.run(stage, [Member(0, 0, 0)])
    for name in ("x", "h", "place"):
        rest.arenas[name].copy_(streams.arenas[name])
    for stage in ("block.1", "head"):
        streams.run(stage, [Member(0, 0, 0)])
        rest.run(stage, [Member(0, 0, 0)])
    assert torch.equal(rest.arenas["x"], streams.arenas["x"])
