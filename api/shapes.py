"""What answers look like, for OpenAPI. They are built elsewhere, by hand; the tests hold every answer against these."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """A field without a default is always there."""


class Problem(Shape):
    """param: the field that is wrong. code: for programs."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorAnswer(Shape):
    error: Problem


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


# Completions


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextPiece(Shape):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextChunk(Shape):
    """usage: with the last one, if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextPiece]
    usage: Usage | UnsetType = UNSET


# Chats


class LikelyToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Shape):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class CallBody(Shape):
    """arguments: JSON, as text."""

    name: str
    arguments: str


class Call(Shape):
    id: str
    type: Literal["function"]
    function: CallBody


class Said(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: Said
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CallBodyPiece(Shape):
    arguments: str
    name: str | UnsetType = UNSET


class CallPiece(Shape):
    """id, type and name come with the first piece of a call."""

    index: int
    function: CallBodyPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class SaidPiece(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChatPiece(Shape):
    index: int
    delta: SaidPiece
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Shape):
    """usage: with the last one, if asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: Usage | UnsetType = UNSET


# Tokens


class Tokens(Shape):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Shape):
    prompt: str


# Jobs


JobStatus = Literal["queued", "prefilling", "decoding", "finished", "failed", "cancelled", "expired"]


class JobQueued(Shape):
    """status: of a request that came again, where its job is by now."""

    id: str
    object: Literal["job"]
    status: JobStatus


class JobEvent(Shape):
    """at: Redis' clock, in milliseconds since 1970."""

    at: int
    event: str
    detail: str


class JobStopped(Shape):
    """Where a cancel or the deadline found it. milliseconds: until its holder had undone its side; null: not yet."""

    phase: str
    milliseconds: int | None


class JobRecord(Shape):
    """failed_attempts: number of the attempt → why it ended."""

    id: str
    object: Literal["job"]
    status: JobStatus
    kind: Literal["text", "chat"]
    attempt: int
    text: str
    token_ids: list[int]
    usage: Usage
    timeline: list[JobEvent]
    finish_reason: Literal["stop", "length"] | None
    reason: str | None
    error: Problem | None
    failed_attempts: dict[str, str]
    stopped: JobStopped | UnsetType = UNSET


class TokenEvent(Shape):
    index: int
    token: int
    text: str


class EndEvent(Shape):
    status: Literal["finished", "failed", "cancelled", "expired"]
    reason: str
    error: Problem | None


# Files and batches


class FileRecord(Shape):
    """Times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FilePage(Shape):
    object: Literal["list"]
    data: list[FileRecord]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Shape):
    id: str
    object: Literal["file"]
    deleted: bool


class Upload(Shape):
    """expires_after[anchor], which is created_at, and expires_after[seconds] go together."""

    file: str
    purpose: Literal["batch"]
    expires_anchor: Literal["created_at"] | UnsetType = msgspec.field(name="expires_after[anchor]", default=UNSET)
    expires_seconds: str | UnsetType = msgspec.field(name="expires_after[seconds]", default=UNSET)


class BatchProblem(Shape):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(Shape):
    object: Literal["list"]
    data: list[BatchProblem]


class BatchCounts(Shape):
    total: int
    completed: int
    failed: int


class InputDetails(Shape):
    cached_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class BatchUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchRecord(Shape):
    """errors: of the file as a whole; those of its lines are in the error file."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchPage(Shape):
    object: Literal["list"]
    data: list[BatchRecord]
    first_id: str | None
    last_id: str | None
    has_more: bool


# System


class ServedModel(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ServedModel]


class Worker(msgspec.Struct):
    """And its figures, which depend on role and device. places: KV caches that a decode worker offers to take now."""

    id: str
    role: Literal["prefill", "decode"]
    state: str
    host: str
    pid: int
    versions: dict[str, str]
    places: int | UnsetType = UNSET


class JobCounts(Shape):
    waiting: int
    working: int


class SystemRecord(Shape):
    object: Literal["system"]
    kvrelay: str
    model: str
    max_model_len: int
    jobs: JobCounts
    workers: list[Worker]


class LiveAnswer(Shape):
    live: bool


class ReadyAnswer(Shape):
    """prefill, decode: living workers. warning: what Redis should be told."""

    redis: bool
    prefill: int
    decode: int
    ready: bool
    warning: str | UnsetType = UNSET
