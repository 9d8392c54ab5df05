"""From what a client writes to token ids: the model's tokenizer and chat template."""

import asyncio
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipeline.errors import InvalidRequest
from pipeline.model import Model
from pipeline.text import HALF

#: Longer texts are tokenized in a thread, so that they hold nobody up.
LONG = 20_000  # characters, some milliseconds
#: How a vocabulary names single bytes: SentencePiece with byte fallback …
BYTE = re.compile("<0x([0-9A-F]{2})>")
#: … and GPT-2's byte-level BPE (Radford et al., 2019), as printable characters: those of Latin-1 for themselves, the others
#: from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


class PromptCodec:
    """context: tokens that a prompt and its answer may have."""

    def __init__(self, model: Model, context: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
        self._context = context
        self._longest = max(len(token) for token in self._tokenizer.get_vocab())  # characters
        self.vocab_size = max(int(model.config.get("vocab_size", 0)), self._tokenizer.get_vocab_size())
        self._template = _compile(model.chat_template)
        self._knows_tools = "tools" in (model.chat_template or "")
        special = model.tokenizer_config
        self._special = {
            name: _text(special.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }

    async def encode(self, text: str, field: str = "prompt", *, special: bool = True) -> list[int]:
        """A raw prompt. special: with the tokens that the tokenizer itself adds (Gemma's <bos>).

        Raises InvalidRequest for a text that cannot fit however it is tokenized: megabytes take seconds, and gigabytes of
        memory."""
        if len(text) > self._context * self._longest:
            message = f"has {len(text)} characters, and more than the context of {self._context} tokens in any case"
            raise InvalidRequest(field, message, code="context_length_exceeded")
        if len(text) < LONG:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; of some tokens only a part of a character."""
        name = self._tokenizer.id_to_token(token) or ""
        if BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        text = self.decode([token])
        if HALF in text and all(character in BYTE_OF for character in name):
            return bytes(BYTE_OF[character] for character in name)
        return text.encode()

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Messages through the model's template, which writes the special tokens itself."""
        if self._template is None:
            raise InvalidRequest(
                "messages",
                "this model has no chat template (a base model): use /v1/completions",
                code="no_chat_template",
            )
        if tools and not self._knows_tools:
            raise InvalidRequest("tools", "this model's chat template knows no tools", code="unsupported_value")
        try:
            text = self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **self._special)
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return await self.encode(text, "messages", special=False)


def _compile(template: str | None) -> jinja2.Template | None:
    """With what chat templates expect to find, as transformers documents it. Templates are data: sandboxed."""
    if template is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text(token: Any) -> str:
    """A special token is written as a string, or as an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
