"""What goes wrong at the HTTP edge, and how it is shown: OpenAI's error object.

ApiError
├── Incomplete          400
├── Unauthorized        401
├── TooSlow             408
├── TooLarge            413
├── NotJson             415
├── KeyReused           422
├── TooMany             429   Retry-After
│   ├── QueueFull             of all jobs, or of the key's
│   └── RateLimited           of the key's requests
├── JobUnknown          404   also of a job that another key made
├── JobGone             410
├── FileUnknown         404
├── BatchUnknown        404
├── NoWorkers           503   Retry-After
├── TooManyConnections  503   Retry-After
├── TooManyBodies       503   Retry-After
├── NoStorage           507
└── JobFailed           what became of the job: see ENDS

``python -m api.error_tables`` draws docs/errors.md's tables from here.
"""

import json
import logging
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import falcon
import falcon.asgi

from pipeline.errors import InvalidRequest, KVRelayError, RedisAway
from pipeline.states import Status

log = logging.getLogger(__name__)

LONGEST_RETRY = 60  # seconds: whatever held things up may be over before


class ApiError(KVRelayError):
    status = 500
    code = "server_error"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class Unauthorized(ApiError):
    """No API key, or one that is not known here."""

    status, code, headers = 401, "invalid_api_key", {"WWW-Authenticate": "Bearer"}


class TooSlow(ApiError):
    """The request, or its body, did not come in time (`KVR_REQUEST_SECONDS`)."""

    status, code = 408, "request_timeout"


class Incomplete(ApiError):
    """The connection ended in the middle of a body."""

    status, code = 400, "body_incomplete"


class TooLarge(ApiError):
    """The body is longer than 8 MiB, announced or counted."""

    status, code = 413, "body_too_large"


class KeyReused(ApiError):
    """An Idempotency-Key that came with another body before."""

    status, code = 422, "idempotency_key_reused"


class TooMany(ApiError):
    """Something has a bound."""

    status, headers = 429, {"Retry-After": "1"}

    def __init__(self, message: str, seconds: float) -> None:
        """seconds: after which it is worth another try."""
        super().__init__(f"{message}; try again later")
        self.headers = {"Retry-After": str(min(LONGEST_RETRY, max(1, math.ceil(seconds))))}


class QueueFull(TooMany):
    """As many jobs wait as may (`KVR_QUEUE_BOUND`), or as many of this key's."""

    code = "queue_full"


class RateLimited(TooMany):
    """The key has no request left for now."""

    code = "rate_limit_exceeded"


class NotJson(ApiError):
    """The Content-Type is not `application/json`, or the body is compressed."""

    status, code = 415, "unsupported_media_type"


class JobUnknown(ApiError):
    """There is no such job, or another key made it."""

    status, code = 404, "job_not_found"


class JobGone(ApiError):
    """The job is over, and its answer has expired (`KVR_KEEP_SECONDS`)."""

    status, code = 410, "job_gone"


class FileUnknown(ApiError):
    """There is no such file, or another key made it."""

    status, code = 404, "file_not_found"


class BatchUnknown(ApiError):
    """There is no such batch, or another key made it."""

    status, code = 404, "batch_not_found"


class NoWorkers(ApiError):
    """No worker of one of the two kinds lives (`KVR_NO_WORKER_SECONDS`)."""

    status, code, headers = 503, "no_workers", {"Retry-After": "5"}


class TooManyConnections(ApiError):
    """An API process holds as many as it may (`KVR_CONNECTIONS`)."""

    status, code, headers = 503, "too_many_connections", {"Retry-After": "1"}


class TooManyBodies(ApiError):
    """Of the bodies that come at the same time, an API process holds as much as it may: 32 MiB."""

    status, code, headers = 503, "too_many_bodies", {"Retry-After": "1"}


class NoStorage(ApiError):
    """The disk that files lie on is full, or gone."""

    status, code = 507, "no_storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a client is told of how a job ended, whether it waits, streams or fetches. code: of the error, if there is one."""

    status: int
    code: str = ""
    what: str


ENDS = {
    Status.FINISHED: End(status=200, what="the model came to an end"),
    Status.FAILED: End(status=500, code="job_failed", what="given up after `KVR_ATTEMPTS` attempts"),
    Status.CANCELLED: End(status=409, code="job_cancelled", what="cancelled, by another than who waits for it"),
    Status.EXPIRED: End(status=504, code="job_expired", what="its deadline passed"),
}


class JobFailed(ApiError):
    """A job that did not finish."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"the job is {status}: {reason}")
        end = ENDS[Status(status)]
        self.status, self.code = end.status, end.code


def failure(status: str, reason: str) -> dict[str, Any] | None:
    """The error of a job that ended so, as its record and its last event show it. None if it finished, or goes on."""
    end = ENDS.get(Status(status))
    if end is None or not end.code:
        return None
    error: dict[str, Any] = describe(JobFailed(status, reason))[1]["error"]
    return error


def error_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def error_object(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape."""
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def describe(error: KVRelayError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(HTTP status, error object, headers) of an error."""
    if isinstance(error, ApiError):
        return error.status, error_object(error.status, str(error), error.code), error.headers
    if isinstance(error, InvalidRequest):
        status = 404 if error.code == "model_not_found" else 400
        return status, error_object(status, str(error), error.code, error.field or None), {}
    if isinstance(error, RedisAway):
        return 503, error_object(503, "the queue does not answer", "queue_away"), {"Retry-After": "2"}
    log.error("unexpected: %s", error, extra={"action": "api_error"})
    return 500, error_object(500, "an internal error; the log has it", "server_error"), {}


async def show(_req: Any, resp: Any, error: KVRelayError, _params: Any) -> None:
    """Falcon's handler for ours."""
    status, resp.media, headers = describe(error)
    resp.status = falcon.code_to_http_status(status)
    resp.set_headers(headers)


#: What Falcon says by itself: (code, message). Everything else of its is a bad request.
HTTP = {
    404: ("unknown_url", "there is no {path} here"),
    405: ("method_not_allowed", "{path} takes {allow}, not {method}"),
}


async def show_http(req: Any, resp: Any, error: falcon.HTTPError, _params: Any) -> None:
    """Falcon's own errors in the same shape."""
    headers = dict(error.headers or {})
    code, message = "bad_request", error.description or error.title or ""
    if known := HTTP.get(error.status_code):
        code, message = known[0], known[1].format(path=req.path[:200], method=req.method, allow=headers.get("Allow"))
    resp.status = error.status
    resp.media = error_object(error.status_code, message, code)
    resp.set_headers(headers)


async def show_bug(_req: Any, resp: Any, error: Exception, _params: Any) -> None:
    """A bug: logged whole, shown without detail."""
    log.error("unexpected", exc_info=error, extra={"action": "api_bug"})
    resp.status = falcon.HTTP_500
    resp.media = error_object(500, "an internal error; the log has it", "server_error")


def response(error: ApiError) -> bytes:
    """All of it, for a connection that no request was read from. It is closed then."""
    body = json.dumps(describe(error)[1])
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **error.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n{body}".encode()
