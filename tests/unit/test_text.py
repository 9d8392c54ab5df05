"""Text from tokens, against the plain thing: decode all ids at once, cut at the first stop string.

Three kinds of tokenizer: one token a byte (that of `sim`), one that falls back to bytes and strips a leading space (as
Llama's and Gemma's do), and, where KVR_TEST_MODEL names a model's directory, a real one.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from pipeline.model import SIM
from pipeline.text import HALF, Decode, StopMatcher, TextStream

Ids = list[int]


def byte_fallback() -> Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnop", "▁a", "ab", "한"]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("a", "b")],
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _tokenizers() -> list[object]:
    found = [
        pytest.param(Tokenizer.from_file(str(SIM / "tokenizer.json")), id="bytes"),
        pytest.param(byte_fallback(), id="fallback"),
    ]
    real = os.environ.get("KVR_TEST_MODEL", "")
    if real and Path(real).is_dir():
        found.append(pytest.param(Tokenizer.from_file(str(Path(real) / "tokenizer.json")), id="real"))
    return found


SIM_TOKENIZER = Tokenizer.from_file(str(SIM / "tokenizer.json"))
each_tokenizer = pytest.mark.parametrize("tokenizer", _tokenizers())

AWKWARD = [
    "👨‍👩‍👧‍👦",
    "👍🏽",
    "🇰🇷",
    "e\u0301",
    "ก็",
    "कि",
    "한글",
    "\u1112\u1161\u11ab",
    "\u200d",
    "𝄞",
    "€",
    "ß",
    "  ",
    "\n",
    " a",
    "ab",
]
texts = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=4)), max_size=10).map("".join)
#: without U+FFFD itself, which looks like half a character; it has tests of its own
whole_texts = texts.map(lambda text: text.replace(HALF, ""))
#: few letters, so that stop strings meet, nearly meet and overlap
dense_texts = st.text(alphabet="ab€ ", max_size=16)


def encode(tokenizer: Tokenizer, text: str) -> Ids:
    """Passes over texts that the tokenizer cannot say: a real one may lack the odd byte."""
    ids: Ids = tokenizer.encode(text, add_special_tokens=False).ids
    assume(HALF in text or HALF not in tokenizer.decode(ids))
    return ids


def decoder(tokenizer: Tokenizer) -> Decode:
    decode: Callable[[Sequence[int]], str] = tokenizer.decode
    return lambda ids: decode(list(ids), skip_special_tokens=True)


def run(stream: TextStream, tokens: Ids) -> tuple[list[str], bool]:
    """What each token let be shown, the flush last unless a stop string came; and whether one came."""
    shown = []
    for token in tokens:
        text, stopped = stream.push(token)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, stream.flush()], False


def cut(decode: Decode, tokens: Ids, stops: Sequence[str]) -> tuple[str, bool]:
    """The plain thing: after each token, all text so far, cut at the earliest stop string in it."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip(HALF)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
    return decode(tokens), False


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Stop strings: pieces of the text, pieces with another end (near misses), and others."""
    text = draw(st.one_of(whole_texts, dense_texts))
    piece = st.just("a")
    if text:
        piece = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda at: text[at[0] :][: at[1]])
    stop = st.one_of(piece, piece.map(lambda p: p + "b"), st.text(alphabet="ab€ ", min_size=1, max_size=4))
    return text, draw(st.lists(stop, max_size=4))


@each_tokenizer
@given(text=whole_texts)
def test_all_increments_together_are_the_text_of_all_tokens(tokenizer: Tokenizer, text: str) -> None:
    decode, tokens = decoder(tokenizer), encode(tokenizer, text)
    shown, _ = run(TextStream(decode), tokens)
    assert "".join(shown) == decode(tokens)


@each_tokenizer
@given(text=whole_texts)
def test_no_increment_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    shown, _ = run(TextStream(decoder(tokenizer)), encode(tokenizer, text))
    assert not [part for part in shown if HALF in part]


@each_tokenizer
@given(prompt=whole_texts, text=whole_texts)
def test_after_a_prompt_the_increments_are_what_its_text_grows_by(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    decode, before, tokens = decoder(tokenizer), encode(tokenizer, prompt), encode(tokenizer, text)
    shown, _ = run(TextStream(decode, prompt=before), tokens)
    assert "".join(shown) == decode(before + tokens)[len(decode(before)) :]


@each_tokenizer
@given(case=texts_with_stops())
def test_the_text_ends_before_the_earliest_stop_string(tokenizer: Tokenizer, case: tuple[str, list[str]]) -> None:
    text, stops = case
    decode, tokens = decoder(tokenizer), encode(tokenizer, text)
    shown, stopped = run(TextStream(decode, stops=stops), tokens)
    assert ("".join(shown), stopped) == cut(decode, tokens, stops)


@each_tokenizer
@given(case=texts_with_stops())
def test_what_is_shown_never_holds_a_stop_string_or_the_beginning_of_one_that_comes(
    tokenizer: Tokenizer, case: tuple[str, list[str]]
) -> None:
    text, stops = case
    decode, tokens = decoder(tokenizer), encode(tokenizer, text)
    final, _ = cut(decode, tokens, stops)
    stream, so_far = TextStream(decode, stops=stops), ""
    for token in tokens:
        part, stopped = stream.push(token)
        so_far += part
        assert final.startswith(so_far)
        if stopped:
            break


@each_tokenizer
@given(case=texts_with_stops(), data=st.data())
def test_a_worker_that_takes_over_after_any_token_shows_what_the_first_would_have(
    tokenizer: Tokenizer, case: tuple[str, list[str]], data: st.DataObject
) -> None:
    text, stops = case
    decode, tokens = decoder(tokenizer), encode(tokenizer, text)
    shown, stopped = run(TextStream(decode, stops=stops), tokens)
    done = data.draw(st.integers(0, len(shown) - 1))
    rest = run(TextStream(decode, stops=stops, tokens=tokens[:done]), tokens[done:])
    assert rest == (shown[done:], stopped)


@settings(max_examples=300)
@given(tokens=st.lists(st.one_of(st.sampled_from([*"한€😀".encode(), 0x80, 0xFF]), st.integers(0, 256)), max_size=12))
def test_tokens_that_are_no_text_lose_nothing_but_an_unfinished_end(tokens: Ids) -> None:
    """A token of this tokenizer is a byte; 256 is the end."""
    decode = decoder(SIM_TOKENIZER)
    whole = decode(tokens)
    shown = "".join(run(TextStream(decode), tokens)[0])
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {HALF}


@pytest.mark.parametrize("text", ["\ufffd€", "a\ufffd한글", "\ufffd\ufffd😀", "\ufffda"])
def test_a_replacement_character_in_the_text_does_not_swallow_the_next_one(text: str) -> None:
    shown, _ = run(TextStream(decoder(SIM_TOKENIZER)), list(text.encode()))
    assert "".join(shown) == text


def test_an_unfinished_character_at_the_end_is_not_shown() -> None:
    tokens = list("ok😀".encode())
    assert "".join(run(TextStream(decoder(SIM_TOKENIZER)), tokens[:-1])[0]) == "ok"


def test_a_stop_string_may_span_tokens_and_be_nearly_met_before() -> None:
    matcher = StopMatcher(["ENDE"])
    assert [matcher.push(piece) for piece in ("aE", "EN", "D", "E and more")] == [
        ("a", False),
        ("E", False),
        ("", False),
        ("", True),
    ]


def test_a_near_miss_is_shown_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(["abc", "bd"])
    assert [matcher.push(letter) for letter in "abxab"] == [
        ("", False),
        ("", False),
        ("abx", False),
        ("", False),
        ("", False),
    ]
    assert matcher.flush() == "ab"


def test_of_two_stop_strings_in_one_token_the_earlier_one_counts() -> None:
    assert StopMatcher(["late", "early"]).push("x early late") == ("x ", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)
