"""Sessions of a world: what was said is shown in order, and what cannot be is refused by name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stretto.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ObservationError,
    PlanError,
    PromptTooLongError,
    StreamClosedError,
)
from stretto.deploy.world import World, WorldOptions
from stretto.deploy.world_actions import HeldTrack
from stretto.models.wan_actions import ActionTrack
from stretto.models.wan_vae import WAN21_VAE, WAN22_VAE, build_vae, load_vae

CHANGES: dict[str, Any] = {"window_frames": 3}


def options(**changes: Any) -> WorldOptions:
    base = WorldOptions(text_encoder="hash", plan="by_step", devices=("cpu:0", "cpu:1"), streams=2, changes=CHANGES)
    return replace(base, **changes)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(options())
    world.warm()
    yield world
    world.close()


@pytest.fixture(autouse=True)
def _no_session_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        world: World = request.getfixturevalue("world")
        for session in world.sessions.values():
            session.close()
        while world.engine.in_flight:
            torch.zeros(1)


def open_one(world: World, *given: Any, **more: Any) -> Any:
    """Open when the memory of a session that ended just now is back."""
    for _ in range(300):
        try:
            return world.open(*(given or ("a road",)), **more)
        except CapacityError:
            time.sleep(0.01)
    return world.open(*given, **more)


def test_chunks_come_in_order_and_say_their_frames_and_samples(world: World) -> None:
    session = open_one(world, seed=1)
    chunks = [session.read(30) for _ in range(5)]
    assert [c.index for c in chunks] == [0, 1, 2, 3, 4]
    assert [c.pixel_frames for c in chunks] == [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17)]
    assert [c.actions["camera"] for c in chunks] == [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17)]
    assert [len(c.frames) for c in chunks] == [1, 4, 4, 4, 4]
    assert chunks[0].frames.dtype == np.uint8


def test_an_event_is_reported_once_by_the_first_chunk_that_shows_it(world: World) -> None:
    plain, steered = open_one(world, seed=1), open_one(world, seed=1)
    before = [(plain.read(30), steered.read(30)) for _ in range(3)]
    steered.act("camera", [1.0, -1.0, 0.5, 2.0], event=7)
    after = [(plain.read(30), steered.read(30)) for _ in range(8)]
    said = [s.events for _, s in (*before, *after)]
    assert said.count((7,)) == 1
    assert {e for events in said for e in events} == {7}
    first = next(s.index for _, s in after if s.events)
    for _, chunk in (*before, *after):
        assert (chunk.events == (7,)) == (chunk.index == first)
    plain.close()
    steered.close()


def test_an_action_changes_the_chunk_that_reports_it_and_none_before() -> None:
    def run(act: bool) -> tuple[list[np.ndarray], int]:
        single = World(options(streams=1))
        single.warm()
        try:
            session = single.open("a road", seed=2)
            chunks = [session.read(30) for _ in range(3)]
            if act:
                session.act("camera", [1.0, -1.0, 0.5, 2.0], event=1)
            chunks += [session.read(30) for _ in range(6)]
            return [c.latents for c in chunks], next((c.index for c in chunks if c.events), -1)
        finally:
            single.close()

    (plain, _), (steered, at) = run(False), run(True)
    assert at >= 3
    assert [np.array_equal(a, b) for a, b in zip(plain, steered, strict=True)] == [i < at for i in range(9)]


def test_a_prompt_reaches_the_chunks_admitted_after_it_and_none_before(world: World) -> None:
    session = open_one(world)
    session.read(30)
    session.switch_prompt(world.embed("at night"), event=3)
    later = [session.read(30) for _ in range(6)]
    versions = [c.prompt_version for c in later]
    assert versions == sorted(versions)
    assert versions[-1] == 1
    assert [c.events for c in later if c.events] == [(3,)]
    assert next(c.index for c in later if c.events) == next(c.index for c in later if c.prompt_version == 1)


def test_renewing_under_a_new_prompt_gives_other_frames_than_switching_alone(world: World) -> None:
    def run(renew: bool) -> np.ndarray:
        single = World(options(streams=1, read_ahead=1))
        single.warm()
        try:
            session = single.open("a road", seed=2)
            for _ in range(3):
                session.read(30)
            session.switch_prompt(single.embed("at night"), renew=renew)
            return np.stack([session.read(30).latents for _ in range(4)])
        finally:
            single.close()

    switched, renewed = run(False), run(True)
    assert np.isfinite(renewed).all()
    assert not np.array_equal(switched, renewed)


def test_what_came_before_and_a_known_first_frame_are_kept(world: World) -> None:
    config = world.model.config
    shape = config.latent_shape[1:]
    given = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    session = open_one(world, "a road", first_frame=given)
    np.testing.assert_array_equal(session.read(30).latents[0], given[0].numpy())
    session.close()
    history = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    session = open_one(world, "a road", history=history.numpy())
    assert session.read(30).index == 2
    assert session.read(30).pixel_frames == (9, 13)


def test_seeding_with_the_first_chunk_changes_the_second_and_not_the_first() -> None:
    def run(seeding: str) -> list[np.ndarray]:
        single = World(options(streams=1))
        single.warm()
        try:
            session = single.open("a road", seed=2, seeding=seeding)
            return [session.read(30).latents for _ in range(3)]
        finally:
            single.close()

    plain, seeded = run("none"), run("first_chunk")
    np.testing.assert_array_equal(plain[0], seeded[0])
    assert not np.array_equal(plain[1], seeded[1])


def test_a_cancelled_session_ends_its_reader_and_makes_room(world: World) -> None:
    kept, doomed = open_one(world), open_one(world)
    with pytest.raises(CapacityError, match="state slots"):
        world.open("one more")
    waiting = [kept.read(30).index, doomed.read(30).index]
    assert waiting == [0, 0]
    doomed.cancel()
    doomed.cancel()
    with pytest.raises(StreamClosedError):
        doomed.read(30)
    with pytest.raises(StreamClosedError):
        doomed.act("camera", [0.0] * 4, event=1)
    another = open_one(world)
    assert another.read(30).index == 0
    assert [kept.read(30).index for _ in range(4)] == [1, 2, 3, 4]


def test_no_more_chunks_are_made_ahead_than_allowed(world: World) -> None:
    session = open_one(world)
    session.read(30)
    time.sleep(0.3)
    assert world.engine.in_flight + len(session._admitted) <= 2 * world.read_ahead
    assert session._next <= 1 + world.read_ahead + 1


@pytest.mark.parametrize(
    ("say", "error", "message"),
    [
        (lambda w, s: s.act("wheel", [0.0], event=5), ObservationError, r"track: got 'wheel', expected one of \['camera'\]"),
        (lambda w, s: s.act("camera", [0.0] * 3, event=5), ObservationError, r"actions\.camera: got shape \(3,\)"),
        (lambda w, s: s.act("camera", [np.nan] * 4, event=5), ObservationError, "not finite"),
        (lambda w, s: s.act("camera", [0.0] * 4, event=4), ObservationError, "event: got 4, expected a whole number above 4"),
        (lambda w, s: s.switch_prompt(torch.zeros(2, 7)), ObservationError, "prompt: got shape"),
        (lambda w, s: w.embed("word " * 9), PromptTooLongError, "9 words, expected at most 8"),
        (lambda w, s: w.open(np.zeros((9, 24), np.float32)), PromptTooLongError, "9 tokens, expected at most 8"),
        (lambda w, s: w.open("a", size=(60, 96)), ConfigError, "the nearest is 64"),
        (lambda w, s: w.open("a", size=(64, 64)), ObservationError, "size: got 64 x 64, expected 64 x 96"),
        (lambda w, s: w.open("a", first_frame=np.zeros((2, 3), np.float32)), ObservationError, "first_frame"),
        (lambda w, s: w.open("a", first_frame="frame.png"), ObservationError, "first_frame: got str"),
        (
            lambda w, s: w.open("a", history=np.full((1, 4, 8, 12), np.nan, np.float32)),
            ObservationError,
            "history: .* not finite",
        ),
        (lambda w, s: w.open(["a", "b"]), ObservationError, "prompt: got list"),
        (lambda w, s: w.open([[1.0], [1.0, 2.0]]), ObservationError, "prompt: got list"),
        (lambda w, s: w.open(np.full((2, 24), np.inf, np.float32)), ObservationError, "prompt: .* not finite"),
        (lambda w, s: (s.read_soon(), s.read_soon()), ObservationError, "reader: got a second reader"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_the_session_goes_on(
    world: World, say: Any, error: type[Exception], message: str
) -> None:
    session = open_one(world)
    session.act("camera", [0.0] * 4, event=4)
    session.read(30)
    with pytest.raises(error, match=message):
        say(world, session)
    if "second reader" not in message:
        assert session.read(30).index == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"plan": "by_step", "devices": tuple(f"cpu:{i}" for i in range(5))}, PlanError, "devices: got 5, expected 1 to 4"),
        ({"devices": ("cuda:63",)}, ConfigError, "device: got cuda:63"),
        ({"devices": ("gpu:0",)}, ConfigError, "device: got 'gpu:0'"),
        ({"devices": ("meta",)}, ConfigError, "devices: got meta"),
        ({"plan": "zigzag"}, ConfigError, "plan: got 'zigzag'"),
        ({"changes": {"window_frames": 1, "frames_per_chunk": 2}}, ConfigError, "window_frames: got 1"),
        ({"changes": {"sink_frames": 9}}, ConfigError, "sink_frames: got 9"),
        ({"changes": {"pixel_height": 100}}, ConfigError, "the nearest is"),
        ({"changes": {"widht": 3}}, ConfigError, "widht"),
        ({"text_encoder": "/nowhere"}, ConfigError, "text_encoder"),
    ],
)
def test_a_world_that_cannot_work_is_refused_by_field(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        World(options(**changes))


def test_a_quick_tap_is_shown_for_one_sample_and_the_last_value_is_held() -> None:
    track = HeldTrack(ActionTrack("key", 1))
    track.say([1.0], 1)
    track.say([0.0], 2)
    taken, events = track.take(4)
    assert taken.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert events == {1, 2}
    track.say([5.0], 3)
    track.say([9.0], 4, pulse=True)
    taken, events = track.take(4)
    assert taken.flatten().tolist() == [5.0, 9.0, 5.0, 5.0]
    assert events == {3, 4}
    track.say([[1.0], [2.0], [3.0]], 5)
    assert track.take(2)[0].flatten().tolist() == [1.0, 2.0]
    assert track.take(2)[0].flatten().tolist() == [3.0, 3.0]


SMALL_VAE = {"base_dim": 8, "dim_mult": (1, 1, 1, 1), "num_res_blocks": 1}


def vae_folder(where: Path, form: Mapping[str, Any], **changes: Any) -> Path:
    build_vae(form, **SMALL_VAE, **changes).save_pretrained(where)  # type: ignore[operator]
    return where


def test_a_world_decodes_with_the_vae_that_it_is_given(tmp_path: Path) -> None:
    folder = vae_folder(tmp_path / "vae", WAN21_VAE)
    world = World(options(plan="whole", devices=("cpu:0",), vae=folder, dtype="float32"))
    try:
        world.warm()
        session = world.open("a road")
        first = session.read(60)
        held = world.engine.model.decoder.module.state_dict()  # type: ignore[attr-defined]
    finally:
        world.close()
    want = load_vae(folder, dtype=torch.float32).state_dict()
    assert held.keys() == want.keys()
    assert all(torch.equal(held[name], want[name]) for name in want)
    assert first.frames is not None
    assert first.frames.shape == (1, 64, 96, 3)


def test_a_vae_that_does_not_fit_or_is_not_there_is_refused(tmp_path: Path) -> None:
    other = vae_folder(tmp_path / "other", WAN22_VAE, decoder_base_dim=8)
    with pytest.raises(ConfigError, match="z_dim"):
        World(options(vae=other))
    with pytest.raises(ConfigError, match=r"vae: got .*expected a folder"):
        World(options(vae=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="since the decoder is 'light'"):
        World(options(vae=other, changes={**CHANGES, "decoder": "light"}))
    with pytest.raises(ConfigError, match="random weights"):
        World(options(checkpoint=tmp_path / "weights.safetensors", changes={**CHANGES, "decoder": "vae"}))


def test_a_checkpoint_of_another_kind_of_wan_is_told_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "i2v.safetensors"
    save_file({"blocks.0.self_attn.q.weight": torch.zeros(1), "img_emb.proj.0.weight": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"i2v\.safetensors: an image-to-video checkpoint"):
        World(options(checkpoint=path, devices=("cpu:0",), plan="whole"))
