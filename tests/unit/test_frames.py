"""Headers: what is encoded comes back, and everything else is a FrameError, whatever it is."""

import pickle
import tracemalloc
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import FrameError
from pipeline.frames import HEADER_LIMIT, Abort, Ack, Commit, Message, Nack, Ok, Open, Part, decode, encode
from pipeline.geometry import Geometry, Layer
from pipeline.transfer import Transfer

OPEN = Open(nonce="n", job="j", lease="p#1", tokens=7, fingerprint={"model": "m", "layers": [{"window": None}]})
PART = Part(
    nonce="n", layer=1, tensor="k", start=0, tokens=7, dtype="bfloat16", shape=(2, 7, 4), digest=b"\0" * 16
)  # fmt: skip
COMMIT = Commit(nonce="n", lease="p#1", tokens=(5, 6))
NACK = Nack(nonce="n", reason="why", void=True)
MESSAGES: list[Message] = [OPEN, Ok(nonce="n"), PART, COMMIT, Ack(nonce="n"), NACK, Abort(nonce="n", reason="why")]

EVERY_FIELD = [(message, field.name) for message in MESSAGES for field in fields(message)]
names = st.text(max_size=20)
numbers = st.integers(0, 2**63)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=10,
)


def header(message: Message, **changes: Any) -> bytes:
    """The message's header with other values in it; one that is ... is left out."""
    changed = {**msgpack.unpackb(encode(message)), **changes}
    packed: bytes = msgpack.packb({name: value for name, value in changed.items() if value is not ...})
    return packed


def refusal(frame: bytes) -> str:
    with pytest.raises(FrameError) as caught:
        decode(frame)
    return str(caught.value)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    tokens = draw(st.integers(1, 1 << 20))
    return draw(
        st.one_of(
            st.builds(
                Open,
                nonce=names,
                job=names,
                lease=names,
                tokens=numbers,
                fingerprint=st.dictionaries(names, st.integers(0, 9)),
                digest=names,
                version=numbers,
            ),
            st.builds(Ok, nonce=names),
            st.builds(
                Part,
                nonce=names,
                layer=numbers,
                tensor=st.sampled_from("kv"),
                start=numbers,
                tokens=st.just(tokens),
                dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
                shape=st.tuples(numbers, st.just(tokens), numbers),
                digest=st.binary(max_size=16),
            ),
            st.builds(Commit, nonce=names, lease=names, tokens=st.lists(numbers).map(tuple)),
            st.builds(Ack, nonce=names),
            st.builds(Nack, nonce=names, reason=names, void=st.booleans()),
            st.builds(Abort, nonce=names, reason=names),
        )
    )


@given(messages())
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


def test_a_commit_of_a_whole_context_fits_in_a_header() -> None:
    commit = Commit(nonce="n" * 24, lease="p" * 60, tokens=tuple([1 << 18] * (128 << 10)))
    assert decode(encode(commit)) == commit


def wrong_values(right: Any) -> list[Any]:
    """One of each type that is not the field's, bools for numbers among them."""
    some: list[Any] = [None, 1.0, 1, "x", b"x", True, [1], {"a": 1}]
    kind = list if type(right) is tuple else type(right)
    bad = [value for value in some if type(value) is not kind]
    return bad + {int: [-1], list: [[True], [-1], ["x"], [1, 1.0, 1], [[1]]]}.get(kind, [])


@pytest.mark.parametrize(("message", "name"), EVERY_FIELD, ids=[f"{m.kind}.{name}" for m, name in EVERY_FIELD])
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(message: Message, name: str) -> None:
    for wrong in wrong_values(getattr(message, name)):
        assert f"{message.kind}.{name}" in refusal(header(message, **{name: wrong})), wrong


@pytest.mark.parametrize(("message", "name"), EVERY_FIELD, ids=[f"{m.kind}.{name}" for m, name in EVERY_FIELD])
def test_a_missing_field_is_refused(message: Message, name: str) -> None:
    assert name in refusal(header(message, **{name: ...}))


@pytest.mark.parametrize("message", MESSAGES, ids=[m.kind for m in MESSAGES])
def test_an_extra_field_is_refused(message: Message) -> None:
    assert f"{message.kind}: fields" in refusal(header(message, surprise=1))


@pytest.mark.parametrize("kind", ["", "OPEN", "pickle", None, 1, b"open", ["open"], {"open": 1}, ...], ids=repr)
def test_a_message_of_unknown_kind_is_refused(kind: Any) -> None:
    assert "unknown kind" in refusal(header(Ok(nonce="n"), kind=kind))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensor": "q"},
        {"tensor": ""},
        {"dtype": "int8"},
        {"dtype": "O"},
        {"shape": []},
        {"shape": [2, 7]},
        {"shape": [2, 7, 4, 1]},
        {"shape": [7, 2, 4]},
        {"shape": [2, 8, 4]},
        {"tokens": 0, "shape": [2, 0, 4]},
    ],
    ids=repr,
)
def test_a_part_whose_header_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    assert "part." in refusal(header(PART, **wrong))


