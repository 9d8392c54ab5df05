"""Texts that come to the tokenizer, and those that do not."""

import pytest

from api.text import PromptCodec
from pipeline.errors import InvalidRequest
from pipeline.model import SIM, Model

CODEC = PromptCodec(Model(SIM), context=100)


async def test_a_text_that_may_fit_is_tokenized() -> None:
    assert await CODEC.encode("aa") == [97, 97]
    assert len(await CODEC.encode("a" * 101)) == 101, "it is the request's room that counts tokens"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound a body of megabytes takes seconds, and gigabytes of memory, to learn the same."""
    monkeypatch.delattr(CODEC, "_tokenizer")
    with pytest.raises(InvalidRequest, match="100 tokens") as refused:
        await CODEC.encode("a" * 8_000_000)
    assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequest) as refused:
        await CODEC.encode("a" * 8_000_000, "messages")
    assert refused.value.field == "messages"
