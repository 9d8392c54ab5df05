"""From what a client writes to token ids: the model's tokenizer and chat template."""

import asyncio
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipeline.errors import InvalidRequest
from pipeline.model import Model

#: Longer texts are tokenized in a thread, so that they hold nobody up.
LONG = 20_000  # characters, some milliseconds


class PromptCodec:
    def __init__(self, model: Model) -> None:
        self._tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
        self.vocab_size = max(int(model.config.get("vocab_size", 0)), self._tokenizer.get_vocab_size())
        self._template = _compile(model.chat_template)
        special = model.tokenizer_config
        self._special = {
            name: _text(special.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }

    async def encode(self, text: str) -> list[int]:
        """A raw prompt, with the special tokens that the tokenizer itself adds (Gemma's <bos>)."""
        return await self._encode(text, special=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages through the model's template, which writes the special tokens itself."""
        if self._template is None:
            raise InvalidRequest(
                "messages",
                "this model has no chat template (a base model): use /v1/completions",
                code="no_chat_template",
            )
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return await self._encode(text, special=False)

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) < LONG:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)
        return list(encoding.ids)


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
