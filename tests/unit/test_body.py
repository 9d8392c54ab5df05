"""Hostile bodies: refused, and the field that is wrong is named."""

from typing import Any

import msgspec
import pytest

from api.body import BYTES, TOKEN, TOKENS, decode
from pipeline.errors import InvalidRequest


class Form(msgspec.Struct, forbid_unknown_fields=True):
    text: str = ""
    count: int | None = None
    share: float | None = None
    free: Any = None


NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (b'{"share": NaN}', "share", "NaN is no JSON number"),
        (b'{"text": "a", "share": -Infinity}', "share", "-Infinity"),
        (b'{"text": "\\ud800"}', "text", "surrogate"),
        (b'{"text": "\\udc00\\ud800"}', "text", "surrogate"),
        (b'{"text": "\xed\xa0\x80"}', "text", "surrogate"),
        (b'{"text": "a", "free": ' + NESTED + b"}", "free", "nested"),
        (b'{"free": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "free", "nested"),
        (NESTED, "", "expected `object`"),
        (b'{"count": true}', "count", "expected `int | null`, got `bool`"),
        (b'{"count": "1"}', "count", "expected `int | null`, got `str`"),
        (b'{"share": "1"}', "share", "got `str`"),
        (b'{"share": 1e999}', "share", "out of range"),
        (b'{"count": 1, "count": 2}', "count", "twice"),
        (b'{"free": {"a": {"b": 1, "b": 1}}}', "b", "twice"),
        (b'{"other": 1}', "other", "is not a known parameter"),
        (b"{", "", "not valid JSON"),
        (b"", "", "not valid JSON"),
        (b'{"text": "\xff"}', "", "not valid JSON"),
        (b"[]", "", "expected `object`"),
        (b'{"count": 1}x', "", "not valid JSON"),
    ],
)
def test_a_body_that_is_wrong_is_refused_and_its_field_named(body: bytes, field: str, said: str) -> None:
    """H3. Without `_trouble` a parser's place in bytes would be all that a client hears, or not even that."""
    with pytest.raises(InvalidRequest, match=said.replace("|", r"\|")) as caught:
        decode(body, Form)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "body", [b'{"text": "\\ud83d\\ude00"}', '{"text": "😀"}'.encode(), b'{"text": "\\\\ud800 is not an escape"}']
)
def test_a_body_that_is_right_is_taken(body: bytes) -> None:
    assert decode(body, Form).text


@pytest.mark.parametrize("before", [b"1," * TOKENS, b'"' + b"x" * BYTES + b'",'], ids=["tokens", "bytes"])
def test_the_field_is_not_looked_for_in_megabytes(before: bytes) -> None:
    """Without the bounds a client that sends what is no JSON holds up all others for seconds."""
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        decode(b'{"free": [' + before + b"NaN]}", Form)
    assert caught.value.field == ""


def test_a_string_without_end_is_looked_at_once() -> None:
    """Without the other end in the pattern each quote in it would begin a search: hours, and all memory."""
    assert len(TOKEN.findall(b'"' + b'\\"' * 1000)) == 1
