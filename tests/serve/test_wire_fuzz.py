"""Hostile and broken messages: each gets an error text on an open socket, and nobody else notices."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from linear_policy import LIBERO, LinearPolicy, example, state
from websockets.sync.client import ClientConnection, connect

from stretto.serve import ServerOptions, ServerThread
from stretto_client.codec import pack, unpack

OBSERVATION = {"state": np.arange(3.0)}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(LinearPolicy({"state": state(3)}, action_horizon=4, action_dim=2)) as running:
        yield running


@pytest.fixture
def ws(server: ServerThread) -> Iterator[ClientConnection]:
    with connect(server.url, compression=None, max_size=None) as connection:
        connection.recv(timeout=5)
        yield connection


def works(ws: ClientConnection) -> bool:
    ws.send(pack(OBSERVATION))
    return "actions" in unpack(ws.recv(timeout=5))


def array(dtype: Any, shape: Any, data: bytes = b"\0" * 24) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


CRAFTED = {
    "int keys": {1: 2},
    "int keys deeper": {"state": {1: 2}},
    "object dtype": {"state": array("|O", [3])},
    "pickled object": {
        "state": {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"cos\nsystem\n(S'x'\ntR."}
    },
    "structured dtype": {"state": array([["a", "<f4"]], [3])},
    "void dtype": {"state": array("|V8", [3])},
    "complex dtype": {"state": array("<c16", [3])},
    "dtype of a gigabyte": {"state": array("<U268435456", [1])},
    "huge shape": {"state": array("<f8", [1 << 62, 1 << 62])},
    "negative shape": {"state": array("<f8", [-3])},
    "shape with zero and huge": {"state": array("<f8", [0, 1 << 62], b"")},
    "shape of many axes": {"state": array("<f8", [1] * 200, b"\0" * 8)},
    "short data": {"state": array("<f8", [3], b"\0" * 23)},
    "data is text": {"state": array("<f8", [3], "x" * 24)},  # type: ignore[arg-type]
    "no dtype": {"state": {b"__ndarray__": True}},
    "scalar out of range": {"state": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}},
    "extension type": {"state": msgpack.ExtType(5, b"x")},
    "top level array": array("<f8", [3]),
    "list": [1, 2, 3],
    "nil": None,
    "wrong width": {"state": np.zeros(2)},
    "nothing": {},
    "rt is a list": {"state": np.zeros(3), "rt": [1]},
    "rt with bytes keys": {"state": np.zeros(3), "rt": {b"seed": 1}},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_message_gets_an_error_text_and_the_socket_stays_open(ws: ClientConnection, name: str) -> None:
    ws.send(msgpack.packb(CRAFTED[name], default=lambda a: array(a.dtype.str, list(a.shape), a.tobytes()), strict_types=False))
    told = ws.recv(timeout=5)
    assert isinstance(told, str), unpack(told)
    assert told.startswith(("[bad_message] ", "[bad_observation] "))
    assert "Traceback" not in told
    assert len(told) < 1200
    assert works(ws)


RAW = {
    "lists claimed to be four billion long": b"\xdd\xff\xff\xff\xff",
    "map claimed to be four billion long": b"\xdf\xff\xff\xff\xff",
    "bytes claimed to be four billion long": b"\xc6\xff\xff\xff\xff",
    "nested lists": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
    "a hundred thousand empty maps": b"\xdd\x00\x01\x86\xa0" + b"\x80" * 100_000,
    "lists of claimed lists": b"\xdc\xff\xff" * 1000,
    "invalid UTF-8 text": b"\x81\xa1\xff\x01",
    "two messages": pack({"state": np.zeros(3)}) * 2,
    "empty": b"",
}


@pytest.mark.parametrize("name", RAW)
def test_raw_bytes_get_an_error_text_and_the_socket_stays_open(ws: ClientConnection, name: str) -> None:
    ws.send(RAW[name])
    told = ws.recv(timeout=5)
    assert isinstance(told, str)
    assert told.startswith("[bad_message] ")
    assert works(ws)


def test_five_hundred_random_truncated_and_flipped_messages_never_close_the_socket(ws: ClientConnection, server: Any) -> None:
    rng = random.Random(7)
    whole = pack({**OBSERVATION, "rt": {"request_id": "r", "seed": 3, "deadline_ms": 50.0}})
    errors = 0
    with connect(server.url) as other:
        other.recv(timeout=5)
        for i in range(500):
            kind = i % 3
            if kind == 0:
                message = rng.randbytes(rng.randrange(200))
            elif kind == 1:
                message = whole[: rng.randrange(len(whole))]
            else:
                flipped = bytearray(whole)
                flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
                message = bytes(flipped)
            ws.send(message)
            answer = ws.recv(timeout=5)
            # A flipped bit in a number leaves a valid request; all others must be refused.
            assert isinstance(answer, str) or (kind == 2 and "actions" in unpack(answer))
            errors += isinstance(answer, str)
            if i % 100 == 0:
                assert works(other)
    assert errors > 330
    assert works(ws)


def test_garbage_below_the_protocol_ends_only_its_own_connection(ws: ClientConnection, server: ServerThread) -> None:
    rng = random.Random(3)
    for _ in range(20):
        with connect(server.url, compression=None) as broken:
            broken.recv(timeout=5)
            broken.socket.sendall(rng.randbytes(300))
            with contextlib.suppress(OSError):  # the server may have hung up already
                broken.socket.shutdown(socket.SHUT_RDWR)
        with socket.create_connection((server.host, server.port)) as raw:
            raw.sendall(rng.randbytes(300))
        assert works(ws)


def test_requests_sent_without_waiting_are_refused_one_by_one(server: ServerThread) -> None:
    policy = LinearPolicy({"state": state(3)}, action_horizon=4, action_dim=2, infer_s=0.3)
    with ServerThread(policy) as slow, connect(slow.url) as ws:
        ws.recv(timeout=5)
        for _ in range(5):
            ws.send(pack(OBSERVATION))
        answers = [ws.recv(timeout=5) for _ in range(5)]
        refused = [a for a in answers if isinstance(a, str)]
        assert len(refused) == 4
        assert all(a.startswith("[protocol] message: got a second request, expected to wait") for a in refused)
        assert len(policy.ran) == 1
        assert works(ws)


def test_a_message_of_millions_of_values_costs_the_others_nothing(server: ServerThread) -> None:
    many = b"\xdd" + (1 << 17).to_bytes(4, "big") + b"\x90" * (1 << 17)
    bomb = b"\x81\xa5state\xdc" + (140).to_bytes(2, "big") + many * 140
    policy = LinearPolicy({"state": state(3)}, action_horizon=4, action_dim=2)
    options = ServerOptions(port=0, max_message_bytes=len(bomb))
    with ServerThread(policy, options) as running, connect(running.url, compression=None) as ws, connect(running.url) as other:
        ws.recv(timeout=5)
        other.recv(timeout=5)
        ws.send(bomb)
        began_s = time.perf_counter()
        assert str(ws.recv(timeout=5)).startswith("[bad_message] message: got more than 32768 separate values")
        assert works(other)
        assert time.perf_counter() - began_s < 1.0
        assert works(ws)


def test_full_size_frames_are_cut_anywhere_and_refused() -> None:
    whole = pack(example(LIBERO))
    with ServerThread(LinearPolicy(LIBERO)) as server, connect(server.url, compression=None, max_size=None) as ws:
        ws.recv(timeout=5)
        for cut in (1, 100, 150_000, len(whole) - 1):
            ws.send(whole[:cut])
            assert str(ws.recv(timeout=5)).startswith(f"[bad_message] message: got {cut} bytes that cannot be read")
        ws.send(whole)
        assert "actions" in unpack(ws.recv(timeout=5))
