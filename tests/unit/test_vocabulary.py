"""What llguidance is told of a tokenizer: the bytes of each token, and which are text."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from pipeline.constraint import Constraint, Matcher
from pipeline.errors import ConstraintError
from pipeline.model import SIM
from pipeline.vocabulary import Vocabulary
from tests.unit.test_text import byte_fallback


def bytes_of_sim() -> Tokenizer:
    return Tokenizer.from_file(str(SIM / "tokenizer.json"))


def with_prefix() -> Tokenizer:
    """As Llama 2's: it writes a space before every text."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_names(tokenizer: Tokenizer) -> Vocabulary:
    """<table> is a token and text, as in Gemma; <|start|> is no text, nor is the end."""
    tokenizer.add_tokens([AddedToken("<table>", special=False, normalized=False)])
    tokenizer.add_special_tokens(["<|start|>", "<end>"])
    return Vocabulary(tokenizer, {tokenizer.token_to_id("<end>")})


def said(vocabulary: Vocabulary, constraint: Constraint, seed: int) -> list[int]:
    matcher, draw, tokens = Matcher(constraint, vocabulary), np.random.default_rng(seed), []
    while not vocabulary.eos & set(tokens):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little"))
        tokens.append(int(draw.choice(allowed)))
        matcher.accept(tokens[-1])
    return tokens[:-1]


TOKENIZERS = [bytes_of_sim, byte_fallback, with_prefix]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_every_text_can_be_said_and_is_what_its_tokens_are_decoded_to(make: object) -> None:
    """Also one in the form of a special token, which must not become one; and where the tokenizer would add a space."""
    tokenizer = make()  # type: ignore[operator]
    vocabulary = with_names(tokenizer)
    for text in ("abc", "<table>", "a<table> <end>b", "<|start|>", "한글 €", "<0x41>"):
        for seed in range(10):
            tokens = said(vocabulary, Constraint("choice", f'["x{text}"]'), seed)
            assert tokenizer.decode(tokens) == f"x{text}"


def test_a_token_with_a_name_that_is_text_is_said_where_its_text_is_asked_for() -> None:
    """Without kvrelay's own reading the library would ask for this token, and then take it for a special one and refuse it."""
    tokenizer = bytes_of_sim()
    vocabulary = with_names(tokenizer)
    assert said(vocabulary, Constraint("regex", "<table>"), 0) == [tokenizer.token_to_id("<table>")]


def test_special_tokens_come_in_no_text() -> None:
    tokenizer = bytes_of_sim()
    vocabulary = with_names(tokenizer)
    mask = np.frombuffer(Matcher(Constraint("regex", r"[\s\S]+"), vocabulary).mask(), dtype=np.uint8)
    allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
    assert tokenizer.token_to_id("<table>") in allowed
    assert allowed.isdisjoint({tokenizer.token_to_id(name) for name in ("<|start|>", "<end>")})
    assert allowed.isdisjoint({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that no UTF-8 has


@pytest.mark.parametrize(
    ("tokenizer", "eos"),
    [(bytes_of_sim(), set()), (Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), {1})],
    ids=["no end", "another kind"],
)
def test_a_model_that_cannot_be_constrained_serves_all_other_jobs(tokenizer: Tokenizer, eos: set[int]) -> None:
    """Its workers start; only what asks for it is refused."""
    vocabulary = Vocabulary(tokenizer, eos)
    with pytest.raises(ConstraintError, match="this model"):
        Matcher(Constraint("json_object"), vocabulary)
