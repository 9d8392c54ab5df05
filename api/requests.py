"""The bodies that clients send: what is honoured, what is neutral, and what is refused by name.

Nothing is ignored in silence. A parameter that would change the answer and is not supported is a 400 that names it; its
neutral value is accepted, because clients send it.
"""

import re
import secrets
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from api.text import PromptCodec
from pipeline.config import Config
from pipeline.errors import InvalidRequest
from pipeline.job import Job, Priority
from pipeline.sampling import MAX_SEED, SamplingParams

DEFAULT_MAX_TOKENS = 16  # of a completion without max_tokens, as OpenAI has it
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters: that much text may be held back


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Generate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions, chats and jobs have in common. null means: the default."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal["high", "normal", "low"] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None  # seconds
    # what only describes the request
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # accepted at their neutral values
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = None
    service_tier: str | None = None
    store: bool | None = None

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise InvalidRequest("stop", f"{len(stops)} strings; at most {MAX_STOPS} are allowed")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"each string must have 1 to {MAX_STOP_LENGTH} characters")
        return stops

    @property
    def queue(self) -> Priority:
        return Priority[(self.priority or "normal").upper()]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Generate, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    kind = "text"


class ChatRequest(Generate, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    kind = "chat"


Request = CompletionRequest | ChatRequest

#: field → the values, beside null, that change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}


class _Peek(msgspec.Struct):
    """Whether a job is a chat."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_job(body: bytes) -> Request:
    """A job is a completion or a chat: the presence of `messages` tells."""
    is_chat = _decode(body, _Peek).messages is not msgspec.UNSET
    request = read(body, ChatRequest) if is_chat else read(body, CompletionRequest)
    if request.stream:
        raise InvalidRequest("stream", "a job is followed at /v1/jobs/{id}/events")
    return request


def read(body: bytes, kind: type[CompletionRequest] | type[ChatRequest]) -> Request:
    """The request of a body. Raises InvalidRequest that names the field."""
    request = _decode(body, kind)
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(
            value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
        ):
            accepted = " or ".join(repr(value) for value in neutral)
            raise InvalidRequest(name, f"{value!r} is not supported, only {accepted}", code="unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "is only for requests with stream: true")
    return request


async def make_job(request: Request, codec: PromptCodec, config: Config) -> Job:
    """The job of a request: tokenized, and known to fit. Raises InvalidRequest that names the field."""
    if request.model and request.model != config.name:
        raise InvalidRequest(
            "model", f"{request.model!r} is not served here, {config.name!r} is", code="model_not_found"
        )
    if isinstance(request, ChatRequest):
        field, limit = "messages", request.max_completion_tokens or request.max_tokens
        prompt = await codec.encode_chat([message.plain() for message in request.messages])
    else:
        field, limit = "prompt", request.max_tokens or DEFAULT_MAX_TOKENS
        prompt = request.prompt if isinstance(request.prompt, list) else await codec.encode(request.prompt)
    if not prompt:
        raise InvalidRequest(field, "is empty: there is nothing to go on from")
    if not all(0 <= token < codec.vocab_size for token in prompt):
        raise InvalidRequest(field, f"token ids must be from 0 to {codec.vocab_size - 1}")
    room = config.context - len(prompt)
    if room < 1:
        message = f"has {len(prompt)} tokens; a context of {config.context} leaves no room for an answer"
        raise InvalidRequest(field, message, code="context_length_exceeded")
    if limit is not None and limit > room:
        message = f"{limit} with {len(prompt)} prompt tokens exceeds the context of {config.context}; at most {room}"
        raise InvalidRequest("max_tokens", message, code="context_length_exceeded")
    return Job(
        prompt=tuple(prompt),
        max_tokens=limit or room,
        sampling=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=request.top_p or 1.0,
            top_k=max(0, request.top_k or 0),
            # chosen now, so that another attempt draws the same tokens
            seed=secrets.randbelow(MAX_SEED) if request.seed is None else request.seed,
        ),
        stop=request.stops(),
        ignore_eos=bool(request.ignore_eos),
        kind=request.kind,
    )


T = TypeVar("T")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("", f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("", "the body is nested too deeply", code="invalid_json") from None


def _named(message: str) -> InvalidRequest:
    """msgspec says `Expected … - at `$.field`` or `Object … field `field``."""
    what, _, path = message.partition(" - at ")
    field = re.sub(r"^\$\.?", "", path.strip("`"))
    if found := re.fullmatch(r"Object (?:contains unknown|missing required) field `(.+)`", what):
        what = "is not a known parameter" if "unknown" in what else "is required"
        field = f"{field}.{found[1]}" if field else found[1]
    return InvalidRequest(field, what[:1].lower() + what[1:])
