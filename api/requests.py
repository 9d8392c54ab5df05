"""The bodies that clients send: what is honoured, what is neutral, and what is refused by name.

Nothing is ignored in silence. A parameter that would change the answer and is not supported is a 400 that names it; its
neutral value is accepted, because clients send it.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from api.body import decode
from api.text import PromptCodec
from api.tools import NamedTool, Tool, ToolChoice, constraint, plain
from pipeline.config import Config
from pipeline.constraint import Constraint, check
from pipeline.errors import InvalidRequest
from pipeline.job import Job, Priority
from pipeline.sampling import MAX_SEED, SamplingParams

R = TypeVar("R", bound="Generate")

DEFAULT_MAX_TOKENS = 16  # of a completion without max_tokens, as OpenAI has it
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters: that much text may be held back
MAX_STOP_TOKENS = 64
MAX_CHOICES = 16  # jobs that one request may make
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOOLS = 128
MAX_URL = 2000  # characters

Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BIASES = Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}})

LIMIT = f"null: {DEFAULT_MAX_TOKENS} of a text, and in a chat what the context has room for"
TIER = Meta(description="flex is low priority, priority is high")

#: OpenAI's names for how urgent a request is.
TIERS = {"auto": "normal", "default": "normal", "flex": "low", "priority": "high"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class Called(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """With its arguments as an object, which is what templates expect."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    # what answers have, and clients send back
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            said["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        return said


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # an answer always follows its schema


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    def constraint(self) -> Constraint | None:
        return None


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    def constraint(self) -> Constraint | None:
        return Constraint(kind="json_object", source="")


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema

    def constraint(self) -> Constraint | None:
        if self.json_schema.schema is None:
            return Constraint(kind="json_object", source="")
        return Constraint(kind="json_schema", source=json.dumps(self.json_schema.schema))


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One of them, as vLLM has it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> Constraint | None:
        given = [
            Constraint(kind=kind, source=source)
            for kind, source in (
                ("json_schema", self.json if isinstance(self.json, str) or self.json is None else _json(self.json)),
                ("regex", self.regex),
                ("choice", None if self.choice is None else _json(self.choice)),
                ("grammar", self.grammar),
                ("json_object", "" if self.json_object else None),
            )
            if source is not None
        ]
        if len(given) > 1:
            raise InvalidRequest("structured_outputs", "only one of json, regex, choice, grammar and json_object")
        return given[0] if given else None


def _json(value: Any) -> str:
    return json.dumps(value)


class Generate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions, chats and jobs have in common. null means: the default."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, description=LIMIT)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 and -1: of all tokens")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None  # logits stay finite
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], BIASES] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED, description="null: another one each time")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal["high", "normal", "low"] | None = None
    service_tier: Annotated[Literal["auto", "default", "flex", "priority"], TIER] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400, description="seconds until the job expires")] | None = None
    # what only describes the request
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # accepted at its neutral value
    store: bool | None = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def queue(self) -> Priority:
        return Priority[(self.priority or TIERS[self.service_tier or "auto"]).upper()]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def constraint(self) -> tuple[str, Constraint | None]:
        """The field that asks for it, and what the answer must be. Raises InvalidRequest if there are two."""
        asked = {
            name: wanted
            for name, value in (
                ("response_format", self.response_format),
                ("structured_outputs", self.structured_outputs),
            )
            if value is not None and (wanted := value.constraint()) is not None
        }
        if len(asked) > 1:
            raise InvalidRequest("structured_outputs", "cannot be combined with response_format")
        return next(iter(asked.items()), ("", None))


class CompletionRequest(Generate, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    kind = "text"

    @property
    def top(self) -> int:
        """Logprobs of so many tokens are wanted at each place; -1: none."""
        return -1 if self.logprobs is None else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        if any(isinstance(item, int) for item in self.prompt):
            raise InvalidRequest("prompt", "token ids and texts cannot be mixed")
        return self.prompt  # type: ignore[return-value]


class ChatRequest(Generate, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    kind = "chat"
    echo = False

    @property
    def top(self) -> int:
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs", "needs logprobs: true")
            return -1
        return self.top_logprobs or 0

    def constraint(self) -> tuple[str, Constraint | None]:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidRequest("tool_choice", f"{self.tool_choice.function.name!r} is none of the tools")
        if self.tool_choice == "required" and not names:
            raise InvalidRequest("tool_choice", "required needs tools")
        if len(set(names)) < len(names):
            raise InvalidRequest("tools", "two have the same name")
        field, wanted = super().constraint()
        calls = constraint(self.tool_choice, self.tools or (), parallel=self.parallel_tool_calls is not False)
        if wanted is not None and calls is not None:
            raise InvalidRequest(field, "cannot be combined with a tool that must be called")
        return ("tools", calls) if calls is not None else (field, wanted)


Request = CompletionRequest | ChatRequest


class CompletionJob(CompletionRequest, kw_only=True):
    """As `POST /v1/jobs` takes it: nobody waits for its answer, but somebody may want to hear that it is there."""

    webhook: Annotated[str, Meta(max_length=MAX_URL)] | None = None


class ChatJob(ChatRequest, kw_only=True):
    webhook: Annotated[str, Meta(max_length=MAX_URL)] | None = None


#: field → the values, beside null, that change nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
}

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
#: field → its JSON Schema, where more is checked here than its type says
SCHEMAS: dict[str, dict[str, Any]] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            _TOKENS,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
            {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_CHOICES},
        ]
    },
    **{name: {"enum": [*neutral, None], "default": None} for name, neutral in NEUTRAL.items()},
}


