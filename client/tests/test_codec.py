"""The wire dialect: exact bytes, every dtype, and refusal of everything else by field name."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto_client.codec import MAX_VALUES, CodecError, pack, unpack, weigh

DTYPES = [
    "|b1",
    "|i1",
    "|u1",
    *(f"{e}{k}{n}" for e in "<>" for k in "iu" for n in (2, 4, 8)),
    *(f"{e}f{n}" for e in "<>" for n in (2, 4, 8)),
]


def array_map(**changes: Any) -> bytes:
    base: dict[str, Any] = {"__ndarray__": True, "data": bytes(12), "dtype": "<f4", "shape": [3]}
    base.update(changes)
    return bytes(msgpack.packb({"state": {k.encode(): v for k, v in base.items()}}))


def test_an_array_is_written_with_the_exact_bytes_of_openpi() -> None:
    got = pack({"a": np.array([1, 2], dtype=np.uint8)})
    head = b"\x81\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x02\x01\x02"
    assert got == head + b"\xc4\x05dtype\xa3|u1\xc4\x05shape\x91\x02"


def test_a_numpy_scalar_is_written_with_the_exact_bytes_of_openpi() -> None:
    assert pack(np.int16(7)) == b"\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x07\xc4\x05dtype\xa3<i2"


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    )
)
def test_every_bool_integer_and_real_array_comes_back_equal_and_read_only(x: np.ndarray) -> None:
    for given_x in (x, x.T, x[..., ::2] if x.ndim else x):
        y = unpack(pack({"x": given_x}))["x"]
        assert y.dtype == given_x.dtype
        assert y.shape == given_x.shape
        assert y.tobytes() == given_x.tobytes()
        assert not y.flags.writeable


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text(max_size=8) | st.binary(max_size=8)
markers = {"__ndarray__", "__npgeneric__", "nd", "complex"}
keys = keys.filter(lambda k: (k if isinstance(k, str) else k.decode("ascii", "replace")) not in markers)
trees = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_a_tree_of_plain_values_comes_back_equal(tree: Any) -> None:
    assert unpack(pack(tree)) == tree


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused_but_never_break_the_reader(frame: bytes) -> None:
    with contextlib.suppress(CodecError):
        unpack(frame)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_message_is_read_or_refused_but_never_breaks_the_reader(data: st.DataObject) -> None:
    frame = bytearray(pack({"image": np.zeros((2, 2, 3), np.uint8), "n": np.float32(1), "rt": {"seed": 1}, "l": [1, "a"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        unpack(frame)


def test_every_truncation_of_a_message_is_refused() -> None:
    frame = pack({"image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3), "prompt": "pick"})
    for n in range(len(frame)):
        with pytest.raises(CodecError, match="message"):
            unpack(frame[:n])


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(CodecError, match="extra data"):
        unpack(pack({"a": 1}) + b"\x00")


def test_text_markers_are_read_like_bytes_markers() -> None:
    frame = msgpack.packb({"x": {"__ndarray__": True, "data": b"\x01\x02", "dtype": "|u1", "shape": [2]}})
    np.testing.assert_array_equal(unpack(frame)["x"], np.array([1, 2], np.uint8))
    frame = msgpack.packb({"x": {"__npgeneric__": True, "data": 3, "dtype": "<i4"}})
    assert unpack(frame)["x"] == np.int32(3)


@pytest.mark.parametrize("as_key", [str, str.encode])
@pytest.mark.parametrize("kind", [b"", ""])
def test_arrays_of_the_msgpack_numpy_package_are_read(as_key: Any, kind: Any) -> None:
    x = np.arange(6, dtype=">i2").reshape(2, 3)
    raw = {"nd": True, "type": x.dtype.str, "kind": kind, "shape": x.shape, "data": x.tobytes()}
    y = unpack(msgpack.packb({"x": {as_key(k): v for k, v in raw.items()}}))["x"]
    np.testing.assert_array_equal(y, x)
    scalar = {"nd": False, "type": "<f8", "data": np.float64(2.5).tobytes()}
    assert unpack(msgpack.packb([{as_key(k): v for k, v in scalar.items()}])) == [2.5]


@pytest.mark.parametrize("kind", [b"O", b"V", "O"])
def test_pickled_and_structured_arrays_are_refused_without_looking_inside(kind: Any) -> None:
    raw = {b"nd": True, b"type": "|O", b"kind": kind, b"shape": [1], b"data": b"cos\nsystem\n."}
    with pytest.raises(CodecError, match=r"images\.wrist"):
        unpack(msgpack.packb({"images": {"wrist": raw}}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "|O"}, "dtype"),
        ({"dtype": "|V8"}, "dtype"),
        ({"dtype": "<c8"}, "dtype"),
        ({"dtype": [["a", "<f4"]]}, "dtype"),
        ({"dtype": "f4,f4"}, "dtype"),
        ({"dtype": "|U0"}, "dtype"),
        ({"dtype": 5}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"data": bytes(11)}, r"got 11 bytes of array data, expected 12 for shape \[3\]"),
        ({"data": "text"}, "expected bytes"),
        ({"shape": [-3]}, "integers >= 0"),
        ({"shape": [3.0]}, "integers >= 0"),
        ({"shape": [True]}, "integers >= 0"),
        ({"shape": 3}, "integers >= 0"),
        ({"shape": [2**62, 2**62, 0], "data": b""}, "shape"),
        ({"shape": [1] * 80, "data": bytes(4)}, "shape"),
    ],
)
def test_an_array_that_does_not_add_up_is_refused_by_field_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CodecError, match=text) as e:
        unpack(array_map(**changes))
    assert e.value.path == "state"


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, np.complex64),
        np.complex128(1),
        1j,
        np.zeros(2, [("a", "f4")]),
        np.datetime64("2026-01-01"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        {1: "int key"},
        {b"__ndarray__": True},
        {1, 2},
        object(),
        2**70,
        "\ud800",
        [0] * (MAX_VALUES + 1),
    ],
    ids=repr,
)
def test_what_has_no_place_on_the_wire_is_refused_when_packing(value: Any) -> None:
    with pytest.raises(CodecError):
        pack({"images": {"left": [1, value]}})


def test_the_refusal_names_the_path_to_the_field() -> None:
    with pytest.raises(CodecError) as e:
        pack({"images": {"left": [1, object()]}})
    assert e.value.path == "images.left[1]"


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CodecError, match="nested deeper"):
        pack(loop)
    with pytest.raises(CodecError):
        unpack(b"\x91" * 900 + b"\x00")


@pytest.mark.parametrize(
    "frame", [b"\x81\x01\x02", b"\xd6\xff\x00\x00\x00\x01", b"\xd4\x05\x00", b"\xc1", b"\xdd\x7f\xff\xff\xff"]
)
def test_integer_keys_extension_types_and_false_lengths_are_refused(frame: bytes) -> None:
    with pytest.raises(CodecError, match=r"got .+, expected") as e:
        unpack(frame)
    assert "()" not in str(e.value), "a decoder that fails without a word is named"


@pytest.mark.parametrize(("dtype", "value"), [("|u1", 256), ("|u1", -1), ("<i4", 1.5), ("|b1", 1), ("<f4", "x"), ("<M8[s]", 0)])
def test_a_scalar_outside_its_dtype_is_refused(dtype: str, value: Any) -> None:
    with pytest.raises(CodecError, match="scalar"):
        unpack(msgpack.packb({b"__npgeneric__": True, b"data": value, b"dtype": dtype}))


def a_tree(rng: random.Random, depth: int) -> Any:
    """Make a value of any kind that msgpack has, with the widths of every header."""
    kind = rng.randrange(10 if depth else 7)
    size = rng.choice((0, 1, 15, 16, 31, 32, 255, 256, 70_000)) if kind in (3, 4) else rng.choice((0, 1, 3, 15, 16))
    if kind < 3:
        return (None, rng.choice((True, False)), rng.choice((0.5, -1e300)))[kind]
    if kind in (3, 4):
        return "x" * size if kind == 3 else rng.randbytes(size)
    if kind == 5:
        return msgpack.ExtType(5, rng.randbytes(rng.choice((1, 2, 4, 8, 16, 3, 300, 70_000))))
    if kind == 6:
        return rng.choice((0, 127, 128, 255, 256, 65_535, 65_536, 2**32, 2**63, -1, -32, -33, -200, -40_000, -(2**40)))
    items = [a_tree(rng, depth - 1) for _ in range(size)]
    return items if kind == 7 else {f"k{i}": item for i, item in enumerate(items)}


def count(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + sum(1 + count(value) for value in node.values())
    return 1 + sum(count(item) for item in node) if isinstance(node, list) else 1


def test_the_weight_of_a_message_is_the_number_of_its_values() -> None:
    rng = random.Random(11)
    for _ in range(500):
        tree = a_tree(rng, depth=3)
        assert weigh(msgpack.packb(tree), limit=1 << 20) == count(tree)
    for wide in ([0] * 70_000, {str(i): 0 for i in range(70_000)}):
        assert weigh(msgpack.packb(wide), limit=1 << 20) == count(wide)


def test_weighing_stops_at_the_limit() -> None:
    assert weigh(msgpack.packb([0] * 99), limit=100) == 100
    with pytest.raises(CodecError, match="more than 100 separate values"):
        weigh(msgpack.packb([0] * 100), limit=100)
