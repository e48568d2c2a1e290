"""The conversation without a socket: turns, the `rt` extension, and the bytes of a reply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stretto.core.errors import ConfigError, DeadlineError, FieldError, NonFiniteActionsError
from stretto.core.policy import PolicyReply, RequestOptions
from stretto.serve.metadata import build_metadata, default_max_message_bytes
from stretto.serve.protocol import Conversation, MessageTooBigError, Phase, TurnError, error_text
from stretto.serve.request import Exchange, MessageError, Offer, read_request
from stretto_client.codec import pack, unpack

OFFER = Offer(4, 2, ("hard", "vjp"))
DESCRIBED = {
    "model": "m",
    "action_horizon": 4,
    "action_dim": 2,
    "observation": {"state": {"kind": "state", "shape": (3,), "dtype": "float32", "required": True}},
}


def exchange(message: Any, *, session_id: str = "s") -> Exchange:
    return Exchange(message if isinstance(message, bytes) else pack(message), "s-1", session_id, 0.0)


def read(rt: dict[str, Any], **known: Any) -> RequestOptions:
    return read_request(exchange({"state": np.zeros(3), "rt": rt}, **known), OFFER)[1]


def in_turn(max_message_bytes: int = 1000) -> Conversation:
    talk = Conversation("s", OFFER, max_message_bytes)
    talk.greeted(0.0)
    return talk


def test_a_request_before_the_metadata_frame_is_refused() -> None:
    talk = Conversation("s", OFFER, 1000)
    with pytest.raises(TurnError, match="got a request before the metadata frame, expected to wait for it"):
        talk.request(b"x", talk.next_id(), 0.0)
    assert talk.phase is Phase.GREETING


def test_a_second_request_is_refused_and_the_first_is_still_answered() -> None:
    talk = in_turn()
    first = talk.request(b"x", talk.next_id(), 0.0)
    with pytest.raises(TurnError, match="got a second request, expected to wait for the reply to request s-1"):
        talk.request(b"y", talk.next_id(), 0.0)
    assert unpack(talk.reply(first, PolicyReply(np.zeros((4, 2)), 1.0), 0.5))["rt"]["request_id"] == "s-1"
    assert talk.request(b"z", talk.next_id(), 0.0).request_id == "s-3"


def test_an_error_passes_the_turn_back_to_the_client() -> None:
    talk = in_turn()
    failing = talk.request(b"x", talk.next_id(), 0.0)
    assert talk.failed(failing, DeadlineError("late", "5 ms left")) == "[deadline] refused (late): 5 ms left (request s-1)"
    assert talk.phase is Phase.IDLE
    with pytest.raises(TurnError, match="got a reply while idle, expected it while busy"):
        talk.reply(failing, PolicyReply(np.zeros((4, 2)), 1.0), 0.0)


def test_text_frames_and_oversized_messages_are_refused_with_the_limit() -> None:
    talk = in_turn(max_message_bytes=10)
    with pytest.raises(MessageError, match="got a text frame, expected a binary frame"):
        talk.request("hello", "s-1", 0.0)
    with pytest.raises(MessageTooBigError, match="got 11 bytes, expected at most 10 bytes"):
        talk.request(b"x" * 11, "s-2", 0.0)
    assert talk.phase is Phase.IDLE


def test_the_previous_total_covers_waiting_and_sending_and_is_absent_at_first() -> None:
    talk = in_turn()
    totals = []
    for start_s in (1.0, 3.0):
        request = talk.request(b"x", talk.next_id(), start_s)
        reply = unpack(talk.reply(request, PolicyReply(np.zeros((4, 2)), 1.0), start_s + 0.25))
        talk.replied(start_s + 0.5)
        assert reply["server_timing"]["infer_ms"] == 250.0
        totals.append(reply["server_timing"].get("prev_total_ms"))
    assert totals == [None, 1500.0]


def test_a_reply_holds_plain_values_and_one_array() -> None:
    talk = in_turn()
    request = talk.request(b"x", talk.next_id(), 0.0)
    reply = PolicyReply(
        np.ones((4, 2), np.float32),
        np.float64(2.0),  # type: ignore[arg-type]
        stage_ms={"denoise": np.float32(1.5)},  # type: ignore[dict-item]
        batch_size=np.int64(3),  # type: ignore[arg-type]
        notes=("camera left was not used",),
    )
    said = unpack(talk.reply(request, reply, 0.0))
    assert said.pop("actions").dtype == np.float32

    def leaves(tree: Any) -> list[Any]:
        if isinstance(tree, dict):
            assert all(type(key) is str for key in tree)
            return [leaf for value in tree.values() for leaf in leaves(value)]
        return [leaf for value in tree for leaf in leaves(value)] if isinstance(tree, list) else [tree]

    assert {type(leaf) for leaf in leaves(said)} == {float, int, str}
    assert said["rt"]["stage_ms"] == {"decode": 0.0, "denoise": 1.5}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_actions_are_withheld(bad: float) -> None:
    talk = in_turn()
    request = talk.request(b"x", talk.next_id(), 0.0)
    actions = np.zeros((4, 2))
    actions[3, 1] = bad
    with pytest.raises(NonFiniteActionsError, match="got 1 of 8 values NaN or infinite"):
        talk.reply(request, PolicyReply(actions, 1.0), 0.0)
    assert talk.phase is Phase.BUSY


def test_actions_of_another_shape_than_published_are_not_sent() -> None:
    talk = in_turn()
    request = talk.request(b"x", talk.next_id(), 0.0)
    with pytest.raises(FieldError, match=r"actions: got shape \[3, 2\], expected shape \[4, 2\]"):
        talk.reply(request, PolicyReply(np.zeros((3, 2)), 1.0), 0.0)


def test_every_option_of_the_extension_arrives() -> None:
    prefix, noise = np.ones((2, 2)), np.zeros((4, 32), np.float32)
    said = {"request_id": "r", "reset": True, "seed": np.int64(7), "deadline_ms": 50, "priority": -1, "obs_time_ns": 5}
    said |= {"executed_steps": 3, "delay_steps": 2, "prefix": prefix, "noise": noise, "mode": "hard"}
    options = read(said)
    assert (options.request_id, options.reset, options.seed, options.deadline_ms) == ("r", True, 7, 50.0)
    assert (options.priority, options.obs_time_ns, options.executed_steps, options.delay_steps) == (-1, 5, 3, 2)
    assert options.mode == "hard"
    np.testing.assert_array_equal(options.prefix_KD, prefix)
    np.testing.assert_array_equal(options.noise_HD, noise)


def test_an_observation_without_the_extension_takes_the_defaults() -> None:
    observation, options = read_request(exchange({"state": np.zeros(3), "anything": 1}), OFFER)
    assert set(observation) == {"state", "anything"}
    assert options == RequestOptions(request_id="s-1")


@pytest.mark.parametrize(
    ("rt", "error"),
    [
        ({"sead": 1}, "rt: got the key 'sead', expected keys among"),
        ({"seed": 1.5}, "rt.seed: got float 1.5, expected an integer"),
        ({"seed": True}, "rt.seed: got bool True"),
        ({"seed": -1}, "rt.seed: got int -1"),
        ({"deadline_ms": float("nan")}, "rt.deadline_ms: got float nan, expected a positive, finite"),
        ({"deadline_ms": True}, "rt.deadline_ms: got bool True"),
        ({"deadline_ms": 0}, "rt.deadline_ms: got int 0"),
        ({"reset": 1}, "rt.reset: got int 1, expected true or false"),
        ({"request_id": ""}, "rt.request_id: got str '', expected 1 to 128"),
        ({"request_id": "x\n"}, "rt.request_id"),
        ({"request_id": "x" * 129}, "rt.request_id"),
        ({"prefix": np.ones((2, 2))}, r"rt.delay_steps: got nothing, expected a number of steps, because of \['prefix'\]"),
        ({"executed_steps": 2}, r"rt.delay_steps: got nothing, expected a number of steps, because of \['executed_steps'\]"),
        ({"mode": "hard"}, r"rt.delay_steps: got nothing, expected a number of steps, because of \['mode'\]"),
        ({"mode": "soft"}, r"rt.mode: got 'soft', expected one of \['none', 'hard', 'vjp'\]"),
        ({"delay_steps": 1}, "rt.prefix: got nothing, expected prefix or executed_steps beside delay_steps"),
        ({"delay_steps": 5, "executed_steps": 1}, "rt.delay_steps: got 5, expected at most the 4 steps of a chunk"),
        ({"delay_steps": 1, "prefix": np.ones((0, 2))}, r"rt.prefix: got shape \[0, 2\], expected \[1 to 4, 2\]"),
        ({"delay_steps": 1, "prefix": np.ones((2, 3))}, r"rt.prefix: got shape \[2, 3\]"),
        ({"delay_steps": 3, "prefix": np.ones((2, 2))}, "rt.delay_steps: got 3, expected at most the 2 steps"),
        ({"delay_steps": 1, "prefix": np.full((2, 2), np.nan)}, "rt.prefix: got NaN or infinity"),
        ({"delay_steps": 1, "prefix": [[1.0, 2.0]]}, "rt.prefix: got list, expected a real array"),
        ({"noise": np.zeros((3, 2))}, r"rt.noise: got shape \[3, 2\]"),
        ({"noise": np.array([["a"]])}, r"rt.noise: got <U1 of shape \[1, 1\]"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(rt: dict[str, Any], error: str) -> None:
    with pytest.raises(MessageError, match=error):
        read(rt)


@pytest.mark.parametrize("rt", [{"mode": "hard"}, {"delay_steps": 1, "executed_steps": 1}, {"prefix": np.ones((1, 2))}])
def test_a_policy_without_real_time_chunking_refuses_what_it_would_ignore(rt: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=r"rt\.\w+: got .*, expected (none: this policy offers no|one of \['none'\])"):
        read_request(exchange({"state": np.zeros(3), "rt": rt}), Offer(4, 2))


def test_an_error_carries_the_clients_own_request_id() -> None:
    failing = exchange({"state": np.zeros(3), "rt": {"seed": "x", "request_id": "mine"}})
    with pytest.raises(MessageError) as caught:
        read_request(failing, OFFER)
    assert error_text(caught.value, failing.request_id).endswith("(request mine)")


def test_a_new_session_id_starts_a_new_episode_once() -> None:
    assert read({"session_id": "t"}, session_id="s").reset
    assert not read({"session_id": "t"}, session_id="t").reset


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", pack([1]), pack({}), pack({"rt": {}}), pack({b"state": 1}), pack({"rt": 1, "a": 1})]
)
def test_a_message_that_is_no_observation_is_refused(message: bytes) -> None:
    with pytest.raises(MessageError):
        read_request(exchange(message), OFFER)


def test_faults_of_our_own_tell_the_client_nothing_about_the_inside() -> None:
    text = error_text(ValueError("secret path /home/x"), "r")
    assert text == "[internal] the request failed inside the server; its log has the details (request r)"


def test_an_error_text_is_short_whatever_was_sent() -> None:
    assert len(error_text(FieldError("f", got="x" * 10_000, expected="y"), "r")) < 1100


def test_the_default_limit_admits_full_hd_cameras_and_stays_bounded() -> None:
    cam = {"kind": "image", "shape": (224, 224, 3), "dtype": "uint8", "required": True}
    three = default_max_message_bytes({"a": cam, "b": cam, "c": cam})
    assert 3 * 3 * 1920 * 1080 < three < 64 << 20
    assert default_max_message_bytes({str(i): cam for i in range(1000)}) == 256 << 20


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "metadata.model"),
        ({"action_horizon": 0}, "metadata.action_horizon"),
        ({"action_horizon": True}, "metadata.action_horizon"),
        ({"action_dim": float("nan")}, "metadata.action_dim"),
        ({"observation": {}}, "metadata.observation"),
        ({"observation": {"x": {"kind": "smell", "shape": (), "dtype": "u1", "required": True}}}, r"observation\[x\].kind"),
        ({"policy_metadata": {"stretto": 1}}, "metadata.policy_metadata"),
        ({"policy_metadata": {"x": object()}}, "metadata.x: got object"),
        ({"rt": {"control_hz": float("inf")}}, "metadata.rt.control_hz"),
        ({"rt": {"rtc_modes": "hard"}}, "metadata.rt.rtc_modes"),
    ],
)
def test_a_service_that_describes_itself_wrongly_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        build_metadata({**DESCRIBED, **change}, max_message_bytes=None, ping_interval_s=20.0)


def test_numpy_values_in_policy_metadata_are_published_as_plain_ones() -> None:
    described = {**DESCRIBED, "policy_metadata": {"reset_pose": np.array([0.0, 1.5])}}
    built = build_metadata(described, max_message_bytes=5000, ping_interval_s=20.0)
    assert built["reset_pose"] == [0.0, 1.5]
    assert built["stretto"]["max_message_bytes"] == 5000