class _Peek(msgspec.Struct):
    """Whether a job is a chat."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_job(body: bytes) -> CompletionJob | ChatJob:
    """A job is a completion or a chat: the presence of `messages` tells."""
    is_chat = decode(body, _Peek).messages is not msgspec.UNSET
    request = read(body, ChatJob) if is_chat else read(body, CompletionJob)
    if request.stream:
        raise InvalidRequest("stream", "a job is followed at /v1/jobs/{id}/events")
    if (request.n or 1) > 1 or (isinstance(request, CompletionRequest) and len(request.prompts()) != 1):
        raise InvalidRequest("n", "a job has one prompt and one answer: submit it again for another")
    return request


def read(body: bytes, kind: type[R]) -> R:
    """The request of a body. Raises InvalidRequest that names the field."""
    request = decode(body, kind)
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


async def make_jobs(request: Request, codec: PromptCodec, config: Config, seed: int) -> list[Job]:
    """The jobs of a request, `n` for each prompt in turn: tokenized, and known to fit. seed: of a request that names none.

    Raises InvalidRequest that names the field."""
    check_model(request.model, config)
    field, wanted = request.constraint()
    if wanted is not None:
        await asyncio.to_thread(check, wanted, field)
    if isinstance(request, ChatRequest):
        tools = None if request.tool_choice == "none" else [plain(tool) for tool in request.tools or ()]
        prompts = [await codec.encode_chat([message.plain() for message in request.messages], tools or None)]
    else:
        if request.echo and request.top >= 0:
            raise InvalidRequest("echo", "cannot be combined with logprobs: the prompt's own are not computed")
        given = request.prompts()
        if len(given) * (request.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                "n", f"{len(given)} prompts and n {request.n or 1}: at most {MAX_CHOICES} answers a request"
            )
        prompts = [await codec.encode(p) if isinstance(p, str) else p for p in given]
    seed = seed if request.seed is None else request.seed  # fixed now, so that another attempt draws the same tokens
    jobs: list[Job] = []
    for prompt in prompts:
        for _ in range(request.n or 1):
            jobs.append(_job(request, prompt, (seed + len(jobs)) % (MAX_SEED + 1), wanted, codec, config))
    return jobs


def _job(
    request: Request, prompt: Sequence[int], seed: int, wanted: Constraint | None, codec: PromptCodec, config: Config
) -> Job:
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    check_tokens(field, prompt, codec)
    if not prompt:
        raise InvalidRequest(field, "is empty: there is nothing to go on from")
    limit = _limit(request, len(prompt), config)
    if (request.min_tokens or 0) > limit:
        raise InvalidRequest("min_tokens", f"{request.min_tokens} is more than the {limit} that are allowed")
    check_tokens("stop_token_ids", request.stop_token_ids or (), codec)
    return Job(
        prompt=tuple(prompt),
        max_tokens=limit,
        min_tokens=request.min_tokens or 0,
        sampling=_sampling(request, seed, codec),
        stop=request.stops(),
        stop_tokens=tuple(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.top,
        constraint=wanted,
        kind=request.kind,
    )


def _limit(request: Request, length: int, config: Config) -> int:
    """Tokens that the answer may have."""
    if isinstance(request, ChatRequest):
        field, limit = "messages", request.max_completion_tokens or request.max_tokens
    else:
        field, limit = "prompt", request.max_tokens or DEFAULT_MAX_TOKENS
    room = config.context - length
    if room < 1:
        message = f"has {length} tokens; a context of {config.context} leaves no room for an answer"
        raise InvalidRequest(field, message, code="context_length_exceeded")
    if limit is not None and limit > room:
        message = f"{limit} with {length} prompt tokens exceeds the context of {config.context}; at most {room}"
        raise InvalidRequest("max_tokens", message, code="context_length_exceeded")
    return limit or room


def _sampling(request: Request, seed: int, codec: PromptCodec) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p or 1.0,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=_biases(request.logit_bias or {}, codec),
        seed=seed,
    )


def _biases(given: dict[str, float], codec: PromptCodec) -> tuple[tuple[int, float], ...]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequest("logit_bias", f'{name[:40]!r} is no token id, as in "1234"')
    biases = tuple((int(name), bias) for name, bias in given.items())
    check_tokens("logit_bias", [token for token, _ in biases], codec)
    return biases


def check_model(name: str | None, config: Config) -> None:
    if name and name not in config.names:
        served = " and ".join(repr(served) for served in config.names)
        raise InvalidRequest("model", f"{name!r} is not served here, {served} is", code="model_not_found")


def check_tokens(field: str, tokens: Sequence[int], codec: PromptCodec) -> None:
    if not all(0 <= token < codec.vocab_size for token in tokens):
        raise InvalidRequest(field, f"token ids must be from 0 to {codec.vocab_size - 1}")
