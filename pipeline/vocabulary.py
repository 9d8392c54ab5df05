"""A model's tokens as bytes, which is what a constraint is about."""

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from pipeline.errors import ConstraintError

BYTE = re.compile("<0x([0-9A-F]{2})>")
NO_TEXT = b"\xff"  # in front of a token that is none, for llguidance; no UTF-8 has it


class Vocabulary:
    """What llguidance must know of a tokenizer. To make one takes a moment and some memory: once per worker, at its start.

    llguidance could read tokenizer.json itself. But it takes every added token that looks like <this> for a special one, also
    those that are text, as Gemma's <table> and Qwen's <tool_call>, and a text with one in it would come to a dead end.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Set[int]) -> None:
        self.eos = eos
        self._library: LLTokenizer | ConstraintError
        try:
            self._library = _Spelling(tokenizer, eos).library
        except ConstraintError as error:  # only jobs with a constraint need it
            self._library = error

    def library(self) -> LLTokenizer:
        """Raises ConstraintError if this model's tokens cannot be constrained."""
        if isinstance(self._library, ConstraintError):
            raise ConstraintError(str(self._library))
        return self._library


class _Spelling:
    """tokens: the bytes of each."""

    def __init__(self, tokenizer: Tokenizer, eos: Set[int]) -> None:
        if not eos:
            raise ConstraintError("this model has no token that ends a text")
        vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(eos), None
        special = {token for token, fact in added.items() if fact.special} | eos
        self.tokens = [b""] * (1 + max(*vocabulary.values(), *eos))
        spell = _speller(tokenizer)
        for text, token in vocabulary.items():
            self.tokens[token] = NO_TEXT * (token in special) + (text.encode() if token in added else spell(text))
        self.library = LLTokenizer(TokenizerWrapper(self), eos_token=sorted(eos))

    def __call__(self, text: str) -> list[int]:
        """The model's own way to write what a constraint leaves no choice about; or else the longest tokens."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in tokens) == text.encode():
            return list(tokens)
        return self.library.greedy_tokenize(text)


def _speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How a token is written in tokenizer.json, to what it says. Raises ConstraintError for a way that is not known here."""
    decoders = list(_parts(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder else []
    kinds = {decoder["type"] for decoder in decoders}
    if "ByteLevel" in kinds:
        letters = _letters()
        return lambda text: b"".join(letters.get(letter, NO_TEXT) for letter in text)
    if "ByteFallback" in kinds:
        replaced = [decoder for decoder in decoders if decoder["type"] == "Replace" and decoder["content"] == " "]
        spaces = [decoder["pattern"]["String"] for decoder in replaced if "String" in decoder["pattern"]]
        return lambda text: _fallback(text, spaces)
    raise ConstraintError("this model's tokenizer is of a kind that cannot be constrained")


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _letters() -> dict[str, bytes]:
    """The byte that each letter of a byte-level tokenizer stands for, as GPT-2 began it: itself, if it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    letters = {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {letter: bytes([byte]) for letter, byte in letters.items()}


def _fallback(text: str, spaces: Sequence[str]) -> bytes:
    """SentencePiece's way: <0x0A> is a byte, and a letter stands for the space."""
    if byte := BYTE.fullmatch(text):
        return bytes([int(byte[1], 16)])
    for space in spaces:
        text = text.replace(space, " ")
    return text.encode()
