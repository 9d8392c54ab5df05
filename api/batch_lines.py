"""The lines of a batch: requests as they come in, answers and errors as they go out, in OpenAI's JSONL form."""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

from api.answer import Answer
from api.body import LIMIT, decode
from api.errors import describe
from api.front import Front
from api.idempotency import seed_of
from api.requests import ChatRequest, CompletionRequest, Request, read
from brokers.token_log import Entry
from pipeline.batch import MAX_LINES, Batch, job_id_of
from pipeline.errors import InvalidRequest, KVRelayError
from pipeline.job import Job, Priority

LINE_LIMIT = LIMIT  # bytes
MAX_ERRORS = 20  # of a file as a whole that are told
REFUSALS = {
    "invalid_json": "invalid_json_line"
}  # code of a body's error → of its line's; invalid_request for all others

KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}

CustomId = Annotated[str, Meta(min_length=1, max_length=512)]


class Envelope(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: CustomId
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


@dataclass(slots=True, kw_only=True)
class Line:
    """Number n, from 1; blank ones do not count. Its answer, once there is one, is `result`."""

    number: int
    end: int  # where the next one begins
    size: int
    job_ids: list[str]  # to begin with, that of one choice
    custom_id: str | None = None
    request: Request | None = None
    jobs: list[Job] = field(default_factory=list)
    logs: dict[str, list[Entry]] = field(default_factory=dict)  # of jobs that are over
    result: bytes = b""
    failed: bool = False
    input_tokens: int = 0
    output_tokens: int = 0

    async def prepare(self, raw: bytes, batch: Batch, front: Front) -> None:
        """From bytes to jobs, or to the error that it ends in."""
        self.custom_id = name_of(raw)
        try:
            envelope = decode(raw, Envelope)
            if envelope.url != batch.endpoint:
                raise InvalidRequest("url", f"{envelope.url[:100]!r} is not the batch's endpoint, {batch.endpoint}")
            await self._read(bytes(envelope.body), batch, front)
        except InvalidRequest as error:
            self.refuse(REFUSALS.get(error.code, "invalid_request"), f"line {self.number}: {error}")

    async def _read(self, body: bytes, batch: Batch, front: Front) -> None:
        try:
            self.request = read(body, KINDS[batch.endpoint])
            _check(self.request)
            self.jobs = await front.jobs(self.request, seed_of(job_id_of(batch.id, self.number, 0)))
            self.job_ids = [job_id_of(batch.id, self.number, choice) for choice in range(len(self.jobs))]
        except InvalidRequest as error:
            self._fail(error)

    def finish(self, front: Front) -> None:
        """All jobs are over."""
        assert self.request is not None
        answer = Answer(self.request, self.jobs, self.job_ids, front.codec, front.config.name)
        try:
            for choice, job_id in zip(answer.choices, self.job_ids, strict=True):
                choice.take(self.logs[job_id])
        except KVRelayError as error:
            self._fail(error)
            return
        body = answer.whole()
        self.input_tokens = body["usage"]["prompt_tokens"]
        self.output_tokens = body["usage"]["completion_tokens"]
        self._respond(200, body)

    def refuse(self, code: str, message: str) -> None:
        """It was no request, or was never made."""
        self.failed = True
        self._write(None, {"code": code, "message": message})

    def _fail(self, error: KVRelayError) -> None:
        self.failed = True
        status, body, _ = describe(error)
        self._respond(status, body)

    def _respond(self, status: int, body: Any) -> None:
        self._write({"status_code": status, "request_id": self.job_ids[0], "body": body}, None)

    def _write(self, response: Any, error: Any) -> None:
        shown = {
            "id": f"batch_req_{self.job_ids[0]}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        self.result = msgspec.json.encode(shown) + b"\n"
        self.request, self.jobs, self.logs = None, [], {}


def name_of(raw: bytes) -> str | None:
    """The custom_id of a line, if it is JSON and has one."""
    try:
        named = msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return named if isinstance(named, str) else None


def _check(request: Request) -> None:
    """What a request of a batch cannot have."""
    if request.stream:
        raise InvalidRequest("stream", "a batch has no streams: its answers are in a file")
    if request.priority is not None and request.queue != Priority.LOW:
        raise InvalidRequest("priority", f"{request.priority!r}: the requests of a batch have priority low")


def examine(lines: BinaryIO) -> tuple[int, list[dict[str, Any]]]:
    """(number of lines, what is wrong with the file as a whole), in one pass. Of each line 16 bytes are kept, those that
    tell whether its custom_id comes again."""
    seen: set[bytes] = set()
    errors: list[dict[str, Any]] = []
    total = 0
    while raw := lines.readline(LINE_LIMIT + 1):
        if not raw.strip():
            continue
        total += 1
        if len(raw) > LINE_LIMIT:
            return total, [_error("line_too_long", f"line {total} exceeds {LINE_LIMIT} bytes", total)]
        if total > MAX_LINES:
            return total, [_error("too_many_tasks", f"there are more than {MAX_LINES} lines")]
        if (name := name_of(raw)) is None:
            continue
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        if digest in seen and len(errors) < MAX_ERRORS:
            errors.append(_error("duplicate_custom_id", f"line {total}: custom_id {name[:100]!r} again", total))
        seen.add(digest)
    if not total:
        errors = [_error("empty_file", "the file has no lines")]
    elif not seen:
        errors = [_error("invalid_json_line", "no line is a JSON object with a custom_id: this is no JSONL")]
    return total, errors


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