def test_a_part_knows_the_bytes_that_must_follow_even_when_they_are_absurdly_many() -> None:
    assert decode(header(PART, shape=[2**60, 7, 2**60])).size == 2**120 * 7 * 2  # type: ignore[union-attr]


def test_a_huge_header_is_refused_before_it_is_read() -> None:
    assert str(HEADER_LIMIT) in refusal(b"\x80" * (HEADER_LIMIT + 1))
    assert "msgpack" in refusal(b"\x80" * HEADER_LIMIT)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\xc0", b"\x90", b"\x01", b"\xa1x", msgpack.packb([1, 2])], ids=repr)
def test_what_is_not_a_map_is_refused(frame: bytes) -> None:
    refusal(frame)


@pytest.mark.parametrize("cut", [1, 5, -1])
def test_a_header_that_is_cut_off_is_refused(cut: int) -> None:
    assert "msgpack" in refusal(encode(PART)[:cut])


def test_bytes_after_the_header_are_refused() -> None:
    assert "msgpack" in refusal(encode(PART) + b"\xc0")


def test_a_name_that_is_no_utf_8_is_refused() -> None:
    assert "msgpack" in refusal(encode(Ok(nonce="n")).replace(b"\xa1n", b"\xa1\xff"))


def test_a_name_given_twice_does_not_slip_past_the_check() -> None:
    once = encode(Ok(nonce="n"))
    twice = b"\x83" + once[1:] + b"\xa5nonce\x01"
    assert "ok.nonce" in refusal(twice)


class Trap:
    """Would run code where somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("somebody unpickled bytes from the network",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(protocol: int) -> None:
    trap = pickle.dumps(Trap(), protocol)
    refusal(trap)
    refusal(msgpack.packb(msgpack.ExtType(0, trap)))
    assert "ok.nonce" in refusal(header(Ok(nonce="n"), nonce=msgpack.ExtType(42, trap)))


DEEP = [100, 500, 900, 950, 1000, 1020, 100_000]
LEVELS = {"list": b"\x91", "map": b"\x81\xa0", "long list": b"\xdc\x00\x01"}


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("field", ["kind", "nonce", "surprise"])
def test_a_deeply_nested_header_is_refused(depth: int, level: str, field: str) -> None:
    pairs = {name: value for name, value in msgpack.unpackb(encode(Ok(nonce="n"))).items() if name != field}
    start = bytes([0x80 + len(pairs) + 1]) + b"".join(
        msgpack.packb(name) + msgpack.packb(pairs[name]) for name in pairs
    )
    refusal(start + msgpack.packb(field) + LEVELS[level] * depth + b"\xc0")


@pytest.mark.parametrize("depth", DEEP)
def test_a_deeply_nested_fingerprint_is_refused_at_the_latest_by_the_geometry(depth: int) -> None:
    geometry = Geometry(model="m", kv_heads=1, head_dim=2, dtype="float32", layers=(Layer(),))
    for name in ("model", "layers"):
        ours = {**geometry.fingerprint(), name: "HERE"}
        frame = header(replace(OPEN, fingerprint=ours)).replace(msgpack.packb("HERE"), b"\x91" * depth + b"\xc0")
        try:
            opened = decode(frame)
        except FrameError:
            continue
        assert isinstance(opened, Open)
        with pytest.raises(FrameError, match="differ"):
            Transfer(opened, geometry, context=64)


@pytest.mark.parametrize(
    "opener", [b"\xdd\x00\x0f\xff\xff", b"\xdf\x00\x0f\xff\xff", b"\xdd\xff\xff\xff\xff"], ids=repr
)
def test_a_header_that_promises_more_than_it_holds_takes_neither_time_nor_memory(opener: bytes) -> None:
    tracemalloc.start()
    try:
        refusal(opener * 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_refusal_does_not_repeat_what_the_sender_wrote() -> None:
    secret = "x" * 100_000
    for frame in (
        header(Ok(nonce="n"), kind=secret),
        header(Ok(nonce="n"), **{secret: 1}),
        header(PART, tensor=secret),
        header(PART, dtype=secret),
        header(PART, shape=[1] * 100_000),
        header(PART, layer=secret),
    ):
        assert len(refusal(frame)) < 1000


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refusal(frame)


@settings(max_examples=500)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_header_with_flipped_bytes_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(frame))
    except FrameError:
        return
    assert encode(decode(encode(decoded))) == encode(decoded)  # their bytes: a NaN is not equal to itself


@settings(max_examples=500)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_header_with_any_value_in_any_field_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    try:
        decoded = decode(header(message, **{name: data.draw(values)}))
    except FrameError:
        return
    assert encode(decode(encode(decoded))) == encode(decoded)  # their bytes: a NaN is not equal to itself
